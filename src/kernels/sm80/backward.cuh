// The backward pass in the instructions that every GPU from Ampere on has: mma.sync, ldmatrix, cp.async.
//
// As in the kernel for Hopper (sm90/backward.cuh) a CTA owns a tile of keys, with dK and dV in registers, and
// loops over the query blocks that see it. Scores are computed transposed, so that P^T and dS^T lie in
// registers as the products for dV and dK read their first operand; dS alone goes through shared memory, for
// dQ. Up to head dimension 128 each of eight warps owns 16 keys. Wider heads leave no registers for that:
// there are 64 keys, of which four warps have the scores with half of a block's queries, and four with the
// other half. They pass each other P, and each four compute half of the columns of dV and dK. All warps load
// and all compute: Q and dO of the next block come in under the products of this one. dQ is added to f32 sums
// in global memory by atomic operations. docs/kernels/sm80-backward.md has the arithmetic.
#pragma once

#include "kernels/config/backward.hpp"
#include "kernels/ptx/barrier.cuh"
#include "kernels/sm80/backward_products.cuh"

namespace tandem {

// ---- Consumer ----

template <BackwardConfig C>
struct Sm80Backward : Sm80BackwardProducts<C> {
  using Base = Sm80BackwardProducts<C>;
  using Base::Base;
  using Base::dout_at;
  using Base::dq_warp_columns;
  using Base::group;
  using Base::key_at;
  using Base::p;
  using Base::position;
  using Base::q_at;
  using Base::scores;
  using Base::shared;
  using Base::slopes;
  using Base::thread;
  using Base::warpgroup;
  using typename Base::KeyGradient;
  using typename Base::QueryGradient;
  using typename Base::Shared;
  using typename Base::ValueGradient;
  static_assert(C.of_sm80() && C.tiling.cluster == 1 && C.dq_parts == 1);
  static_assert(!C.functions.dropout && !C.schedule.pingpong && !C.schedule.staggered);

  TANDEM_DEVICE typename Shared::KTile& k() { return shared.k; }
  TANDEM_DEVICE void meet() { ptx::sync_block(); }
  TANDEM_DEVICE void join() { ptx::sync_block(); }

  /// A visit of a head of the group: a query block, or with lists its place in the head's list.
  struct Step {
    int head;
    int visit;
  };
  /// All lanes of a warp call, also of the next ones.
  TANDEM_DEVICE Step first_step(const BackwardTile& t) const {
    const int head = t.head_kv * group;
    if constexpr (C.functions.block_lists) return after({head, -1});
    return {head, t.blocks.first};
  }
  TANDEM_DEVICE Step after(Step at) const {
    const BackwardTile t = current();
    if constexpr (C.functions.block_lists) {  // which of a head may be empty
      Step next{at.head, at.visit + 1};
      const int end = (t.head_kv + 1) * group;
      while (next.head < end && next.visit >= this->listed(this->list_of(t, next.head)))
        next = {next.head + 1, 0};
      return next;
    }
    return at.visit + 1 < t.blocks.end ? Step{at.head, at.visit + 1} : Step{at.head + 1, t.blocks.first};
  }
  TANDEM_DEVICE int block_of(Step at) const {
    if constexpr (C.functions.block_lists)
      return this->listed(this->list_of(current(), at.head) + 1 + at.visit) / 2;
    return at.visit;
  }
  /// The tile that is computed.
  TANDEM_DEVICE BackwardTile current() const { return ptx::load_shared(&shared.tile); }

  /// What functions need of the thread's keys, made again in each step: registers are for dK, dV and scores.
  /// Gives the query block.
  TANDEM_DEVICE int take_functions(const BackwardTile& t, Step at) {
    this->own_head = at.head;
    this->take_keys(p, t, key_at(), position);
    return Base::take_visit(t, at.visit);
  }
  /// Clears rows of Q and dO whose LSE says that they see no key, which with functions may be any: 0 * NaN is
  /// NaN. Each warp looks at the LSE of the whole block, so that all find the same rows.
  TANDEM_DEVICE void clear_blind_queries() {
    constexpr int words = C.tiling.block_m / warp_size;
    u32 blind[words];
    u32 any = 0;
#pragma unroll
    for (int i = 0; i < words; ++i) {
      const float lse = ptx::load_shared(shared.lse_log2[q_at.stage] + i * warp_size + thread % warp_size);
      blind[i] = ptx::ballot(lse == ptx::infinity());
      any |= blind[i];
    }
    if (any == 0) return;
    const int among = static_cast<int>(ptx::thread_index_anew());
#pragma unroll
    for (int i = 0; i < words; ++i) {
#pragma unroll 1
      for (int bit = 0; bit < warp_size; ++bit) {
        if ((blind[i] >> bit & 1U) == 0) continue;
        const int row = i * warp_size + bit;
        shared.q[q_at.stage].zero_rows(row, row + 1, among, Base::threads);
        shared.dout[dout_at.stage].zero_rows(row, row + 1, among, Base::threads);
      }
    }
    join();
  }

  /// Adds dQ to the sums. Register i of a warpgroup's threads lies together, so that a warp adds to whole
  /// lines; of a block of 32 queries as backward_convert's threads hold them, which have 64 columns'
  /// registers one behind the other. In a fixed order each warpgroup waits for the tiles that add before this
  /// one.
  TANDEM_DEVICE void add_dq(Step at, const QueryGradient& dq) {
    const BackwardTile t = current();
    const int m = block_of(at);
    const i64 block = workspace_block(p, at.head, t.q_block + m);
    float* sums = p.dq_sum + block * (C.tiling.block_m * C.tiling.head_dim_qk);
    if constexpr (C.tiling.block_m < 64) {
      sums += thread / 64 * (dq_warp_columns / 2 * warpgroup_size) + warpgroup * 64 + thread % 64;
    } else {
      sums += warpgroup * C.dq_values() + thread;
    }
    u32* const semaphore = p.dq_semaphores + block * C.dq_pieces() + warpgroup;
    if constexpr (C.schedule.deterministic) {
      if (thread == 0) ptx::semaphore_wait(semaphore, BackwardTiles<C>::additions_before(t, m));
      ptx::named_barrier_sync(barrier_added + warpgroup, warpgroup_size);
    }
#pragma unroll
    for (int i = 0; i < dq_warp_columns / 2; ++i) ptx::atomic_add(sums + i * warpgroup_size, dq[i]);
    if constexpr (C.schedule.deterministic) announce(semaphore);
  }
  /// All additions of this warpgroup are visible to those who see the semaphore.
  TANDEM_DEVICE void announce(u32* semaphore) {
    ptx::named_barrier_sync(barrier_added + warpgroup, warpgroup_size);
    if (thread == 0) ptx::semaphore_increment(semaphore);
  }
  static constexpr int barrier_added = 1;  ///< and the next, of the other warpgroup

  TANDEM_DEVICE void run() {
    BackwardTiles<C> tiles(p);
    BackwardTile t;
    ptx::wait_for_previous_grid();
    while (tiles.next(t)) {
      KeyGradient dk;
      ValueGradient dv;
      set_zero(dk);
      set_zero(dv);
      ptx::sync_block();  // all have read what the last tile left
      if (ptx::thread_index() == 0) ptx::store_shared(&shared.tile, t);
      if constexpr (C.functions.block_lists) ptx::sync_block();  // first_step reads it
      if (has_visits<C>(p, t)) compute(t, dk, dv);
      ptx::sync_block();
      store(dk, dv);
    }
  }
  TANDEM_DEVICE void store(const KeyGradient& dk, const ValueGradient& dv) {
    const BackwardTile t = current();
    this->store_keys(t, dk, this->key_column_at());
    this->store_values(t, dv, this->value_column_at());
    announce(tiles_added(p, t.batch, t.head_kv));
  }
  TANDEM_DEVICE void compute(const BackwardTile& t, KeyGradient& dk, ValueGradient& dv);
  template <typename LoadDout>
  TANDEM_DEVICE void step(Step at, KeyGradient& dk, ValueGradient& dv, LoadDout load_dout);
};

/// All query blocks of all heads of the group.
template <BackwardConfig C>
TANDEM_DEVICE void Sm80Backward<C>::compute(const BackwardTile& t, KeyGradient& dk, ValueGradient& dv) {
  Sm80BackwardLoader<C> loader{p, shared};
  Step at = first_step(t);
  const int end = (t.head_kv + 1) * group;
  loader.load_keys(t);
  loader.load_q(t, at.head, block_of(at), q_at.stage);
  loader.load_dout(t, at.head, block_of(at), dout_at.stage);
  ptx::wait_for_copies();
  ptx::sync_block();
  if constexpr (Base::hides) tile::clear_poisoned_keys<C>(*this);
#pragma unroll 1
  while (at.head < end) {
    const Step next = after(at);
    auto q_to = q_at;
    auto dout_to = dout_at;
    q_to.advance();
    dout_to.advance();
    const auto load_q = [&] {
      if (next.head != end) loader.load_q(current(), next.head, block_of(next), q_to.stage);
    };
    const auto load_dout = [&] {
      if (next.head != end) loader.load_dout(current(), next.head, block_of(next), dout_to.stage);
    };
    // Where there is one buffer, behind the last product that reads it.
    if constexpr (C.q_stages > 1) load_q();
    if constexpr (C.dout_stages > 1) load_dout();
    step(at, dk, dv, load_dout);
    if constexpr (C.q_stages == 1 || C.ds_in_dout) ptx::sync_block();
    if constexpr (C.q_stages == 1) load_q();
    if constexpr (C.ds_in_dout) load_dout();
    ptx::wait_for_copies();
    ptx::sync_block();
    at = next;
    q_at = q_to;
    dout_at = dout_to;
  }
}

/// A query block, whose Q and dO have come. `load_dout` starts the copy of the next block's dO.
template <BackwardConfig C>
template <typename LoadDout>
TANDEM_DEVICE void Sm80Backward<C>::step(Step at, KeyGradient& dk, ValueGradient& dv, LoadDout load_dout) {
  auto& q = shared.q[q_at.stage];
  auto& dout = shared.dout[dout_at.stage];
  if constexpr (C.functions.given()) clear_blind_queries();
  u32 p_packed[scores / 2];
  u32 p_sloped[slopes];
  u32 inputs[Base::kept_inputs];
  {
    float s[scores];
    this->template multiply_scores<C.tiling.head_dim_qk>(s, shared.k, q);
    const BackwardTile t = current();
    int m = at.visit;
    if constexpr (C.functions.given()) m = take_functions(t, at);
    if (Base::needs_mask(t, m)) {
      this->template probabilities<true>(t, m, s, p_packed, p_sloped);
    } else {
      this->template probabilities<false>(t, m, s, p_packed, p_sloped);
    }
    if constexpr (C.functions.captured_gradients) this->keep_inputs(s, inputs);
  }
  if constexpr (C.halves_queries()) this->hand_over(p_packed);
  u32 ds_packed[scores / 2];
  {
    float dp[scores];
    this->template multiply_scores<C.tiling.head_dim_v>(dp, shared.v, dout);
    this->score_gradients(ds_packed, p_packed, p_sloped, dp);
    if constexpr (C.functions.captured_gradients) {
      this->add_captured_gradients(current(), block_of(at), inputs, p_packed, dp);
    }
  }
  if constexpr (C.halves_queries()) {
    if constexpr (!C.ds_in_dout) this->store_scores(ds_packed);
    u32 other[scores / 2];
    this->take_over(other, p_packed);
    this->multiply_gradient(dv, p_packed, dout, this->query_at(), this->value_column_at());
    this->multiply_gradient(dv, other, dout, 2 * scores - this->query_at(), this->value_column_at());
  } else {
    this->multiply_gradient(dv, p_packed, dout);
  }
  if constexpr (C.ds_in_dout) ptx::sync_block();  // all have read dO
  if constexpr (C.ds_in_dout || !C.halves_queries()) this->store_scores(ds_packed);
  if constexpr (C.dout_stages == 1 || !C.halves_queries()) ptx::sync_block();
  if constexpr (C.dout_stages == 1 && !C.ds_in_dout) load_dout();
  if constexpr (C.halves_queries()) {
    this->multiply_halved_dk(dk);
  } else {
    this->multiply_gradient(dk, ds_packed, q);
  }
  QueryGradient dq;
  this->multiply_dq(dq);
  add_dq(at, dq);
}

// ---- Entry ----

template <BackwardConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), 1)
    sm80_backward(const __grid_constant__ BackwardKernelParams<C> p) {
  static_assert((sizeof(Sm80BackwardShared<C>) + 1023) / 1024 * 1024 == backward_shared_bytes(C));
  auto& shared = *reinterpret_cast<Sm80BackwardShared<C>*>(ptx::dynamic_shared());
  // The shuffle lets ptxas know that the number is uniform over the warp.
  const int warp = static_cast<int>(ptx::shuffle(ptx::thread_index() / warp_size, 0));
  Sm80Backward<C>(p, shared, warp / 4, static_cast<int>(ptx::thread_index()) % warpgroup_size).run();
}

}  // namespace tandem
