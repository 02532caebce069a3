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

#include "ops/backward/sm80/backward_products.cuh"
#include "ops/backward/sm80/config.hpp"
#include "ptx/barrier.cuh"
#include "tile/poisoned_keys.cuh"

namespace tandem {

// ---- Consumer ----

template <Sm80BackwardConfig C>
struct Sm80Backward : Sm80BackwardProducts<C> {
  using Base = Sm80BackwardProducts<C>;
  using Base::dout_at;
  using Base::dq_units;
  using Base::dq_warp_columns;
  using Base::key_at;
  using Base::p;
  using Base::position;
  using Base::q_at;
  using Base::scores;
  using Base::shared;
  using Base::slopes;
  using Base::thread;
  using Base::units;
  using Base::warpgroup;
  using typename Base::KeyGradient;
  using typename Base::QueryGradient;
  using typename Base::Shared;
  using typename Base::ValueGradient;
  using Visit = typename Sm80Visits<C>::Visit;

  /// The thread's numbers are found again by who makes one: around the loop they would be in local memory.
  TANDEM_DEVICE Sm80Backward(const BackwardKernelParams<C>& params, Shared& s)
      : Sm80Backward(params, s, static_cast<int>(ptx::thread_index_anew())) {}
  TANDEM_DEVICE Sm80Backward(const BackwardKernelParams<C>& params, Shared& s, int of_cta)
      : Base(params, s, ptx::warp_uniform(of_cta / warp_size) / 4, of_cta % warpgroup_size) {}

  TANDEM_DEVICE Sm80Visits<C> visits() const { return {p, shared}; }
  TANDEM_DEVICE typename Shared::KTile& k() { return shared.k; }
  TANDEM_DEVICE void meet() { ptx::sync_block(); }
  TANDEM_DEVICE void join() { ptx::sync_block(); }

  /// What functions need of the thread's keys, made again in each step: registers are for dK, dV and scores.
  /// Gives the query block.
  TANDEM_DEVICE int prepare_functions(const BackwardTile& t, Visit at) {
    this->function_head = at.head;
    this->set_keys(p, t, key_at(), position);
    return Base::begin_visit(t, at.visit);
  }
  TANDEM_DEVICE void clear_blind_queries() {
    const int among = static_cast<int>(ptx::thread_index_anew());
    if (tile::clear_blind_queries(shared.lse_log2[q_at.stage], shared.q[q_at.stage],
                                  shared.dout[dout_at.stage], thread % warp_size, among, Base::threads,
                                  [] {}))
      join();
  }

  /// Adds dQ to the sums. Register i of a warpgroup's threads lies together, so that a warp adds to whole
  /// lines; of a block of 32 queries as backward_convert's threads hold them, which have 64 columns'
  /// registers one behind the other. In a fixed order each warpgroup waits for the tiles that add before this
  /// one.
  TANDEM_DEVICE void add_dq(Visit at, const QueryGradient& dq) {
    const BackwardTile t = visits().current();
    const int m = visits().block_of(at);
    const i64 block = visits().workspace_block_of(at);
    float* sums = p.dq_sum + block * (C.tiling.block_m * C.tiling.head_dim_qk);
    if constexpr (C.tiling.block_m < 64) {
      sums += thread / 64 * (dq_warp_columns / 2 * warpgroup_size) + warpgroup * 64 + thread % 64;
    } else {
      sums += warpgroup * C.dq_values();
      if constexpr (dq_units == 2) {  // where the thread that has 16 queries with all columns would add
        sums += thread / warp_size % 2 * (dq_warp_columns / 2 * warpgroup_size) + thread / 64 * 64 +
                thread % warp_size;
      } else {
        sums += thread;
      }
    }
    u32* const semaphore = p.dq_semaphores + block * C.dq_pieces() + warpgroup;
    if constexpr (C.schedule.deterministic) {
      if (thread == 0) ptx::semaphore_wait(semaphore, BackwardTiles<C>::additions_before(t, m));
      ptx::named_barrier_sync(barrier_added + warpgroup, warpgroup_size);
    }
#pragma unroll
    for (int i = 0; i < dq_warp_columns / 2; ++i) {
#pragma unroll
      for (int u = 0; u < dq_units; ++u) ptx::atomic_add(sums + i * warpgroup_size + u * warp_size, dq[u][i]);
    }
    if constexpr (C.schedule.deterministic) announce(semaphore);
  }
  /// All additions of this warpgroup are visible to those who see the semaphore.
  TANDEM_DEVICE void announce(u32* semaphore) {
    ptx::named_barrier_sync(barrier_added + warpgroup, warpgroup_size);
    if (thread == 0) ptx::semaphore_increment(semaphore);
  }
  enum Barrier : int { barrier_added = 1 };  ///< and the next, of the other warpgroup

  TANDEM_DEVICE void store(const KeyGradient& dk, const ValueGradient& dv) {
    const BackwardTile t = visits().current();
#pragma unroll
    for (int u = 0; u < units; ++u) {
      this->select_unit(u);
      this->store_keys(t, dk[u], this->key_column_at());
      this->store_values(t, dv[u], this->value_column_at());
    }
    announce(tiles_added(p, t.batch, t.head_kv));
  }
  template <typename LoadDout>
  TANDEM_DEVICE void step(Visit at, KeyGradient& dk, ValueGradient& dv, LoadDout load_dout);

  using Packed = typename Base::Packed;
  /// What a query block's scores leave for its gradients.
  struct Kept {
    Packed p;  ///< P^T
    u32 sloped[units][slopes];
    u32 inputs[Base::kept_inputs];
    u32 whole[Base::whole_p];
  };
  TANDEM_DEVICE void compute_probabilities(Visit at, Kept& kept);
  TANDEM_DEVICE void compute_score_gradients(Visit at, const Kept& kept, Packed& ds);
  TANDEM_DEVICE void add_value_gradient(const Packed& p_packed, ValueGradient& dv);
};

/// A query block, whose Q and dO have come. `load_dout` starts the copy of the next block's dO.
template <Sm80BackwardConfig C>
template <typename LoadDout>
TANDEM_DEVICE void Sm80Backward<C>::step(Visit at, KeyGradient& dk, ValueGradient& dv, LoadDout load_dout) {
  static_assert(units == 1 || !C.functions.given());
  if constexpr (C.functions.given()) clear_blind_queries();
  Kept kept;
  Packed ds;
  compute_probabilities(at, kept);
  if constexpr (C.halves_queries()) this->hand_over(kept.p);
  compute_score_gradients(at, kept, ds);
  if constexpr (C.halves_queries() && !C.ds_in_dout) this->store_scores(ds);
  add_value_gradient(kept.p, dv);
  if constexpr (C.ds_in_dout) ptx::sync_block();  // all have read dO
  if constexpr (C.ds_in_dout || !C.halves_queries()) this->store_scores(ds);
  if constexpr (C.dout_stages == 1 || !C.halves_queries()) ptx::sync_block();
  if constexpr (C.dout_stages == 1 && !C.ds_in_dout) load_dout();
  if constexpr (C.halves_queries()) {
    this->multiply_halved_dk(dk);
  } else {
    this->multiply_gradient(dk, ds, shared.q[q_at.stage]);
  }
  QueryGradient dq;
  this->multiply_dq(dq);
  add_dq(at, dq);
}

/// P^T from S^T.
template <Sm80BackwardConfig C>
TANDEM_DEVICE void Sm80Backward<C>::compute_probabilities(Visit at, Kept& kept) {
  typename Base::Scores s;
  this->template multiply_scores<C.tiling.head_dim_qk>(s, shared.k, shared.q[q_at.stage]);
  const BackwardTile t = visits().current();
  int m = at.visit;
  if constexpr (C.functions.given()) m = prepare_functions(t, at);
  const bool masked = Base::needs_mask(t, m);
#pragma unroll
  for (int u = 0; u < units; ++u) {
    this->select_unit(u);
    if (masked) {
      this->template probabilities<true>(t, m, s[u], kept.p[u], kept.sloped[u]);
    } else {
      this->template probabilities<false>(t, m, s[u], kept.p[u], kept.sloped[u]);
    }
  }
  if constexpr (C.functions.captured_gradients) this->keep_inputs(s[0], kept.inputs);
  this->keep_whole(kept.whole, kept.p[0]);
  if constexpr (C.functions.dropout) {
    this->draw(t, m);
    this->drop(kept.p[0]);
  }
}

/// dS^T from dP^T, and what captured tensors are owed.
template <Sm80BackwardConfig C>
TANDEM_DEVICE void Sm80Backward<C>::compute_score_gradients(Visit at, const Kept& kept, Packed& ds) {
  typename Base::Scores dp;
  this->template multiply_scores<C.tiling.head_dim_v>(dp, shared.v, shared.dout[dout_at.stage]);
  if constexpr (C.functions.dropout) this->drop(dp[0]);
#pragma unroll
  for (int u = 0; u < units; ++u) this->score_gradients(ds[u], kept.p[u], kept.sloped[u], dp[u]);
  if constexpr (C.functions.captured_gradients) {
    this->add_captured_gradients(visits().current(), visits().block_of(at), kept.inputs, kept.whole,
                                 kept.p[0], dp[0]);
  }
}

/// dV += P^T dO, of all queries of the block.
template <Sm80BackwardConfig C>
TANDEM_DEVICE void Sm80Backward<C>::add_value_gradient(const Packed& p_packed, ValueGradient& dv) {
  auto& dout = shared.dout[dout_at.stage];
  if constexpr (C.halves_queries()) {
    Packed other;
    this->receive(other, p_packed);
    this->multiply_gradient(dv, p_packed, dout, this->query_at());
    this->multiply_gradient(dv, other, dout, 2 * scores - this->query_at());
  } else {
    this->multiply_gradient(dv, p_packed, dout);
  }
}

// ---- The loop over tiles ----

/// Loads K, V, Q and dO of a tile's first visit, and clears keys that are not finite.
template <Sm80BackwardConfig C>
TANDEM_DEVICE void begin_tile(Sm80BackwardLoader<C> loader) {
  const auto at = loader.first();
  loader.load_keys();
  loader.load_q(at, 0);
  loader.load_dout(at, 0);
  ptx::wait_for_copies();
  ptx::sync_block();
  if constexpr (Sm80Backward<C>::hides) {
    Sm80Backward<C> consumer(loader.p, loader.shared);
    tile::clear_poisoned_keys<C>(consumer);
  }
}

/// All visits of a tile. What follows from a visit is found again where it is needed, as the thread's numbers
/// are: ptxas would keep it in local memory.
template <Sm80BackwardConfig C>
TANDEM_DEVICE void compute_tile(Sm80BackwardLoader<C> loader, typename Sm80Backward<C>::KeyGradient& dk,
                                typename Sm80Backward<C>::ValueGradient& dv) {
  auto at = loader.first();
  int odd = 0;  // the visit's number modulo 2
#pragma unroll 1
  for (; loader.exists(at); at = loader.after(at), odd ^= 1) {
    const auto load_q = [&] { loader.load_q(loader.after(at), C.q_stages > 1 ? odd ^ 1 : 0); };
    const auto load_dout = [&] { loader.load_dout(loader.after(at), C.dout_stages > 1 ? odd ^ 1 : 0); };
    // Where there is one buffer, behind the last product that reads it.
    if constexpr (C.q_stages > 1) load_q();
    if constexpr (C.dout_stages > 1) load_dout();
    Sm80Backward<C> consumer(loader.p, loader.shared);
    consumer.q_at.stage = C.q_stages > 1 ? odd : 0;
    consumer.dout_at.stage = C.dout_stages > 1 ? odd : 0;
    consumer.step(at, dk, dv, load_dout);
    if constexpr (C.q_stages == 1 || C.ds_in_dout) ptx::sync_block();
    if constexpr (C.q_stages == 1) load_q();
    if constexpr (C.ds_in_dout) load_dout();
    ptx::wait_for_copies();
    ptx::sync_block();
  }
}

template <Sm80BackwardConfig C>
TANDEM_DEVICE void compute_tiles(const BackwardKernelParams<C>& p, Sm80BackwardShared<C>& shared) {
  const Sm80BackwardLoader<C> loader(p, shared);
  BackwardTiles<C> tiles(p);
  BackwardTile t;
  if (ptx::thread_index_anew() == 0) ptx::store_shared(&shared.group, p.heads_q / p.heads_kv);
  ptx::wait_for_previous_grid();
  while (tiles.next(t)) {
    t.q_block = 0;
    ptx::sync_block();  // all have read what the last tile left
    if (ptx::thread_index_anew() == 0) {
      ptx::store_shared(&shared.tile, t);
      ptx::store_shared(&shared.progress, tiles.progress());
    }
    const bool visits = has_visits<C>(p, t);
    ptx::sync_block();
    if (visits) begin_tile<C>(loader);
    typename Sm80Backward<C>::KeyGradient dk;
    typename Sm80Backward<C>::ValueGradient dv;
#pragma unroll
    for (int u = 0; u < C.key_units(); ++u) {
      tile::set_zero(dk[u]);
      tile::set_zero(dv[u]);
    }
    if (visits) compute_tile<C>(loader, dk, dv);
    Sm80Backward<C>(p, shared).store(dk, dv);
    tiles.resume(ptx::load_shared(&shared.progress));
  }
}

// ---- Entry ----

template <Sm80BackwardConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), 1)
    sm80_backward(const __grid_constant__ BackwardKernelParams<C> p) {
  static_assert((sizeof(Sm80BackwardShared<C>) + 1023) / 1024 * 1024 == backward_shared_bytes(C));
  auto& shared = *reinterpret_cast<Sm80BackwardShared<C>*>(ptx::dynamic_shared());
  compute_tiles<C>(p, shared);
}

}  // namespace tandem
