// The sections of hardware_truth.cuh that multiply matrices: WGMMA and mma.sync.
#pragma once

#include "hardware_truth_sections.cuh"

namespace tandem::kernel_tests {

template <int n, typename Sum>
TANDEM_DEVICE void finish_product(Truth& t, Sum (&d)[n]) {
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::pin_registers(d);
  for (int i = 0; i < n; ++i) t.record(d[i]);
  ptx::sync_block();
}

/// A and B K-major with the same swizzle: 64 x 32 out of one row of the pattern, 16 to 64 deep.
template <Swizzle swizzle>
TANDEM_DEVICE void truth_k_major(Truth& t) {
  constexpr u32 span = 32U << static_cast<int>(swizzle);
  const TensorMap& map = t.p.source[static_cast<int>(swizzle)];
  t.load(t.s.a, map, swizzle, 2, 0, 0);
  t.load(t.s.b[0], map, swizzle, 1, 64, 32);
  const ptx::MatrixDescriptor a = ptx::matrix_descriptor(t.s.a, 16, 8 * span, swizzle);
  const ptx::MatrixDescriptor b = ptx::matrix_descriptor(t.s.b[0], 16, 8 * span, swizzle);
  float d[16];
  ptx::wgmma_fence();
  for (u32 k = 0; k < span / 32; ++k) {
    ptx::wgmma_shared<32, Element::bf16, false>(d, a + 32 * k, b + 32 * k, k != 0);
  }
  finish_product(t, d);
}

/// B MN-major, two strips wide and 32 deep; A K-major.
template <Swizzle swizzle>
TANDEM_DEVICE void truth_mn_major(Truth& t) {
  constexpr u32 span = 32U << static_cast<int>(swizzle);
  constexpr int cols = static_cast<int>(span) / 2;
  t.load(t.s.a, t.p.source[2], Swizzle::b128, 2, 0, 0);
  t.load(t.s.b[0], t.p.source[static_cast<int>(swizzle)], swizzle, 1, 64, 0);
  t.load(t.s.b[0] + 32 * span, t.p.source[static_cast<int>(swizzle)], swizzle, 1, 64, cols);
  const ptx::MatrixDescriptor a = ptx::matrix_descriptor(t.s.a, 16, 1024, Swizzle::b128);
  const ptx::MatrixDescriptor b = ptx::matrix_descriptor(t.s.b[0], 32 * span, 8 * span, swizzle);
  float d[cols];
  ptx::wgmma_fence();
  for (u32 k = 0; k < 2; ++k) {
    ptx::wgmma_shared<2 * cols, Element::bf16, true>(d, a + 32 * k, b + 16 * span * k, k != 0);
  }
  finish_product(t, d);
}

/// A in registers, taken from the plain matrix by the layout that wgmma.cuh states; accumulators that start
/// at 1.
TANDEM_DEVICE void truth_registers(Truth& t) {
  t.load(t.s.b[0], t.p.source[2], Swizzle::b128, 1, 32, 0);
  t.load(t.s.b[1], t.p.source[2], Swizzle::b128, 1, 32, 64);
  const int lane = t.thread % 32;
  u32 a[4];
  for (int g = 0; g < 2; ++g) {
    for (int h = 0; h < 2; ++h) {
      const int row = t.thread / 32 * 16 + lane / 4 + 8 * h;
      const int col = 8 * g + 2 * (lane % 4);
      a[2 * g + h] = ptx::load_global(reinterpret_cast<const u32*>(t.p.plain + row * truth_cols + col));
    }
  }
  float d[64];
  for (int i = 0; i < 64; ++i) d[i] = 1.0F;
  ptx::wgmma_fence();
  ptx::wgmma_registers<128, Element::bf16, true>(
      d, a, ptx::matrix_descriptor(t.s.b[0], 32 * 128, 1024, Swizzle::b128), true);
  finish_product(t, d);
}

TANDEM_DEVICE void truth_f16(Truth& t) {
  t.load(t.s.a, t.p.source_f16, Swizzle::b128, 2, 0, 0);
  t.load(t.s.b[0], t.p.source_f16, Swizzle::b128, 2, 64, 64);
  float d[32];
  ptx::wgmma_fence();
  ptx::wgmma_shared<64, Element::f16, false>(d, ptx::matrix_descriptor(t.s.a, 16, 1024, Swizzle::b128),
                                             ptx::matrix_descriptor(t.s.b[0], 16, 1024, Swizzle::b128),
                                             false);
  finish_product(t, d);
}

/// 8-bit operands: the bytes of bf16 numbers from -4 to 4, which as e4m3 are 0, 1.875 and 2, so that sums of
/// 64 products are exact.
template <Bytes bytes>
TANDEM_DEVICE void truth_bytes_shared(Truth& t, u32 steps) {
  t.load(t.s.a, t.p.source_bytes, Swizzle::b128, 2, 0, 0);
  t.load(t.s.b[0], t.p.source_bytes, Swizzle::b128, 1, 64, 128);
  const ptx::MatrixDescriptor a = ptx::matrix_descriptor(t.s.a, 16, 1024, Swizzle::b128);
  const ptx::MatrixDescriptor b = ptx::matrix_descriptor(t.s.b[0], 16, 1024, Swizzle::b128);
  typename ptx::ByteSum<bytes>::type d[16];
  ptx::wgmma_fence();
  ptx::wgmma_bytes_shared<32, bytes, ptx::Start::fresh>(d, a, b);
  for (u32 k = 1; k < steps; ++k) {
    ptx::wgmma_bytes_shared<32, bytes, ptx::Start::add>(d, a + 32 * k, b + 32 * k);
  }
  finish_product(t, d);
}

/// A in registers by the layout that wgmma_bytes.cuh states.
template <Bytes bytes>
TANDEM_DEVICE void truth_bytes_registers(Truth& t) {
  t.load(t.s.b[0], t.p.source_bytes, Swizzle::b128, 2, 64, 128);
  const int lane = t.thread % 32;
  u32 a[4];
  for (int g = 0; g < 2; ++g) {
    for (int h = 0; h < 2; ++h) {
      const int row = t.thread / 32 * 16 + lane / 4 + 8 * h;
      const int col = 16 * g + 4 * (lane % 4);  // in bytes
      a[2 * g + h] = ptx::load_global(reinterpret_cast<const u32*>(t.p.plain + row * truth_cols + col / 2));
    }
  }
  typename ptx::ByteSum<bytes>::type d[32];
  ptx::wgmma_fence();
  ptx::wgmma_bytes_registers<64, bytes, ptx::Start::fresh>(
      d, a, ptx::matrix_descriptor(t.s.b[0], 16, 1024, Swizzle::b128));
  finish_product(t, d);
}

/// Products of a warp: 16 rows of A each, with B out of rows, 64 deep, and out of columns, 16 deep.
template <Element element>
TANDEM_DEVICE void truth_mma(Truth& t) {
  const TensorMap& map = element == Element::bf16 ? t.p.source[2] : t.p.source_f16;
  t.load(t.s.a, map, Swizzle::b128, 2, 0, 0);
  t.load(t.s.b[0], map, Swizzle::b128, 1, 64, 64);
  const int lane = t.thread % 32;
  const auto at = [](char* tile, int row, int unit) { return tile + row * 128 + (unit ^ row % 8) * 16; };
  float by_rows[8];
  float by_columns[8];
  for (int i = 0; i < 8; ++i) by_rows[i] = by_columns[i] = 1.0F;
  for (int step = 0; step < 4; ++step) {
    u32 a[4];
    u32 b[4];
    ptx::ldmatrix_x4(at(t.s.a, t.thread / 32 * 16 + lane % 16, 2 * step + lane / 16), a);
    ptx::ldmatrix_x4(at(t.s.b[0], lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2), b);
    ptx::mma<element>(by_rows, a, b[0], b[1]);
    ptx::mma<element>(by_rows + 4, a, b[2], b[3]);
    if (step > 0) continue;
    ptx::ldmatrix_x4_transposed(at(t.s.b[0], 16 + lane % 16, 4 + lane / 16), b);
    ptx::mma<element>(by_columns, a, b[0], b[1]);
    ptx::mma<element>(by_columns + 4, a, b[2], b[3]);
  }
  for (const float x : by_rows) t.record(x);
  for (const float x : by_columns) t.record(x);
  ptx::sync_block();
}

}  // namespace tandem::kernel_tests
