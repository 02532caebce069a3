// Computes K's mean by channel, which smoothing removes from K.
#pragma once

#include "ops/quantize/common/quantize_rows.cuh"

namespace tandem {

namespace quantizer {

/// The keys of a tile that are summed: `rows` in each of `heads` segments of 1 << shift rows.
struct MeanTile {
  bool sampled;
  int rows;
  int heads;
  int shift;
};

/// Loads the keys into shared memory, all loads in flight at the same time.
template <QuantizeConfig C>
TANDEM_DEVICE void load_mean_tile(const QuantizeParams& p, const WorkItem& item, const MeanTile& keys,
                                  ptx::Vec4* tile, int thread) {
  constexpr int threads = mean_threads(C);
  constexpr int vectors = quantize_channels(C.head_dim_qk) / 8;  ///< vectors of a row
  const u16* const first = static_cast<const u16*>(p.k.source) +
                           offset_of(p.k.stride, item, item.begin + static_cast<i64>(item.first));
#pragma unroll
  for (int i = 0; i < quant_block * vectors / threads; ++i) {
    const int at = i * threads + thread;
    const int segment = C.varlen ? at / vectors >> keys.shift : 0;
    const int row = C.varlen ? at / vectors & ((1 << keys.shift) - 1) : at / vectors;
    const int col = at % vectors * 8;
    const u16* const from =
        first + segment * p.k.stride.head + (keys.sampled ? sampled_key(row) : row) * p.k.stride.row;
    const bool used = row < keys.rows && segment < keys.heads;
    if (C.vectors && used && col < C.head_dim_qk) {
      ptx::copy_async(tile + at, reinterpret_cast<const ptx::Vec4*>(from + col));
    } else {
      ptx::store_shared(tile + at, load_elements(from, col, C.head_dim_qk, !C.vectors && used));
    }
  }
  ptx::wait_for_copies();
  ptx::sync_block();
}

/// 0 in place of an infinity or a NaN: x - x is 0 for numbers alone.
TANDEM_DEVICE float number_or_zero(float x) {
  return x - x == 0.0F ? x : 0.0F;
}

/// The sums over `rows` rows of the tile, from `begin` on, of this thread's two channels.
template <QuantizeConfig C>
TANDEM_DEVICE ptx::Float2 sum_of_rows(const ptx::Vec4* tile, int begin, int rows, int thread) {
  constexpr int pitch = quantize_channels(C.head_dim_qk);
  float low = 0.0F;
  float high = 0.0F;
#pragma unroll 8
  for (int row = 0; row < rows; ++row) {
    const int at = begin + row;
    const u32 pair = ptx::load_shared(reinterpret_cast<const u32*>(tile) + at * (pitch / 2) + thread);
    const float a = ptx::unpack<C.element>(static_cast<u16>(pair));
    const float b = ptx::unpack<C.element>(static_cast<u16>(pair >> 16));
    low += number_or_zero(a);
    high += number_or_zero(b);
  }
  return {low, high};
}

/// What the CTAs of a head have found in every `step`-th of its `blocks` blocks, `pitch` floats apart from
/// `all` on, added up in double.
template <typename Store>
TANDEM_DEVICE void add_up_blocks(const float* all, int blocks, int step, int pitch, Store store_mean) {
  double low_sum = 0.0;
  double high_sum = 0.0;
  constexpr int batch = 16;  // loads in flight
  for (int block = 0; block < blocks; block += batch * step) {
    ptx::Float2 pairs[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      pairs[i] = {0.0F, 0.0F};
      const int at = block + i * step;
      if (at >= blocks) continue;
      pairs[i] = ptx::load_global(reinterpret_cast<const ptx::Float2*>(all + static_cast<i64>(at) * pitch));
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      low_sum += static_cast<double>(pairs[i].x);
      high_sum += static_cast<double>(pairs[i].y);
    }
  }
  store_mean(0, low_sum, high_sum);
}

/// Sums `heads` heads from item.head on, each in a segment of the 128 rows that the CTA sums. There is more
/// than one only if a sequence is a single block.
template <QuantizeConfig C>
TANDEM_DEVICE void find_means(const QuantizeParams& p, const WorkItem& item, int heads, int shift) {
  constexpr int pitch = quantize_channels(C.head_dim_qk);
  const bool sampled = item.used > p.mean_all_keys;
  const int step = sampled ? mean_step : 1;
  if (item.first % (step * quant_block) != 0) return;
  const int thread = static_cast<int>(ptx::thread_index());
  const int left = max(0, item.used - item.first);
  const int rows = min(quant_block, sampled ? sampled_keys(left) : left);
  auto* const tile = reinterpret_cast<ptx::Vec4*>(ptx::dynamic_shared());
  load_mean_tile<C>(p, item, MeanTile{sampled, rows, heads, shift}, tile, thread);

  const int c = 2 * thread;
  const bool sums_channels = c < pitch;
  const double used = max(sampled ? sampled_keys(item.used) : item.used, 1);
  float* const mean = p.mean + item.batch * p.mean_stride.batch + item.head * p.mean_stride.head + c;
  const auto store_mean = [&](int segment, double low, double high) {
    float* const to = mean + segment * p.mean_stride.head;
    if (c < C.head_dim_qk) ptx::store_global(to, static_cast<float>(low / used));
    if (c + 1 < C.head_dim_qk) ptx::store_global(to + 1, static_cast<float>(high / used));
  };
  const int blocks = max(ceil_div(item.blocks, step), 1);  // that a head has
  float* const sums =
      p.sums +
      ((static_cast<i64>(item.entry) * p.heads_kv + item.head) * p.axis_blocks_k + item.block) * pitch + c;
  for (int segment = 0; segment < heads && sums_channels; ++segment) {
    const ptx::Float2 sum = sum_of_rows<C>(tile, segment << shift, rows, thread);
    if (blocks == 1) {
      store_mean(segment, static_cast<double>(sum.x), static_cast<double>(sum.y));
    } else {
      ptx::store_global(reinterpret_cast<ptx::Float2*>(sums), sum);
    }
  }
  if (blocks == 1) return;

  auto* const before = reinterpret_cast<u32*>(ptx::dynamic_shared());
  ptx::sync_block();
  if (thread == 0) {
    ptx::store_shared(before, ptx::atomic_add_ordered(p.arrived + item.batch * p.heads_kv + item.head, 1U));
  }
  ptx::sync_block();
  if (ptx::load_shared(before) + 1 != static_cast<u32>(blocks) || !sums_channels) return;
  const float* const all = sums - static_cast<i64>(item.first / quant_block) * pitch;
  add_up_blocks(all, item.blocks, step, pitch, store_mean);
}

}  // namespace quantizer

/// K's mean over the keys in use, or over their sample, by channel. A CTA sums 128 keys of a head in f32, key
/// by key. The last CTA of a head to finish adds up what all have found, in double. All loads of a CTA are in
/// flight at the same time.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(mean_threads(C), (C.varlen ? 768 : 1536) / mean_threads(C))
    mean_of_keys(const __grid_constant__ QuantizeParams p) {
  ptx::launch_next_grid();
  const quantizer::Side side = quantizer::key_side(p);
  quantizer::WorkItem item;
  const bool some = quantizer::locate<C>(side, static_cast<int>(ptx::block_index()), item);
  if (!some && item.first != 0) return;
  if constexpr (C.varlen) {
    const int end = min(item.head + side.heads_per_item, p.heads_kv);
    const int shift = quantizer::log2_segment(item.blocks > 1 ? quant_block : item.used);
    const int segments = quant_block >> shift;
    for (; item.head < end; item.head += segments) {
      quantizer::find_means<C>(p, item, min(segments, end - item.head), shift);
      ptx::sync_block();
    }
  } else {
    quantizer::find_means<C>(p, item, 1, quantizer::log2_segment(quant_block));
  }
}

}  // namespace tandem
