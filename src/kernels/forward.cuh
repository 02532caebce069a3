// The forward pass: O = softmax(scale Q K^T) V, one persistent block an SM.
//
// A producer warp feeds shared memory through the copy engine; each consumer warpgroup owns 64 queries. In
// one warpgroup the products of block i + 1 and block i run while its softmax waits for neither (two-stage
// pipelining); between warpgroups, named barriers hand the tensor cores round, so that one's exponentials run
// under the other's products (ping-pong). Method: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608),
// algorithm 2. docs/kernels/forward.md has the arithmetic.
#pragma once

#include "kernels/config.hpp"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/registers.cuh"
#include "kernels/tile/mask.cuh"
#include "kernels/tile/pipeline.cuh"
#include "kernels/tile/scheduler.cuh"
#include "kernels/tile/shared_tile.cuh"
#include "kernels/tile/softmax.cuh"

namespace tandem {

// ---- Shared storage
// ---------------------------------------------------------------------------------------------------

template <ForwardConfig C>
struct ForwardShared {
  using QTile = tile::SharedTile<64, C.head_dim_qk>;
  using KTile = tile::SharedTile<C.block_n, C.head_dim_qk>;
  using VTile = tile::SharedTile<C.block_n, C.head_dim_v>;

  QTile q[C.consumers()];
  KTile k[C.stages];
  VTile v[C.stages];
  tile::Ring<C.stages> k_ring;
  tile::Ring<C.stages> v_ring;
  tile::Ring<1> q_ring[C.consumers()];
};

/// Named barriers: 1 to 3 hand the turn to a consumer warpgroup; 4 joins all consumers.
constexpr int barrier_turn = 1;
constexpr int barrier_consumers = 4;

template <bool ragged, typename Ragged, typename Dense>
struct Select {
  using type = Dense;
};
template <typename Ragged, typename Dense>
struct Select<true, Ragged, Dense> {
  using type = Ragged;
};
template <ForwardConfig C>
using ForwardScheduler =
    typename Select<C.ragged, tile::RaggedScheduler<C.block_m>, tile::DenseScheduler<C.causal>>::type;

template <ForwardConfig C>
TANDEM_DEVICE tile::Visibility visibility(const ForwardParams& p, const tile::TileIndex& t) {
  return {t.seqlen_q, t.seqlen_k, C.local ? p.window_left : tile::Visibility::unbounded,
          C.causal ? p.window_right : tile::Visibility::unbounded};
}

/// Key blocks of the whole tile: every warpgroup walks them all, so that their turns and buffers stay in
/// step.
template <ForwardConfig C>
TANDEM_DEVICE tile::BlockRange tile_blocks(const tile::Visibility& v, const tile::TileIndex& t) {
  return tile::BlockRange::of<C.block_n>(v, t.m * C.block_m, (t.m + 1) * C.block_m);
}

// ---- Producer
// ---------------------------------------------------------------------------------------------------------

/// One warp; its elected lane starts the copies. Blocks go right to left. K runs one block ahead of V, as the
/// consumers do.
template <ForwardConfig C>
TANDEM_DEVICE void forward_producer(const ForwardParams& p, ForwardShared<C>& shared) {
  using Shared = ForwardShared<C>;
  const bool leader = ptx::elect_one();
  typename tile::Ring<C.stages>::Position k_at, v_at;
  tile::RingPosition<1> q_at;
  ForwardScheduler<C> scheduler(p);
  tile::TileIndex t;
  while (scheduler.next(t)) {
    const tile::BlockRange blocks = tile_blocks<C>(visibility<C>(p, t), t);
    if (blocks.first >= blocks.end) continue;
    if (leader) {
      const int head_kv = t.head / (p.heads_q / p.heads_kv);
      const int batch_q = p.packed_q ? 0 : t.batch;
      const int batch_k = p.packed_k ? 0 : t.batch;
      auto load_k = [&](int block) {
        ptx::Mbarrier& full = shared.k_ring.acquire(k_at, Shared::KTile::bytes);
        shared.k[k_at.stage].load(p.k, full, t.begin_k + block * C.block_n, head_kv, batch_k,
                                  ptx::CacheHint::last);
        k_at.advance();
      };
      auto load_v = [&](int block) {
        ptx::Mbarrier& full = shared.v_ring.acquire(v_at, Shared::VTile::bytes);
        shared.v[v_at.stage].load(p.v, full, t.begin_k + block * C.block_n, head_kv, batch_k,
                                  ptx::CacheHint::last);
        v_at.advance();
      };
      for (int w = 0; w < C.consumers(); ++w) {
        ptx::Mbarrier& full = shared.q_ring[w].acquire(q_at, Shared::QTile::bytes);
        shared.q[w].load(p.q, full, t.begin_q + t.m * C.block_m + w * 64, t.head, batch_q,
                         ptx::CacheHint::first);
        if (w == 0) load_k(blocks.end - 1);
      }
      q_at.advance();
      for (int block = blocks.end - 2; block >= blocks.first; --block) {
        load_k(block);
        load_v(block + 1);
      }
      load_v(blocks.first);
    }
  }
}

// ---- Consumer
// ---------------------------------------------------------------------------------------------------------

/// Scores before the mask: scaled or capped where the exponent's multiply-add cannot do it.
template <ForwardConfig C, int n>
TANDEM_DEVICE void transform_scores(float (&s)[n], const ForwardParams& p) {
  if constexpr (C.transform == ScoreTransform::scaled) {
#pragma unroll
    for (int i = 0; i < n; ++i) s[i] *= p.scale;
  } else if constexpr (C.transform == ScoreTransform::softcap) {
    // cap * tanh(x) = cap * (1 - 2 / (1 + e^2x)): absolute error 1e-7 of the cap; tanh.approx would leave
    // 5e-4.
    const float inner = p.scale / p.softcap * 2.0F * tile::log2_e;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      s[i] = p.softcap - 2.0F * p.softcap * ptx::reciprocal(1.0F + ptx::exp2(s[i] * inner));
    }
  }
}

template <ForwardConfig C>
struct ForwardConsumer {
  using Shared = ForwardShared<C>;
  static constexpr int scores = C.block_n / 2;
  static constexpr int outputs = C.head_dim_v / 2;

  const ForwardParams& p;
  Shared& shared;
  const int warpgroup;
  const int thread;  ///< in the warpgroup
  const tile::FragmentPosition position;
  const float scale_log2;
  typename tile::Ring<C.stages>::Position k_at, v_at;
  tile::RingPosition<1> q_at;

  TANDEM_DEVICE ForwardConsumer(const ForwardParams& params, Shared& s, int warpgroup_, int thread_)
      : p(params),
        shared(s),
        warpgroup(warpgroup_),
        thread(thread_),
        position(thread_),
        scale_log2((C.transform == ScoreTransform::raw ? params.scale : 1.0F) * tile::log2_e) {}

  TANDEM_DEVICE bool warp_leader() const { return thread % warp_size == 0; }

  /// The warpgroups' turns on the tensor cores.
  TANDEM_DEVICE void take_turn() {
    if constexpr (C.pingpong) ptx::named_barrier_sync(barrier_turn + warpgroup, 2 * warpgroup_size);
  }
  TANDEM_DEVICE void pass_turn() {
    if constexpr (C.pingpong) {
      const int next = warpgroup + 1 == C.consumers() ? 0 : warpgroup + 1;
      ptx::named_barrier_arrive(barrier_turn + next, 2 * warpgroup_size);
    }
  }

  /// Issues S = Q K^T for the K block at k_at.
  TANDEM_DEVICE void issue_scores(float (&s)[scores]) {
    const ptx::MatrixDescriptor q = shared.q[warpgroup].k_major();
    const ptx::MatrixDescriptor k = shared.k[k_at.stage].k_major();
#pragma unroll
    for (int step = 0; step < C.head_dim_qk / 16; ++step) {
      ptx::wgmma_shared<C.block_n, C.element, false>(s, q + Shared::QTile::k_major_offset(step),
                                                     k + Shared::KTile::k_major_offset(step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Issues O (+)= P V for the V block at v_at.
  TANDEM_DEVICE void issue_output(float (&o)[outputs], const u32 (&probabilities)[scores / 2],
                                  bool accumulate) {
    const ptx::MatrixDescriptor v = shared.v[v_at.stage].mn_major();
#pragma unroll
    for (int step = 0; step < C.block_n / 16; ++step) {
      ptx::wgmma_registers<C.head_dim_v, C.element, true>(
          o, probabilities + 4 * step, v + Shared::VTile::mn_major_offset(step), step != 0 || accumulate);
    }
    ptx::wgmma_commit();
  }

  TANDEM_DEVICE void release_k() {
    if (warp_leader()) shared.k_ring.release(k_at);
    k_at.advance();
  }
  TANDEM_DEVICE void release_v() {
    if (warp_leader()) shared.v_ring.release(v_at);
    v_at.advance();
  }

  TANDEM_DEVICE void release_q() {
    if (warp_leader()) shared.q_ring[warpgroup].release(q_at);
    q_at.advance();
  }

  /// Rows of V past the sequence's end may hold anything, and 0 * NaN is NaN: the consumers zero them in
  /// shared memory before their first product. Only the rightmost block has such rows, and only where the
  /// copy engine cannot know the end.
  TANDEM_DEVICE void clear_v_tail(int valid_rows) {
    shared.v_ring.wait(v_at);
    shared.v[v_at.stage].zero_rows(valid_rows, warpgroup * warpgroup_size + thread,
                                   C.block_m / 64 * warpgroup_size);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(barrier_consumers, C.consumers() * warpgroup_size);
  }

  TANDEM_DEVICE void compute(const tile::TileIndex& t);
  TANDEM_DEVICE void store(const tile::TileIndex& t, const float (&o)[outputs],
                           const tile::OnlineSoftmax& softmax);
  TANDEM_DEVICE void store_columns(u16* row, int col, const u32 (&words)[4]);
};

template <ForwardConfig C>
TANDEM_DEVICE void ForwardConsumer<C>::compute(const tile::TileIndex& t) {
  const tile::Visibility v = visibility<C>(p, t);
  const tile::BlockRange blocks = tile_blocks<C>(v, t);
  const int first_query = t.m * C.block_m + warpgroup * 64;
  const tile::BlockRange own = tile::BlockRange::of<C.block_n>(v, first_query, first_query + 64);
  tile::OnlineSoftmax softmax;
  float o[outputs];
  if (blocks.first >= blocks.end) {
#pragma unroll
    for (int i = 0; i < outputs; ++i) o[i] = 0.0F;
    store(t, o, softmax);
    return;
  }

  float s[scores];
  u32 probabilities[scores / 2];
  float rescale[2];
  auto exponentials = [&](int block, bool masked) {
    transform_scores<C>(s, p);
    if (masked) tile::apply_mask(s, v, first_query, block * C.block_n, position);
    softmax.step(s, rescale, scale_log2);
  };
  auto rescale_output = [&] {
#pragma unroll
    for (int i = 0; i < outputs; ++i) o[i] *= rescale[i / 2 % 2];
  };

  // The first block has no product to run under.
  shared.q_ring[warpgroup].wait(q_at);
  shared.k_ring.wait(k_at);
  ptx::wgmma_fence();
  issue_scores(s);
  ptx::wgmma_wait<0>();
  ptx::pin_registers(s);
  release_k();
  int block = blocks.end - 1;
  if (block == blocks.first) release_q();
  exponentials(block, true);
  tile::convert<C.element>(probabilities, s);
  if (C.ragged && (block + 1) * C.block_n > t.seqlen_k) clear_v_tail(t.seqlen_k - block * C.block_n);

  if (block > blocks.first) shared.k_ring.wait(k_at);
  bool accumulate = false;
  auto iteration = [&](bool masked) {
    take_turn();
    ptx::wgmma_fence();
    issue_scores(s);
    shared.v_ring.wait(v_at);
    issue_output(o, probabilities, accumulate);
    pass_turn();
    ptx::wgmma_wait<1>();
    ptx::pin_registers(s);
    release_k();
    if (block == blocks.first) release_q();
    exponentials(block, masked);
    // The next K block is waited for here, not at its use: the branch in this wait keeps the assembler from
    // moving the exponentials, which belong under the product, behind the wait for it.
    if (block > blocks.first) shared.k_ring.wait(k_at);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(o);
    release_v();
    tile::convert<C.element>(probabilities, s);
    rescale_output();
    accumulate = true;
  };
  --block;
  if constexpr (C.causal) {
    for (; block >= max(blocks.first, own.inner_end); --block) iteration(true);
  }
  for (; block >= max(blocks.first, own.inner_first); --block) iteration(false);
  if constexpr (C.local) {
    for (; block >= blocks.first; --block) iteration(true);
  }

  shared.v_ring.wait(v_at);
  ptx::wgmma_fence();
  issue_output(o, probabilities, accumulate);
  ptx::wgmma_wait<0>();
  ptx::pin_registers(o);
  release_v();
  store(t, o, softmax);
}

/// Normalises O and writes it with the LSE. The four lanes of a quad exchange words so that each stores 16
/// bytes of a row and the quad 64 in a run: no shared memory, so the next tile's loads need not wait for this
/// store.
template <ForwardConfig C>
TANDEM_DEVICE void ForwardConsumer<C>::store(const tile::TileIndex& t, const float (&o)[outputs],
                                             const tile::OnlineSoftmax& softmax) {
  const int quad_lane = thread % 4;
  const int batch_q = p.packed_q ? 0 : t.batch;
  const bool has_sink = p.sink != nullptr;
  const float sink_log2 = has_sink ? ptx::load_global(p.sink + t.head * p.sink_stride) * tile::log2_e : 0.0F;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = t.m * C.block_m + warpgroup * 64 + position.row(h);
    float factor;
    float lse = softmax.finish(h, scale_log2, has_sink, sink_log2, factor);
    const bool in_use = query < t.seqlen_q;
    if (!in_use) lse = -ptx::infinity();
    if (query < t.end_q && p.lse != nullptr && quad_lane == 0) {
      ptx::store_global(p.lse + batch_q * p.lse_stride.batch + t.head * p.lse_stride.head +
                            (t.begin_q + static_cast<i64>(query)) * p.lse_stride.row,
                        lse);
    }
    u16* row = static_cast<u16*>(p.out) + batch_q * p.out_stride.batch + t.head * p.out_stride.head +
               (t.begin_q + static_cast<i64>(query)) * p.out_stride.row;
#pragma unroll
    for (int g = 0; g < C.head_dim_v / 32; ++g) {
      u32 words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 4 * (4 * g + j) + 2 * h;
        words[j] = in_use && factor != 0.0F ? tile::pack<C.element>(o[i] * factor, o[i + 1] * factor) : 0;
      }
      tile::transpose_quad(words, quad_lane);
      const int col = 8 * (4 * g + quad_lane);
      if (query < t.end_q) store_columns(row, col, words);
    }
  }
}

template <ForwardConfig C>
TANDEM_DEVICE void ForwardConsumer<C>::store_columns(u16* row, int col, const u32 (&words)[4]) {
  if (p.out_vectors) {
    if (col < p.head_dim_v) {
      ptx::store_global(reinterpret_cast<ptx::Vec4*>(row + col),
                        ptx::Vec4{words[0], words[1], words[2], words[3]});
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (col + i < p.head_dim_v)
      ptx::store_global(row + col + i, static_cast<u16>(words[i / 2] >> (16 * (i % 2))));
  }
}

// ---- Entry
// ------------------------------------------------------------------------------------------------------------

template <ForwardConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), 1) forward(const __grid_constant__ ForwardParams p) {
  static_assert(sizeof(ForwardShared<C>) == forward_shared_bytes(C));
  auto& shared = *reinterpret_cast<ForwardShared<C>*>(ptx::dynamic_shared());
  // Uniform over the warp, and the compiler is to know it.
  const int warp = static_cast<int>(ptx::shuffle(ptx::thread_index() / warp_size, 0));
  if (ptx::thread_index() == 0) {
    shared.k_ring.init(C.consumers() * 4);
    shared.v_ring.init(C.consumers() * 4);
    for (int w = 0; w < C.consumers(); ++w) shared.q_ring[w].init(4);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_block();

  if (warp < 4) {
    ptx::release_registers<C.registers().producer>();
    if (warp == 0) forward_producer<C>(p, shared);
  } else {
    ptx::claim_registers<C.registers().consumer>();
    const int warpgroup = warp / 4 - 1;
    ForwardConsumer<C> consumer(p, shared, warpgroup, static_cast<int>(ptx::thread_index()) % warpgroup_size);
    if (warpgroup == C.consumers() - 1) consumer.pass_turn();
    ForwardScheduler<C> scheduler(p);
    tile::TileIndex t;
    while (scheduler.next(t)) consumer.compute(t);
  }
}

}  // namespace tandem
