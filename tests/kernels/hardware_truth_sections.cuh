// What the sections of the kernel in hardware_truth.cuh are, and what they share: inputs, outputs, loads.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma_bytes.cuh"

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
  reduce_add,
  copies,
  cluster_stores
};
constexpr int truth_sections = static_cast<int>(TruthSection::cluster_stores) + 1;

/// CTAs that a section is launched with, a cluster.
constexpr int truth_cluster = 4;
TANDEM_DEVICE constexpr int truth_ctas(TruthSection section) {
  return section == TruthSection::cluster_stores ? truth_cluster : 1;
}

struct TruthParams {
  TensorMap source[3];     ///< bf16, by Swizzle: boxes of 32 rows, as wide as the swizzle
  TensorMap source_f16;    ///< b128
  TensorMap source_bytes;  ///< b128: the bytes of the bf16 source, 2 * truth_cols in a row
  TensorMap target[3];     ///< like source
  TensorMap sum;           ///< f32, b128
  const u32* numbers;      ///< 64 f32 as bits
  const u16* plain;        ///< the bf16 source
  u32* out;
  u32* late;  ///< of the sections behind reduce_add
  TruthSection section;
};

/// Words that a section writes to `out`; the four before the last two write to their targets alone, and these
/// two to `late`: what a GPU has recorded before there was one stays a beginning of what is recorded now.
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
    0, 0, 0, 0,
    // copies by threads, stores among the CTAs of a cluster
    0, 0};
constexpr int truth_copied_words = 1024;
/// What threads of each CTA of a cluster send each, four words and two.
constexpr int truth_senders = 16;
constexpr int truth_received_words = truth_cluster * truth_senders * 6;
constexpr int truth_late_words = truth_copied_words + truth_cluster * truth_received_words;
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

}  // namespace tandem::kernel_tests
