#include "gpu/mixed_forward.hpp"

#include "gpu/forward.hpp"
#include "gpu/forward_params.hpp"
#include "gpu/kernel_name.hpp"
#include "gpu/launch.hpp"
#include "gpu/packing.hpp"
#include "gpu/quantize_params.hpp"
#include "problem/effective.hpp"

namespace tandem::gpu {

std::size_t mixed_forward_workspace_bytes(const Problem& problem, const ForwardConfig& config) {
  return mixed_space(problem).bytes +
         forward_workspace_bytes(heads_as_rows(dequantized(problem, nullptr)), config);
}

void mixed_forward(const Problem& problem, const QuantizeConfig& dequantize, const ForwardConfig& config,
                   void* stream_handle, void* workspace) {
  if (forward_tile_count(heads_as_rows(dequantized(problem, nullptr)), config.tiling()) == 0) return;
  const int device = problem.device.index;
  const auto stream = static_cast<abi::Stream>(stream_handle);
  const LoadedKernel kernel = loaded_kernel(device, Kernel::dequantize, dequantize);
  load_forward(device, config);
  const ContextGuard guard(device);
  const Scratch scratch(workspace, workspace != nullptr ? 0 : mixed_forward_workspace_bytes(problem, config),
                        stream);
  const Problem d = dequantized(problem, scratch.data());
  const ArrangeParams params = make_dequantize_params(problem, d);
  if (const int units = params.quantize.units_k + params.quantize.units_v; units > 0) {
    launch(kernel, {.grid = static_cast<unsigned int>(units), .threads = quantize_threads, .stream = stream},
           &params);
  }
  forward(heads_as_rows(d), config, stream_handle, scratch.data() + mixed_space(problem).bytes);
}

}  // namespace tandem::gpu
