// The 8-bit forward kernel with lazy rescaling: P is e4m3, a floating-point number, and the
// exponent's reference moves only when P grows too large (tile/lazy_softmax.cuh).
#pragma once

#include "ops/eight_bit/sm90/eight_bit_rows.cuh"
#include "tile/plain_scores.cuh"

namespace tandem {

/// One tile of queries: the order of products and softmax over the blocks of keys.
template <EightBitConfig C>
struct EightBitLazyRows : EightBitRows<C> {
  using Base = EightBitRows<C>;
  using Base::block;
  using Base::c;
  using Base::o;
  using Base::outputs;
  using Base::probabilities;
  using Base::scores;
  using Base::slice_outputs;
  using Base::softmax;
  using Base::t;
  using typename Base::Consumer;
  using typename Base::OutputSum;
  using typename Base::ScoreSum;
  static_assert(C.lazy_rescaling() && (!C.schedule.overlap || C.slices <= 2));

  /// O begins as P V of the first block. (If zeros were made for it to add to, O of 256 columns would take
  /// 250 moves a tile, and wide slices of P V beside it up to 250 bytes of local memory.)
  static constexpr bool in_order = C.in_order();
  /// The first block runs through the code of all others, where tiles are short: at 512 keys and head
  /// dimension 64 that is 10 % faster; with more of either it is slower.
  static constexpr bool one_loop = in_order && C.tiling.head_dim_v <= 64;

  TANDEM_DEVICE EightBitLazyRows(Consumer& consumer, const tile::QueryTile& tile) : Base(consumer, tile) {
    if constexpr (!in_order || one_loop) this->clear_output();
  }

  // ---- Softmax ----

  /// What rescales O when a row's reference moves. `first`: there is no O yet.
  template <bool first>
  TANDEM_DEVICE auto scale_o() {
    return [this](int h, float factor) {
      if constexpr (!(first && in_order)) scale_output(h, factor);
    };
  }
  TANDEM_DEVICE void scale_output(int h, float factor) {
#pragma unroll
    for (int j = 0; j < outputs / 4; ++j) {
      o[4 * j + 2 * h] *= factor;
      o[4 * j + 2 * h + 1] *= factor;
    }
  }

  /// Computes P from the scores; `beside(i)` is called behind quarter i of the exponentials.
  template <bool first, typename Beside>
  TANDEM_DEVICE void find_probabilities(float (&s)[scores], const ScoreSum (&sums)[scores], bool masked,
                                        Beside beside) {
    c.find_factors();
    if constexpr (Consumer::has_nan_markers) this->apply_nan_keys();
    c.convert_scores(s, sums);
    c.scale_scores(s);
    if (masked) {
      c.move_sign_to_scores(s);
      this->mask(s);
      softmax.move_to_maximum(s, c.score_factor, scale_o<first>());
    }
    softmax.exponentials(s, c.score_factor, beside);
  }
  /// Adds the block's sums, rescales where P is too large, and rounds P to the operand of P V. `converted`:
  /// how many quarters of P have been rounded beside the exponentials.
  template <bool first, int converted>
  TANDEM_DEVICE void add_tile(float (&s)[scores], bool masked) {
    if constexpr (converted > 0) this->convert_quarter(s, 3);
    const auto again = [&](float(&lost)[scores]) {
      if (masked) {  // its references are where they should be
        if constexpr (C.linear_exp2) softmax.drop_infinite(lost);
        return;
      }
      tile::plain_scores<Consumer::score_bytes, C.tiling.head_dim_qk>(
          lost, c.shared.q[c.warpgroup][c.q_at.stage], c.shared.k[c.k_at.stage], c.position);
      c.scale_scores(lost);
      c.move_sign_to_scores(lost);
      softmax.move_lost(lost, c.score_factor, scale_o<first>());
      softmax.template exponentials<true>(lost, c.score_factor, [](int) {});
    };
    // With more columns this makes nothing faster.
    constexpr bool apart = C.tiling.head_dim_v <= 64;
    const auto take = [&](const float(&p)[scores], bool moved) {
      if (moved || converted == 0) c.template convert<Consumer::words>(probabilities, p, 0);
    };
    softmax.template add_tile<apart>(c.v_scale, s, scale_o<first>(), again, take);
    this->release_scores();
    this->wait_next_k();
  }

  // ---- Blocks of keys ----

  // Accumulators are declared where their products begin. Declared outside, they would be taken to live
  // through the loop, for which head dimension 256 has no registers.

  /// A block's scores and softmax, without P V. `meanwhile` is called when the scores have come.
  template <bool first = false, typename Meanwhile>
  TANDEM_DEVICE void only_scores(bool masked, Meanwhile meanwhile) {
    ScoreSum sums[scores];
    float converted[C.qk == OperandType::s8 ? scores : 1];
    float(&s)[scores] = pick_scores(sums, converted);
    c.issue_scores(sums);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(sums);
    meanwhile();
    find_probabilities<first>(s, sums, masked, [&](int) {});
    add_tile<first, 0>(s, masked);
  }
  template <bool first = false>
  TANDEM_DEVICE void only_output() {
    this->template finish_output<first>([] {});
  }

  /// Scores of this block and P V of the previous one, in flight together.
  TANDEM_DEVICE void overlapped(bool masked) {
    ScoreSum sums[scores];
    float converted[C.qk == OperandType::s8 ? scores : 1];
    float(&s)[scores] = pick_scores(sums, converted);
    OutputSum held[slice_outputs];
    c.pingpong_wait();
    c.issue_scores(sums);
    c.shared.v_ring.wait(c.v_at);
    this->issue_output(held);
    c.pingpong_pass();
    ptx::wgmma_wait<1>();
    ptx::pin_registers(sums);
    find_probabilities<false>(s, sums, masked, [&](int quarter) {
      constexpr int half = slice_outputs / 2;
      if constexpr (C.slices == 2) {
        if (quarter == 0) this->next_slice(held, 1);
      }
      if (quarter == 1) {
        this->wait_output(held);
        c.release_v();
      }
      if (quarter >= 2) c.template promote<half>(o, held, C.slices - 1, softmax.weight, (quarter - 2) * half);
      if (quarter > 0) this->convert_quarter(s, quarter - 1);
    });
    add_tile<false, 3>(s, masked);
  }
  /// P V of the previous block and then the scores of this one: other warpgroups fill the tensor cores
  /// meanwhile.
  TANDEM_DEVICE void serial(bool masked) {
    c.shared.v_ring.wait(c.v_at);
    c.pingpong_wait();
    only_output();
    only_scores(masked, [&] { c.pingpong_pass(); });
  }
  /// A block's scores, its softmax and its P V.
  TANDEM_DEVICE void in_order_block(bool masked) {
    only_scores(masked, [] {});
    c.shared.v_ring.wait(c.v_at);
    only_output();
  }

  // ---- The tile ----

  TANDEM_DEVICE void run() {
    this->begin();
    if constexpr (Base::skips) {
      if (this->skip_unseen()) return this->store_empty();
    }
    c.shared.k_ring.wait(c.k_at);
    if constexpr (one_loop) {
      run_one_loop();
    } else {
      run_from_first_block();
    }
  }
  TANDEM_DEVICE void run_one_loop() {
    c.convert_scales();
    if constexpr (Consumer::has_nan_markers) this->apply_nan_queries();
    const auto own = this->blocks_of_warpgroup();
    bool masked = true;  // the first block's maxima are what P is relative to
#pragma unroll 1
    for (; block >= t.blocks.first;
         masked = block >= own.inner_end || (C.mask.local && block < own.inner_first)) {
      in_order_block(masked);
      --block;
    }
    float shift[2];
    this->load_shift(shift);
    c.store(t, o, softmax, shift);
  }
  TANDEM_DEVICE void run_from_first_block() {
    only_scores<true>(true, [&] {
      c.convert_scales();
      if constexpr (Consumer::has_nan_markers) this->apply_nan_queries();
    });
    if constexpr (in_order) {
      c.shared.v_ring.wait(c.v_at);
      only_output<true>();
    }
    auto next_block = [&](bool masked) {
      if constexpr (in_order) {
        in_order_block(masked);
      } else if constexpr (C.schedule.overlap) {
        overlapped(masked);
      } else {
        serial(masked);
      }
    };
    --block;
    const auto own = this->blocks_of_warpgroup();
    tile::walk_blocks<C.mask>(block, t.blocks, own, next_block);
    float shift[2];
    this->load_shift(shift);
    if constexpr (!in_order) {
      c.shared.v_ring.wait(c.v_at);
      only_output();
    }
    c.store(t, o, softmax, shift);
  }
};

}  // namespace tandem
