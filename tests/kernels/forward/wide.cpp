// Head dimension 128, and the paper's ablation on it.
#include "forward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedForward> wide_forwards() {
  constexpr ForwardConfig causal{.block_n = 128, .q_stages = 2, .causal = true};
  static constexpr auto kernels =
      emulate<ForwardConfig{.block_n = 160, .output_late = true, .pingpong = false}, causal,
              [](ForwardConfig c) {
                c.local = c.varlen = true;
                return c;
              }(causal),
              [](ForwardConfig c) {
                c.element = Element::f16;
                c.causal = false;
                c.varlen = c.dynamic = true;
                return c;
              }(causal),
              [](ForwardConfig c) {
                c.dynamic = c.output_late = true;
                return c;
              }(causal),
              ForwardConfig{.head_dim_v = 64, .block_m = 64, .block_n = 112, .stages = 1, .pingpong = false},
              ForwardConfig{.overlap = false}, ForwardConfig{.specialised = false},
              ForwardConfig{.causal = true, .specialised = false, .overlap = false, .pingpong = false},
              ForwardConfig{.pingpong = false}>();
  return kernels;
}

}  // namespace tandem::kernel_tests
