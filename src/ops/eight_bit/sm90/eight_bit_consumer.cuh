// A consumer warpgroup of the 8-bit forward kernel: its products, conversions and scales, piece by piece.
// eight_bit_lazy.cuh and eight_bit_by_tile.cuh have the order of the pieces.
#pragma once

#include "ops/eight_bit/sm90/eight_bit_producer.cuh"
#include "ptx/barrier.cuh"
#include "ptx/eight_bit.cuh"
#include "tile/lazy_softmax.cuh"
#include "tile/logits.cuh"
#include "tile/output.cuh"
#include "tile/pingpong.cuh"
#include "tile/tile_softmax.cuh"

namespace tandem {

/// The f32 scores: the accumulators themselves, or what integers are converted into.
template <int n, typename Converted>
TANDEM_DEVICE float (&pick_scores(float (&sums)[n], Converted&))[n] {
  return sums;
}
template <int n>
TANDEM_DEVICE float (&pick_scores(i32 (&)[n], float (&converted)[n]))[n] {
  return converted;
}

template <EightBitConfig C>
struct EightBitConsumer {
  using Shared = EightBitShared<C>;
  static constexpr int scores = quant_block / 2;
  static constexpr int outputs = C.tiling.head_dim_v / 2;
  static constexpr int slice_outputs = C.slice_columns() / 2;
  static constexpr int words = scores / 4;  ///< words of packed P
  static constexpr Bytes score_bytes = C.qk == OperandType::e4m3 ? Bytes::e4m3 : Bytes::s8;
  static constexpr Bytes output_bytes = C.pv == OperandType::e4m3 ? Bytes::e4m3
                                        : C.v_has_zero_point()    ? Bytes::u8_u8
                                                                  : Bytes::u8;
  using Softmax =
      typename Select<C.lazy_rescaling(), tile::LazySoftmax<C.linear_exp2>, tile::TileSoftmax<C>>::type;
  using ScoreSum = typename ptx::ByteSum<score_bytes>::type;
  using OutputSum = typename ptx::ByteSum<output_bytes>::type;
  static_assert(C.slice_columns() % 16 == 0);

  const EightBitKernelParams<C>& p;
  Shared& shared;
  const int warpgroup;
  const int thread;  ///< in the warpgroup
  const tile::FragmentPosition position;
  typename tile::Ring<C.stages>::Position k_at, v_at;
  typename tile::Ring<C.q_stages>::Position q_at;
  tile::Output<C.tiling> output;
  tile::QueryTiles<C.tiling, C.mask, C.schedule.dynamic, KeySource::rows, C.by_number()> tiles;
  // What belongs to the tile that is computed:
  static constexpr int factors = C.row_scales ? 2 : 1;  ///< the thread's two rows have one each, or share one
  float q_factor[factors];                              ///< scales of Q times the softmax's scale
  float score_factor[factors];                          ///< the same times the scale of K's block
  float v_scale = 1.0F;                                 ///< scale of the block whose scores came last
  /// softcap: the factor of scores in the exponent of tanh, and the summand that stands for K's removed mean.
  float cap_factor[factors];
  float cap_shift[2];
  /// Whether rows of Q's block, and of the K block whose scores came last, have NaN markers.
  static constexpr bool has_nan_markers = C.qk == OperandType::s8 && !C.row_scales;
  bool q_has_nan = false;
  bool k_has_nan = false;

  TANDEM_DEVICE EightBitConsumer(const EightBitKernelParams<C>& params, Shared& s, int warpgroup_,
                                 int thread_)
      : p(params),
        shared(s),
        warpgroup(warpgroup_),
        thread(thread_),
        position(thread_),
        output{{}, params.forward, warpgroup_, thread_},
        tiles(params.forward, s.tiles) {}

  TANDEM_DEVICE bool warp_leader() const { return thread % warp_size == 0; }

  TANDEM_DEVICE void pingpong_wait() { tile::pingpong_wait<C.schedule.pingpong>(warpgroup); }
  TANDEM_DEVICE void pingpong_pass() { tile::pingpong_pass<C.schedule.pingpong, C.consumers()>(warpgroup); }

  TANDEM_DEVICE void issue_scores(ScoreSum (&s)[scores]) {
    const ptx::MatrixDescriptor q = shared.q[warpgroup][q_at.stage].operand();
    const ptx::MatrixDescriptor k = shared.k[k_at.stage].operand();
    ptx::wgmma_fence();
    ptx::wgmma_bytes_shared<quant_block, score_bytes, ptx::Start::fresh>(s, q, k);
#pragma unroll
    for (int step = 1; step < C.tiling.head_dim_qk / 32; ++step) {
      ptx::wgmma_bytes_shared<quant_block, score_bytes, ptx::Start::add>(s, q + Shared::QTile::offset(step),
                                                                         k + Shared::KTile::offset(step));
    }
    ptx::wgmma_commit();
  }

  /// Issues P V for the columns of slice `slice`.
  template <ptx::Start start>
  TANDEM_DEVICE void issue_slice(OutputSum (&d)[slice_outputs], const u32 (&probabilities)[words],
                                 int slice) {
    const ptx::MatrixDescriptor v = shared.v[v_at.stage].operand();
    ptx::wgmma_fence();
    const int first_row = slice * C.slice_columns();
    ptx::wgmma_bytes_registers<C.slice_columns(), output_bytes, start>(
        d, probabilities, v + Shared::VTile::offset(0, first_row));
#pragma unroll
    for (int step = 1; step < quant_block / 32; ++step) {
      ptx::wgmma_bytes_registers<C.slice_columns(), output_bytes, ptx::Start::add>(
          d, probabilities + 4 * step, v + Shared::VTile::offset(step, first_row));
    }
    ptx::wgmma_commit();
  }

  /// O += weight * the sums of slice `slice`: `count` registers from `first` on. `count` is a template
  /// parameter because the loop must be unrolled before the one around it: otherwise registers are indexed.
  template <int count = slice_outputs>
  TANDEM_DEVICE void promote(float (&o)[outputs], const OutputSum (&d)[slice_outputs], int slice,
                             const float (&weight)[2], int first = 0) {
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const int i = first + n;
      float& to = o[slice * slice_outputs + i];
      if constexpr (output_bytes == Bytes::e4m3) {
        to = ptx::fma(d[i], weight[i / 2 % 2], to);
      } else if constexpr (output_bytes == Bytes::u8_u8) {
        to = ptx::fma(ptx::float_of(static_cast<u32>(d[i])), weight[i / 2 % 2], to);
      } else {
        to = ptx::fma(ptx::to_float(d[i]), weight[i / 2 % 2], to);
      }
    }
  }

  /// Rounds P to the A operands of P V. A word has two neighbouring keys of each of two groups of 8.
  template <int count>
  TANDEM_DEVICE void convert(u32 (&probabilities)[words], const float (&s)[scores], int first) {
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const int i = first + n;
      const int at = i / 2 * 8 + i % 2 * 2;
      if constexpr (output_bytes == Bytes::e4m3) {
        probabilities[i] = ptx::pack_e4m3(s[at], s[at + 1], s[at + 4], s[at + 5]);
      } else {
        probabilities[i] = C.v_row_scales ? ptx::pack_low_bytes(s[at], s[at + 1], s[at + 4], s[at + 5])
                                          : ptx::pack_u8(s[at], s[at + 1], s[at + 4], s[at + 5]);
      }
    }
  }

  /// All lanes must have loaded the scales, which come with K.
  TANDEM_DEVICE void release_k() {
    ptx::sync_warp();
    if (warp_leader()) shared.k_ring.release(k_at);
    k_at.advance();
  }
  TANDEM_DEVICE void release_v() {
    if constexpr (C.v_row_scales) ptx::sync_warp();
    if (warp_leader()) shared.v_ring.release(v_at);
    v_at.advance();
  }
  TANDEM_DEVICE void release_q() {
    if (warp_leader()) shared.q_ring[warpgroup].release(q_at);
    q_at.advance();
  }

  /// Loads the tile's scales; nothing waits for them before convert_scales. Rows past the sequence's end,
  /// whose results are dropped, take the scale of its last row.
  TANDEM_DEVICE void load_scales(const tile::QueryTile& t) {
    const int batch = p.forward.packed_q && !C.in_place ? 0 : t.index.batch;
    const int head = C.in_place ? t.index.head / p.q_scale_heads : t.index.head;
#pragma unroll
    for (int h = 0; h < factors; ++h) {
      const i64 row = padded_row(t, h);
      const float scale = load_scale<C>(p.q_scales, batch, head, C.row_scales ? row : row / quant_block);
      q_factor[h] = scale;
    }
    if constexpr (C.transform == ScoreTransform::softcap) {
#pragma unroll
      for (int h = 0; h < 2; ++h) cap_shift[h] = shift_of_row(t, h) * (2.0F / p.forward.score.softcap);
    }
  }
  TANDEM_DEVICE void convert_scales() {
#pragma unroll
    for (float& factor : q_factor)
      factor = magnitude(factor, q_has_nan) * p.forward.score.scale * tile::log2_e;
  }
  /// What the removal of K's mean subtracted from the scores of a thread's row (logarithm to base 2).
  TANDEM_DEVICE float shift_of_row(const tile::QueryTile& t, int h) const {
    if (p.shift.data == nullptr) return 0.0F;
    const float* of_q = scales_of(p.shift, p.forward.packed_q ? 0 : t.index.batch, t.index.head);
    return ptx::load_global(of_q + padded_row(t, h) * p.shift.stride.group) * tile::log2_e;
  }
  /// The magnitude of a scale by block, whose sign says whether rows have NaN markers.
  static TANDEM_DEVICE float magnitude(float scale, bool& has_nan) {
    if constexpr (has_nan_markers) {
      has_nan = ptx::bits_of(scale) >> 31 != 0;
      return ptx::float_of(ptx::bits_of(scale) & 0x7fffffffU);
    } else {
      return scale;
    }
  }
  TANDEM_DEVICE i64 padded_row(const tile::QueryTile& t, int h) const {
    const int query =
        min(t.index.m * C.tiling.block_m + warpgroup * 64 + position.row(h), t.index.seqlen_q - 1);
    return static_cast<i64>(first_block(t.index.begin_q, t.index.batch, p.forward.packed_q)) * quant_block +
           query;
  }
  TANDEM_DEVICE void convert_scores(float (&s)[scores], const ScoreSum (&sums)[scores]) {
    if constexpr (C.qk == OperandType::s8) {
#pragma unroll
      for (int i = 0; i < scores; ++i) s[i] = ptx::to_float(sums[i]);
    }
  }
  /// Multiplies scores by K's scales if those are by row, and applies the softcap.
  TANDEM_DEVICE void scale_scores(float (&s)[scores]) {
    if constexpr (C.row_scales) {
      const float* scales = shared.k_scales.data[k_at.stage] + position.first_col;
#pragma unroll
      for (int j = 0; j < scores / 4; ++j) {
        const ptx::Float2 k = ptx::load_shared(reinterpret_cast<const ptx::Float2*>(scales + 8 * j));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          s[4 * j + 2 * h] *= k.x;
          s[4 * j + 2 * h + 1] *= k.y;
        }
      }
    }
    if constexpr (C.transform == ScoreTransform::softcap)
      tile::cap_scores(s, cap_factor, cap_shift, p.forward.score.softcap * tile::log2_e);
  }
  /// Caller-supplied scales may be negative. The exponent's multiply-add allows that, but a maximum does not:
  /// the scores take the sign.
  TANDEM_DEVICE void move_sign_to_scores(float (&s)[scores]) {
    if constexpr (C.in_place) {
      if (!(score_factor[0] < 0.0F)) return;
#pragma unroll
      for (float& score : s) score = -score;
      score_factor[0] = -score_factor[0];
    }
  }
  /// Finds the factors of the block whose scores have come.
  TANDEM_DEVICE void find_factors() {
    // Scale 0 (a block of zeros, or the user's) would turn masked scores, -inf, into NaN. Any small factor is
    // right.
    constexpr float tiny = 0x1p-100F;
#pragma unroll
    for (int h = 0; h < factors; ++h) {
      float factor = q_factor[h];
      if constexpr (!C.row_scales) {
        factor *= magnitude(ptx::load_shared(&shared.block_scales[k_at.stage].k), k_has_nan);
      }
      const float size = C.in_place ? ptx::max_magnitude(0.0F, factor) : factor;
      score_factor[h] = size < tiny ? tiny : factor;
      if constexpr (C.transform == ScoreTransform::softcap) {
        cap_factor[h] = factor * (2.0F / p.forward.score.softcap);
        score_factor[h] = 1.0F;
      }
    }
    if constexpr (!C.v_row_scales) {
      v_scale = ptx::load_shared(&shared.block_scales[k_at.stage].v);
    }
  }

  TANDEM_DEVICE void run() {
    tile::QueryTile t;
    while (tiles.template next<false>(t, warp_leader())) {
      if (t.blocks.first < t.blocks.end) {
        compute(t);
      } else {
        output.store_empty(t.index);
      }
    }
  }
  TANDEM_DEVICE void compute(const tile::QueryTile& t);
  TANDEM_DEVICE void store(const tile::QueryTile& t, float (&o)[outputs], const Softmax& softmax,
                           const float (&shift)[2]);
};

}  // namespace tandem
