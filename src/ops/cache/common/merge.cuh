// Attention over all keys from attention over parts of them: out = sum of exp(lse of the part - lse) * out of
// the part. Bound by memory: one read of the parts and one write.
//
// A warp has a row of a head. Its lanes share the parts to find the LSE, and then the columns. Parts whose
// LSE is -inf are not read. Sums are of runs of 32 parts, and of these, in f32.
#pragma once

#include "ops/cache/common/stored_rows.cuh"
#include "ptx/warp.cuh"
#include "tile/softmax.cuh"

namespace tandem {

namespace merge_parts {

using tile::ln_2;
using tile::log2_e;
constexpr int lane_columns = 4;

/// Where a row is in every part, in out and in lse, as offsets in elements.
struct Place {
  i64 part_out;
  i64 part_lse;
  i64 out;
  i64 lse;
};
TANDEM_DEVICE i64 offset(const Strides& s, i64 batch, i64 row, i64 head) {
  return batch * s.batch + row * s.row + head * s.head;
}
TANDEM_DEVICE Place place_of(const MergeParams& p, i64 n) {
  const i64 line = n / p.heads;
  const i64 head = n - line * p.heads;
  const i64 batch = line / p.rows;
  const i64 row = line - batch * p.rows;
  return {offset(p.part_stride, batch, row, head), offset(p.part_lse_stride, batch, row, head),
          offset(p.out_stride, batch, row, head), offset(p.lse_stride, batch, row, head)};
}

TANDEM_DEVICE float lse_of(const MergeParams& p, int part, i64 at) {
  const float* const lse = p.even ? p.lses[0] + part * p.lse_step : p.lses[part];
  return ptx::load_global(lse + at);
}
template <Stored type>
TANDEM_DEVICE const u8* out_of(const MergeParams& p, int part, i64 at) {
  const void* const out = p.even ? stored::at<type>(p.outs[0], part * p.out_step) : p.outs[part];
  return stored::at<type>(out, at);
}

/// What all lanes know of a row's parts.
struct Weights {
  float largest;
  float inverse;  ///< 1 / sum of exp(lse - largest)
  float lse;
  int live;  ///< parts that are not empty
};

TANDEM_DEVICE Weights find_weights(const MergeParams& p, i64 at) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  float largest = -ptx::infinity();
  bool defined = true;
  u32 live = 0;
  for (int part = lane; part < p.parts; part += warp_size) {
    const float lse = lse_of(p, part, at);
    defined = defined && lse < ptx::infinity();
    largest = ptx::fmax(largest, lse);
    live += lse != -ptx::infinity() ? 1 : 0;
  }
  largest = tile::largest_of_lanes(largest);
#pragma unroll
  for (int mask = 1; mask < warp_size; mask *= 2) live += ptx::shuffle_xor(live, mask);
  float sum = 0.0F;
  for (int part = lane; part < p.parts; part += warp_size) {
    const float lse = lse_of(p, part, at);
    if (lse != -ptx::infinity()) sum += ptx::exp2((lse - largest) * log2_e);
  }
  sum = tile::sum_of_lanes(sum);
  Weights w{largest, ptx::reciprocal(sum), largest + ptx::log2(sum) * ln_2, static_cast<int>(live)};
  if (live == 0) w.lse = -ptx::infinity();
  if (ptx::any_lane(!defined)) w.lse = ptx::quiet_nan();
  return w;
}

/// The row's columns of a lane, from `col` on, in four sums.
template <MergeConfig C>
TANDEM_DEVICE void sum_parts(float (&total)[lane_columns], const MergeParams& p, const Weights& w,
                             const Place& at, int col) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  for (int base = 0; base < p.parts; base += warp_size) {
    const float lse = base + lane < p.parts ? lse_of(p, base + lane, at.part_lse) : -ptx::infinity();
    const float weight = ptx::exp2((lse - w.largest) * log2_e) * w.inverse;
    float run[lane_columns] = {};
    for (u32 live = ptx::ballot(lse != -ptx::infinity()); live != 0; live &= live - 1) {
      const int i = ptx::find_first_set(live);
      const float of_part = ptx::shuffle(weight, i);
      if (col >= p.columns) continue;
      float x[lane_columns];
      stored::load<C.from, C.vectors>(x, out_of<C.from>(p, base + i, at.part_out), col, p.columns);
#pragma unroll
      for (int c = 0; c < lane_columns; ++c) run[c] = ptx::fma(of_part, x[c], run[c]);
    }
#pragma unroll
    for (int c = 0; c < lane_columns; ++c) total[c] += run[c];
  }
}

/// The one part that is not empty, as it is: bit for bit where out has its type.
template <MergeConfig C>
TANDEM_DEVICE void copy_part(const MergeParams& p, const Place& at, u8* out) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  int part = 0;
  for (int base = 0; base < p.parts; base += warp_size) {
    const bool live = base + lane < p.parts && lse_of(p, base + lane, at.part_lse) != -ptx::infinity();
    const u32 lanes = ptx::ballot(live);
    if (lanes != 0) part = base + ptx::find_first_set(lanes);
  }
  const u8* const from = out_of<C.from>(p, part, at.part_out);
  constexpr int bytes = stored_bytes(C.from);
  if constexpr (C.from == C.to) {
    for (int col = lane; col < p.columns; col += warp_size) {
      if constexpr (bytes == 4) {
        ptx::store_global(reinterpret_cast<u32*>(out) + col,
                          ptx::load_global(reinterpret_cast<const u32*>(from) + col));
      } else {
        ptx::store_global(reinterpret_cast<u16*>(out) + col,
                          ptx::load_global(reinterpret_cast<const u16*>(from) + col));
      }
    }
  } else {
    for (int col = lane * lane_columns; col < p.columns; col += warp_size * lane_columns) {
      float x[lane_columns];
      stored::load<C.from, C.vectors>(x, from, col, p.columns);
      stored::store<C.to, C.vectors>(x, out, col, p.columns);
    }
  }
}

template <MergeConfig C>
TANDEM_DEVICE void merge_row(const MergeParams& p, i64 n) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  const Place at = place_of(p, n);
  const Weights w = find_weights(p, at.part_lse);
  u8* const out = stored::at<C.to>(p.out, at.out);
  if (p.lse != nullptr && lane == 0) ptx::store_global(p.lse + at.lse, w.lse);
  const bool defined = w.lse == w.lse;
  if (defined && w.live == 1) return copy_part<C>(p, at, out);
  for (int first = 0; first < p.columns; first += warp_size * lane_columns) {
    const int col = first + lane * lane_columns;
    float x[lane_columns] = {};
    if (defined && w.live > 0) sum_parts<C>(x, p, w, at, col);
    if (!defined) {
#pragma unroll
      for (int c = 0; c < lane_columns; ++c) x[c] = ptx::quiet_nan();
    }
    if (col < p.columns) stored::store<C.to, C.vectors>(x, out, col, p.columns);
  }
}

}  // namespace merge_parts

/// Four blocks an SM: ptxas would spill to make room for six.
template <MergeConfig C>
TANDEM_KERNEL __launch_bounds__(merge_threads, 4) merge(const __grid_constant__ MergeParams p) {
  constexpr int warps = merge_threads / warp_size;
  const i64 step = static_cast<i64>(ptx::grid_size()) * warps;
  const i64 first = static_cast<i64>(ptx::block_index()) * warps + ptx::thread_index() / warp_size;
  for (i64 n = first; n < p.count; n += step) merge_parts::merge_row<C>(p, n);
}

}  // namespace tandem
