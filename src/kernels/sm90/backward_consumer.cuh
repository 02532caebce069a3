// What the consumer warpgroups of the main backward kernel do with one query block, piece by piece: products,
// arithmetic, and the transport of dQ. backward.cuh has the order of the pieces, and backward_wide.cuh that
// of wide heads.
#pragma once

#include "kernels/config/backward.hpp"
#include "kernels/ptx/barrier.cuh"
#include "kernels/sm90/backward_producer.cuh"
#include "kernels/tile/backward_tiles.cuh"
#include "kernels/tile/functions.cuh"
#include "kernels/tile/logits.cuh"
#include "kernels/tile/select.cuh"
#include "kernels/tile/softmax.cuh"
#include "kernels/tile/store_rows.cuh"

namespace tandem {

/// What the main kernel is launched with.
template <BackwardConfig C>
using BackwardKernelParams =
    typename Select<C.functions.given(), WithFunctions<BackwardParams>, BackwardParams>::type;

template <BackwardConfig C>
struct BackwardConsumer : tile::FunctionKeys<C.functions> {
  using Shared = BackwardShared<C>;
  using QPosition = typename tile::Ring<C.q_stages>::Position;
  using DoutPosition = typename tile::Ring<C.dout_stages>::Position;
  static constexpr int scores = C.tiling.block_m / 2;
  static constexpr int slopes = C.sloped() ? scores / 2 : 1;
  static constexpr int threads = C.consumers * warpgroup_size;
  /// A mask hides keys inside a sequence.
  static constexpr bool hides = C.mask.causal || C.mask.local || C.functions.given();

  const BackwardKernelParams<C>& p;
  Shared& shared;
  const int warpgroup;
  const int thread;  ///< in the warpgroup
  const tile::FragmentPosition position;
  const float scale_log2;  ///< the scale itself where a score function takes the scaled score
  const int group;         ///< query heads of a KV head
  tile::Ring<kv_stages>::Position k_at;
  tile::Ring<kv_stages>::Position v_at;
  QPosition q_at;
  DoutPosition dout_at;
  tile::RingPosition<2> score_at;  ///< narrow heads: which of the two tiles dS is written to
  u32 exchange = 0;                ///< wide heads, in a cluster: parity of the query block

  TANDEM_DEVICE BackwardConsumer(const BackwardKernelParams<C>& params, Shared& s, int warpgroup_,
                                 int thread_)
      : p(params),
        shared(s),
        warpgroup(warpgroup_),
        thread(thread_),
        position(thread_),
        scale_log2(C.functions.score_function ? params.scale : params.scale * tile::log2_e),
        group(params.heads_q / params.heads_kv) {}

  TANDEM_DEVICE typename Shared::KTile& k() { return shared.k[k_at.stage]; }
  TANDEM_DEVICE typename Shared::OtherKTile& other_k() { return shared.other_k[k_at.stage]; }
  TANDEM_DEVICE typename Shared::VTile& v() { return shared.v[v_at.stage]; }
  /// This warpgroup's first key of the tile.
  TANDEM_DEVICE int key_at() const { return C.owns_keys() ? warpgroup * 64 : 0; }
  TANDEM_DEVICE int dq_row_group() const { return warpgroup % C.dq_row_groups(); }
  TANDEM_DEVICE int dq_column_at() const { return warpgroup / C.dq_row_groups() * C.dq_columns(); }
  /// This warpgroup's first column of dQ, as a column of K. (Of the other CTA's keys, shared memory has only
  /// the columns that this CTA computes of dQ.)
  TANDEM_DEVICE int own_k_column_at() const {
    return BackwardTiles<C>::rank() * (C.tiling.head_dim_qk / C.tiling.cluster) + dq_column_at();
  }

  /// Where products are issued at three places in the code, ptxas would keep 100 shared-memory addresses for
  /// them, spill some, and move them with 60 to 90 R2UR a step.
  static TANDEM_DEVICE void separate(ptx::MatrixDescriptor& a, ptx::MatrixDescriptor& b) {
    if constexpr (C.owns_keys() && !C.schedule.pingpong) return;
    ptx::forget_address(a);
    ptx::forget_address(b);
  }

  /// Stands for nothing between the steps of a product.
  struct Nothing {
    TANDEM_DEVICE void operator()(int) const {}
  };

  /// Issues S^T = K Q^T or dP^T = V dO^T.
  template <int head_dim, typename Keys, typename Queries>
  TANDEM_DEVICE void issue_scores(float (&s)[scores], const Keys& keys, const Queries& queries) {
    ptx::MatrixDescriptor a = keys.k_major() + static_cast<u32>(key_at()) * Keys::row_bytes;
    ptx::MatrixDescriptor b = queries.k_major();
    separate(a, b);
#pragma unroll
    for (int step = 0; step < head_dim / 16; ++step) {
      ptx::wgmma_shared<C.tiling.block_m, C.tiling.element, false>(
          s, a + Keys::k_major_offset(step), b + Queries::k_major_offset(step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Issues dV += P^T dO or dK += dS^T Q; `beside(i)` is called after step i is issued.
  template <int columns, typename Rows, typename Beside = Nothing>
  TANDEM_DEVICE void issue_gradient(float (&d)[columns / 2], const u32 (&operand)[scores / 2],
                                    const Rows& rows, Beside beside = {}) {
    const ptx::MatrixDescriptor b = rows.mn_major();
#pragma unroll
    for (int step = 0; step < C.tiling.block_m / 16; ++step) {
      ptx::wgmma_registers<columns, C.tiling.element, true>(d, operand + 4 * step,
                                                            b + Rows::mn_major_offset(step), true);
      beside(step);
    }
    ptx::wgmma_commit();
  }

  /// Issues dQ = dS K, or dQ += dS K, for this warpgroup's columns of dQ, which begin at `column` of the
  /// keys.
  template <bool add, typename Keys>
  TANDEM_DEVICE void issue_dq(float (&dq)[C.dq_columns() / 2], const typename Shared::ScoreTile& ds,
                              const Keys& keys, int column) {
    // The score tile is transposed, so its columns are queries: a strip of 64 is an operand with M
    // contiguous.
    ptx::MatrixDescriptor a =
        ds.mn_major() + static_cast<u32>(dq_row_group()) * Shared::ScoreTile::strip_bytes;
    ptx::MatrixDescriptor b =
        keys.mn_major() + static_cast<u32>(column / Keys::strip_cols) * Keys::strip_bytes;
    separate(a, b);
#pragma unroll
    for (int step = 0; step < C.tiling.block_n / 16; ++step) {
      ptx::wgmma_shared<C.dq_columns(), C.tiling.element, true, true>(
          dq, a + Shared::ScoreTile::mn_major_offset(step), b + Keys::mn_major_offset(step),
          add || step != 0);
    }
    ptx::wgmma_commit();
  }
  /// Issues dQ = dS K for this CTA's keys.
  TANDEM_DEVICE void issue_dq(float (&dq)[C.dq_columns() / 2], const typename Shared::ScoreTile& ds) {
    issue_dq<false>(dq, ds, k(), own_k_column_at());
  }

  /// Computes P^T of query block m from S^T, packed as the product for dV reads it. With a softcap or a
  /// score function `sloped` is P^T times the slope. dS is later computed from packed values: there are not
  /// enough registers for S, dP, dK, dV and an unpacked P. What the mask hides is set to 0 after the
  /// exponential, so that neither a NaN nor scale 0 matters.
  template <bool masked>
  TANDEM_DEVICE void probabilities(const BackwardTile& t, int m, const float (&s)[scores],
                                   u32 (&packed)[scores / 2], u32 (&sloped)[slopes]) const {
    const float* lse = shared.lse_log2[q_at.stage] + position.first_col;
    const int query = m * C.tiling.block_m + position.first_col;
    float scale[2];
    int first[2];  // the queries that see this thread's two keys; queries past the end have an LSE of +inf
    int end[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = key_at() + position.row(h);
      scale[h] = hides ? ptx::load_shared(shared.key_scale_log2 + row) : scale_log2;
      const int key = t.first_key + row;
      first[h] = key < t.visible.seqlen_k ? t.visible.first_query(key) - query : C.tiling.block_m;
      end[h] = C.mask.local ? t.visible.end_query(key) - query : C.tiling.block_m;
    }
#pragma unroll
    for (int j = 0; j < C.tiling.block_m / 8; ++j) {
      const auto [x, y] = ptx::load_shared(reinterpret_cast<const ptx::Float2*>(lse + 8 * j));
      const float subtract[2] = {x, y};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float p_each[2];
        float slope[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float score = s[4 * j + 2 * h + e];
          if constexpr (C.functions.given()) {
            // `m` counts from where the tile starts, if that is staggered.
            const int at = BackwardTiles<C>::passing(t, m) * C.tiling.block_m + position.first_col;
            p_each[e] = function_probability(at + 8 * j + e, h, score, subtract[e], scale[h], slope[e]);
          } else {
            p_each[e] = probability(score, subtract[e], scale[h], slope[e]);
          }
          if constexpr (masked) {
            if (8 * j + e < first[h] || (C.mask.local && 8 * j + e >= end[h])) p_each[e] = slope[e] = 0.0F;
          }
        }
        packed[2 * j + h] = tile::pack<C.tiling.element>(p_each[0], p_each[1]);
        if constexpr (C.sloped()) {
          sloped[2 * j + h] = tile::pack<C.tiling.element>(p_each[0] * slope[0], p_each[1] * slope[1]);
        }
      }
    }
  }

  TANDEM_DEVICE float probability(float score, float lse_log2, float scale, float& slope) const {
    if constexpr (!C.softcap) return ptx::exp2(ptx::fma(score, scale, -lse_log2));
    const tile::CappedScore capped = tile::cap_score(score, 2.0F * scale / p.softcap);
    slope = capped.slope;
    return ptx::exp2(ptx::fma(capped.part, p.softcap * tile::log2_e, -lse_log2));
  }

  /// The same of the thread's key h and a query, through the caller's functions.
  TANDEM_DEVICE float function_probability(int query, int h, float score, float lse_log2, float scale,
                                           float& slope) const {
    float x = score * scale;
    slope = 1.0F;
    if constexpr (C.functions.score_function && C.softcap) {
      const tile::CappedScore capped = tile::cap_score(score, 2.0F * tile::log2_e * scale / p.softcap);
      x = p.softcap * capped.part;
      slope = capped.slope;
    }
    const tile::Logit logit = this->logit_of(query, h, x);
    bool hidden = !logit.visible || lse_log2 == ptx::infinity();
    float probability_of = 0.0F;
    if constexpr (C.functions.score_function) {
      hidden = hidden || logit.value == -ptx::infinity();
      slope *= logit.slope;
      probability_of = ptx::exp2(ptx::fma(logit.value, tile::log2_e, -lse_log2));
    } else {
      probability_of = probability(score, lse_log2, scale, slope);
    }
    if (hidden) slope = 0.0F;
    return hidden ? 0.0F : probability_of;
  }

  /// Computes dS^T = P^T (dP^T - delta), packed for dK and dQ. `packed_p` is P^T, or P^T times the slope.
  TANDEM_DEVICE void score_gradients(u32 (&packed)[scores / 2], const u32 (&packed_p)[scores / 2],
                                     const float (&dp)[scores]) const {
    const float* delta = shared.delta[dout_at.stage] + position.first_col;
#pragma unroll
    for (int j = 0; j < C.tiling.block_m / 8; ++j) {
      const auto [x, y] = ptx::load_shared(reinterpret_cast<const ptx::Float2*>(delta + 8 * j));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = 2 * j + h;
        packed[i] = tile::pack<C.tiling.element>(
            tile::unpack_low<C.tiling.element>(packed_p[i]) * (dp[2 * i] - x),
            tile::unpack_high<C.tiling.element>(packed_p[i]) * (dp[2 * i + 1] - y));
      }
    }
  }
  /// The same, if there may be a slope.
  TANDEM_DEVICE void score_gradients(u32 (&packed)[scores / 2], const u32 (&packed_p)[scores / 2],
                                     const u32 (&sloped)[slopes], const float (&dp)[scores]) const {
    if constexpr (C.sloped()) {
      score_gradients(packed, sloped, dp);
    } else {
      score_gradients(packed, packed_p, dp);
    }
  }

  /// Writes this warpgroup's part of a transposed score tile: four 8 x 8 matrices at a time.
  TANDEM_DEVICE void store_scores(typename Shared::ScoreTile& target, const u32 (&packed)[scores / 2]) {
    const int lane = thread % warp_size;
    const int row = key_at() + thread / warp_size * 16 + lane % 16;
    const int col = lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < C.tiling.block_m / 16; ++j) {
      ptx::stmatrix_x4(target.address(row, col + 16 * j), packed[4 * j], packed[4 * j + 1], packed[4 * j + 2],
                       packed[4 * j + 3]);
    }
  }

  /// Hands dQ to the warp that adds it to the sums. Each thread stores its registers in their order, 16 bytes
  /// at a time, contiguous over the warp: only the conversion must know which elements they are.
  TANDEM_DEVICE void store_dq(const float (&dq)[C.dq_columns() / 2]) {
#pragma unroll
    for (int part = 0; part < C.dq_parts; ++part) store_dq(dq, part);
  }
  TANDEM_DEVICE void store_dq(const float (&dq)[C.dq_columns() / 2], int part) {
    await_dq_buffer();
    store_dq(dq, part, 0, dq_units);
    hand_over_dq();
  }
  static constexpr int dq_units = C.dq_part() / warpgroup_size / 4;  ///< 16 bytes a thread
  TANDEM_DEVICE void await_dq_buffer() {
    ptx::named_barrier_sync(barrier_dq_empty + warpgroup, dq_threads);
  }
  TANDEM_DEVICE void store_dq(const float (&dq)[C.dq_columns() / 2], int part, int from, int to) {
    auto* target = reinterpret_cast<ptx::Float4*>(shared.dq + warpgroup * C.dq_part()) + thread;
#pragma unroll
    for (int u = from; u < to; ++u) {
      const float* d = dq + 4 * (part * dq_units + u);
      ptx::store_shared(target + u * warpgroup_size, ptx::Float4{d[0], d[1], d[2], d[3]});
    }
  }
  /// The dQ writer's warp fences, not these 128 threads: here a fence waits 480 cycles for products in
  /// flight.
  TANDEM_DEVICE void hand_over_dq() {
    ptx::named_barrier_arrive(barrier_dq_full + warpgroup, dq_threads);
  }

  /// All consumers wait for each other. With wide heads the two warpgroups run different code, and
  /// compute-sanitizer's synccheck reports threads that wait for each other at two different instructions:
  /// therefore one arrives at a barrier at which the other waits, and the other way round.
  TANDEM_DEVICE void meet() {
    if constexpr (C.owns_keys()) {
      ptx::named_barrier_sync(barrier_joined, threads);
    } else if (warpgroup == 0) {
      ptx::named_barrier_arrive(barrier_met, threads);
      ptx::named_barrier_sync(barrier_met + 1, threads);
    } else {
      ptx::named_barrier_sync(barrier_met, threads);
      ptx::named_barrier_arrive(barrier_met + 1, threads);
    }
  }
  TANDEM_DEVICE void join() {
    ptx::fence_async_shared();
    meet();
  }

  // Rows of the tiles in shared memory that must not be multiplied: backward_clear.cuh
  TANDEM_DEVICE void clear_key_tail(const BackwardTile& t);
  TANDEM_DEVICE void set_scale(int h, float value);
  TANDEM_DEVICE void clear_poisoned_keys();
  TANDEM_DEVICE void clear_queries(QPosition q_to, DoutPosition dout_to, int first, int end);
  TANDEM_DEVICE void clear_unseeing_queries(const BackwardTile& t, int m, QPosition q_to,
                                            DoutPosition dout_to);
  TANDEM_DEVICE void clear_blind_queries(QPosition q_to, DoutPosition dout_to);

  TANDEM_DEVICE void release_q() {
    if (thread % warp_size == 0) shared.q_ring.release(q_at);
    q_at.advance();
  }
  TANDEM_DEVICE void release_dout() {
    if (thread % warp_size == 0) shared.dout_ring.release(dout_at);
    dout_at.advance();
  }

  static TANDEM_DEVICE bool needs_mask(const BackwardTile& t, int m) {
    return m < t.blocks.inner_first || (C.mask.local && m >= t.blocks.inner_end);
  }

  /// Waits for Q of query block m, and issues S^T.
  TANDEM_DEVICE void begin_scores(const BackwardTile& t, int m, float (&s)[scores]) {
    shared.q_ring.wait(q_at);
    clear_unseeing_queries(t, m, q_at, dout_at);
    ptx::wgmma_fence();
    issue_scores<C.tiling.head_dim_qk>(s, k(), shared.q[q_at.stage]);
  }
  /// The query blocks that follow are those of head g of the group.
  TANDEM_DEVICE void begin_head(const BackwardTile& t, int g) {
    if constexpr (C.functions.given()) this->own_head = t.head_kv * group + g;
  }
  /// Waits for a tile's K and V, and clears what must not be multiplied.
  TANDEM_DEVICE void begin_tile(const BackwardTile& t) {
    shared.k_ring.wait(k_at);
    if constexpr (C.functions.given()) this->take_keys(p, t, key_at(), position);
    if constexpr (hides) clear_poisoned_keys();
    shared.v_ring.wait(v_at);
    if constexpr (C.mask.varlen) {
      if ((t.n + 1) * C.tile_keys() > t.visible.seqlen_k) clear_key_tail(t);
    }
  }
  TANDEM_DEVICE void end_tile() {
    if (thread % warp_size == 0) {
      shared.k_ring.release(k_at);
      shared.v_ring.release(v_at);
    }
    k_at.advance();
    v_at.advance();
  }

  /// Writes dK of the tile's keys that this warpgroup has.
  template <int n>
  TANDEM_DEVICE void store_keys(const BackwardTile& t, const float (&dk)[n]) {
    const int batch = p.packed_k ? 0 : t.batch;
    const tile::RowTarget rows{static_cast<u16*>(p.dk) + batch * p.dk_stride.batch +
                                   t.head_kv * p.dk_stride.head +
                                   static_cast<i64>(t.begin_k) * p.dk_stride.row,
                               p.dk_stride.row, p.head_dim_qk, p.dk_vectors};
    tile::store_rows<C.tiling.element>(rows, dk, p.scale, t.first_key + key_at(), 0, t.visible.seqlen_k,
                                       t.end_k, thread);
  }
  /// Writes dV of the tile's keys that this warpgroup has.
  template <int n>
  TANDEM_DEVICE void store_values(const BackwardTile& t, const float (&dv)[n]) {
    const int batch = p.packed_k ? 0 : t.batch;
    const tile::RowTarget rows{static_cast<u16*>(p.dv) + batch * p.dv_stride.batch +
                                   t.head_kv * p.dv_stride.head +
                                   static_cast<i64>(t.begin_k) * p.dv_stride.row,
                               p.dv_stride.row, p.head_dim_v, p.dv_vectors};
    tile::store_rows<C.tiling.element>(rows, dv, 1.0F, t.first_key + key_at(), 0, t.visible.seqlen_k, t.end_k,
                                       thread);
  }
};

template <int n>
TANDEM_DEVICE void set_zero(float (&d)[n]) {
#pragma unroll
  for (float& x : d) x = 0.0F;
}

}  // namespace tandem
