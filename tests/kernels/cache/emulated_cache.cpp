#include "cache/emulated_cache.hpp"

#include <array>
#include <stdexcept>
#include <utility>

#include "api/append_builder.hpp"
#include "api/make_merge_problem.hpp"
#include "emulated_call.hpp"
#include "launch.hpp"
#include "ops/cache/common/append.cuh"
#include "ops/cache/common/merge.cuh"
#include "ops/cache/launch.hpp"
#include "ops/cache/plan.hpp"

namespace tandem::kernel_tests {
namespace {

using stored::is_code;

/// The pairs of dtypes that are compiled here: every kind of rows and caches; f16, which differs from bf16 by
/// two instructions, of itself and of bf16 alone.
constexpr bool is_compiled(Stored from, Stored to) {
  if (from == to || to == Stored::bf16) return from == to || is_code(from);
  return to == Stored::f16 ? from == Stored::bf16 : is_code(to) && !is_code(from) && from != Stored::f16;
}
constexpr bool is_compiled(const AppendConfig& c) {
  if (!is_compiled(c.from, c.to) || (c.finds_scales && (is_code(c.from) || !is_code(c.to)))) return false;
  return c.rotary ? !is_code(c.from) : !c.interleaved && c.f32_tables;
}

constexpr AppendConfig append_config(int n) {
  return {.from = static_cast<Stored>(n % 5),
          .to = static_cast<Stored>(n / 5 % 5),
          .rotary = n / 25 % 2 != 0,
          .interleaved = n / 50 % 2 != 0,
          .f32_tables = n / 100 % 2 != 0,
          .vectors = n / 200 % 2 != 0,
          .finds_scales = n / 400 != 0};
}
constexpr int append_kinds = 800;

using AppendKernel = void (*)(AppendParams);
template <int n>
constexpr AppendKernel append_kernel() {
  if constexpr (is_compiled(append_config(n))) {
    return &tandem::append<append_config(n)>;
  } else {
    return nullptr;
  }
}
template <int... n>
AppendKernel find(const AppendConfig& config, std::integer_sequence<int, n...>) {
  AppendKernel found = nullptr;
  ((config == append_config(n) ? void(found = append_kernel<n>()) : void()), ...);
  return found;
}

constexpr MergeConfig merge_config(int n) {
  return {.from = static_cast<Stored>(n % 3), .to = static_cast<Stored>(n / 3 % 3), .vectors = n / 9 != 0};
}
using MergeKernel = void (*)(MergeParams);
template <int... n>
MergeKernel find(const MergeConfig& config, std::integer_sequence<int, n...>) {
  MergeKernel found = nullptr;
  ((config == merge_config(n) ? void(found = &tandem::merge<merge_config(n)>) : void()), ...);
  return found;
}

}  // namespace

void emulate_append(const AppendProblem& problem, const emulator::Options& options, unsigned blocks) {
  const AppendConfig config = choose_append_config(problem);
  const AppendKernel kernel = find(config, std::make_integer_sequence<int, append_kinds>());
  if (kernel == nullptr) throw std::logic_error("no kernel was compiled for it");
  const unsigned grid = blocks > 0 ? blocks : static_cast<unsigned>(gpu::append_grid(problem, config, 1));
  if (grid == 0) return;
  emulator::launch(kernel, gpu::make_append_params(problem, grid),
                   {.blocks = grid, .threads = append_threads, .shared_bytes = append_shared_bytes}, options);
}

void emulate_merge(const MergeProblem& problem, const emulator::Options& options) {
  const MergeKernel kernel = find(choose_merge_config(problem), std::make_integer_sequence<int, 18>());
  const auto grid = static_cast<unsigned>(gpu::merge_grid(problem, 1));
  if (grid == 0) return;
  emulator::launch(kernel, gpu::make_merge_params(problem), {.blocks = grid, .threads = merge_threads},
                   options);
}

std::string EmulatedCache::refuses_append(const harness::AppendCase& c) const {
  return is_compiled(gpu::stored(c.dtype), gpu::stored(c.cache_dtype)) ? "" : "not compiled here";
}

std::string EmulatedCache::refuses_merge(const harness::MergeCase& /*c*/) const {
  return {};
}

void EmulatedCache::append(harness::AppendCall& call) {
  emulator::Options options;
  add_buffers(options,
              {&call.k_new, &call.v_new, &call.cu_seqlens_new, &call.seqused_new, &call.page_table,
               &call.cache_batch_idx, &call.leftpad_k, &call.cache_seqlens, &call.slot_mapping, &call.k_scale,
               &call.v_scale, &call.rotary_cos, &call.rotary_sin, &call.rotary_offsets, &call.q},
              false);
  add_buffers(options, {&call.k_cache, &call.v_cache, &call.k_scale_cache, &call.v_scale_cache, &call.q_out},
              true);
  emulate_append(make_append_problem(call.args()), options, blocks_);
}

void EmulatedCache::merge(harness::MergeCall& call) {
  emulator::Options options;
  for (harness::Box& box : call.outs) add_buffers(options, {&box}, false);
  for (harness::Box& box : call.lses) add_buffers(options, {&box}, false);
  add_buffers(options, {&call.out, &call.lse}, true);
  emulate_merge(make_merge_problem(call.args()), options);
}

}  // namespace tandem::kernel_tests
