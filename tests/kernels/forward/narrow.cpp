// Head dimensions up to 96.
#include "forward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedForward> narrow_forwards() {
  constexpr ForwardConfig full{
      .tiling = {.head_dim_qk = 64, .head_dim_v = 64, .block_m = 192, .block_n = 128}, .q_stages = 2};
  static constexpr auto kernels = emulate<
      full,
      [](ForwardConfig c) {
        c.mask.causal = true;
        return c;
      }(full),
      [](ForwardConfig c) {
        c.tiling.element = Element::f16;
        c.mask.causal = c.mask.local = c.mask.varlen = c.schedule.dynamic = true;
        c.transform = ScoreTransform::softcap;
        return c;
      }(full),
      [](ForwardConfig c) {
        c.mask.local = true;
        c.transform = ScoreTransform::scaled;
        return c;
      }(full),
      ForwardConfig{.tiling = {.head_dim_qk = 96, .head_dim_v = 96, .block_m = 128, .block_n = 176},
                    .schedule = {.dynamic = true}},
      ForwardConfig{.tiling = {.head_dim_qk = 96, .head_dim_v = 64, .block_m = 192, .block_n = 64},
                    .q_stages = 2,
                    .mask = {.causal = true},
                    .schedule = {.dynamic = true}},
      ForwardConfig{
          .tiling =
              {.element = Element::f16, .head_dim_qk = 32, .head_dim_v = 64, .block_m = 64, .block_n = 64},
          .stages = 3,
          .mask = {.causal = true, .varlen = true},
          .schedule = {.pingpong = false}},
      [](ForwardConfig c) {
        c.mask.causal = c.mask.local = c.schedule.dynamic = true;
        return f32_out(by_sequence(c));
      }(full),
      [](ForwardConfig c) {
        c.mask.causal = true;
        return by_sequence(c);
      }(full),
      f32_out(full)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
