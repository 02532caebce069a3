#include "ops/portable_set.hpp"
#include "ops/cache/launch.hpp"
#include "ops/forward/launch.hpp"
#include "ops/pack/launch.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "config/fields.hpp"
#include "ops/backward/launch.hpp"
#include "ops/backward/sm80_plan.hpp"
#include "ops/cache/plan.hpp"
#include "ops/forward/plan.hpp"
#include "ops/forward/sm80_plan.hpp"

namespace tandem {
namespace {

constexpr int widths[] = {64, 128, 256};
constexpr Element elements[] = {Element::bf16, Element::f16};

/// The set's head dimension that holds these.
int width_of(std::int64_t head_dim_qk, std::int64_t head_dim_v) {
  const std::int64_t widest = std::max(head_dim_qk, head_dim_v);
  return *std::ranges::find_if(widths, [&](int width) { return width >= widest || width == widths[2]; });
}

/// The call with the set's head dimensions, on a GPU with the least shared memory.
CallFacts with_width(const CallFacts& facts) {
  Problem p = facts.problem;
  p.head_dim_qk = p.head_dim_v = width_of(p.head_dim_qk, p.head_dim_v);
  return CallFacts(p, {.family = Family::sm80,
                       .multiprocessors = facts.device.multiprocessors,
                       .shared_bytes_per_sm = portable_shared_bytes_per_sm});
}

/// A mask that serves all: of what a call does not bound, the parameters say so.
void serve_every_mask(Mask& mask) {
  mask.causal = mask.local = mask.varlen = true;
}

/// The set's problem of a width: bf16 or f16, of many queries or few.
Problem problem_of(Pass pass, int width, Element element, std::int64_t rows_q) {
  Problem p;
  p.pass = pass;
  p.q.dtype = p.k.dtype = p.out.dtype = element == Element::f16 ? DType::f16 : DType::bf16;
  p.head_dim_qk = p.head_dim_v = width;
  p.batch = p.heads_kv = p.heads_q = 1;
  p.rows_q = rows_q;
  p.rows_k = 4096;
  return p;
}

}  // namespace

Sm80ForwardConfig portable_forward_config(const CallFacts& facts) {
  Sm80ForwardConfig c = choose_sm80_forward_config(with_width(facts));
  if (facts.problem.has_function()) return c;  // compiled for the call in any case
  serve_every_mask(c.mask);
  // For a smaller set heads are not rows, so that of several queries, but few, each head reads the keys; and
  // few queries always share them.
  if (c.tiling.heads_as_rows && !c.schedule.invariant) {
    c.tiling.heads_as_rows = false;
    c.schedule.split = true;
  }
  return c;
}

Sm80BackwardConfig portable_backward_config(const CallFacts& facts) {
  Sm80BackwardConfig c = choose_sm80_backward_config(with_width(facts));
  if (!facts.problem.has_function()) serve_every_mask(c.mask);
  return c;
}

std::vector<Sm80ForwardConfig> portable_forward_configs() {
  std::vector<Sm80ForwardConfig> configs;
  for (const int width : widths) {
    for (const Element element : elements) {
      for (const KeySource keys : {KeySource::rows, KeySource::pages}) {
        for (const std::int64_t queries : {4096, 1}) {
          Sm80ForwardConfig c =
              portable_forward_config(CallFacts(problem_of(Pass::forward, width, element, queries)));
          c.keys = keys;
          configs.push_back(c);
        }
      }
    }
  }
  return configs;
}

std::vector<Sm80BackwardConfig> portable_backward_configs() {
  std::vector<Sm80BackwardConfig> configs;
  for (const int width : widths) {
    if (width > max_sm80_backward_head_dim) break;
    for (const Element element : elements) {
      for (const bool f32 : {false, true}) {  // as ranks add gradients up, in bf16
        if (f32 && element != Element::bf16) continue;
        Sm80BackwardConfig c =
            portable_backward_config(CallFacts(problem_of(Pass::backward, width, element, 4096)));
        c.f32_dq = c.f32_dk_dv = f32;
        configs.push_back(c);
      }
    }
  }
  return configs;
}

std::vector<gpu::KernelName> portable_kernels() {
  std::vector<gpu::KernelName> kernels;
  const auto add = [&](gpu::KernelName name) {
    name.architecture = gpu::portable_architecture;
    if (std::ranges::find(kernels, name) == kernels.end()) kernels.push_back(std::move(name));
  };
  for (const Sm80ForwardConfig& c : portable_forward_configs()) {
    add(gpu::kernel_of(c).name(c));
    if (c.schedule.split) add(gpu::kernels::combine.name(combine_config(c)));
  }
  for (const Sm80BackwardConfig& c : portable_backward_configs()) {
    add(gpu::kernel_of(c).name(gpu::backward_main_config(c)));
    add(gpu::kernels::backward_preprocess.name(gpu::backward_rows_config(c)));
    add(gpu::kernels::backward_convert.name(gpu::backward_convert_config(c)));
  }
  for (const bool paired : {false, true}) add(gpu::kernels::pack.name(PackConfig{.paired = paired}));
  for (const AppendConfig& c : shipped_append_configs()) {
    if (c.to == c.from) add(gpu::kernels::append.name(c));
  }
  for (const MergeConfig& c : shipped_merge_configs()) add(gpu::kernels::merge.name(c));
  return kernels;
}

std::vector<std::string> explain_portable(const CallFacts& facts, const gpu::KernelConfig& config) {
  const Problem& problem = facts.problem;
  const auto* forward = std::get_if<Sm80ForwardConfig>(&config);
  const auto* backward = std::get_if<Sm80BackwardConfig>(&config);
  std::vector<std::string> lines = {
      fmt::format("kernels sm80, portable: PTX of {} that the driver compiles, since {}",
                  gpu::portable_architecture, facts.portable)};
  const auto add_kernel = [&](const char* kernel, Element element, int head_dim) {
    lines.push_back(
        fmt::format("kernel {}: {}, every mask, any lengths, head_dim {} and head_dim_v {} padded to {}",
                    kernel, name_of(element), problem.head_dim_qk, problem.head_dim_v, head_dim));
  };
  const int room = portable_shared_bytes_per_sm / 1024;
  if (forward != nullptr) {
    add_kernel("sm80_forward", forward->tiling.element, forward->tiling.head_dim_qk);
    lines.push_back(
        fmt::format("tile {} x {} keys, {} stages, {} bytes of shared memory: what {} KB an SM hold",
                    words_of_rows(problem, forward->tiling), forward->tiling.block_n, forward->stages,
                    forward_shared_bytes(*forward), room));
    if (forward->schedule.split) lines.emplace_back(shared_keys);
  } else if (backward != nullptr) {
    add_kernel("sm80_backward", backward->tiling.element, backward->tiling.head_dim_qk);
    lines.push_back(
        fmt::format("tile {} keys, {} queries at a time, {} bytes of shared memory: what {} KB an SM hold",
                    backward->tile_keys(), backward->tiling.block_m, backward_shared_bytes(*backward), room));
  }
  return lines;
}

}  // namespace tandem
