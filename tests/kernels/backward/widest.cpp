// Head dimensions 192 and 256.
#include "backward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedBackward> widest_backwards() {
  static constexpr auto kernels = emulate<
      BackwardConfig{.head_dim_qk = 192, .head_dim_v = 128, .block_n = 64, .causal = true},
      BackwardConfig{
          .element = Element::f16, .head_dim_qk = 192, .head_dim_v = 192, .block_n = 64, .varlen = true},
      [](BackwardConfig c) {
        c.staggered = true;
        return c;
      }(cluster_of_two),
      [](BackwardConfig c) {
        c.causal = c.deterministic = true;
        return c;
      }(cluster_of_two),
      BackwardConfig{.head_dim_qk = 192, .head_dim_v = 128, .block_n = 64, .causal = true, .varlen = true},
      [](BackwardConfig c) {
        c.element = Element::f16;
        c.causal = c.local = c.softcap = c.varlen = c.deterministic = true;
        return c;
      }(cluster_of_two)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
