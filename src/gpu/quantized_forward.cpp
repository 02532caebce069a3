#include "gpu/quantized_forward.hpp"

#include <algorithm>

#include "gpu/kernel_name.hpp"
#include "gpu/packing.hpp"
#include "gpu/quantize.hpp"
#include "gpu/quantized_forward_params.hpp"
#include "gpu/tensor_map.hpp"

namespace tandem::gpu {
namespace {

/// V stays as it is for some recipes, and then the copy engine has to be able to read it.
bool needs_packing(const Problem& p, const QuantizedConfig& config) {
  return config.pv == Codes::input &&
         !copy_engine_can_read(forward_tensor_map(p, config.forward(), Loaded::v));
}
Packing packing_of_v(Problem& p) {
  return {.operand = &p.v,
          .batch = p.packed_k ? 1 : p.batch,
          .rows = p.rows_k,
          .heads = p.heads_kv,
          .head_dim = p.head_dim_v};
}

LoadedKernel attention_kernel(int device, const QuantizedConfig& config) {
  static KernelTable<QuantizedConfig> table;
  return table.get(device, config, [](int d, const QuantizedConfig& c) {
    return load_kernel(d, kernel_name(c), quantized_shared_bytes(c));
  });
}

void attend(const Problem& p, const QuantizedConfig& config, const LoadedKernel& kernel,
            const QuantizedOperands& operands, unsigned int* tile_counter, bool programmatic,
            abi::Stream stream) {
  const DeviceProperties& limits = properties(p.device.index);
  const QuantizedParams params =
      make_quantized_params(p, config, operands, encode_tensor_map, limits.multiprocessors, tile_counter);
  const std::int64_t tiles = forward_tile_count(p, config.forward());
  launch(kernel,
         {.grid = static_cast<unsigned int>(std::min<std::int64_t>(tiles, limits.multiprocessors)),
          .threads = static_cast<unsigned int>(config.threads()),
          .stream = stream,
          .programmatic = programmatic},
         &params);
}

}  // namespace

std::size_t quantized_forward_workspace_bytes(const Problem& problem, const Recipe& recipe,
                                              const QuantizedConfig& config) {
  Problem p = problem;
  return quantized_space(p, recipe).bytes + (needs_packing(p, config) ? packing_of_v(p).bytes() : 0);
}

void quantized_forward(const Problem& problem, const Recipe& recipe, const QuantizedConfig& config,
                       void* stream_handle, void* workspace, QuantizedStages stages) {
  const std::int64_t tiles = forward_tile_count(problem, config.forward());
  if (tiles == 0) return;
  const int device = problem.device.index;
  const auto stream = static_cast<abi::Stream>(stream_handle);
  // All kernels are there before the first is launched: an error leaves the outputs as they were.
  const QuantizeKernels quantizer = quantize_kernels(device, problem, recipe);
  const LoadedKernel attention = stages.attend ? attention_kernel(device, config) : LoadedKernel{};
  const ContextGuard guard(device);
  const Scratch scratch(workspace,
                        workspace != nullptr ? 0 : quantized_forward_workspace_bytes(problem, recipe, config),
                        stream);
  const QuantizedSpace space = quantized_space(problem, recipe);
  Problem p = problem;
  if (needs_packing(p, config)) pack(packing_of_v(p), scratch.data() + space.bytes, device, stream);
  clear_counters(space, reinterpret_cast<abi::DevicePointer>(scratch.data()), stream);
  const QuantizeParams params = make_quantize_params(p, recipe, scratch.data());
  if (stages.quantize) quantize(p, quantizer, params, stream);
  if (stages.attend) {
    auto* const tile_counter = reinterpret_cast<unsigned int*>(scratch.data() + space.counters);
    attend(p, config, attention, operands_of(params), tile_counter, stages.quantize, stream);
  }
}

}  // namespace tandem::gpu
