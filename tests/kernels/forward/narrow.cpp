// Head dimensions up to 96.
#include "forward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedForward> narrow_forwards() {
  constexpr ForwardConfig full{
      .head_dim_qk = 64, .head_dim_v = 64, .block_m = 192, .block_n = 128, .q_stages = 2};
  static constexpr auto kernels =
      emulate<full,
              [](ForwardConfig c) {
                c.causal = true;
                return c;
              }(full),
              [](ForwardConfig c) {
                c.element = Element::f16;
                c.causal = c.local = c.varlen = c.dynamic = true;
                c.transform = ScoreTransform::softcap;
                return c;
              }(full),
              [](ForwardConfig c) {
                c.local = true;
                c.transform = ScoreTransform::scaled;
                return c;
              }(full),
              ForwardConfig{
                  .head_dim_qk = 96, .head_dim_v = 96, .block_m = 128, .block_n = 176, .dynamic = true},
              ForwardConfig{.head_dim_qk = 96,
                            .head_dim_v = 64,
                            .block_m = 192,
                            .block_n = 64,
                            .q_stages = 2,
                            .causal = true,
                            .dynamic = true},
              ForwardConfig{.element = Element::f16,
                            .head_dim_qk = 32,
                            .head_dim_v = 64,
                            .block_m = 64,
                            .block_n = 64,
                            .stages = 3,
                            .causal = true,
                            .varlen = true,
                            .pingpong = false}>();
  return kernels;
}

}  // namespace tandem::kernel_tests
