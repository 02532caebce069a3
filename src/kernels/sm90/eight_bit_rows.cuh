// What a warpgroup of the 8-bit forward kernel does with a tile of queries: the order of products and softmax
// over the blocks of keys.
#pragma once

#include "kernels/sm90/eight_bit_consumer.cuh"
#include "kernels/tile/plain_scores.cuh"

namespace tandem {

/// What a warpgroup does with one tile of queries: the order of the steps.
template <EightBitConfig C>
struct EightBitRows {
  using Consumer = EightBitConsumer<C>;
  using ScoreSum = typename Consumer::ScoreSum;
  using OutputSum = typename Consumer::OutputSum;
  static constexpr int scores = Consumer::scores;
  static constexpr int outputs = Consumer::outputs;
  static constexpr int part_outputs = Consumer::part_outputs;
  static constexpr int quarter_words = Consumer::words / 4;
  static constexpr bool keeps_input = Consumer::keeps_input;
  /// Maxima of scores that are not masked are those of the sums.
  static constexpr bool integer_maxima = C.qk == Codes::s8 && !C.row_scales && !C.softcap;
  static_assert(!C.lazy_rescaling() || !C.overlap || C.parts <= 2);
  /// A block is done before the next begins, and O begins as P V of the first. (Made zeros for it to add to,
  /// O of 256 columns took 250 moves a tile, and wide parts of P V beside it up to 250 bytes of local
  /// memory.)
  static constexpr bool in_order =
      (C.causal || C.part_columns() > 64) && C.lazy_rescaling() && !C.overlap && !C.pingpong && !keeps_input;
  /// The first block by the code of all others, where tiles are short: 512 keys at 64, +10 %; more is slower.
  static constexpr bool one_loop = in_order && C.head_dim_v <= 64;

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
        first_query(tile.index.m * C.block_m + consumer.warpgroup * 64),
        block(tile.blocks.end - 1) {
    softmax.reset();
    if constexpr (!in_order || one_loop) clear_output();
  }
  TANDEM_DEVICE void clear_output() {
#pragma unroll
    for (int i = 0; i < outputs; ++i) o[i] = 0.0F;
  }

  /// `first`: O is not there yet.
  template <bool first>
  TANDEM_DEVICE auto scale_o() {
    return [this](int h, float factor) {
      if constexpr (!(first && in_order)) scale_output(h, factor);
    };
  }
  /// A row's reference moves.
  TANDEM_DEVICE void scale_output(int h, float factor) {
#pragma unroll
    for (int j = 0; j < outputs / 4; ++j) {
      o[4 * j + 2 * h] *= factor;
      o[4 * j + 2 * h + 1] *= factor;
    }
  }

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

  // ---- Rows that are marked ----

  static TANDEM_DEVICE bool is_nan_row(u32 first_codes) {
    return (first_codes & 0xFFU) == nan_marker;
  }
  /// A query that holds a NaN: its row's sum starts as one.
  TANDEM_DEVICE void take_nan_queries() {
    if (!c.q_has_nan) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (is_nan_row(c.shared.q[c.warpgroup][c.q_at.stage].word(c.position.row(h), 0))) {
        softmax.sum[h] = ptx::quiet_nan();
      }
    }
  }
  /// Keys that hold one make the sums of the rows that see them NaN, and with them out and LSE. The lanes of
  /// a quad share the keys.
  TANDEM_DEVICE void take_nan_keys() {
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

  // ---- The softmax whose reference lags ----

  /// S to P; `beside(i)` is called behind quarter i of the exponentials.
  template <bool first, typename Beside>
  TANDEM_DEVICE void find_probabilities(float (&s)[scores], const ScoreSum (&sums)[scores], bool masked,
                                        Beside beside) {
    c.find_units();
    if constexpr (Consumer::has_nan_markers) take_nan_keys();
    c.convert_scores(s, sums);
    c.scale_scores(s);
    if (masked) {
      c.take_sign(s);
      mask(s);
      softmax.move_to_maximum(s, c.score_unit, scale_o<first>());
    }
    softmax.exponentials(s, c.score_unit, beside);
  }
  /// `converted`: quarters of P that have been converted beside the exponentials.
  template <bool first, int converted>
  TANDEM_DEVICE void add_lazily(float (&s)[scores], bool masked) {
    if constexpr (converted > 0) convert_quarter(s, 3);
    const auto again = [&](float(&lost)[scores]) {
      if (masked) {  // its references are where they should be
        if constexpr (C.linear_exp2) softmax.drop_infinite(lost);
        return;
      }
      tile::plain_scores<Consumer::score_bytes, C.head_dim_qk>(lost, c.shared.q[c.warpgroup][c.q_at.stage],
                                                               c.shared.k[c.k_at.stage], c.position);
      c.scale_scores(lost);
      c.take_sign(lost);
      softmax.move_lost(lost, c.score_unit, scale_o<first>());
      softmax.template exponentials<true>(lost, c.score_unit, [](int) {});
    };
    // With more columns that makes nothing faster.
    constexpr bool apart = C.head_dim_v <= 64;
    const auto take = [&](const float(&p)[scores], bool moved) {
      if (moved || converted == 0) c.template convert<Consumer::words>(probabilities, p, 0);
    };
    softmax.template add_tile<apart>(c.v_scale, s, scale_o<first>(), again, take);
    release_scores();
    wait_next_k();
  }

  // ---- The softmax by tiles ----

  TANDEM_DEVICE void find_maximum(float (&s)[scores], const ScoreSum (&sums)[scores], bool masked) {
    c.find_units();
    if constexpr (Consumer::has_nan_markers) take_nan_keys();
    if constexpr (integer_maxima) {
      if (!masked) {
        softmax.find_maximum(sums, c.score_unit);
        release_scores();
        return;
      }
    }
    c.convert_scores(s, sums);
    c.scale_scores(s);
    release_scores();
    if (masked) mask(s);
    softmax.find_maximum(s, c.score_unit);
  }
  /// As find_probabilities. Where V's scales join P, all conversions wait for the last exponential.
  template <typename Beside>
  TANDEM_DEVICE void find_exponentials(float (&s)[scores], const ScoreSum (&sums)[scores], bool masked,
                                       Beside beside) {
    const auto raw = [&](int i) {
      if constexpr (integer_maxima) {
        return masked ? s[i] : ptx::to_float(sums[i]);
      } else {
        return s[i];
      }
    };
    softmax.exponentials(s, c.score_unit, raw, [&](int quarter) {
      beside(quarter);
      if (!C.v_row_scales && quarter > 0) convert_quarter(s, quarter - 1);
    });
  }
  TANDEM_DEVICE void find_tile(float (&s)[scores]) {
    if constexpr (C.v_row_scales) {  // V's scales come with its block
      c.shared.v_ring.wait(c.v_at);
      softmax.join_scales(s, c.shared.v_scales.data[c.v_at.stage] + c.position.first_col);
      c.template convert<Consumer::words>(probabilities, s, 0);
    } else {
      convert_quarter(s, 3);
    }
  }
  /// Of the tile whose P is in registers: called where its products are under way, and where they are not.
  template <bool late>
  TANDEM_DEVICE void add_tile() {
    if constexpr (!C.lazy_rescaling() && late == C.adds_late()) {
      softmax.add_tile(c.v_scale, probabilities, block % 64 == 0, o);
    }
  }

  // ---- Blocks of keys ----

  // Accumulators are declared where their products begin: declared outside, they would be taken to live
  // through the loop, which d = 256 has no registers for.
  template <bool first = false, typename Meanwhile>
  TANDEM_DEVICE void only_scores(bool masked, Meanwhile meanwhile) {
    ScoreSum sums[scores];
    float converted[C.qk == Codes::s8 ? scores : 1];
    float(&s)[scores] = pick_scores(sums, converted);
    c.issue_scores(sums);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(sums);
    meanwhile();
    if constexpr (C.lazy_rescaling()) {
      find_probabilities<first>(s, sums, masked, [&](int) {});
      add_lazily<first, 0>(s, masked);
    } else {
      find_maximum(s, sums, masked);
      find_exponentials(s, sums, masked, [](int) {});
      wait_next_k();
      find_tile(s);
    }
  }

  template <bool first>
  TANDEM_DEVICE void promote(const OutputSum (&held)[part_outputs], int part) {
    if constexpr (first) {
#pragma unroll
      for (int i = 0; i < part_outputs; ++i) o[part * part_outputs + i] = held[i] * softmax.weight[i / 2 % 2];
    } else {
      c.promote(o, held, part, softmax.weight);
    }
  }
  template <bool first = false>
  TANDEM_DEVICE void next_part(OutputSum (&held)[part_outputs], int part) {
    ptx::wgmma_wait<0>();
    ptx::pin_registers(held);
    promote<first>(held, part - 1);
    c.template issue_part<ptx::Start::replace>(held, probabilities, part);
  }
  TANDEM_DEVICE void issue_output(OutputSum (&held)[part_outputs]) {
    if constexpr (keeps_input) {
      c.issue_output(o, probabilities);
    } else {
      c.template issue_part<ptx::Start::fresh>(held, probabilities, 0);
    }
  }
  TANDEM_DEVICE void wait_output(OutputSum (&held)[part_outputs]) {
    ptx::wgmma_wait<0>();
    if constexpr (keeps_input) {
      ptx::pin_registers(o);
    } else {
      ptx::pin_registers(held);
    }
  }
  /// P V of the block whose P is in registers, alone. `first`: it is all of O.
  template <bool first = false>
  TANDEM_DEVICE void finish_output() {
    OutputSum held[part_outputs];
    issue_output(held);
    add_tile<true>();
    if constexpr (!keeps_input) {
#pragma unroll
      for (int part = 1; part < C.parts; ++part) next_part<first>(held, part);
    }
    wait_output(held);
    if constexpr (!keeps_input) promote<first>(held, C.parts - 1);
    c.release_v();
  }

  /// S of this block and P V of the block before, in flight together.
  TANDEM_DEVICE void overlapped(bool masked) {
    ScoreSum sums[scores];
    float converted[C.qk == Codes::s8 ? scores : 1];
    float(&s)[scores] = pick_scores(sums, converted);
    OutputSum held[part_outputs];
    c.pingpong_wait();
    c.issue_scores(sums);
    c.shared.v_ring.wait(c.v_at);
    issue_output(held);
    if constexpr (C.lazy_rescaling() || C.parts == 1) c.pingpong_pass();
    add_tile<true>();
    ptx::wgmma_wait<1>();
    ptx::pin_registers(sums);
    if constexpr (C.lazy_rescaling()) {
      if (keeps_input && masked) wait_output(held);  // before a reference moves, and O with it
      find_probabilities<false>(s, sums, masked, [&](int quarter) {
        constexpr int half = part_outputs / 2;
        if constexpr (C.parts == 2) {
          if (quarter == 0) next_part(held, 1);
        }
        if (quarter == 1) {
          wait_output(held);
          c.release_v();
        }
        if constexpr (!keeps_input) {
          if (quarter >= 2) {
            c.template promote<half>(o, held, C.parts - 1, softmax.weight, (quarter - 2) * half);
          }
        }
        if (quarter > 0) convert_quarter(s, quarter - 1);
      });
      add_lazily<false, 3>(s, masked);
    } else {
      find_maximum(s, sums, masked);
      if constexpr (C.parts > 1) {
#pragma unroll
        for (int part = 1; part < C.parts; ++part) next_part(held, part);
        c.pingpong_pass();
      }
      wait_next_k();
      wait_output(held);
      c.release_v();
      // The exponentials run under the other warpgroups' products, with the promotion and the conversions
      // between them. (Written before the wait for their own product, ptxas moves them behind it.)
      find_exponentials(s, sums, masked, [&](int quarter) {
        constexpr int size = part_outputs / 4;
        c.template promote<size>(o, held, C.parts - 1, softmax.weight, quarter * size);
      });
      find_tile(s);
      add_tile<false>();
    }
  }
  /// One after the other: other warpgroups fill the tensor cores meanwhile.
  TANDEM_DEVICE void serial(bool masked) {
    c.shared.v_ring.wait(c.v_at);
    c.pingpong_wait();
    finish_output();
    only_scores(masked, [&] { c.pingpong_pass(); });
    add_tile<false>();
  }

  /// A block's scores, its softmax and its P V.
  TANDEM_DEVICE void in_order_block(bool masked) {
    only_scores(masked, [] {});
    c.shared.v_ring.wait(c.v_at);
    finish_output();
  }

  /// Blocks from `first` on of the tile, which none of the warpgroup's queries sees: of a causal tile of 192
  /// queries, up to a third; of a sequence's last tile, all where the warpgroup has no queries.
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

  TANDEM_DEVICE tile::BlockRange own_blocks() const {
    return tile::BlockRange::of<quant_block>(t.visible, first_query, first_query + 64);
  }

  TANDEM_DEVICE void load_shift(float (&shift)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) shift[h] = C.softcap ? 0.0F : c.shift_of_row(t, h);
  }
  /// Rows that see no key.
  TANDEM_DEVICE void store() {
    constexpr float shift[2] = {0.0F, 0.0F};
    clear_output();
    c.store(t, o, softmax, shift);
  }

  TANDEM_DEVICE void run() {
    c.load_scales(t);
    c.shared.q_ring[c.warpgroup].wait(c.q_at);
    if constexpr ((C.causal || !C.varlen) && !keeps_input && C.block_m % quant_block != 0) {
      const auto own = own_blocks();
      skip_blocks(own.first < own.end ? own.end : t.blocks.first);
      if (block < t.blocks.first) return store();
    }
    c.shared.k_ring.wait(c.k_at);
    if constexpr (one_loop) {
      c.take_scales();
      if constexpr (Consumer::has_nan_markers) take_nan_queries();
      const auto own = own_blocks();
      bool masked = true;  // the first block's maxima are what P is relative to
#pragma unroll 1
      for (; block >= t.blocks.first;
           masked = block >= own.inner_end || (C.local && block < own.inner_first)) {
        in_order_block(masked);
        --block;
      }
      float shift[2];
      load_shift(shift);
      return c.store(t, o, softmax, shift);
    }
    only_scores<true>(true, [&] {
      c.take_scales();
      if constexpr (Consumer::has_nan_markers) take_nan_queries();
    });
    if constexpr (!C.lazy_rescaling()) softmax.start(c.v_scale, probabilities, o);
    if constexpr (keeps_input && C.varlen) {
      const int valid_rows = t.index.seqlen_k - block * quant_block;
      if (valid_rows < quant_block) c.clear_v_tail(valid_rows);
    }
    if constexpr (in_order) {
      c.shared.v_ring.wait(c.v_at);
      finish_output<true>();
    }
    auto next_block = [&](bool masked) {
      if constexpr (in_order) {
        in_order_block(masked);
      } else if constexpr (C.overlap) {
        overlapped(masked);
      } else {
        serial(masked);
      }
    };
    --block;
    const auto own = own_blocks();
    tile::walk_blocks<C.causal, C.local>(block, t.blocks, own, next_block);
    float shift[2];
    load_shift(shift);
    if constexpr (!in_order) {
      c.shared.v_ring.wait(c.v_at);
      finish_output();
    }
    if constexpr (C.v_has_zero_point()) softmax.finish(o);
    c.store(t, o, softmax, shift);
  }
};

}  // namespace tandem
