#include "eight_bit_backward/emulated_eight_bit_backward.hpp"

#include <future>
#include <limits>
#include <vector>

#include "eight_bit_backward/kernels.hpp"
#include "emulated_quantize.hpp"
#include "harness/changes.hpp"
#include "ops/eight_bit_backward/launch.hpp"
#include "problem/recipe_of.hpp"

namespace tandem::kernel_tests {
namespace {

using harness::Box;
using harness::Call;
using harness::Case;

emulator::Grid grid_of(std::int64_t blocks, int threads, int shared_bytes = 0) {
  return {.blocks = static_cast<unsigned>(blocks),
          .threads = static_cast<unsigned>(threads),
          .shared_bytes = static_cast<std::size_t>(shared_bytes)};
}

}  // namespace

std::span<const EmulatedEightBitBackward> eight_bit_backwards() {
  constexpr EightBitBackwardConfig full{};
  static constexpr auto kernels = emulate<full, staggered(full),
                                          [](EightBitBackwardConfig c) {
                                            c.mask.causal = true;
                                            c.f32_dq = true;
                                            return c;
                                          }(full),
                                          [](EightBitBackwardConfig c) {
                                            c.mask.varlen = true;
                                            c.f32_dk_dv = true;
                                            return c;
                                          }(full),
                                          [](EightBitBackwardConfig c) {
                                            c.mask.causal = c.schedule.deterministic = true;
                                            return c;
                                          }(full)>();
  return kernels;
}

Case random_eight_bit_backward_case(std::uint64_t seed, const EmulatedEightBitBackward& kernels) {
  const EightBitBackwardConfig& config = kernels.config;
  harness::Random random(seed + 1000);
  Case c = harness::random_case(seed, 300);
  c.dtype = c.out_dtype = config.tiling.element == Element::f16 ? DType::f16 : DType::bf16;
  c.scales = 0;
  c.amplitude = 1.0;
  c.sink = false;
  c.lse = true;
  c.batch = std::min<std::int64_t>(c.batch, 2);
  c.heads_kv = std::min<std::int64_t>(c.heads_kv, 2);
  c.heads_q = c.heads_kv * random.between(1, 2);
  c.head_dim_qk = c.head_dim_v = config.tiling.head_dim_qk;
  c.f32_gradients = f32_gradients_of(config);
  c.seqlen_q = std::max<std::int64_t>(c.seqlen_q, 1);
  const auto batch = static_cast<std::size_t>(c.batch);
  choose_lengths(c, config.mask.varlen, random);
  for (std::vector<std::int64_t>* lengths : {&c.lengths_q, &c.lengths_k, &c.used_q, &c.used_k}) {
    if (lengths->size() > batch) lengths->resize(batch);
  }
  c.options = {};
  c.options.causal = config.mask.causal && !config.mask.local;
  if (config.mask.local) {
    c.options.window_left = random.between(0, 80);
    c.options.window_right = random.between(0, 80);
  }
  c.options.deterministic = config.schedule.deterministic;
  c.options.precision = c.options.backward_precision = Precision::int8;
  if (random.chance(0.3)) c.options.scale = random.pick({0.0F, -0.125F});
  const int rank_q = c.packed_q ? 3 : 4;
  const int rank_k = c.packed_k ? 3 : 4;
  // Kernels with vectors of 16 bytes want rows that begin at multiples of them.
  const std::int64_t unit = kernels.quantizer.vectors ? 8 : 1;
  const auto layout = [&](int rank, bool input) {
    harness::Layout x = harness::random_layout(random, rank, input);
    x.pad -= x.pad % unit;
    x.base_offset -= x.base_offset % unit;
    return x;
  };
  for (harness::Layout* x : {&c.q, &c.dout}) *x = layout(rank_q, true);
  for (harness::Layout* x : {&c.k, &c.v}) *x = layout(rank_k, true);
  for (harness::Layout* x : {&c.out, &c.dq}) *x = layout(rank_q, false);
  for (harness::Layout* x : {&c.dk, &c.dv}) *x = layout(rank_k, false);
  return c;
}

void run_eight_bit_backward(const EmulatedEightBitBackward& kernels, Call& call,
                            const EightBitBackwardRun& run) {
  const EightBitBackwardConfig& config = kernels.config;
  const Problem p = problem_of(call.backward_args());
  const Recipe recipe = recipe_of(p.backward_precision, p.strict);
  emulator::Options options{.seed = run.seed, .host_threads = run.host_threads};
  options.unordered = call.rows_overlap || !p.dk.given() || !p.dv.given();
  std::vector<Box*> read = call.inputs();
  for (Box* box : {&call.out, &call.lse, &call.max_logits}) read.push_back(box);
  add_buffers(options, read, false);
  add_buffers(options, call.outputs(Pass::backward), true);
  const gpu::Workspace workspace = gpu::eight_bit_backward_workspace(p, config, recipe);
  QuantizedScratch scratch(workspace);
  options.buffers.push_back({scratch.data, workspace.bytes(), true});
  const EightBitBackwardParams params = gpu::make_eight_bit_backward_params(
      p, config, recipe,
      [&] {
        gpu::LoadedMaps maps = gpu::eight_bit_backward_maps(p, config);
        gpu::place(maps, workspace, scratch.data);
        return maps;
      }(),
      &emulator::encode, workspace, scratch.data);
  const gpu::QuantizeItems items = gpu::gradient_items(p);
  if (items.k > 0)
    emulator::launch(kernels.mean, params.quantize,
                     grid_of(items.k, mean_threads(kernels.quantizer), mean_shared_bytes(kernels.quantizer)),
                     options);
  if (items.total() > 0)
    emulator::launch(kernels.keys, params,
                     grid_of(items.total(), quantize_threads, gradient_keys_bytes(kernels.quantizer)),
                     options);
  if (items.q > 0)
    emulator::launch(kernels.queries, params,
                     grid_of(items.q, quantize_threads, gradient_queries_bytes(kernels.quantizer)), options);
  const std::int64_t rows_blocks = gpu::backward_rows_count(p, config.tiling.block_m);
  const std::int64_t grid = gpu::backward_grid(p, config, static_cast<int>(run.blocks));
  const bool converts = rows_blocks > 0 && p.dq.given();
  const auto convert = [&] {
    emulator::Options beside_main = options;
    // What the main kernel writes, and the counters.
    char* const sums = workspace.at(gpu::Region::dq_sum, scratch.data);
    const auto bytes_of_main = workspace.at(gpu::Region::q_quantized, scratch.data) - sums;
    beside_main.of_running_grid = {{sums, static_cast<std::size_t>(bytes_of_main), true}};
    emulator::launch(kernels.convert, params, grid_of(rows_blocks, eight_bit_convert_threads(config)),
                     beside_main);
  };
  std::future<void> beside;
  if (converts && run.convert_beside && grid > 0) beside = std::async(std::launch::async, convert);
  if (grid > 0) {
    emulator::Options after_quantizer = options;
    after_quantizer.of_previous_grid = {{scratch.data, workspace.bytes(), true}};
    emulator::launch(kernels.main, params, grid_of(grid, config.threads(), backward_shared_bytes(config)),
                     after_quantizer);
  }
  if (beside.valid()) {
    beside.get();
  } else if (converts) {
    convert();
  }
}

}  // namespace tandem::kernel_tests
