// The kernels there are, and what a Config makes of each: the C++20 expression that NVRTC instantiates, and
// the shape of its thread blocks.
#pragma once

#include <string>
#include <variant>

#include "gpu/compiler.hpp"
#include "kernels/config/append.hpp"
#include "kernels/config/backward.hpp"
#include "kernels/config/eight_bit.hpp"
#include "kernels/config/forward.hpp"
#include "kernels/config/pack.hpp"
#include "kernels/config/quantize.hpp"

namespace tandem::gpu {

enum class Kernel : int {
  pack,
  dequantize,
  mean_of_keys,
  largest_of_groups,
  quantize,
  arrange_quantized,
  forward,
  forward_wide,
  sm80_forward,
  decode,
  combine,
  list_blocks,
  list_query_blocks,
  clear_gradients,
  eight_bit_forward,
  backward_preprocess,
  backward,
  sm80_backward,
  backward_convert,
  backward_sink,
  append,
  merge
};

/// The Config of any kernel.
using KernelConfig = std::variant<ForwardConfig, EightBitConfig, BackwardConfig, QuantizeConfig, PackConfig,
                                  AppendConfig, MergeConfig>;

/// "tandem::ForwardConfig{.element = tandem::Element::bf16, .head_dim_qk = 128, ...}": valid C++20 that gives
/// `config` back.
std::string expression_of(const KernelConfig& config);

/// The kernel as `config`, one of its kind, specialises it.
KernelName kernel_name(Kernel kernel, const KernelConfig& config);

/// The same for the Configs of one kernel.
inline Kernel kernel_of(const ForwardConfig& config) {
  if (config.of_sm80()) return Kernel::sm80_forward;
  return config.by_warps() ? Kernel::decode : config.wide ? Kernel::forward_wide : Kernel::forward;
}
/// The main kernel of the backward pass.
inline Kernel kernel_of(const BackwardConfig& config) {
  return config.of_sm80() ? Kernel::sm80_backward : Kernel::backward;
}
inline KernelName kernel_name(const ForwardConfig& config) {
  return kernel_name(kernel_of(config), config);
}
inline KernelName kernel_name(const EightBitConfig& config) {
  return kernel_name(Kernel::eight_bit_forward, config);
}
inline KernelName kernel_name(const PackConfig& config) {
  return kernel_name(Kernel::pack, config);
}

inline KernelName kernel_name(const AppendConfig& config) {
  return kernel_name(Kernel::append, config);
}
inline KernelName kernel_name(const MergeConfig& config) {
  return kernel_name(Kernel::merge, config);
}

/// Its thread blocks.
struct BlockShape {
  int threads = 128;
  int shared_bytes = 0;  ///< dynamic shared memory
  int cluster = 1;       ///< blocks of a cluster
};
BlockShape block_shape(Kernel kernel, const KernelConfig& config);

}  // namespace tandem::gpu
