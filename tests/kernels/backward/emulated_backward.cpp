#include "emulated_backward.hpp"

#include <algorithm>
#include <array>
#include <future>
#include <limits>
#include <vector>

#include "forward/emulated_forward.hpp"
#include "functions/any_function.hpp"
#include "gpu/function_source.hpp"
#include "ops/backward/common/convert.cuh"
#include "ops/backward/launch.hpp"
#include "ops/functions/common/clear_gradients.cuh"
#include "ops/pack/launch.hpp"

namespace tandem::kernel_tests {

using harness::Box;
using harness::Call;
using harness::Case;
using harness::Random;

harness::Case random_backward_case(std::uint64_t seed, const EmulatedBackwardConfig& config) {
  const ForwardConfig forward{
      .tiling = {.element = config.tiling.element,
                 .head_dim_qk = config.tiling.head_dim_qk,
                 .head_dim_v = config.tiling.head_dim_v},
      .mask = {.causal = config.mask.causal, .local = config.mask.local, .varlen = config.mask.varlen},
      .transform = config.transform};
  Case c = random_forward_case(seed, forward);
  Random random(seed + 2000);
  const int rank_q = c.packed_q ? 3 : 4;
  const int rank_k = c.packed_k ? 3 : 4;
  c.lse = true;
  if (config.transform != ScoreTransform::softcap && random.chance(0.2))
    c.options.scale = random.pick({0.0F, -0.125F});
  c.options.deterministic = config.deterministic;
  c.dout = harness::random_layout(random, rank_q, true);
  c.dq = harness::random_layout(random, rank_q, false);
  c.dk = harness::random_layout(random, rank_k, false);
  c.dv = harness::random_layout(random, rank_k, false);
  c.gate = random.chance(0.3);
  if (!c.gate) return c;
  c.gate_layout = harness::random_layout(random, rank_q, false);
  c.unwanted |= random.pick<unsigned>({0, 0, 8});
  return c;
}

namespace {

template <typename Params>
WithCapturedGradients<Params> with_gradients(const Problem& p, const Params& params) {
  WithCapturedGradients<Params> with{params, {}};
  gpu::set_captured_gradients(p, with.gradients);
  return with;
}

/// The launch before the others of a call that wants gradients of captured tensors.
void clear_captured(const Problem& p, const emulator::Options& options) {
  emulator::launch(
      &tandem::clear_gradients<BackwardConfig{}>, gpu::make_clear_params(p),
      {.blocks = static_cast<unsigned>(gpu::clear_grid(p, 1)), .threads = clear_threads, .shared_bytes = 0},
      options);
}

void launch_main(const EmulatedBackward& kernels, const Problem& p, const Call& call, const EmulatedRun& run,
                 const BackwardParams& params, const gpu::Workspace& workspace, char* memory,
                 const emulator::Grid& shape, const emulator::Options& options) {
  const EmulatedBackwardConfig& config = kernels.config;
  const auto sm80 = [&] {
    const auto& c = std::get<Sm80BackwardConfig>(config.of_kernel);
    return gpu::make_sm80_backward_params(p, c, gpu::backward_maps(p, c), workspace, memory);
  };
  if (kernels.sm80 != nullptr) {
    emulator::launch(kernels.sm80, sm80(), shape, options);
  } else if (config.functions.given()) {
    running = run.functions != nullptr ? run.functions : printed_functions(digest_of(call, Pass::backward));
    WithFunctions<BackwardParams> with{params, gpu::function_params(gpu::functions_of(p))};
    std::vector<unsigned int> lists;
    emulator::Options listed = options;
    if (kernels.lists != nullptr) {
      const gpu::ListedBlocks of_call = gpu::listed_query_blocks(p, config.tile_keys, config.tiling.block_m);
      lists.assign(static_cast<std::size_t>(of_call.bytes()) / sizeof(unsigned int), ~0U);
      with.functions.lists = of_call.lists;
      with.functions.lists.data = lists.data();
      emulator::Options listing = options;
      listing.of_previous_grid.clear();
      listing.buffers.push_back(emulator::writable(lists));
      emulator::launch(kernels.lists, with,
                       {.blocks = static_cast<unsigned>(of_call.count),
                        .threads = list_threads,
                        .shared_bytes = list_shared_bytes},
                       listing);
      if (run.with_lists) run.with_lists(lists);
      listed.buffers.push_back(emulator::readable(lists));
    }
    if (kernels.sm80_captured != nullptr) {
      emulator::launch(kernels.sm80_captured, with_gradients(p, gpu::with_functions(sm80(), with.functions)),
                       shape, listed);
    } else if (kernels.captured != nullptr) {
      emulator::launch(kernels.captured, with_gradients(p, with), shape, listed);
    } else if (kernels.sm80_functions != nullptr) {
      emulator::launch(kernels.sm80_functions, gpu::with_functions(sm80(), with.functions), shape, listed);
    } else {
      emulator::launch(kernels.functions, with, shape, listed);
    }
  } else {
    emulator::launch(kernels.main, params, shape, options);
  }
}

/// Gives a call with a gate room for the dout that is made, where nothing has been written.
void make_dout(Problem& p, std::vector<std::uint16_t>& made, emulator::Options& options) {
  const gpu::LoadedTensor dout = gpu::loaded_tensor(p, gpu::Loaded::dout);
  made.assign(static_cast<std::size_t>(gpu::packed_bytes(dout)) / 2, 0xFFFF);
  Operand operand = gpu::packed_operand(dout);
  operand.data = made.data();
  p.dout = operand;
  options.buffers.push_back(emulator::writable(made));
}

template <typename Config>
void run_as(const Config& config, const EmulatedBackward& kernels, Call& call, const EmulatedRun& run) {
  Problem p = problem_of(call.backward_args());
  emulator::Options options;
  // A gradient that nobody asked for goes to rows that all heads share.
  options.unordered = call.rows_overlap || !p.dk.given() || !p.dv.given();
  options.seed = run.seed;
  options.host_threads = run.host_threads;
  std::vector<Box*> read = call.inputs();
  read.push_back(&call.out);
  read.push_back(&call.lse);
  add_buffers(options, read, false);
  add_buffers(options, call.outputs(Pass::backward), true);
  std::array<std::vector<std::uint16_t>, 4> packed;
  const Operand gated_dout = p.dout;
  if (p.gate.given()) make_dout(p, packed[gpu::index_of(gpu::Loaded::dout)], options);
  for (const gpu::Loaded which : gpu::backward_loaded_tensors) {
    if (tma_can_read(gpu::backward_tensor_map(p, config, which))) continue;
    const std::size_t at = gpu::index_of(which);
    const gpu::LoadedTensor tensor = gpu::loaded_tensor(p, which);
    pack_in_emulator(gpu::operand_of(p, which), packed[at], tensor.batch, tensor.rows, tensor.heads,
                     tensor.head_dim, options);
    options.buffers.push_back(emulator::readable(packed[at]));
  }
  // Whole 256 bytes, as the workspace is aligned; NaN, since nobody clears it.
  struct alignas(256) Unit {
    std::array<std::uint32_t, 64> words;
  };
  Unit nan{};
  nan.words.fill(std::numeric_limits<std::uint32_t>::max());
  const gpu::Workspace workspace = gpu::backward_workspace(p, config);
  std::vector<Unit> scratch(workspace.bytes() / sizeof(Unit), nan);
  options.buffers.push_back(emulator::writable(scratch));
  const BackwardParams params =
      gpu::make_backward_params(p, config, gpu::backward_maps(p, config), &emulator::encode, workspace,
                                reinterpret_cast<char*>(scratch.data()));
  if (p.wants_captured_gradients() && run.clears) clear_captured(p, options);
  const auto rows_threads = static_cast<unsigned>(backward_rows_threads(config));
  const auto rows_blocks = static_cast<unsigned>(gpu::backward_rows_count(p, config.tiling.block_m));
  const auto grid = static_cast<unsigned>(gpu::backward_grid(p, config, static_cast<int>(run.blocks)));
  const emulator::Grid rows_grid{.blocks = rows_blocks, .threads = rows_threads, .shared_bytes = 0};
  if (rows_blocks > 0 && p.gate.given()) {
    emulator::launch(kernels.gated, gpu::with_gate(p, gated_dout, params), rows_grid, options);
  } else if (rows_blocks > 0) {
    emulator::launch(kernels.preprocess, params, rows_grid, options);
  }
  const bool converts = rows_blocks > 0 && p.dq.given();
  const auto convert = [&] {
    emulator::Options beside_main = options;
    beside_main.of_running_grid = {emulator::readable(scratch)};
    emulator::launch(kernels.convert, params, rows_grid, beside_main);
  };
  std::future<void> beside;
  if (converts && run.convert_beside && grid > 0) beside = std::async(std::launch::async, convert);
  if (grid > 0) {
    emulator::Options after_preprocess = options;
    // All of the workspace but gradients that nobody asked for, which the main kernel writes.
    const auto* const memory = reinterpret_cast<char*>(scratch.data());
    const auto preprocessed = workspace.at(gpu::Region::dk, reinterpret_cast<char*>(scratch.data())) - memory;
    if (rows_blocks > 0)
      after_preprocess.of_previous_grid = {{memory, static_cast<std::size_t>(preprocessed), true}};
    const emulator::Grid shape{.blocks = grid,
                               .threads = static_cast<unsigned>(config.threads()),
                               .shared_bytes = static_cast<std::size_t>(backward_shared_bytes(config)),
                               .cluster = static_cast<unsigned>(config.cluster)};
    launch_main(kernels, p, call, run, params, workspace, reinterpret_cast<char*>(scratch.data()), shape,
                after_preprocess);
  }
  if (beside.valid()) {
    beside.get();
  } else if (converts) {
    convert();
  }
  if (p.dsink != nullptr) {
    emulator::launch(kernels.sink, params,
                     {.blocks = static_cast<unsigned>(p.heads_q),
                      .threads = backward_sink_threads,
                      .shared_bytes = backward_sink_shared_bytes},
                     options);
  }
}

}  // namespace

void run_backward(const EmulatedBackward& kernels, Call& call, const EmulatedRun& run) {
  gpu::visit_backward(kernels.config.of_kernel, [&](const auto& c) { run_as(c, kernels, call, run); });
}

}  // namespace tandem::kernel_tests
