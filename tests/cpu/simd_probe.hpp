// The vector vocabulary, one instruction set at a time, behind plain functions that a test can call.
#pragma once

#include <cstdint>

#include "cpu/common/convert.hpp"
#include "cpu/cpu.hpp"

namespace tandem::cpu {

/// Each works on a whole number of registers and a last, partial one.
struct SimdProbe {
  Target target;
  int lanes;
  void (*exp2)(const float* x, float* y, int n);
  void (*linear_exp2)(const float* x, float* y, int n);
  void (*tanh)(const float* x, float* y, int n);
  void (*widen_f16)(const f16* x, float* y, int n);
  void (*widen_bf16)(const bf16* x, float* y, int n);
  void (*widen_e4m3)(const e4m3* x, float* y, int n);
  void (*narrow_f16)(const float* x, f16* y, int n);
  void (*narrow_bf16)(const float* x, bf16* y, int n);
  void (*transpose)(const float* src, std::int64_t src_stride, int rows, int columns, float* dst,
                    std::int64_t dst_stride);
  /// sum[i] += a[2i] * b[2i] + a[2i+1] * b[2i+1] over `lanes` sums, a and b rounded to bf16; null without the
  /// instruction.
  void (*dot_bf16)(const float* a, const float* b, float* sum);
  /// c (16 x 16) += a (16 x 32) b (16 x 16 pairs of rows) on a matrix unit; null where there is none.
  void (*multiply_tiles)(const bf16* a, const bf16* b, float* c);
  /// A product of whole numbers: a (16 x 64, signed), b (16 x 16 quadruples of rows, signed or not).
  void (*multiply_tiles_s8)(const std::int8_t* a, const std::int8_t* b, std::int32_t* c);
  void (*multiply_tiles_s8_u8)(const std::int8_t* a, const std::uint8_t* b, std::int32_t* c);
};

}  // namespace tandem::cpu
