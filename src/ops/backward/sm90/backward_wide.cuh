// The backward pass of wide heads (more than 128 columns): a tile of 64 keys, and different products for the
// two consumer warpgroups.
//
// Warpgroup 0: S^T = K Q^T; P^T, kept in registers and handed over; dV += P^T dO; half of dQ = dS K.
// Warpgroup 1: dP^T = V dO^T; dS^T = P^T (dP^T - delta); dK += dS^T Q; the other half of dQ.
//
// At head dimension 256 two CTAs of a cluster send each other dS. Each CTA then computes half of the columns
// of dQ over the keys of both, and each warpgroup a quarter.
//
// A product with 64 queries reads 4 KB of operands in 32 cycles; if each warpgroup had 32 of the queries, it
// would read 3 KB in 16. dV and dK take their first operand from registers. The exponentials of one warpgroup
// run under the products of the other without a barrier for it. P and dS have one buffer each: the barrier
// that hands over one of them also says that the other has been read.
#pragma once

#include "ops/backward/sm90/backward_clear.cuh"
#include "ops/backward/sm90/backward_consumer.cuh"

namespace tandem {

template <BackwardConfig C>
struct WideBackwardConsumer : BackwardConsumer<C> {
  using Base = BackwardConsumer<C>;
  using Base::Base;
  using Base::dout_at;
  using Base::exchange;
  using Base::group;
  using Base::p;
  using Base::q_at;
  using Base::scores;
  using Base::shared;
  using Base::slopes;
  using Base::thread;
  using Base::threads;
  using Base::warpgroup;

  /// The warpgroup that has dP has no S.
  static_assert(!C.functions.captured_gradients);

  // ---- Exchange between warpgroups, and between the CTAs of a cluster ----

  /// Passes P^T from warpgroup 0 to 1, in the order in which threads hold it.
  TANDEM_DEVICE void hand_over(const u32 (&packed)[scores / 2]) {
    auto* at = reinterpret_cast<ptx::Vec4*>(shared.scores[1].data) + thread;
#pragma unroll
    for (int i = 0; i < scores / 8; ++i) {
      const u32* of = packed + 4 * i;
      ptx::store_shared(at + i * warpgroup_size, ptx::Vec4{of[0], of[1], of[2], of[3]});
    }
    ptx::named_barrier_arrive(barrier_p_full, threads);
  }
  TANDEM_DEVICE void receive(u32 (&packed)[scores / 2]) {
    ptx::named_barrier_sync(barrier_p_full, threads);
    const auto* at = reinterpret_cast<const ptx::Vec4*>(shared.scores[1].data) + thread;
#pragma unroll
    for (int i = 0; i < scores / 8; ++i) {
      const ptx::Vec4 of = ptx::load_shared(at + i * warpgroup_size);
      packed[4 * i] = of.x;
      packed[4 * i + 1] = of.y;
      packed[4 * i + 2] = of.z;
      packed[4 * i + 3] = of.w;
    }
  }

  /// Sends dS, which warpgroup 1 has written, to the other CTA of the cluster, whose buffer is free.
  TANDEM_DEVICE void send_ds() {
    ptx::named_barrier_sync(barrier_ds_own, warpgroup_size);
    if (thread == 0) {
      ptx::mbarrier_arrive_expect(shared.ds_full, Base::Shared::ScoreTile::bytes);
      ptx::bulk_send(shared.scores[2].data, shared.scores[0].data, Base::Shared::ScoreTile::bytes,
                     shared.ds_full);
    }
  }

  // ---- Steps ----

  /// Computes this warpgroup's part of dQ; dS is in shared memory. The last part of it leaves under the
  /// product that `begin` issues, whose result is `x`.
  template <typename Begin>
  TANDEM_DEVICE void make_dq(float (&x)[scores], Begin begin) {
    float dq[C.dq_columns() / 2];
    ptx::wgmma_fence();
    this->issue_dq(dq, shared.scores[0]);
    if constexpr (C.cluster > 1) {
      ptx::mbarrier_wait_other(shared.ds_full, exchange);
      this->template issue_dq<true>(dq, shared.scores[2], this->other_k(), this->dq_column_at());
    }
    ptx::wgmma_wait<0>();
    ptx::pin_registers(dq);
    if constexpr (C.cluster > 1) {
      if (thread % warp_size == 0) ptx::mbarrier_arrive_other(shared.ds_empty);
      exchange ^= 1;
    }
#pragma unroll
    for (int slice = 0; slice < C.dq_slices - 1; ++slice) this->store_dq(dq, slice);
    begin();
    this->store_dq(dq, C.dq_slices - 1);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(x);
  }

  /// Warpgroup 0's part of query block m, whose S is in `s`; S of the next block replaces it. P's buffer is
  /// free: this warpgroup has waited for dS of the previous block, which was computed from it.
  template <bool masked>
  TANDEM_DEVICE void probabilities_step(const BackwardTile& t, int m, int next, float (&s)[scores],
                                        float (&dv)[C.tiling.head_dim_v / 2]) {
    u32 packed[scores / 2];
    if constexpr (C.functions.dropout) this->draw(t, m);
    {
      u32 sloped[slopes];
      this->template probabilities<masked>(t, m, s, packed, sloped);
      if constexpr (C.sloped()) {
        hand_over(sloped);
      } else {
        hand_over(packed);
      }
    }
    if constexpr (C.functions.dropout) this->drop(packed);
    ptx::sync_warp();  // all lanes have read LSE
    this->release_q();
    shared.dout_ring.wait(dout_at);
    ptx::wgmma_fence();
    this->template issue_gradient<C.tiling.head_dim_v>(dv, packed, shared.dout[dout_at.stage]);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(dv);
    this->release_dout();
    ptx::named_barrier_sync(barrier_ds_full, threads);
    make_dq(s, [&] { this->begin_scores(t, next, s); });
  }

  /// Waits for dO of query block m, and issues dP^T.
  TANDEM_DEVICE void begin_gradients(const BackwardTile& t, int m, float (&dp)[scores]) {
    shared.dout_ring.wait(dout_at);
    this->template clear_unseeing_queries<true>(t, m, q_at, dout_at);
    ptx::wgmma_fence();
    this->template issue_scores<C.tiling.head_dim_v>(dp, this->v(), shared.dout[dout_at.stage]);
  }

  /// Warpgroup 1's part of query block m, whose dP is in `dp`; dP of the next block replaces it. The buffer
  /// of dS is free: both warpgroups waited for dQ of the previous block before P was handed over.
  TANDEM_DEVICE void gradients_step(const BackwardTile& t, int m, int next, float (&dp)[scores],
                                    float (&dk)[C.tiling.head_dim_qk / 2]) {
    u32 ds_packed[scores / 2];
    if constexpr (C.functions.dropout) {
      this->draw(t, m);
      this->drop(dp);
    }
    {
      u32 p_packed[scores / 2];
      receive(p_packed);
      this->score_gradients(ds_packed, p_packed, dp);
    }
    if constexpr (C.cluster > 1) ptx::mbarrier_wait_other(shared.ds_empty, exchange ^ 1);
    this->store_scores(shared.scores[0], ds_packed);
    ptx::fence_async_shared();
    ptx::named_barrier_arrive(barrier_ds_full, threads);
    if constexpr (C.cluster > 1) send_ds();
    ptx::sync_warp();  // all lanes have read delta
    this->release_dout();
    shared.q_ring.wait(q_at);
    ptx::wgmma_fence();
    this->template issue_gradient<C.tiling.head_dim_qk>(dk, ds_packed, shared.q[q_at.stage]);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(dk);
    this->release_q();
    if constexpr (C.cluster == 1) ptx::named_barrier_sync(barrier_ds_own, warpgroup_size);
    make_dq(dp, [&] { begin_gradients(t, next, dp); });
  }

  /// The query block after visit i of head g of the group, which is m; after the last, one past the end.
  TANDEM_DEVICE int next_block(const BackwardTile& t, int g, int i, int m) const {
    if constexpr (C.functions.block_lists) {
      for (; g < group; ++g, i = -1) {
        const QueryVisits<C, true> visits{p, t, t.head_kv * group + g};
        if (i + 1 < visits.end()) return visits.at(i + 1).block;
      }
      return t.blocks.end;
    }
    if (m + 1 < t.blocks.end) return m + 1;
    return g + 1 < group ? t.blocks.first : t.blocks.end;
  }

  /// All query blocks of a tile for a warpgroup that computes dK (`keys`) or dV, which `d` is. After the last
  /// block one more product is computed and not used, so that no branch stands between products.
  template <bool keys, int n>
  TANDEM_DEVICE void blocks(const BackwardTile& t, float (&d)[n]) {
    float x[scores];
    const int before = C.functions.block_lists ? next_block(t, 0, -1, 0) : t.blocks.first;
    if constexpr (keys) {
      begin_gradients(t, before, x);
    } else {
      this->begin_scores(t, before, x);
    }
    ptx::wgmma_wait<0>();
    ptx::pin_registers(x);
    for (int g = 0; g < group; ++g) {
      this->begin_head(t, g);
      const int end = this->visits(t).end();
      for (int i = this->visits(t).first(); i < end; ++i) {
        const int m = this->begin_visit(t, i);
        const int next = next_block(t, g, i, m);
        if constexpr (keys) {
          gradients_step(t, m, next, x, d);
        } else if (this->needs_mask(t, m)) {
          probabilities_step<true>(t, m, next, x, d);
        } else {
          probabilities_step<false>(t, m, next, x, d);
        }
      }
    }
    shared.q_ring.wait(q_at);
    shared.dout_ring.wait(dout_at);
    ptx::sync_warp();  // all lanes have seen the phases that a release may end
    this->release_q();
    this->release_dout();
  }

  /// The tiles of a warpgroup that computes dK (`keys`) or dV.
  template <bool keys>
  TANDEM_DEVICE void run_tiles() {
    BackwardTiles<C> tiles(p);
    BackwardTile t;
    while (tiles.next(t)) {
      float d[(keys ? C.tiling.head_dim_qk : C.tiling.head_dim_v) / 2];
      tile::set_zero(d);
      if (has_visits<C>(p, t)) {
        this->begin_tile(t);
        blocks<keys>(t, d);
        this->end_tile();
      }
      if constexpr (keys) {
        this->store_keys(t, d);
      } else {
        this->store_values(t, d);
      }
    }
  }

  TANDEM_DEVICE void run() {
    if (warpgroup == 0) {
      run_tiles<false>();
    } else {
      run_tiles<true>();
    }
    this->dq_buffer().await();  // the dQ writer's last arrival
  }
};

}  // namespace tandem
