// Head dimensions 192 and 256.
#include "backward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedBackward> widest_backwards() {
  static constexpr auto kernels = emulate<
      BackwardConfig{.head_dim_qk = 192, .head_dim_v = 128, .block_n = 64, .causal = true},
      BackwardConfig{
          .element = Element::f16, .head_dim_qk = 192, .head_dim_v = 192, .block_n = 64, .ragged = true},
      BackwardConfig{.head_dim_qk = 256,
                     .head_dim_v = 256,
                     .block_n = 64,
                     .cluster = 2,
                     .dout_stages = 1,
                     .dq_parts = 2,
                     .rotated = true},
      BackwardConfig{.head_dim_qk = 256,
                     .head_dim_v = 256,
                     .block_n = 64,
                     .cluster = 2,
                     .dout_stages = 1,
                     .dq_parts = 2,
                     .causal = true,
                     .deterministic = true},
      BackwardConfig{.head_dim_qk = 192, .head_dim_v = 128, .block_n = 64, .causal = true, .ragged = true},
      BackwardConfig{.element = Element::f16,
                     .head_dim_qk = 256,
                     .head_dim_v = 256,
                     .block_n = 64,
                     .cluster = 2,
                     .dout_stages = 1,
                     .dq_parts = 2,
                     .causal = true,
                     .local = true,
                     .softcap = true,
                     .ragged = true,
                     .deterministic = true}>();
  return kernels;
}

}  // namespace tandem::kernel_tests
