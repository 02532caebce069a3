// One kernel that shows what the instructions of src/kernels/ptx do: swizzles, register layouts, roundings,
// votes. It runs in the emulator and on a GPU, and must write the same bytes
// (tests/gpu/hardware_truth_test.cpp compares them; what a GPU wrote is recorded in hardware_truth.bin, so
// that the comparison needs none). Each launch runs one section, so that an instruction that faults on a GPU,
// which ends its context, is known by its section and takes no other with it.
#pragma once

#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/ptx/warp.cuh"
#include "kernels/ptx/wgmma_bytes.cuh"

namespace tandem::kernel_tests {

/// Source matrices are truth_rows x truth_cols small integers; targets are as large, of u16 and f32.
constexpr int truth_rows = 128;
constexpr int truth_cols = 128;
constexpr int truth_threads = 128;

/// One group of instructions.
enum class TruthSection : int {
  load_b32,
  load_b64,
  load_b128,
  wgmma_k_major_b32,
  wgmma_k_major_b64,
  wgmma_k_major_b128,
  wgmma_mn_major_b32,
  wgmma_mn_major_b64,
  wgmma_mn_major_b128,
  wgmma_registers,
  wgmma_f16,
  stmatrix,
  warp,
  math,
  wgmma_e4m3,
  wgmma_s8,
  wgmma_e4m3_registers,
  wgmma_u8_registers,
  pack_e4m3,
  mma_bf16,
  mma_f16,
  store_b32,
  store_b64,
  store_b128,
  reduce_add
};
constexpr int truth_sections = static_cast<int>(TruthSection::reduce_add) + 1;

struct TruthParams {
  TensorMap source[3];     ///< bf16, by Swizzle: boxes of 32 rows, as wide as the swizzle
  TensorMap source_f16;    ///< b128
  TensorMap source_bytes;  ///< b128: the bytes of the bf16 source, 2 * truth_cols in a row
  TensorMap target[3];     ///< like source
  TensorMap sum;           ///< f32, b128
  const u32* numbers;      ///< 64 f32 as bits
  const u16* plain;        ///< the bf16 source
  u32* out;
  TruthSection section;
};

/// Words that a section writes to `out`; the last four write to their targets alone.
constexpr int truth_section_words[truth_sections] = {
    // boxes of 32 rows
    32 * 32 / 4, 32 * 64 / 4, 32 * 128 / 4,
    // accumulators
    16 * truth_threads, 16 * truth_threads, 16 * truth_threads, 16 * truth_threads, 32 * truth_threads,
    64 * truth_threads, 64 * truth_threads, 32 * truth_threads,
    // stmatrix, warp, math
    4 * 64 * 4, 32 * 6, 64 * 8,
    // accumulators of 8-bit products, quantized values
    16 * truth_threads, 16 * truth_threads, 32 * truth_threads, 32 * truth_threads, 64 * 2,
    // accumulators of a warp's products
    16 * truth_threads, 16 * truth_threads,
    // stores
    0, 0, 0, 0};
/// Where a section's words begin.
TANDEM_DEVICE constexpr int truth_begin(TruthSection section) {
  int words = 0;
  for (int i = 0; i < static_cast<int>(section); ++i) words += truth_section_words[i];
  return words;
}
constexpr int truth_words = truth_begin(TruthSection::reduce_add);

/// Where a load of `cols` columns begins, so that it crosses two edges of the tensor. The innermost
/// coordinate must lead to a multiple of 16 bytes: TMA takes any other for an illegal
/// instruction.
constexpr int truth_load_row = -3;
TANDEM_DEVICE constexpr int truth_load_col(int cols) {
  return truth_cols - cols + 8;
}

struct TruthShared {
  alignas(1024) char a[64 * 128];
  alignas(1024) char b[4][32 * 128];
  alignas(1024) char stage[32 * 128];
  ptx::Mbarrier bar;
};

struct Truth {
  const TruthParams& p;
  TruthShared& s;
  u32* out;
  u32 phase = 0;
  const int thread = static_cast<int>(ptx::thread_index());

  TANDEM_DEVICE Truth(const TruthParams& params, TruthShared& shared, TruthSection section)
      : p(params), s(shared), out(params.out + truth_begin(section)) {}

  /// One word a thread; NaNs, whose payloads differ between GPU and CPU, as one NaN.
  TANDEM_DEVICE void record(float x) {
    union {
      float f;
      u32 bits;
    } word;
    word.f = x;
    record(x != x ? 0x7fffffffU : word.bits);
  }
  TANDEM_DEVICE void record(i32 x) { record(static_cast<u32>(x)); }
  TANDEM_DEVICE void record(u32 word) {
    ptx::store_global(out + thread, word);
    out += truth_threads;
  }
  /// `count` words of shared memory.
  TANDEM_DEVICE void record_shared(const char* data, int count) {
    for (int i = thread; i < count; i += truth_threads) {
      ptx::store_global(out + i, ptx::load_shared(reinterpret_cast<const u32*>(data) + i));
    }
    out += count;
    ptx::sync_block();
  }

  /// Boxes of 32 rows from (row, col), one below the other.
  TANDEM_DEVICE void load(char* to, const TensorMap& map, Swizzle swizzle, int boxes, int row, int col) {
    const u32 bytes = 32U * (32U << static_cast<int>(swizzle));
    if (thread == 0) {
      ptx::mbarrier_arrive_expect(s.bar, static_cast<u32>(boxes) * bytes);
      for (int i = 0; i < boxes; ++i) {
        ptx::tma_load(to + static_cast<u32>(i) * bytes, map, s.bar, col, row + 32 * i, 0, 0,
                      ptx::CacheHint::normal);
      }
    }
    ptx::mbarrier_wait(s.bar, phase);
    phase ^= 1;
  }
};

/// Where TMA puts a box's bytes, two edges of the tensor included.
TANDEM_DEVICE void truth_swizzle(Truth& t, Swizzle swizzle) {
  const int cols = 16 << static_cast<int>(swizzle);
  t.load(t.s.stage, t.p.source[static_cast<int>(swizzle)], swizzle, 1, truth_load_row, truth_load_col(cols));
  t.record_shared(t.s.stage, 32 * cols / 2);
}

/// Where it takes them from, when it stores and when it adds.
TANDEM_DEVICE void truth_store(Truth& t, const TensorMap& map, int cols, bool add, int row, int col) {
  for (int i = t.thread; i < 32 * cols / 2; i += truth_threads) {
    ptx::store_shared(reinterpret_cast<u32*>(t.s.stage) + i,
                      add ? 0x3f800000U : static_cast<u32>(i * 0x20001 + 1));
  }
  ptx::fence_async_shared();
  ptx::sync_block();
  if (t.thread == 0) {
    if (add) {
      ptx::tma_reduce_add(map, t.s.stage, col, row, 0, 0);
    } else {
      ptx::tma_store(map, t.s.stage, col, row, 0, 0);
    }
    ptx::tma_store_commit();
    ptx::tma_store_wait<0>();
  }
  ptx::sync_block();
}

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

/// Each warp stores four 8 x 8 matrices, one below the other, in rows of 32 bytes.
TANDEM_DEVICE void truth_stmatrix(Truth& t) {
  char* base = t.s.stage + t.thread / 32 * 1024;
  for (int i = t.thread; i < 1024; i += truth_threads) {
    ptx::store_shared(reinterpret_cast<u32*>(t.s.stage) + i, 0U);
  }
  ptx::sync_block();
  const u32 tag = static_cast<u32>(t.thread) << 8;
  ptx::stmatrix_x4(base + t.thread % 32 * 32, tag, tag + 1, tag + 2, tag + 3);
  ptx::sync_block();
  t.record_shared(t.s.stage, 1024);
}

TANDEM_DEVICE void truth_warp(Truth& t) {
  const u32 lane = static_cast<u32>(t.thread) % 32;
  const u32 elected = ptx::ballot(ptx::elect_one());
  const u32 words[6] = {ptx::shuffle_xor(lane * 3, 5), ptx::shuffle(lane * 7, 11),
                        ptx::shuffle_up(lane + 100, 4), ptx::ballot(lane % 3 == 1),
                        ptx::reduce_or(lane == 9 ? 0x500U : lane & 3),
                        // Exactly one lane; which one is the hardware's choice.
                        elected != 0 && (elected & (elected - 1)) == 0 ? 1U : 0U};
  if (t.thread < 32) {
    for (int i = 0; i < 6; ++i) ptx::store_global(t.out + i * 32 + t.thread, words[i]);
  }
}

/// Roundings, and those values of the approximations that are exact everywhere. An H100 has 2^0.25 one place
/// above, and the logarithms of 0.5, 0.25 and 2^-126 one place beside the exact ones.
TANDEM_DEVICE void truth_math(Truth& t) {
  union {
    u32 bits;
    float f;
  } x, y;
  x.bits = ptx::load_global(t.p.numbers + t.thread % 64);
  y.bits = ptx::load_global(t.p.numbers + (t.thread + 17) % 64);
  const u32 number = t.thread % 64;
  const bool ordinary = number >= 16 || number == 7 || number == 10 || number == 11;
  const float special = ordinary ? 1.0F : x.f;
  const float results[5] = {ptx::fmax(x.f, y.f), ptx::fma(x.f, y.f, 1.5F), ptx::exp2(special),
                            ptx::log2(special), ptx::reciprocal(special)};
  const u32 packed[3] = {ptx::pack_bf16(x.f, y.f), ptx::pack_f16(x.f, y.f),
                         ptx::pack_f16(x.f * 0x1p-14F, y.f * 0x1p-10F)};
  if (t.thread < 64) {
    for (int i = 0; i < 5; ++i) {
      union {
        float f;
        u32 bits;
      } word;
      word.f = results[i];
      ptx::store_global(t.out + i * 64 + t.thread, word.f != word.f ? 0x7fffffffU : word.bits);
    }
    for (int i = 0; i < 3; ++i) ptx::store_global(t.out + (5 + i) * 64 + t.thread, packed[i]);
  }
}

/// e4m3's roundings: as they are, and about its smallest numbers.
TANDEM_DEVICE void truth_pack_e4m3(Truth& t) {
  union {
    u32 bits;
    float f;
  } x, y;
  x.bits = ptx::load_global(t.p.numbers + t.thread % 64);
  y.bits = ptx::load_global(t.p.numbers + (t.thread + 17) % 64);
  const u32 packed[2] = {ptx::pack_e4m3(x.f, y.f, x.f * 0x1p-4F, y.f * 0x1p-6F),
                         ptx::pack_e4m3(x.f * 0x1p-8F, y.f * 0x1p-9F, x.f * 0x1p-10F, y.f * 0x1p-11F)};
  if (t.thread < 64) {
    for (int i = 0; i < 2; ++i) ptx::store_global(t.out + i * 64 + t.thread, packed[i]);
  }
}

TANDEM_KERNEL __launch_bounds__(truth_threads, 1) hardware_truth(const __grid_constant__ TruthParams p) {
  auto& s = *reinterpret_cast<TruthShared*>(ptx::dynamic_shared());
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_init(s.bar, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_block();
  Truth t(p, s, p.section);
  switch (p.section) {
    case TruthSection::load_b32: truth_swizzle(t, Swizzle::b32); break;
    case TruthSection::load_b64: truth_swizzle(t, Swizzle::b64); break;
    case TruthSection::load_b128: truth_swizzle(t, Swizzle::b128); break;
    case TruthSection::wgmma_k_major_b32: truth_k_major<Swizzle::b32>(t); break;
    case TruthSection::wgmma_k_major_b64: truth_k_major<Swizzle::b64>(t); break;
    case TruthSection::wgmma_k_major_b128: truth_k_major<Swizzle::b128>(t); break;
    case TruthSection::wgmma_mn_major_b32: truth_mn_major<Swizzle::b32>(t); break;
    case TruthSection::wgmma_mn_major_b64: truth_mn_major<Swizzle::b64>(t); break;
    case TruthSection::wgmma_mn_major_b128: truth_mn_major<Swizzle::b128>(t); break;
    case TruthSection::wgmma_registers: truth_registers(t); break;
    case TruthSection::wgmma_f16: truth_f16(t); break;
    case TruthSection::stmatrix: truth_stmatrix(t); break;
    case TruthSection::warp: truth_warp(t); break;
    case TruthSection::math: truth_math(t); break;
    case TruthSection::wgmma_e4m3: truth_bytes_shared<Bytes::e4m3>(t, 2); break;
    case TruthSection::wgmma_s8: truth_bytes_shared<Bytes::s8>(t, 4); break;
    case TruthSection::wgmma_e4m3_registers: truth_bytes_registers<Bytes::e4m3>(t); break;
    case TruthSection::wgmma_u8_registers: truth_bytes_registers<Bytes::u8>(t); break;
    case TruthSection::pack_e4m3: truth_pack_e4m3(t); break;
    case TruthSection::mma_bf16: truth_mma<Element::bf16>(t); break;
    case TruthSection::mma_f16: truth_mma<Element::f16>(t); break;
    // A store that begins at a negative row is an illegal instruction, unlike a load.
    case TruthSection::store_b32: truth_store(t, p.target[0], 16, false, 8, 0); break;
    case TruthSection::store_b64: truth_store(t, p.target[1], 32, false, 40, 16); break;
    case TruthSection::store_b128: truth_store(t, p.target[2], 64, false, 100, 72); break;
    case TruthSection::reduce_add: truth_store(t, p.sum, 64, true, 120, 104); break;
  }
}

}  // namespace tandem::kernel_tests
