// Head dimensions from 160 on.
#include "eight_bit/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedEightBit> widest_eight_bit() {
  constexpr EightBitConfig parts_of_112{.element = Element::f16,
                                        .head_dim_qk = 224,
                                        .head_dim_v = 224,
                                        .overlap = false,
                                        .pingpong = false,
                                        .parts = 2,
                                        .linear_exp2 = true};
  static constexpr auto kernels = emulate_eight_bit<
      EightBitConfig{.head_dim_qk = 192, .head_dim_v = 128, .causal = true, .parts = 2, .linear_exp2 = true},
      EightBitConfig{
          .head_dim_qk = 192, .head_dim_v = 192, .overlap = false, .parts = 3, .linear_exp2 = true},
      EightBitConfig{.head_dim_qk = 160,
                     .head_dim_v = 160,
                     .local = true,
                     .varlen = true,
                     .dynamic = true,
                     .overlap = false,
                     .pingpong = false,
                     .parts = 1,
                     .linear_exp2 = true},
      parts_of_112,
      [](EightBitConfig c) {
        c.parts = 7;
        return c;
      }(parts_of_112),
      EightBitConfig{.head_dim_qk = 256,
                     .head_dim_v = 256,
                     .causal = true,
                     .varlen = true,
                     .overlap = false,
                     .pingpong = false,
                     .parts = 8},
      EightBitConfig{.element = Element::f16,
                     .qk = Codes::s8,
                     .pv = Codes::s8,
                     .head_dim_qk = 64,
                     .head_dim_v = 192,
                     .causal = true,
                     .rotated_v = true,
                     .dynamic = true,
                     .overlap = false,
                     .parts = 2},
      EightBitConfig{.qk = Codes::s8,
                     .pv = Codes::input,
                     .head_dim_qk = 256,
                     .head_dim_v = 256,
                     .row_scales = true,
                     .overlap = false,
                     .pingpong = false,
                     .parts = 1}>();
  return kernels;
}

}  // namespace tandem::kernel_tests
