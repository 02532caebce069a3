#include "gpu/backward.hpp"

#include <algorithm>

#include "gpu/backward_params.hpp"
#include "gpu/kernel_name.hpp"
#include "gpu/launch.hpp"
#include "gpu/packing.hpp"
#include "gpu/tensor_map.hpp"

namespace tandem::gpu {
namespace {

/// The tensors of `problem` that TMA cannot read. Calls f with each.
template <typename F>
void for_each_packing(Problem& p, const BackwardConfig& config, F&& f) {
  const std::array<Operand*, 4> operands = {&p.q, &p.k, &p.v, &p.dout};
  for (const BackwardLoaded which : backward_loaded_tensors) {
    if (tma_can_read(backward_tensor_map(p, config, which))) continue;
    const LoadedTensor tensor = backward_tensor(p, which);
    f(Packing{.operand = operands[static_cast<std::size_t>(which)],
              .batch = tensor.batch,
              .rows = tensor.rows,
              .heads = tensor.heads,
              .head_dim = tensor.head_dim});
  }
}

}  // namespace

std::size_t backward_workspace_bytes(const Problem& problem, const BackwardConfig& config) {
  Problem p = problem;
  std::size_t bytes = backward_scratch_bytes(p, config);
  for_each_packing(p, config, [&](const Packing& t) { bytes += t.bytes(); });
  return bytes;
}

void backward(const Problem& problem, const BackwardConfig& config, void* stream_handle, void* workspace) {
  const int device = problem.device.index;
  const auto stream = static_cast<abi::Stream>(stream_handle);
  const auto rows = static_cast<unsigned int>(backward_rows_count(problem, config));
  const bool wants_dq = problem.dq.given();
  const bool wants_main = wants_dq || problem.dk.given() || problem.dv.given();
  const std::int64_t tiles = wants_main ? backward_tile_count(problem, config) : 0;
  const bool sinks = problem.dsink != nullptr && problem.heads_q > 0;
  if (rows == 0 && tiles == 0 && !sinks) return;

  // All kernels are there before the first is launched: an error leaves the outputs as they were.
  const BackwardConfig rows_config = backward_rows_config(config);
  const auto rows_threads = static_cast<unsigned int>(backward_rows_threads(config));
  const LoadedKernel preprocess = loaded_kernel(device, Kernel::backward_preprocess, rows_config);
  const LoadedKernel main = loaded_kernel(device, Kernel::backward, config);
  const LoadedKernel convert = loaded_kernel(device, Kernel::backward_convert, rows_config);
  const LoadedKernel sink =
      sinks ? loaded_kernel(device, Kernel::backward_sink, rows_config) : LoadedKernel{};
  const DeviceProperties& limits = properties(device);
  const ContextGuard guard(device);

  Problem p = problem;
  const Scratch scratch(workspace, workspace != nullptr ? 0 : backward_workspace_bytes(problem, config),
                        stream);
  char* free = scratch.data() + backward_scratch_bytes(problem, config);
  for_each_packing(p, config, [&](const Packing& t) {
    pack(t, free, device, stream);
    free += t.bytes();
  });
  const BackwardParams params = make_backward_params(p, config, encode_tensor_map, scratch.data());
  if (rows > 0) launch(preprocess, {.grid = rows, .threads = rows_threads, .stream = stream}, &params);
  if (tiles > 0) {
    launch(main,
           {.grid = static_cast<unsigned int>(backward_grid(p, config, limits.multiprocessors)),
            .threads = static_cast<unsigned int>(config.threads()),
            .stream = stream,
            .cluster = static_cast<unsigned int>(config.cluster),
            // In a fixed order blocks wait for others'. Beside another such grid, half of each being
            // resident, none would end. Such a launch cannot be programmatic, too.
            .programmatic = rows > 0 && !config.deterministic,
            .resident = config.deterministic},
           &params);
  }
  if (rows > 0 && wants_dq) {
    launch(convert, {.grid = rows, .threads = rows_threads, .stream = stream, .programmatic = true}, &params);
  }
  if (sinks) {
    launch(sink,
           {.grid = static_cast<unsigned int>(p.heads_q), .threads = backward_sink_threads, .stream = stream},
           &params);
  }
}

}  // namespace tandem::gpu
