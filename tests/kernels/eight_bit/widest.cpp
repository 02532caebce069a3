// Head dimensions from 160 on.
#include "eight_bit/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedEightBit> widest_eight_bit() {
  constexpr EightBitConfig parts_of_112{
      .tiling = {.element = Element::f16, .head_dim_qk = 224, .head_dim_v = 224},
      .slices = 2,
      .linear_exp2 = true,
      .schedule = {.overlap = false, .pingpong = false}};
  static constexpr auto kernels =
      emulate_eight_bit<EightBitConfig{.tiling = {.head_dim_qk = 192, .head_dim_v = 128},
                                       .mask = {.causal = true},
                                       .slices = 2,
                                       .linear_exp2 = true},
                        EightBitConfig{.tiling = {.head_dim_qk = 192, .head_dim_v = 192},
                                       .slices = 3,
                                       .linear_exp2 = true,
                                       .schedule = {.overlap = false}},
                        EightBitConfig{.tiling = {.head_dim_qk = 160, .head_dim_v = 160},
                                       .mask = {.local = true, .varlen = true},
                                       .slices = 1,
                                       .linear_exp2 = true,
                                       .schedule = {.dynamic = true, .overlap = false, .pingpong = false}},
                        parts_of_112,
                        [](EightBitConfig c) {
                          c.slices = 7;
                          return c;
                        }(parts_of_112),
                        EightBitConfig{.tiling = {.head_dim_qk = 256, .head_dim_v = 256},
                                       .mask = {.causal = true, .varlen = true},
                                       .slices = 8,
                                       .schedule = {.overlap = false, .pingpong = false}},
                        EightBitConfig{
                            .tiling = {.element = Element::f16, .head_dim_qk = 64, .head_dim_v = 192},
                            .qk = OperandType::s8,
                            .pv = OperandType::s8,
                            .mask = {.causal = true},
                            .rotated_v = true,
                            .slices = 2,
                            .schedule = {.dynamic = true, .overlap = false}}>();
  return kernels;
}

}  // namespace tandem::kernel_tests
