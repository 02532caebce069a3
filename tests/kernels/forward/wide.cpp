// Head dimension 128, and the paper's ablation on it.
#include "forward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedForward> wide_forwards() {
  constexpr ForwardConfig causal{.tiling = {.block_n = 128}, .q_stages = 2, .mask = {.causal = true}};
  static constexpr auto kernels = emulate<
      ForwardConfig{.tiling = {.block_n = 160}, .schedule = {.pingpong = false, .output_late = true}}, causal,
      [](ForwardConfig c) {
        c.mask.local = c.mask.varlen = true;
        return c;
      }(causal),
      [](ForwardConfig c) {
        c.tiling.element = Element::f16;
        c.mask.causal = false;
        c.mask.varlen = c.schedule.dynamic = true;
        return c;
      }(causal),
      [](ForwardConfig c) {
        c.schedule.dynamic = c.schedule.output_late = true;
        return c;
      }(causal),
      ForwardConfig{.tiling = {.head_dim_v = 64, .block_m = 64, .block_n = 112},
                    .stages = 1,
                    .schedule = {.pingpong = false}},
      [](ForwardConfig c) {
        c.mask.varlen = c.schedule.dynamic = c.schedule.output_late = true;
        c.stages = 3;
        c.q_stages = 1;
        c.keys = gathered_pages;
        return c;
      }(causal),
      ForwardConfig{.tiling = {.head_dim_v = 64, .block_m = 64, .block_n = 112},
                    .stages = 1,
                    .mask = {.varlen = true},
                    .keys = gathered_pages,
                    .schedule = {.pingpong = false}},
      f32_out(ForwardConfig{.tiling = {.head_dim_qk = 192},
                            .mask = {.causal = true, .local = true, .varlen = true},
                            .keys = gathered_pages,
                            .transform = softcap,
                            .schedule = {.dynamic = true}}),
      ForwardConfig{.schedule = {.overlap = false}}, ForwardConfig{.schedule = {.specialised = false}},
      ForwardConfig{.mask = {.causal = true},
                    .schedule = {.specialised = false, .overlap = false, .pingpong = false}},
      ForwardConfig{.schedule = {.pingpong = false}}>();
  return kernels;
}

}  // namespace tandem::kernel_tests
