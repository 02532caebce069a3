// A consumer warpgroup of the main backward kernel: what one query block takes, piece by piece. The order of
// the pieces is in backward.cuh.
#pragma once

#include "kernels/config/backward.hpp"
#include "kernels/ptx/barrier.cuh"
#include "kernels/sm90/backward_producer.cuh"
#include "kernels/tile/backward_tiles.cuh"
#include "kernels/tile/softmax.cuh"

namespace tandem {

template <BackwardConfig C>
struct BackwardConsumer {
  using Shared = BackwardShared<C>;
  static constexpr int scores = C.block_m / 2;
  static constexpr int slopes = C.softcap ? scores / 2 : 1;
  static constexpr int threads = C.consumers * warpgroup_size;
  static constexpr bool hides = C.causal || C.local;  ///< a mask hides keys inside the sequence

  const BackwardParams& p;
  Shared& shared;
  const int warpgroup;
  const int thread;  ///< in the warpgroup
  const tile::FragmentPosition position;
  const float scale_log2;
  const int group;  ///< query heads of a KV head
  tile::Ring<kv_stages>::Position k_at;
  tile::Ring<kv_stages>::Position v_at;
  typename tile::Ring<C.q_stages>::Position q_at;
  typename tile::Ring<C.dout_stages>::Position dout_at;
  tile::RingPosition<2> score_at;  ///< owning keys: which of the two tiles dS goes to
  u32 exchange = 0;                ///< parity of the query block, in a cluster

  TANDEM_DEVICE BackwardConsumer(const BackwardParams& params, Shared& s, int warpgroup_, int thread_)
      : p(params),
        shared(s),
        warpgroup(warpgroup_),
        thread(thread_),
        position(thread_),
        scale_log2(params.scale * tile::log2_e),
        group(params.heads_q / params.heads_kv) {}

  TANDEM_DEVICE typename Shared::KTile& k() { return shared.k[k_at.stage]; }
  TANDEM_DEVICE typename Shared::OtherKTile& other_k() { return shared.other_k[k_at.stage]; }
  TANDEM_DEVICE typename Shared::VTile& v() { return shared.v[v_at.stage]; }
  /// This warpgroup's first key of the tile.
  TANDEM_DEVICE int key_at() const { return C.owns_keys() ? warpgroup * 64 : 0; }
  TANDEM_DEVICE int dq_row_group() const { return warpgroup % C.dq_row_groups(); }
  TANDEM_DEVICE int dq_column_at() const { return warpgroup / C.dq_row_groups() * C.dq_columns(); }
  /// K has all columns in shared memory; of the other block's keys there are those that this block makes of
  /// dQ.
  TANDEM_DEVICE int own_k_column_at() const {
    return BackwardTiles<C>::rank() * (C.head_dim_qk / C.cluster) + dq_column_at();
  }

  /// Where products stand in three places, 100 shared addresses would spill, and 60 to 90 R2UR a step move
  /// them.
  static TANDEM_DEVICE void separate(ptx::MatrixDescriptor& a, ptx::MatrixDescriptor& b) {
    if constexpr (C.owns_keys() && !C.pingpong) return;
    ptx::forget_address(a);
    ptx::forget_address(b);
  }

  /// What is written between the steps of a product in program order: nothing.
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
      ptx::wgmma_shared<C.block_m, C.element, false>(s, a + Keys::k_major_offset(step),
                                                     b + Queries::k_major_offset(step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Issues dV += P^T dO or dK += dS^T Q; `beside(i)` comes after step i.
  template <int columns, typename Rows, typename Beside = Nothing>
  TANDEM_DEVICE void issue_gradient(float (&d)[columns / 2], const u32 (&operand)[scores / 2],
                                    const Rows& rows, Beside beside = {}) {
    const ptx::MatrixDescriptor b = rows.mn_major();
#pragma unroll
    for (int step = 0; step < C.block_m / 16; ++step) {
      ptx::wgmma_registers<columns, C.element, true>(d, operand + 4 * step, b + Rows::mn_major_offset(step),
                                                     true);
      beside(step);
    }
    ptx::wgmma_commit();
  }

  /// Issues dQ = dS K, or dQ += dS K, of keys whose columns from `column` on are this warpgroup's.
  template <bool add, typename Keys>
  TANDEM_DEVICE void issue_dq(float (&dq)[C.dq_columns() / 2], const typename Shared::ScoreTile& ds,
                              const Keys& keys, int column) {
    // Queries are the columns of the transposed tile: a strip of 64 is an operand with M contiguous.
    ptx::MatrixDescriptor a =
        ds.mn_major() + static_cast<u32>(dq_row_group()) * Shared::ScoreTile::strip_bytes;
    ptx::MatrixDescriptor b =
        keys.mn_major() + static_cast<u32>(column / Keys::strip_cols) * Keys::strip_bytes;
    separate(a, b);
#pragma unroll
    for (int step = 0; step < C.block_n / 16; ++step) {
      ptx::wgmma_shared<C.dq_columns(), C.element, true, true>(
          dq, a + Shared::ScoreTile::mn_major_offset(step), b + Keys::mn_major_offset(step),
          add || step != 0);
    }
    ptx::wgmma_commit();
  }
  /// Issues dQ = dS K of this block's keys.
  TANDEM_DEVICE void issue_dq(float (&dq)[C.dq_columns() / 2], const typename Shared::ScoreTile& ds) {
    issue_dq<false>(dq, ds, k(), own_k_column_at());
  }

  /// Turns S^T of query block m into P^T, packed as dV wants it; with a softcap `sloped` is P^T times its
  /// slope. The scores are done with here: dS is made from packed values, since registers for S, dP, dK and
  /// dV and for P in both forms are more than there are. What the mask hides becomes 0 after the exponential,
  /// so that neither NaN nor scale 0 matters.
  template <bool masked>
  TANDEM_DEVICE void probabilities(const BackwardTile& t, int m, const float (&s)[scores],
                                   u32 (&packed)[scores / 2], u32 (&sloped)[slopes]) const {
    const float* lse = shared.lse_log2[q_at.stage] + position.first_col;
    const int query = m * C.block_m + position.first_col;
    float scale[2];
    int first[2];  // the queries that see this thread's two keys; those past the end have an LSE of +inf
    int end[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = key_at() + position.row(h);
      scale[h] = hides ? ptx::load_shared(shared.key_scale_log2 + row) : scale_log2;
      const int key = t.first_key + row;
      first[h] = key < t.visible.seqlen_k ? t.visible.first_query(key) - query : C.block_m;
      end[h] = C.local ? t.visible.end_query(key) - query : C.block_m;
    }
#pragma unroll
    for (int j = 0; j < C.block_m / 8; ++j) {
      const auto [x, y] = ptx::load_shared(reinterpret_cast<const ptx::Float2*>(lse + 8 * j));
      const float subtract[2] = {x, y};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float p_each[2];
        float slope[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          p_each[e] = probability(s[4 * j + 2 * h + e], subtract[e], scale[h], slope[e]);
          if constexpr (masked) {
            if (8 * j + e < first[h] || (C.local && 8 * j + e >= end[h])) p_each[e] = slope[e] = 0.0F;
          }
        }
        packed[2 * j + h] = tile::pack<C.element>(p_each[0], p_each[1]);
        if constexpr (C.softcap) {
          sloped[2 * j + h] = tile::pack<C.element>(p_each[0] * slope[0], p_each[1] * slope[1]);
        }
      }
    }
  }

  TANDEM_DEVICE float probability(float score, float lse_log2, float scale, float& slope) const {
    if constexpr (!C.softcap) return ptx::exp2(ptx::fma(score, scale, -lse_log2));
    // tanh(x) = 1 - 2 r with r = 1 / (1 + e^2x), as forward has it; its slope is 4 r (1 - r).
    const float r = ptx::reciprocal(1.0F + ptx::exp2(score * (2.0F * scale / p.softcap)));
    slope = 4.0F * r * (1.0F - r);
    return ptx::exp2(ptx::fma(1.0F - 2.0F * r, p.softcap * tile::log2_e, -lse_log2));
  }

  /// dS^T = P^T (dP^T - delta), packed for dK and dQ; `packed_p` is P^T, or P^T times the softcap's slope.
  TANDEM_DEVICE void score_gradients(u32 (&packed)[scores / 2], const u32 (&packed_p)[scores / 2],
                                     const float (&dp)[scores]) const {
    const float* delta = shared.delta[dout_at.stage] + position.first_col;
#pragma unroll
    for (int j = 0; j < C.block_m / 8; ++j) {
      const auto [x, y] = ptx::load_shared(reinterpret_cast<const ptx::Float2*>(delta + 8 * j));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = 2 * j + h;
        packed[i] = tile::pack<C.element>(tile::unpack_low<C.element>(packed_p[i]) * (dp[2 * i] - x),
                                          tile::unpack_high<C.element>(packed_p[i]) * (dp[2 * i + 1] - y));
      }
    }
  }
  /// The same where there may be a softcap.
  TANDEM_DEVICE void score_gradients(u32 (&packed)[scores / 2], const u32 (&packed_p)[scores / 2],
                                     const u32 (&sloped)[slopes], const float (&dp)[scores]) const {
    if constexpr (C.softcap) {
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
    for (int j = 0; j < C.block_m / 16; ++j) {
      ptx::stmatrix_x4(target.address(row, col + 16 * j), packed[4 * j], packed[4 * j + 1], packed[4 * j + 2],
                       packed[4 * j + 3]);
    }
  }

  /// Hands dQ to the warp that adds it to the sums. Threads store their registers as they have them, 16 bytes
  /// in a run a warp: only the conversion must know the order.
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
  /// The adder fences, not the 128 threads: a fence here waits for products in flight, 480 cycles.
  TANDEM_DEVICE void hand_over_dq() {
    ptx::named_barrier_arrive(barrier_dq_full + warpgroup, dq_threads);
  }

  /// The warpgroups' turns on the tensor cores (ping-pong).
  TANDEM_DEVICE void pingpong_wait() {
    ptx::named_barrier_sync(barrier_pingpong + warpgroup, threads);
  }
  TANDEM_DEVICE void pingpong_pass() {
    ptx::named_barrier_arrive(barrier_pingpong + (warpgroup ^ 1), threads);
  }

  /// All consumers. Roles come here at two instructions each, and synccheck reports threads that wait at two
  /// instructions for each other: one role arrives where the other waits, and the other way round.
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

  /// Rows of keys past the sequence's end may hold anything, and 0 * NaN is NaN.
  TANDEM_DEVICE void clear_key_tail(const BackwardTile& t) {
    const int among = warpgroup * warpgroup_size + thread;
    const auto valid = [&](int first_key) { return min(max(t.visible.seqlen_k - first_key, 0), C.block_n); };
    k().zero_rows(valid(t.first_key), among, threads);
    v().zero_rows(valid(t.first_key), among, threads);
    if constexpr (C.cluster > 1) {
      const int other = t.first_key + BackwardTiles<C>::other_keys();
      other_k().zero_rows(valid(other), among, threads);
    }
    join();
  }
  /// One thread a key.
  TANDEM_DEVICE void set_scale(int h, float value) {
    if (thread % 4 == 0 && (C.owns_keys() || warpgroup == 0))
      ptx::store_shared(shared.key_scale_log2 + key_at() + position.row(h), value);
  }
  /// dQ = dS K multiplies a key by 0 for the queries that it is hidden from, and 0 * NaN is NaN: a row of K
  /// that is not finite becomes 0, and the scale of its scores NaN, which reaches the queries that see it.
  /// Looking costs a read of the tile, under the loads of V and Q.
  TANDEM_DEVICE void clear_poisoned_keys() {
    const int among = warpgroup * warpgroup_size + thread;
    bool found = k().template any_nonfinite<C.element>(0, C.block_n, among, threads);
    if constexpr (C.cluster > 1)
      found |= other_k().template any_nonfinite<C.element>(0, C.block_n, among, threads);
#pragma unroll
    for (int h = 0; h < 2; ++h) set_scale(h, scale_log2);
    // A word a warp. What reduce_or gives is uniform for ptxas too, which else serialises the
    // products (C7520).
    const int lane = thread % warp_size;
    const u32 found_in_warp = ptx::reduce_or(found ? 1U : 0U);
    if (lane == 0)
      ptx::store_shared(shared.poisoned + (warpgroup * warpgroup_size + thread) / warp_size, found_in_warp);
    meet();
    if (ptx::reduce_or(lane < threads / warp_size ? ptx::load_shared(shared.poisoned + lane) : 0U) == 0)
      return;
    bool poisoned[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = key_at() + position.row(h);
      poisoned[h] = k().template any_nonfinite<C.element>(row, row + 1, 0, 1);
      if (poisoned[h]) set_scale(h, ptx::infinity() - ptx::infinity());
      // dS of these is the other block's, which knows; this one's columns of such a key are not to be read.
      if constexpr (C.cluster > 1) {
        if (warpgroup == 1) poisoned[h] = other_k().template any_nonfinite<C.element>(row, row + 1, 0, 1);
      }
    }
    join();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = key_at() + position.row(h);
      if (poisoned[h] && (C.owns_keys() || warpgroup == 0)) {
        k().zero_rows(row, row + 1, thread % 4, 4);
      } else if constexpr (C.cluster > 1) {
        if (poisoned[h]) other_k().zero_rows(row, row + 1, thread % 4, 4);
      }
    }
    join();
  }
  /// The same for rows of Q and dO before `first` and from `end` on.
  TANDEM_DEVICE void clear_queries(typename tile::Ring<C.q_stages>::Position q_to,
                                   typename tile::Ring<C.dout_stages>::Position dout_to, int first, int end) {
    const int among = warpgroup * warpgroup_size + thread;
    shared.q_ring.wait(q_to);
    shared.dout_ring.wait(dout_to);
    shared.q[q_to.stage].zero_rows(0, first, among, threads);
    shared.q[q_to.stage].zero_rows(end, C.block_m, among, threads);
    shared.dout[dout_to.stage].zero_rows(0, first, among, threads);
    shared.dout[dout_to.stage].zero_rows(end, C.block_m, among, threads);
    join();
  }

  /// Query block m's rows that see no key or are past the end. All consumers call it.
  TANDEM_DEVICE void clear_unseeing_queries(const BackwardTile& t, int m,
                                            typename tile::Ring<C.q_stages>::Position q_to,
                                            typename tile::Ring<C.dout_stages>::Position dout_to) {
    if constexpr (C.causal || C.varlen) {
      const int first = C.causal ? t.visible.first_seeing() - m * C.block_m : 0;
      const int end = C.varlen ? t.visible.seqlen_q - m * C.block_m : C.block_m;
      if (m < t.blocks.end && (first > 0 || end < C.block_m)) {
        clear_queries(q_to, dout_to, first, max(first, min(end, C.block_m)));
      }
    }
  }

  TANDEM_DEVICE void release_q() {
    if (thread % warp_size == 0) shared.q_ring.release(q_at);
    q_at.advance();
  }
  TANDEM_DEVICE void release_dout() {
    if (thread % warp_size == 0) shared.dout_ring.release(dout_at);
    dout_at.advance();
  }

  static TANDEM_DEVICE bool needs_mask(const BackwardTile& t, int m) {
    return m < t.blocks.inner_first || (C.local && m >= t.blocks.inner_end);
  }

  /// Waits for query block m's Q, and issues S.
  TANDEM_DEVICE void begin(const BackwardTile& t, int m, float (&s)[scores]) {
    shared.q_ring.wait(q_at);
    clear_unseeing_queries(t, m, q_at, dout_at);
    ptx::wgmma_fence();
    issue_scores<C.head_dim_qk>(s, k(), shared.q[q_at.stage]);
  }
  template <bool masked>
  TANDEM_DEVICE void step(const BackwardTile& t, int m, float (&dk)[C.head_dim_qk / 2],
                          float (&dv)[C.head_dim_v / 2]);
  template <bool masked, bool first>
  TANDEM_DEVICE void step_pingpong(const BackwardTile& t, int m, u32 (&p_packed)[scores / 2],
                                   u32 (&ds_packed)[scores / 2], float (&dk)[C.head_dim_qk / 2],
                                   float (&dv)[C.head_dim_v / 2]);
  TANDEM_DEVICE void finish_pingpong(const u32 (&p_packed)[scores / 2], const u32 (&ds_packed)[scores / 2],
                                     float (&dk)[C.head_dim_qk / 2], float (&dv)[C.head_dim_v / 2]);
  TANDEM_DEVICE void blocks(const BackwardTile& t, float (&dk)[C.head_dim_qk / 2],
                            float (&dv)[C.head_dim_v / 2]);
  template <int n>
  TANDEM_DEVICE void store_keys(const BackwardTile& t, const float (&dk)[n]);
  template <int n>
  TANDEM_DEVICE void store_values(const BackwardTile& t, const float (&dv)[n]);
  TANDEM_DEVICE void begin_tile(const BackwardTile& t);
  TANDEM_DEVICE void end_tile();
  TANDEM_DEVICE void run();

  // Not owning keys: see backward_roles.cuh
  /// The query block after m of head g of the group; past the end after the last.
  TANDEM_DEVICE int next_block(const BackwardTile& t, int g, int m) const {
    if (m + 1 < t.blocks.end) return m + 1;
    return g + 1 < group ? t.blocks.first : t.blocks.end;
  }
  TANDEM_DEVICE void hand_over(const u32 (&packed)[scores / 2]);
  TANDEM_DEVICE void take_over(u32 (&packed)[scores / 2]);
  template <bool masked>
  TANDEM_DEVICE void probabilities_step(const BackwardTile& t, int m, int next, float (&s)[scores],
                                        float (&dv)[C.head_dim_v / 2]);
  TANDEM_DEVICE void begin_gradients(const BackwardTile& t, int m, float (&dp)[scores]);
  template <typename Begin>
  TANDEM_DEVICE void make_dq(float (&x)[scores], Begin begin);
  TANDEM_DEVICE void gradients_step(const BackwardTile& t, int next, float (&dp)[scores],
                                    float (&dk)[C.head_dim_qk / 2]);
  template <bool keys, int n>
  TANDEM_DEVICE void role_blocks(const BackwardTile& t, float (&d)[n]);
  template <bool keys>
  TANDEM_DEVICE void run_role();
  TANDEM_DEVICE void send_ds();
};

}  // namespace tandem
