// Rows of a head on their way to 8-bit codes: four threads a row, loads, the rotation across them, scales.
//
// Thread t of four has vectors t, t + 4, t + 8, ... of a row's vectors of 8 channels. Of the Hadamard
// matrix's levels, the first three are then between a thread's own values, two between threads, the others
// between a thread's own again: 2 shuffles a value whatever the head dimension. The levels come in the CPU's
// order, so that every bit is the CPU's.
#pragma once

#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/codes.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/warp.cuh"
#include "kernels/quantize_units.cuh"

namespace tandem::quantizer {

constexpr int row_threads = 4;
constexpr float largest_float = 3.4028235e38F;
/// Below, a group is taken for zeros: the inverse of its scale might overflow.
constexpr float smallest_largest = 0x1p-100F;

/// In shared memory. What one job reads while another may already write has two places, taken in turn.
struct Tables {
  ptx::Vec4* rows;  ///< [2] jobs: vector j of thread i at j * quantize_threads + i
  int unit_vectors;
  float* sign;  ///< by channel, of Q and K
  float* v_sign;
  float* means;  ///< [2][heads of a job][channels]
  int mean_size;
  int channels;
  float* warp_largest;  ///< [2][warps]
  u32* warp_bad;
  u32* tile;
  char* jobs;  ///< this one, the next, the one after that

  /// A turn is the offset of its job, so that no address is kept beside it.
  TANDEM_DEVICE Job* job(int turn) const { return reinterpret_cast<Job*>(jobs + turn); }
  TANDEM_DEVICE float* mean(int turn) const { return means + place_of(turn) * mean_size; }
  static TANDEM_DEVICE int place_of(int turn) { return turn / quantize_job_bytes % 2; }
  static TANDEM_DEVICE int after(int turn) {
    return (turn + quantize_job_bytes) % (quantize_jobs * quantize_job_bytes);
  }
};

template <QuantizeConfig C>
TANDEM_DEVICE Tables tables() {
  static_assert(sizeof(Job) <= quantize_job_bytes);
  constexpr int channels = quantize_channels(C.head_dim_qk > C.head_dim_v ? C.head_dim_qk : C.head_dim_v);
  constexpr int warps = quantize_threads / warp_size;
  auto* const base = reinterpret_cast<float*>(ptx::dynamic_shared());
  auto* const maxima = base + 2 * channels;
  auto* const rows = reinterpret_cast<ptx::Vec4*>(base) + arrange_shared_bytes(C) / 16;
  auto* const jobs = reinterpret_cast<char*>(rows + 2 * quantize_rows_bytes(C) / 16);
  return {.rows = rows,
          .unit_vectors = quantize_rows_bytes(C) / 16,
          .sign = base,
          .v_sign = base + channels,
          .means = reinterpret_cast<float*>(jobs + quantize_jobs * quantize_job_bytes),
          .mean_size = quantize_mean_bytes(C) / 4,
          .channels = channels,
          .warp_largest = maxima,
          .warp_bad = reinterpret_cast<u32*>(maxima + 2 * warps),
          .tile = reinterpret_cast<u32*>(maxima + 4 * warps),
          .jobs = jobs};
}

/// The rotation's factor for a block of `size` channels, as the CPU computes it: 1 / sqrt(size) with sqrt
/// rounded.
constexpr float rotation_factor(int size) {
  float factor = 1.0F;
  for (; size >= 4; size /= 4) factor *= 0.5F;
  return size == 2 ? factor * (1.0F / 1.41421356237309504880F) : factor;
}

/// Every thread's values of one row.
template <int head_dim>
struct Row {
  static constexpr int vectors = (head_dim + 31) / 32;
  /// Vectors of all four threads that the row fills.
  static constexpr int whole = head_dim / 32;
  float x[vectors][8];
};

/// Eight elements of a row from `col` on. Those past its end, and of rows that are not in use, are 0.
template <bool vectors>
TANDEM_DEVICE ptx::Vec4 load_vector(const u16* row, int col, int head_dim, bool used) {
  ptx::Vec4 v{0, 0, 0, 0};
  if constexpr (vectors) {
    if (used && col < head_dim) v = ptx::load_global(reinterpret_cast<const ptx::Vec4*>(row + col));
  } else if (used) {
    u32 elements[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) elements[i] = col + i < head_dim ? ptx::load_global(row + col + i) : 0;
    v = {elements[0] | elements[1] << 16, elements[2] | elements[3] << 16, elements[4] | elements[5] << 16,
         elements[6] | elements[7] << 16};
  }
  return v;
}

/// Starts copying a thread's part of a row into its place in shared memory.
template <bool vectors, int head_dim>
TANDEM_DEVICE void fetch_row(const Tables& tables, const u16* row, bool used, int thread, int turn) {
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    ptx::Vec4* const to =
        tables.rows + Tables::place_of(turn) * tables.unit_vectors + j * quantize_threads + thread;
    const int col = (4 * j + thread % row_threads) * 8;
    if (vectors && used && col < head_dim) {
      ptx::copy_async(to, reinterpret_cast<const ptx::Vec4*>(row + col));
    } else {
      ptx::store_shared(to, load_vector<false>(row, col, head_dim, !vectors && used));
    }
  }
}

/// What fetch_row has brought.
template <Element element, int head_dim>
TANDEM_DEVICE void take_row(Row<head_dim>& row, const Tables& tables, int thread, int turn) {
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    const ptx::Vec4 v = ptx::load_shared(tables.rows + Tables::place_of(turn) * tables.unit_vectors +
                                         j * quantize_threads + thread);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      row.x[j][i] = ptx::unpack<element>(static_cast<u16>(words[i / 2] >> (16 * (i % 2))));
    }
  }
}

/// The rotary embedding of a row: `source` is the row, whose other halves of pairs are read again, `position`
/// its row in the tables. Products are rounded before they are added, as on the CPU.
template <QuantizeConfig C>
TANDEM_DEVICE void embed(Row<C.head_dim_qk>& row, const RotaryTables& tables, const u16* source, int position,
                         int t) {
  const float* const cos = tables.cos + position * tables.cos_stride;
  const float* const sin = tables.sin + position * tables.sin_stride;
  const int half = tables.dim / 2;
#pragma unroll
  for (int j = 0; j < Row<C.head_dim_qk>::vectors; ++j) {
    const int col = (4 * j + t) * 8;
    if (col >= tables.dim) continue;
    float(&x)[8] = row.x[j];
    if constexpr (C.interleaved) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float c = ptx::load_global(cos + (col + i) / 2);
        const float s = ptx::load_global(sin + (col + i) / 2);
        const float a = x[i];
        const float b = x[i + 1];
        x[i] = ptx::multiply(a, c) - ptx::multiply(b, s);
        x[i + 1] = ptx::multiply(b, c) + ptx::multiply(a, s);
      }
    } else {
      const bool lower = col < half;
      const int first = lower ? col : col - half;
      const ptx::Vec4 other = load_vector<C.vectors>(source, lower ? col + half : first, C.head_dim_qk, true);
      const u32 words[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float c = ptx::load_global(cos + first + i);
        const float s = ptx::load_global(sin + first + i);
        const float y = ptx::unpack<C.element>(static_cast<u16>(words[i / 2] >> (16 * (i % 2))));
        const float turned = ptx::multiply(y, s);
        x[i] = ptx::multiply(x[i], c) + (lower ? -turned : turned);
      }
    }
  }
}

/// Eight channels of a table.
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

template <int head_dim>
TANDEM_DEVICE void subtract(Row<head_dim>& row, const float* mean, int t) {
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    float m[8];
    load_table(m, mean, (4 * j + t) * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) row.x[j][i] -= m[i];
  }
}

/// The row's dot product with a table, on all four threads.
template <int head_dim>
TANDEM_DEVICE float dot(const Row<head_dim>& row, const float* table, int t) {
  float sum = 0.0F;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    float m[8];
    load_table(m, table, (4 * j + t) * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = ptx::fma(row.x[j][i], m[i], sum);
  }
  sum += ptx::shuffle_xor(sum, 1);
  return sum + ptx::shuffle_xor(sum, 2);
}

TANDEM_DEVICE void butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

/// A level between threads: the lower one keeps the sum. `side` is 1 on it, -1 on the upper one.
TANDEM_DEVICE float butterfly_across(float x, int distance, float side) {
  return ptx::fma(x, side, ptx::shuffle_xor(x, distance));
}

/// Whether channels `c` and `other`, the larger one, are in one block of the rotation.
constexpr bool in_one_block(int c, int other, int head_dim) {
  int begin = 0;
  while (begin + rotation_block(begin, head_dim) <= c) begin += rotation_block(begin, head_dim);
  return other < begin + rotation_block(begin, head_dim);
}

/// The last vectors of a row whose head dimension is no multiple of 32: blocks of at most 16 channels.
template <int head_dim>
TANDEM_DEVICE void rotate_rest(float (&x)[8], int t) {
  constexpr int rest = head_dim % 32;
  const int col = 8 * t;
#pragma unroll
  for (int half = 1; half < 8; half *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & half) != 0) continue;
      const int c = rest / 8 * 8 + i;
      const bool pair = col + 8 <= rest || (rest % 8 != 0 && col < rest && in_one_block(c, c + half, rest));
      if (pair) butterfly(x[i], x[i + half]);
    }
  }
  const bool sixteen = rest >= 16 && t < 2;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float across = butterfly_across(x[i], 1, (t & 1) != 0 ? -1.0F : 1.0F);
    float factor = rotation_factor(8);
    if (sixteen) {
      x[i] = across;
      factor = rotation_factor(16);
    } else if (col + 8 > rest) {
      factor = 1.0F;
      const int c = rest / 8 * 8 + i;  // blocks of 4, 2 and 1
      if (c < rest) {
        int begin = 0;
        while (begin + rotation_block(begin, rest) <= c) begin += rotation_block(begin, rest);
        factor = rotation_factor(rotation_block(begin, rest));
      }
    }
    x[i] *= factor;
  }
}

/// The levels between groups of 32 channels, and the factor: the rotation's blocks are powers of two of them,
/// the largest first, as the bits of their number.
template <int head_dim, int groups = 8>
TANDEM_DEVICE void rotate_groups(Row<head_dim>& row) {
  constexpr int whole = Row<head_dim>::whole;
  if constexpr ((whole & groups) != 0) {
    constexpr int first = whole / (2 * groups) * (2 * groups);
#pragma unroll
    for (int half = 1; half < groups; half *= 2) {
#pragma unroll
      for (int j = 0; j < groups; ++j) {
        if ((j & half) != 0) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) butterfly(row.x[first + j][i], row.x[first + j + half][i]);
      }
    }
    constexpr float factor = rotation_factor(32 * groups);
#pragma unroll
    for (int j = 0; j < groups; ++j) {
#pragma unroll
      for (int i = 0; i < 8; ++i) row.x[first + j][i] *= factor;
    }
  }
  if constexpr (groups > 1) rotate_groups<head_dim, groups / 2>(row);
}

/// Signs, then Hadamard blocks over the square roots of their sizes.
template <int head_dim>
TANDEM_DEVICE void rotate(Row<head_dim>& row, const float* signs, int t) {
  constexpr int whole = Row<head_dim>::whole;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    float s[8];
    load_table(s, signs, (4 * j + t) * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) row.x[j][i] *= s[i];
  }
#pragma unroll
  for (int j = 0; j < whole; ++j) {
#pragma unroll
    for (int half = 1; half < 8; half *= 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if ((i & half) == 0) butterfly(row.x[j][i], row.x[j][i + half]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      row.x[j][i] = butterfly_across(row.x[j][i], 1, (t & 1) != 0 ? -1.0F : 1.0F);
      row.x[j][i] = butterfly_across(row.x[j][i], 2, (t & 2) != 0 ? -1.0F : 1.0F);
    }
  }
  rotate_groups<head_dim>(row);
  if constexpr (head_dim % 32 != 0) rotate_rest<head_dim>(row.x[whole], t);
}

constexpr float limit_of(Codes codes) {
  return codes == Codes::s8 ? largest_s8 : largest_e4m3;
}

/// The largest finite magnitude of some values, and whether one is not finite.
struct Magnitude {
  float largest;
  bool bad;
};

template <int head_dim>
TANDEM_DEVICE Magnitude magnitude_of(const Row<head_dim>& row) {
  float largest = 0.0F;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = ptx::max_magnitude(largest, row.x[j][i]);
  }
  if (largest <= largest_float) return {largest, false};
  largest = 0.0F;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float size = ptx::max_magnitude(0.0F, row.x[j][i]);
      if (size <= largest_float) largest = ptx::fmax(largest, size);
    }
  }
  return {largest, true};
}

/// Whether one of the four threads has a bad value.
TANDEM_DEVICE bool row_is_bad(bool bad, int lane) {
  return (ptx::ballot(bad) >> (lane / row_threads * row_threads) & 0xFU) != 0;
}

/// Of all four threads' values.
TANDEM_DEVICE Magnitude of_row(Magnitude m, int lane) {
  m.largest = ptx::fmax(m.largest, ptx::shuffle_xor(m.largest, 1));
  m.largest = ptx::fmax(m.largest, ptx::shuffle_xor(m.largest, 2));
  m.bad = row_is_bad(m.bad, lane);
  return m;
}

/// Of the `together` neighbouring warps, a power of two, that have a head's rows.
template <Codes codes>
TANDEM_DEVICE Magnitude of_block(Magnitude m, const Tables& tables, int warp, int lane, int together,
                                 int turn) {
  constexpr int warps = quantize_threads / warp_size;
  const int place = Tables::place_of(turn) * warps;
#pragma unroll
  for (int distance = 1; distance < warp_size; distance *= 2) {
    m.largest = ptx::fmax(m.largest, ptx::shuffle_xor(m.largest, distance));
  }
  const u32 bad = ptx::ballot(m.bad);
  if (lane == 0) {
    ptx::store_shared(tables.warp_largest + place + warp, m.largest);
    ptx::store_shared(tables.warp_bad + place + warp, bad);
  }
  ptx::sync_block();
  const int other = place + (warp & -together) + (lane & (together - 1));
  m.largest = ptx::load_shared(tables.warp_largest + other);
#pragma unroll
  for (int distance = 1; distance < warps; distance *= 2) {
    m.largest = ptx::fmax(m.largest, ptx::shuffle_xor(m.largest, distance));
  }
  m.bad = false;
  if (codes == Codes::s8) {
    m.bad = ptx::ballot(ptx::load_shared(tables.warp_bad + other) != 0) != 0;
  }
  return m;
}

struct Scale {
  float stored;
  float inverse;
};

/// a / b to nearest, from r = 1 / b as good as f32 has it: what is left of a, twice. Nothing here may be near
/// the ends of f32's range.
TANDEM_DEVICE float divide(float a, float b, float r) {
  float q = ptx::multiply(a, r);
  q = ptx::fma(ptx::fma(-b, q, a), r, q);
  return ptx::fma(ptx::fma(-b, q, a), r, q);
}

/// limit / largest for any largest from 2^-100 on, whose reciprocal may be too small for f32.
TANDEM_DEVICE float inverse_of(float limit, float largest) {
  const float power = largest > 1.0F ? 0x1p-64F : 0x1p64F;
  const float b = largest * power;
  float r = ptx::reciprocal(b);
  r = ptx::fma(ptx::fma(-b, r, 1.0F), r, r);
  return divide(limit, b, r) * power;
}

template <Codes codes>
TANDEM_DEVICE Scale scale_for(const Magnitude& m) {
  constexpr float limit = limit_of(codes);
  Scale s{0.0F, 0.0F};
  if (m.largest >= smallest_largest) {
    s = {divide(m.largest, limit, 1.0F / limit), inverse_of(limit, m.largest)};
  }
  // s8 has no NaN: the scale says it for all of its group.
  if (codes == Codes::s8 && m.bad) s.stored = ptx::quiet_nan();
  return s;
}

/// Codes of eight values, the first in the lowest byte.
struct Codes8 {
  u32 low, high;
};
template <Codes codes>
TANDEM_DEVICE u32 encode(const float (&y)[4]) {
  if constexpr (codes == Codes::s8) {
    const u32 low = ptx::permute_bytes(ptx::round_s8(y[0]), ptx::round_s8(y[1]), 0x0040);
    const u32 high = ptx::permute_bytes(ptx::round_s8(y[2]), ptx::round_s8(y[3]), 0x0040);
    return ptx::permute_bytes(low, high, 0x5410);
  } else {
    return ptx::pack_e4m3(y[0], y[1], y[2], y[3]);
  }
}

/// `bad`: one of the thread's values may not be finite; the code is then that of NaN, or 0 where there is
/// none.
template <Codes codes>
TANDEM_DEVICE Codes8 encode(const float (&x)[8], float inverse, bool bad) {
  u32 words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float y[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) y[n] = ptx::multiply(x[4 * i + n], inverse);
    words[i] = encode<codes>(y);
  }
  if (bad) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float y[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const bool finite = ptx::max_magnitude(0.0F, x[4 * i + n]) <= largest_float;
        const float wrong = codes == Codes::s8 ? 0.0F : ptx::quiet_nan();
        y[n] = finite ? ptx::multiply(x[4 * i + n], inverse) : wrong;
      }
      words[i] = encode<codes>(y);
    }
  }
  return {words[0], words[1]};
}

}  // namespace tandem::quantizer
