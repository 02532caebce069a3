// Quantises rows of a head: loads, scales, and rounding to 8 bits.
//
// Two or four threads share a row. Of every 32 channels a thread has sixteen neighbours where two share it,
// and eight where four do, in vectors of eight.
#pragma once

#include "ops/quantize/common/quantize_items.cuh"
#include "ptx/barrier.cuh"
#include "ptx/eight_bit.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/load_elements.cuh"

namespace tandem::quantizer {

constexpr int row_threads = 4;  ///< unless a Row has others
constexpr float largest_float = 3.4028235e38F;
/// A group whose largest magnitude is smaller counts as zeros: the inverse of its scale might overflow.
constexpr float smallest_largest = 0x1p-100F;

/// The CTA's arrays in shared memory. What one pass reads while the next may already write has two buffers.
struct Tables {
  ptx::Vec4* rows;  ///< [2] passes
  int pass_vectors;
  float* means;  ///< [2][heads of a pass][channels]
  int mean_size;
  int channels;
  float* warp_largest;  ///< [2][warps]
  u32* warp_bad;
  u32* tile;
  char* passes;  ///< the current one, the next, and the one after that

  /// `pass_at` is the offset of a pass in `passes`. It also selects the buffers, so that no address is kept.
  TANDEM_DEVICE Pass* pass(int pass_at) const { return reinterpret_cast<Pass*>(passes + pass_at); }
  TANDEM_DEVICE float* mean(int pass_at) const { return means + buffer_of(pass_at) * mean_size; }
  static TANDEM_DEVICE int buffer_of(int pass_at) {
    return static_cast<int>(static_cast<u32>(pass_at) / quantize_pass_bytes % 2);
  }
  static TANDEM_DEVICE int after(int pass_at) {
    return static_cast<int>(static_cast<u32>(pass_at + quantize_pass_bytes) %
                            (quantize_passes * quantize_pass_bytes));
  }
};

template <QuantizeConfig C>
TANDEM_DEVICE Tables tables() {
  static_assert(sizeof(Pass) <= quantize_pass_bytes);
  constexpr int channels = quantize_channels(C.largest_head_dim());
  constexpr int warps = quantize_threads / warp_size;
  auto* const base = reinterpret_cast<float*>(ptx::dynamic_shared());
  auto* const maxima = base;
  auto* const rows = reinterpret_cast<ptx::Vec4*>(base) + arrange_shared_bytes(C) / 16;
  auto* const passes = reinterpret_cast<char*>(rows + 2 * quantize_rows_bytes(C) / 16);
  return {.rows = rows,
          .pass_vectors = quantize_rows_bytes(C) / 16,
          .means = reinterpret_cast<float*>(passes + quantize_passes * quantize_pass_bytes),
          .mean_size = quantize_mean_bytes(C) / 4,
          .channels = channels,
          .warp_largest = maxima,
          .warp_bad = reinterpret_cast<u32*>(maxima + 2 * warps),
          .tile = reinterpret_cast<u32*>(maxima + 4 * warps),
          .passes = passes};
}

/// One thread's values of a row that `threads` share.
template <int head_dim, int threads = row_threads>
struct Row {
  static constexpr int unit = 32 / threads;  ///< channels of 32
  static constexpr int vectors = (head_dim + 31) / 32 * (unit / 8);
  /// Vectors of 32 channels that are complete.
  static constexpr int whole = head_dim / 32 * (unit / 8);
  float x[vectors][8];

  /// The first channel of vector `j` of thread `t`.
  static constexpr TANDEM_DEVICE int channel(int j, int t) {
    return j / (unit / 8) * 32 + t * unit + j % (unit / 8) * 8;
  }
};

using tile::load_elements;

/// Vectors of 8 channels of a row in shared memory.
template <int head_dim>
constexpr int row_vectors = (head_dim + 31) / 32 * 4;

/// The address of vector `vector` of a row. Vectors of neighbouring rows are permuted, so that the eight
/// lanes that read at the same time, which have two rows or four, use different banks.
template <int head_dim, int threads>
TANDEM_DEVICE ptx::Vec4* vector_at(const Tables& tables, int row, int vector, int pass_at) {
  constexpr int all = row_vectors<head_dim>;
  const int by_row = threads == 4 ? (row & 1) << 2 : (row & 1) | (row & 2) << 1;
  const int moved = all % 8 == 0 ? vector ^ by_row : vector;
  return tables.rows + Tables::buffer_of(pass_at) * tables.pass_vectors + row * all + moved;
}

/// Starts copying a vector of a row to shared memory.
template <bool vectors, int head_dim>
TANDEM_DEVICE void fetch_vector(ptx::Vec4* to, const u16* row, int col, bool used) {
  if constexpr (vectors) {
    const bool exists = used && (head_dim % 32 == 0 || col < head_dim);
    ptx::copy_async_or_zero(to, reinterpret_cast<const ptx::Vec4*>(row + col), exists);
  } else {
    ptx::store_shared(to, load_elements(row, col, head_dim, used));
  }
}

/// Reads a thread's part of a row from shared memory.
template <Element element, int head_dim, int threads>
TANDEM_DEVICE void load_row(Row<head_dim, threads>& row, const Tables& tables, int row_of_pass, int t,
                            int pass_at) {
  using Values = Row<head_dim, threads>;
#pragma unroll
  for (int j = 0; j < Values::vectors; ++j) {
    const int vector = Values::channel(j, t) / 8;
    const ptx::Vec4 v = ptx::load_shared(vector_at<head_dim, threads>(tables, row_of_pass, vector, pass_at));
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      row.x[j][i] = ptx::unpack<element>(static_cast<u16>(words[i / 2] >> (16 * (i % 2))));
    }
  }
}

/// Loads eight channels of a table.
TANDEM_DEVICE void load_table(float (&values)[8], const float* table, int col) {
  const auto* at = reinterpret_cast<const ptx::Float4*>(table + col);
  const ptx::Float4 low = ptx::load_shared(at);
  const ptx::Float4 high = ptx::load_shared(at + 1);
  values[0] = low.x;
  values[1] = low.y;
  values[2] = low.z;
  values[3] = low.w;
  values[4] = high.x;
  values[5] = high.y;
  values[6] = high.z;
  values[7] = high.w;
}

template <int head_dim, int threads>
TANDEM_DEVICE void subtract(Row<head_dim, threads>& row, const float* mean, int t) {
#pragma unroll
  for (int j = 0; j < row.vectors; ++j) {
    float m[8];
    load_table(m, mean, row.channel(j, t));
#pragma unroll
    for (int i = 0; i < 8; ++i) row.x[j][i] -= m[i];
  }
}

/// The row's dot product with a table; all its threads get it. Four sums do not wait for each other.
template <int head_dim, int threads>
TANDEM_DEVICE float dot(const Row<head_dim, threads>& row, const float* table, int t) {
  float sums[4] = {};
#pragma unroll
  for (int j = 0; j < row.vectors; ++j) {
    float m[8];
    load_table(m, table, row.channel(j, t));
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i % 4] = ptx::fma(row.x[j][i], m[i], sums[i % 4]);
  }
  float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
  for (int distance = 1; distance < threads; distance *= 2) sum += ptx::shuffle_xor(sum, distance);
  return sum;
}

constexpr float limit_of(OperandType type) {
  return type == OperandType::s8 ? largest_s8 : largest_e4m3;
}

/// The largest finite magnitude of some values, and whether one is not finite.
struct Magnitude {
  float largest;
  bool bad;
};

template <int head_dim, int threads>
TANDEM_DEVICE Magnitude magnitude_of(const Row<head_dim, threads>& row) {
  float of_four[4] = {};  // which do not wait for each other
#pragma unroll
  for (int j = 0; j < row.vectors; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) of_four[i % 4] = ptx::max_magnitude(of_four[i % 4], row.x[j][i]);
  }
  float largest = ptx::max_magnitude(ptx::max_magnitude(of_four[0], of_four[1]),
                                     ptx::max_magnitude(of_four[2], of_four[3]));
  if (largest <= largest_float) return {largest, false};
  largest = 0.0F;
#pragma unroll
  for (int j = 0; j < row.vectors; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float size = ptx::max_magnitude(0.0F, row.x[j][i]);
      if (size <= largest_float) largest = ptx::fmax(largest, size);
    }
  }
  return {largest, true};
}

/// Whether one of the row's threads has a value that is not finite.
template <int threads>
TANDEM_DEVICE bool row_is_bad(bool bad, int lane) {
  constexpr u32 all = (1U << threads) - 1;
  return (ptx::ballot(bad) >> (lane / threads * threads) & all) != 0;
}

/// The magnitude of the whole row, from those of its threads.
template <int threads>
TANDEM_DEVICE Magnitude of_row(Magnitude m, int lane) {
#pragma unroll
  for (int distance = 1; distance < threads; distance *= 2) {
    m.largest = ptx::fmax(m.largest, ptx::shuffle_xor(m.largest, distance));
  }
  m.bad = row_is_bad<threads>(m.bad, lane);
  return m;
}

/// The largest over a warp of numbers that are not negative: their bits are in the numbers' order.
TANDEM_DEVICE float largest_of_warp(float x) {
  return ptx::float_of(ptx::reduce_max(ptx::bits_of(x)));
}

/// The magnitude of a head's rows, which `warps_of_head` neighbouring warps (a power of two) have.
template <OperandType type>
TANDEM_DEVICE Magnitude of_block(Magnitude m, const Tables& tables, int warp, int lane, int warps_of_head,
                                 int pass_at) {
  const int buffer = Tables::buffer_of(pass_at) * (quantize_threads / warp_size);
  m.largest = largest_of_warp(m.largest);
  const u32 bad = ptx::ballot(m.bad);
  if (lane == 0) {
    ptx::store_shared(tables.warp_largest + buffer + warp, m.largest);
    ptx::store_shared(tables.warp_bad + buffer + warp, bad);
  }
  ptx::sync_block();
  const int other = buffer + (warp & -warps_of_head) + (lane & (warps_of_head - 1));
  m.largest = largest_of_warp(ptx::load_shared(tables.warp_largest + other));
  m.bad = false;
  if (type == OperandType::s8) {
    m.bad = ptx::ballot(ptx::load_shared(tables.warp_bad + other) != 0) != 0;
  }
  return m;
}

struct Scale {
  float stored;
  float inverse;
};

/// a / b rounded to nearest. r is 1 / b rounded; two steps of refinement add what is left of a. No operand
/// may be near the limits of f32's range.
TANDEM_DEVICE float divide(float a, float b, float r) {
  float q = ptx::multiply(a, r);
  q = ptx::fma(ptx::fma(-b, q, a), r, q);
  return ptx::fma(ptx::fma(-b, q, a), r, q);
}

/// limit / largest, for any largest from 2^-100 on. Its reciprocal may be too small for f32, so it is scaled.
TANDEM_DEVICE float inverse_of(float limit, float largest) {
  const float power = largest > 1.0F ? 0x1p-64F : 0x1p64F;
  const float b = largest * power;
  float r = ptx::reciprocal(b);
  r = ptx::fma(ptx::fma(-b, r, 1.0F), r, r);
  return divide(limit, b, r) * power;
}

template <OperandType type>
TANDEM_DEVICE Scale scale_for(const Magnitude& m) {
  constexpr float limit = limit_of(type);
  Scale s{0.0F, 0.0F};
  if (m.largest >= smallest_largest) {
    s = {divide(m.largest, limit, 1.0F / limit), inverse_of(limit, m.largest)};
  }
  // s8 has no NaN: a NaN as scale stands for the whole group.
  if (type == OperandType::s8 && m.bad) s.stored = ptx::quiet_nan();
  return s;
}

/// Eight quantized values, the first in the lowest byte.
struct Quantized8 {
  u32 low, high;
};
template <OperandType type>
TANDEM_DEVICE u32 encode(const float (&y)[4]) {
  if constexpr (type == OperandType::s8) {
    const u32 low = ptx::permute_bytes(ptx::round_s8(y[0]), ptx::round_s8(y[1]), 0x0040);
    const u32 high = ptx::permute_bytes(ptx::round_s8(y[2]), ptx::round_s8(y[3]), 0x0040);
    return ptx::permute_bytes(low, high, 0x5410);
  } else {
    return ptx::pack_e4m3(y[0], y[1], y[2], y[3]);
  }
}

/// Quantises eight values. `bad`: one of the thread's values may not be finite; it becomes NaN, or 0 in s8,
/// which has no NaN.
template <OperandType type>
TANDEM_DEVICE Quantized8 encode(const float (&x)[8], float inverse, bool bad) {
  u32 words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float y[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) y[n] = ptx::multiply(x[4 * i + n], inverse);
    words[i] = encode<type>(y);
  }
  if (bad) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float y[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const bool finite = ptx::max_magnitude(0.0F, x[4 * i + n]) <= largest_float;
        const float wrong = type == OperandType::s8 ? 0.0F : ptx::quiet_nan();
        y[n] = finite ? ptx::multiply(x[4 * i + n], inverse) : wrong;
      }
      words[i] = encode<type>(y);
    }
  }
  return {words[0], words[1]};
}

}  // namespace tandem::quantizer
