// One tile of queries of the 8-bit forward kernel, as one consumer warpgroup has it: its state, and the
// steps that do not depend on the softmax. eight_bit_lazy.cuh and eight_bit_by_tile.cuh have the order of
// the steps.
#pragma once

#include "ops/eight_bit/sm90/eight_bit_consumer.cuh"

namespace tandem {

/// The 64 queries of a warpgroup in one tile.
template <EightBitConfig C>
struct EightBitRows {
  using Consumer = EightBitConsumer<C>;
  using ScoreSum = typename Consumer::ScoreSum;
  using OutputSum = typename Consumer::OutputSum;
  static constexpr int scores = Consumer::scores;
  static constexpr int outputs = Consumer::outputs;
  static constexpr int slice_outputs = Consumer::slice_outputs;
  static constexpr int quarter_words = Consumer::words / 4;
  /// Whether a warpgroup may skip key blocks that others of its tile need.
  static constexpr bool skips = (C.mask.causal || !C.mask.varlen) && C.tiling.block_m % quant_block != 0;

  Consumer& c;
  const tile::QueryTile& t;
  const int first_query;
  int block;  ///< whose scores come next
  float o[outputs];
  u32 probabilities[Consumer::words];
  typename Consumer::Softmax softmax;

  TANDEM_DEVICE EightBitRows(Consumer& consumer, const tile::QueryTile& tile)
      : c(consumer),
        t(tile),
        first_query(tile.index.m * C.tiling.block_m + consumer.warpgroup * 64),
        block(tile.blocks.end - 1) {
    softmax.reset();
  }
  TANDEM_DEVICE void clear_output() { tile::set_zero(o); }

  TANDEM_DEVICE void wait_next_k() {
    if (block > t.blocks.first) c.shared.k_ring.wait(c.k_at);
  }
  TANDEM_DEVICE void release_scores() {
    c.release_k();
    if (block == t.blocks.first) c.release_q();
  }
  TANDEM_DEVICE void mask(float (&s)[scores]) {
    tile::apply_mask(s, t.visible, first_query, block * quant_block, c.position);
  }
  TANDEM_DEVICE void convert_quarter(const float (&s)[scores], int quarter) {
    c.template convert<quarter_words>(probabilities, s, quarter * quarter_words);
  }

  // ---- NaN markers ----

  static TANDEM_DEVICE bool is_nan_row(u32 first_values) { return (first_values & 0xFFU) == nan_marker; }
  /// Queries with a NaN: their row's sum starts as NaN.
  TANDEM_DEVICE void apply_nan_queries() {
    if (!c.q_has_nan) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (is_nan_row(c.shared.q[c.warpgroup][c.q_at.stage].word(c.position.row(h), 0))) {
        softmax.sum[h] = ptx::quiet_nan();
      }
    }
  }
  /// Keys with a NaN: they make the sums of the rows that see them NaN, and so out and LSE. The lanes of a
  /// quad divide the keys.
  TANDEM_DEVICE void apply_nan_keys() {
    if (!c.k_has_nan) return;
#pragma unroll 1
    for (int key = c.position.first_col / 2; key < quant_block; key += 4) {
      if (!is_nan_row(c.shared.k[c.k_at.stage].word(key, 0))) continue;
      const int at = block * quant_block + key;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int query = first_query + c.position.row(h);
        if (at >= t.visible.first_key(query) && at < t.visible.end_key(query)) {
          softmax.sum[h] = ptx::quiet_nan();
        }
      }
    }
  }

  // ---- P V ----

  /// O (+)= weight * what the tensor cores have of `slice`. `first`: it is the beginning of O.
  template <bool first>
  TANDEM_DEVICE void promote(const OutputSum (&held)[slice_outputs], int slice) {
    if constexpr (first) {
#pragma unroll
      for (int i = 0; i < slice_outputs; ++i)
        o[slice * slice_outputs + i] = held[i] * softmax.weight[i / 2 % 2];
    } else {
      c.promote(o, held, slice, softmax.weight);
    }
  }
  template <bool first = false>
  TANDEM_DEVICE void next_slice(OutputSum (&held)[slice_outputs], int slice) {
    ptx::wgmma_wait<0>();
    ptx::pin_registers(held);
    promote<first>(held, slice - 1);
    c.template issue_slice<ptx::Start::replace>(held, probabilities, slice);
  }
  TANDEM_DEVICE void issue_output(OutputSum (&held)[slice_outputs]) {
    c.template issue_slice<ptx::Start::fresh>(held, probabilities, 0);
  }
  TANDEM_DEVICE void wait_output(OutputSum (&held)[slice_outputs]) {
    ptx::wgmma_wait<0>();
    ptx::pin_registers(held);
  }
  /// P V of the block whose P is in registers, alone. `meanwhile` is called under its first product.
  template <bool first, typename Meanwhile>
  TANDEM_DEVICE void finish_output(Meanwhile meanwhile) {
    OutputSum held[slice_outputs];
    issue_output(held);
    meanwhile();
    if constexpr (C.slices_overlap()) {
      overlap_slices<first>(held);
    } else {
#pragma unroll
      for (int slice = 1; slice < C.slices; ++slice) next_slice<first>(held, slice);
      wait_output(held);
      promote<first>(held, C.slices - 1);
    }
    c.release_v();
  }
  /// The slices after the first, whose products are in flight: each is promoted under the next one's.
  template <bool first>
  TANDEM_DEVICE void overlap_slices(OutputSum (&even)[slice_outputs]) {
    OutputSum odd[slice_outputs];
    c.template issue_slice<ptx::Start::fresh>(odd, probabilities, 1);
#pragma unroll
    for (int slice = 0; slice < C.slices; ++slice) {
      OutputSum(&held)[slice_outputs] = slice % 2 == 0 ? even : odd;
      slice + 1 < C.slices ? ptx::wgmma_wait<1>() : ptx::wgmma_wait<0>();
      ptx::pin_registers(held);
      promote<first>(held, slice);
      if (slice + 2 < C.slices) c.template issue_slice<ptx::Start::replace>(held, probabilities, slice + 2);
    }
  }

  // ---- Begin and end of the tile ----

  /// Releases the tile's last blocks, from `first` on, of which none of the warpgroup's queries sees a key.
  /// In a causal tile of 192 queries they are up to a third; in a sequence's last tile they may be all
  /// blocks, if the warpgroup has no queries.
  TANDEM_DEVICE void skip_blocks(int first) {
    for (; block >= first; --block) {
      c.shared.k_ring.wait(c.k_at);
      if (block > t.blocks.first) {
        c.pingpong_wait();
        c.pingpong_pass();
      }
      release_scores();
      c.shared.v_ring.wait(c.v_at);
      ptx::sync_warp();  // elsewhere a product joins the lanes between wait and release
      c.release_v();
    }
  }
  TANDEM_DEVICE tile::BlockRange blocks_of_warpgroup() const {
    return tile::BlockRange::of<quant_block>(t.visible, first_query, first_query + 64);
  }
  /// Skips the blocks of which none of the warpgroup's queries sees a key. True if none is left.
  TANDEM_DEVICE bool skip_unseen() {
    const auto own = blocks_of_warpgroup();
    skip_blocks(own.first < own.end ? own.end : t.blocks.first);
    return block < t.blocks.first;
  }
  TANDEM_DEVICE void begin() {
    c.load_scales(t);
    c.shared.q_ring[c.warpgroup].wait(c.q_at);
  }

  TANDEM_DEVICE void load_shift(float (&shift)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      shift[h] = C.transform == ScoreTransform::softcap ? 0.0F : c.shift_of_row(t, h);
  }
  /// Stores rows that see no key.
  TANDEM_DEVICE void store_empty() {
    constexpr float shift[2] = {0.0F, 0.0F};
    clear_output();
    c.store(t, o, softmax, shift);
  }
};

}  // namespace tandem
