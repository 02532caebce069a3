#include "gpu/eight_bit_forward.hpp"

#include <algorithm>

#include "gpu/eight_bit_forward_params.hpp"
#include "gpu/kernel_name.hpp"
#include "gpu/packing.hpp"
#include "gpu/quantize.hpp"
#include "gpu/tensor_map.hpp"

namespace tandem::gpu {
namespace {

/// V stays as it is for some recipes, and then TMA has to be able to read it.
bool needs_packing(const Problem& p, const EightBitConfig& config) {
  return config.pv == Codes::input && !tma_can_read(forward_tensor_map(p, config.tiling(), Loaded::v));
}
Packing packing_of_v(Problem& p) {
  return {.operand = &p.v,
          .batch = p.packed_k ? 1 : p.batch,
          .rows = p.rows_k,
          .heads = p.heads_kv,
          .head_dim = p.head_dim_v};
}

/// What the launches before the attention kernel write, which transpose_v leaves out, and counters.
QuantizedSpace space_of(const Problem& p, const Recipe& recipe, const EightBitConfig& config) {
  if (!config.transpose_v) return quantized_space(p, recipe);
  QuantizedSpace counters{};
  counters.counter_bytes = sizeof(unsigned int);
  counters.bytes = scratch_alignment;
  return counters;
}

void attend(const Problem& p, const EightBitConfig& config, const LoadedKernel& kernel,
            const EightBitParams& params, bool programmatic, abi::Stream stream) {
  const std::int64_t tiles = forward_tile_count(p, config.tiling());
  const std::int64_t processors = properties(p.device.index).multiprocessors;
  launch(kernel,
         {.grid = static_cast<unsigned int>(std::min(tiles, processors)),
          .threads = static_cast<unsigned int>(config.threads()),
          .stream = stream,
          .programmatic = programmatic},
         &params);
}

}  // namespace

std::size_t eight_bit_forward_workspace_bytes(const Problem& problem, const Recipe& recipe,
                                              const EightBitConfig& config) {
  Problem p = problem;
  return space_of(p, recipe, config).bytes + (needs_packing(p, config) ? packing_of_v(p).bytes() : 0);
}

void eight_bit_forward(const Problem& problem, const Recipe& recipe, const QuantizeConfig& quantize_config,
                       const EightBitConfig& config, void* stream_handle, void* workspace,
                       EightBitStages stages) {
  const std::int64_t tiles = forward_tile_count(problem, config.tiling());
  if (tiles == 0) return;
  const int device = problem.device.index;
  const auto stream = static_cast<abi::Stream>(stream_handle);
  // All kernels are there before the first is launched: an error leaves the outputs as they were.
  const bool quantizes = stages.quantize && !config.transpose_v;
  const QuantizeKernels quantizer = !quantizes           ? QuantizeKernels{}
                                    : problem.of_codes() ? arrange_kernels(device, quantize_config)
                                                         : quantize_kernels(device, quantize_config);
  const LoadedKernel attention =
      stages.attend ? loaded_kernel(device, Kernel::eight_bit_forward, config) : LoadedKernel{};
  const ContextGuard guard(device);
  const Scratch scratch(workspace,
                        workspace != nullptr ? 0 : eight_bit_forward_workspace_bytes(problem, recipe, config),
                        stream);
  const QuantizedSpace space = space_of(problem, recipe, config);
  Problem p = problem;
  if (needs_packing(p, config)) pack(packing_of_v(p), scratch.data() + space.bytes, device, stream);
  clear_counters(space, reinterpret_cast<abi::DevicePointer>(scratch.data()), stream);
  auto* const tile_counter = reinterpret_cast<unsigned int*>(scratch.data() + space.counters);
  const int processors = properties(device).multiprocessors;
  if (config.transpose_v) {
    if (!stages.attend) return;
    const EightBitParams brought =
        make_brought_params(p, config, encode_tensor_map, processors, tile_counter);
    return attend(p, config, attention, brought, false, stream);
  }
  const QuantizeParams params = make_quantize_params(p, recipe, scratch.data());
  if (quantizes) quantize(p, quantizer, params, stream);
  if (stages.attend) {
    attend(p, config, attention,
           make_eight_bit_params(p, config, operands_of(params), encode_tensor_map, processors, tile_counter),
           quantizes, stream);
  }
}

}  // namespace tandem::gpu
