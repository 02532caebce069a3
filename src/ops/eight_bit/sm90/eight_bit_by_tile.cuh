// The 8-bit forward kernel that rounds P tile by tile, in units of its largest value in the row: int8, whose
// P is u8, and every strict recipe, where V's scales by row multiply P (tile/tile_softmax.cuh).
#pragma once

#include "ops/eight_bit/sm90/eight_bit_rows.cuh"

namespace tandem {

/// One tile of queries: the order of products and softmax over the blocks of keys.
template <EightBitConfig C>
struct EightBitByTileRows : EightBitRows<C> {
  using Base = EightBitRows<C>;
  using Base::block;
  using Base::c;
  using Base::o;
  using Base::probabilities;
  using Base::scores;
  using Base::slice_outputs;
  using Base::softmax;
  using Base::t;
  using typename Base::Consumer;
  using typename Base::OutputSum;
  using typename Base::ScoreSum;
  static_assert(!C.lazy_rescaling());

  /// Maxima of scores that are not masked are found among the integer sums.
  static constexpr bool integer_maxima =
      C.qk == OperandType::s8 && !C.row_scales && C.transform == ScoreTransform::raw;

  TANDEM_DEVICE EightBitByTileRows(Consumer& consumer, const tile::QueryTile& tile) : Base(consumer, tile) {
    this->clear_output();
  }

  // ---- Softmax ----

  TANDEM_DEVICE void find_maximum(float (&s)[scores], const ScoreSum (&sums)[scores], bool masked) {
    c.find_factors();
    if constexpr (Consumer::has_nan_markers) this->apply_nan_keys();
    if constexpr (integer_maxima) {
      if (!masked) {
        softmax.find_maximum(sums, c.score_factor);
        this->release_scores();
        return;
      }
    }
    c.convert_scores(s, sums);
    c.scale_scores(s);
    this->release_scores();
    if (masked) this->mask(s);
    softmax.find_maximum(s, c.score_factor);
  }
  /// Computes P; `beside(i)` is called behind quarter i of the exponentials. If V's scales multiply P, it is
  /// rounded after the last exponential.
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
    softmax.exponentials(s, c.score_factor, raw, [&](int quarter) {
      beside(quarter);
      if (!C.v_row_scales && quarter > 0) this->convert_quarter(s, quarter - 1);
    });
  }
  /// Rounds what is left of P to the operand of P V.
  TANDEM_DEVICE void finish_probabilities(float (&s)[scores]) {
    if constexpr (C.v_row_scales) {  // V's scales come with its block
      c.shared.v_ring.wait(c.v_at);
      softmax.join_scales(s, c.shared.v_scales.data[c.v_at.stage] + c.position.first_col);
      c.template convert<Consumer::words>(probabilities, s, 0);
    } else {
      this->convert_quarter(s, 3);
    }
  }
  /// Adds the sums of the tile whose P is in registers, and finds its weight. It is called where the tile's
  /// products are in flight (`late`), and where they are not issued yet; C.adds_late() says at which of the
  /// two it happens.
  template <bool late>
  TANDEM_DEVICE void add_tile() {
    if constexpr (late == C.adds_late()) softmax.add_tile(c.v_scale, probabilities, block % 64 == 0, o);
  }

  // ---- Blocks of keys ----

  // Accumulators are declared where their products begin. Declared outside, they would be taken to live
  // through the loop, for which head dimension 256 has no registers.

  /// A block's scores and softmax, without P V. `meanwhile` is called when the scores have come.
  template <typename Meanwhile>
  TANDEM_DEVICE void only_scores(bool masked, Meanwhile meanwhile) {
    ScoreSum sums[scores];
    float converted[C.qk == OperandType::s8 ? scores : 1];
    float(&s)[scores] = pick_scores(sums, converted);
    c.issue_scores(sums);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(sums);
    meanwhile();
    find_maximum(s, sums, masked);
    find_exponentials(s, sums, masked, [](int) {});
    this->wait_next_k();
    finish_probabilities(s);
  }
  TANDEM_DEVICE void only_output() {
    this->template finish_output<false>([&] { add_tile<true>(); });
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
    if constexpr (C.slices == 1) c.pingpong_pass();
    add_tile<true>();
    ptx::wgmma_wait<1>();
    ptx::pin_registers(sums);
    find_maximum(s, sums, masked);
    if constexpr (C.slices > 1) {
#pragma unroll
      for (int slice = 1; slice < C.slices; ++slice) this->next_slice(held, slice);
      c.pingpong_pass();
    }
    this->wait_next_k();
    this->wait_output(held);
    c.release_v();
    // The exponentials run under the products of the other warpgroups, with promotion and rounding between
    // them. (Placed before the wait for their own product, ptxas moves them behind it.)
    find_exponentials(s, sums, masked, [&](int quarter) {
      constexpr int size = slice_outputs / 4;
      c.template promote<size>(o, held, C.slices - 1, softmax.weight, quarter * size);
    });
    finish_probabilities(s);
    add_tile<false>();
  }
  /// P V of the previous block and then the scores of this one: other warpgroups fill the tensor cores
  /// meanwhile.
  TANDEM_DEVICE void serial(bool masked) {
    c.shared.v_ring.wait(c.v_at);
    c.pingpong_wait();
    only_output();
    only_scores(masked, [&] { c.pingpong_pass(); });
    add_tile<false>();
  }

  // ---- The tile ----

  TANDEM_DEVICE void run() {
    this->begin();
    if constexpr (Base::skips) {
      if (this->skip_unseen()) return this->store_empty();
    }
    c.shared.k_ring.wait(c.k_at);
    only_scores(true, [&] {
      c.convert_scales();
      if constexpr (Consumer::has_nan_markers) this->apply_nan_queries();
    });
    softmax.start(c.v_scale, probabilities, o);
    auto next_block = [&](bool masked) {
      if constexpr (C.schedule.overlap) {
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
    c.shared.v_ring.wait(c.v_at);
    only_output();
    if constexpr (C.v_has_zero_point()) softmax.finish(o);
    c.store(t, o, softmax, shift);
  }
};

}  // namespace tandem
