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

// ---- Shared storage ----

template <ForwardConfig C>
struct ForwardShared {
  using QTile = tile::SharedTile<64, C.head_dim_qk>;
  using KTile = tile::SharedTile<C.block_n, C.head_dim_qk>;
  using VTile = tile::SharedTile<C.block_n, C.head_dim_v>;

  QTile q[C.consumers()][C.q_stages];
  KTile k[C.stages];
  VTile v[C.stages];
  tile::Ring<C.stages> k_ring;
  tile::Ring<C.stages> v_ring;
  tile::Ring<C.q_stages> q_ring[C.consumers()];
  tile::DrawnTiles::Shared tiles;
};

/// Named barriers: 1 to 3 hand the turn to a consumer warpgroup; 4 joins all consumers.
constexpr int barrier_turn = 1;
constexpr int barrier_consumers = 4;

/// A tile with what follows from its place: which keys its queries see, and the key blocks it walks. Every
/// warpgroup walks all of them, so that turns and buffers stay in step.
template <ForwardConfig C>
struct ForwardTile {
  tile::TileIndex index;
  tile::Visibility visible;
  tile::BlockRange blocks;
};

template <bool condition, typename Then, typename Else>
struct Select {
  using type = Then;
};
template <typename Then, typename Else>
struct Select<false, Then, Else> {
  using type = Else;
};

/// The tiles of this block, one after another; producer and consumers walk the same ones.
template <ForwardConfig C>
struct ForwardTiles {
  const ForwardParams& p;
  tile::DealtTiles<C.causal && !C.ragged> dealt;
  tile::DrawnTiles drawn;
  typename Select<C.ragged, tile::RaggedTiles<C.block_m>, tile::DenseTiles<C.causal>>::type tiles;

  TANDEM_DEVICE ForwardTiles(const ForwardParams& params, ForwardShared<C>& shared)
      : p(params), drawn(shared.tiles, params.tile_counter) {}

  /// All lanes of a warp call; `leader` is true on one of them.
  template <bool producer>
  TANDEM_DEVICE bool next(ForwardTile<C>& t, bool leader) {
    const int number = !C.dynamic ? dealt.next() : producer ? drawn.draw(leader) : drawn.receive(leader);
    // Uniform already; the shuffle lets the assembler know, which then keeps loop counts and descriptors in
    // uniform registers. Without it each WGMMA waits for four moves (measured: 15 % of the kernel).
    if (!tiles.locate(p, ptx::warp_uniform(number), t.index)) return false;
    t.visible = {t.index.seqlen_q, t.index.seqlen_k, C.local ? p.window_left : tile::Visibility::unbounded,
                 C.causal ? p.window_right : tile::Visibility::unbounded};
    t.blocks = tile::BlockRange::of<C.block_n>(t.visible, t.index.m * C.block_m, (t.index.m + 1) * C.block_m);
    return true;
  }
};

// ---- Producer ----

/// One warp; its elected lane starts the copies, in the order in which the consumers need them: blocks go
/// right to left, K one block ahead of V.
template <ForwardConfig C>
TANDEM_DEVICE void forward_producer(const ForwardParams& p, ForwardShared<C>& shared) {
  using Shared = ForwardShared<C>;
  const bool leader = ptx::elect_one();
  typename tile::Ring<C.stages>::Position k_at, v_at;
  typename tile::Ring<C.q_stages>::Position q_at;
  ForwardTiles<C> tiles(p, shared);
  ForwardTile<C> t;
  while (tiles.template next<true>(t, leader)) {
    if (!leader || t.blocks.first >= t.blocks.end) continue;
    const int head_kv = t.index.head / (p.heads_q / p.heads_kv);
    const int batch_q = p.packed_q ? 0 : t.index.batch;
    const int batch_k = p.packed_k ? 0 : t.index.batch;
    auto load_k = [&](int block) {
      ptx::Mbarrier& full = shared.k_ring.acquire(k_at, Shared::KTile::bytes);
      const int row = t.index.begin_k + block * C.block_n;
      shared.k[k_at.stage].load(p.k, full, row, head_kv, batch_k, ptx::CacheHint::last);
      k_at.advance();
    };
    auto load_v = [&](int block) {
      ptx::Mbarrier& full = shared.v_ring.acquire(v_at, Shared::VTile::bytes);
      const int row = t.index.begin_k + block * C.block_n;
      shared.v[v_at.stage].load(p.v, full, row, head_kv, batch_k, ptx::CacheHint::last);
      v_at.advance();
    };
    for (int w = 0; w < C.consumers(); ++w) {
      ptx::Mbarrier& full = shared.q_ring[w].acquire(q_at, Shared::QTile::bytes);
      const int row = t.index.begin_q + t.index.m * C.block_m + w * 64;
      shared.q[w][q_at.stage].load(p.q, full, row, t.index.head, batch_q, ptx::CacheHint::first);
      if (w == 0) load_k(t.blocks.end - 1);
    }
    q_at.advance();
    for (int block = t.blocks.end - 2; block >= t.blocks.first; --block) {
      load_k(block);
      load_v(block + 1);
    }
    load_v(t.blocks.first);
  }
}

// ---- Consumer ----

/// Scores before the mask: scaled or capped where the exponent's multiply-add cannot do it.
template <ForwardConfig C, int n>
TANDEM_DEVICE void transform_scores(float (&s)[n], const ForwardParams& p) {
  if constexpr (C.transform == ScoreTransform::scaled) {
#pragma unroll
    for (int i = 0; i < n; ++i) s[i] *= p.scale;
  } else if constexpr (C.transform == ScoreTransform::softcap) {
    // cap * tanh(x) = cap * (1 - 2 / (1 + e^2x)): absolute error 1e-7 of the cap; tanh.approx leaves 5e-4.
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
  typename tile::Ring<C.q_stages>::Position q_at;
  ForwardTiles<C> tiles;

  TANDEM_DEVICE ForwardConsumer(const ForwardParams& params, Shared& s, int warpgroup_, int thread_)
      : p(params),
        shared(s),
        warpgroup(warpgroup_),
        thread(thread_),
        position(thread_),
        scale_log2((C.transform == ScoreTransform::raw ? params.scale : 1.0F) * tile::log2_e),
        tiles(params, s) {}

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

  /// The operands of the next products.
  TANDEM_DEVICE ptx::MatrixDescriptor q_operand() const { return shared.q[warpgroup][q_at.stage].k_major(); }
  TANDEM_DEVICE ptx::MatrixDescriptor k_operand() const { return shared.k[k_at.stage].k_major(); }
  TANDEM_DEVICE ptx::MatrixDescriptor v_operand() const { return shared.v[v_at.stage].mn_major(); }

  /// Issues S = Q K^T.
  TANDEM_DEVICE void issue_scores(float (&s)[scores], ptx::MatrixDescriptor q, ptx::MatrixDescriptor k) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C.head_dim_qk / 16; ++step) {
      ptx::wgmma_shared<C.block_n, C.element, false>(s, q + Shared::QTile::k_major_offset(step),
                                                     k + Shared::KTile::k_major_offset(step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Issues O (+)= P V.
  TANDEM_DEVICE void issue_output(float (&o)[outputs], const u32 (&probabilities)[scores / 2],
                                  ptx::MatrixDescriptor v, bool accumulate) {
    ptx::wgmma_fence();
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

  TANDEM_DEVICE void run() {
    ForwardTile<C> t;
    while (tiles.template next<false>(t, warp_leader())) {
      if (t.blocks.first < t.blocks.end) {
        compute(t);
      } else {
        store_empty(t.index);
      }
    }
  }
  TANDEM_DEVICE void compute(const ForwardTile<C>& t);
  TANDEM_DEVICE void store(const tile::TileIndex& t, const float (&o)[outputs],
                           const tile::OnlineSoftmax& softmax);
  TANDEM_DEVICE void store_empty(const tile::TileIndex& t);
  TANDEM_DEVICE void store_columns(u16* row, int col, const ptx::Vec4& words);
  TANDEM_DEVICE u16* out_row(const tile::TileIndex& t, int query) const;
  TANDEM_DEVICE void store_lse(const tile::TileIndex& t, int query, float value);
};

template <ForwardConfig C>
TANDEM_DEVICE void ForwardConsumer<C>::compute(const ForwardTile<C>& t) {
  const int first_query = t.index.m * C.block_m + warpgroup * 64;
  const tile::BlockRange own = tile::BlockRange::of<C.block_n>(t.visible, first_query, first_query + 64);
  float s[scores];
  float o[outputs];
  u32 probabilities[scores / 2];
  tile::OnlineSoftmax softmax;
  float rescale[2];
  int block = t.blocks.end - 1;
  auto maximum = [&](bool masked) {
    release_k();
    if (block == t.blocks.first) release_q();
    transform_scores<C>(s, p);
    if (masked) tile::apply_mask(s, t.visible, first_query, block * C.block_n, position);
    softmax.update_maximum(s, rescale, scale_log2);
  };
  auto wait_next_k = [&] {
    if (block > t.blocks.first) shared.k_ring.wait(k_at);
  };

  // The first block has no product to run under.
  shared.q_ring[warpgroup].wait(q_at);
  shared.k_ring.wait(k_at);
  issue_scores(s, q_operand(), k_operand());
  ptx::wgmma_wait<0>();
  ptx::pin_registers(s);
  maximum(block >= own.inner_end || block < own.inner_first);
  softmax.exponentials(s, rescale, scale_log2);
  wait_next_k();
  tile::convert<C.element>(probabilities, s);
  if (C.ragged && (block + 1) * C.block_n > t.index.seqlen_k)
    clear_v_tail(t.index.seqlen_k - block * C.block_n);

  bool accumulate = false;
  auto iteration = [&](bool masked) {
    take_turn();
    issue_scores(s, q_operand(), k_operand());
    shared.v_ring.wait(v_at);
    issue_output(o, probabilities, v_operand(), accumulate);
    pass_turn();
    ptx::wgmma_wait<1>();
    ptx::pin_registers(s);
    maximum(masked);
    if constexpr (C.exp_under_product) {
      softmax.exponentials(s, rescale, scale_log2);
      // The next K block is waited for here, not at its use: the branch in this wait keeps the assembler from
      // moving the exponentials behind the wait for the product.
      wait_next_k();
    }
    ptx::wgmma_wait<0>();
    ptx::pin_registers(o);
    release_v();
    if constexpr (!C.exp_under_product) {
      wait_next_k();
      softmax.exponentials(s, rescale, scale_log2);
    }
    tile::convert<C.element>(probabilities, s);
    if (!C.skip_rescale || ptx::ballot(rescale[0] != 1.0F || rescale[1] != 1.0F) != 0) {
#pragma unroll
      for (int i = 0; i < outputs; ++i) o[i] *= rescale[i / 2 % 2];
    }
    accumulate = true;
  };
  --block;
  if constexpr (C.causal) {
    for (; block >= max(t.blocks.first, own.inner_end); --block) iteration(true);
  }
  for (; block >= max(t.blocks.first, own.inner_first); --block) iteration(false);
  if constexpr (C.local) {
    for (; block >= t.blocks.first; --block) iteration(true);
  }

  shared.v_ring.wait(v_at);
  issue_output(o, probabilities, v_operand(), accumulate);
  ptx::wgmma_wait<0>();
  ptx::pin_registers(o);
  release_v();
  store(t.index, o, softmax);
}

template <ForwardConfig C>
TANDEM_DEVICE u16* ForwardConsumer<C>::out_row(const tile::TileIndex& t, int query) const {
  const int batch = p.packed_q ? 0 : t.batch;
  const i64 row = t.begin_q + static_cast<i64>(query);
  return static_cast<u16*>(p.out) + batch * p.out_stride.batch + t.head * p.out_stride.head +
         row * p.out_stride.row;
}

template <ForwardConfig C>
TANDEM_DEVICE void ForwardConsumer<C>::store_lse(const tile::TileIndex& t, int query, float value) {
  if (p.lse == nullptr) return;
  const int batch = p.packed_q ? 0 : t.batch;
  const i64 row = t.begin_q + static_cast<i64>(query);
  float* lse = p.lse + batch * p.lse_stride.batch + t.head * p.lse_stride.head + row * p.lse_stride.row;
  ptx::store_global(lse, value);
}

/// Eight columns of a row.
template <ForwardConfig C>
TANDEM_DEVICE void ForwardConsumer<C>::store_columns(u16* row, int col, const ptx::Vec4& words) {
  if (p.out_vectors) {
    if (col < p.head_dim_v) ptx::store_global(reinterpret_cast<ptx::Vec4*>(row + col), words);
    return;
  }
  const u32 each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (col + i < p.head_dim_v)
      ptx::store_global(row + col + i, static_cast<u16>(each[i / 2] >> (16 * (i % 2))));
  }
}

/// Normalises O and writes it with the LSE. The four lanes of a quad exchange words so that each stores 16
/// bytes of a row and the quad 64 in a run: no shared memory, so the next tile's loads need not wait for this
/// store.
template <ForwardConfig C>
TANDEM_DEVICE void ForwardConsumer<C>::store(const tile::TileIndex& t, const float (&o)[outputs],
                                             const tile::OnlineSoftmax& softmax) {
  const int quad_lane = thread % 4;
  const bool has_sink = p.sink != nullptr;
  const float sink_log2 = has_sink ? ptx::load_global(p.sink + t.head * p.sink_stride) * tile::log2_e : 0.0F;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = t.m * C.block_m + warpgroup * 64 + position.row(h);
    float factor;
    float lse = softmax.finish(h, scale_log2, has_sink, sink_log2, factor);
    if (query >= t.seqlen_q) {  // past the end: whatever was computed there is no result
      factor = 0.0F;
      lse = -ptx::infinity();
    }
    const bool inside = query < t.end_q;
    if (inside && quad_lane == 0) store_lse(t, query, lse);
    u16* row = out_row(t, query);
#pragma unroll
    for (int g = 0; g < C.head_dim_v / 32; ++g) {
      u32 words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 4 * (4 * g + j) + 2 * h;
        words[j] = factor != 0.0F ? tile::pack<C.element>(o[i] * factor, o[i + 1] * factor) : 0;
      }
      tile::transpose_quad(words, quad_lane);
      if (inside) store_columns(row, 8 * (4 * g + quad_lane), {words[0], words[1], words[2], words[3]});
    }
  }
}

/// Writes a tile whose queries see no key: out 0, LSE -inf.
template <ForwardConfig C>
TANDEM_DEVICE void ForwardConsumer<C>::store_empty(const tile::TileIndex& t) {
  const int first = t.m * C.block_m + warpgroup * 64;
  const int rows = min(64, t.end_q - first);
  constexpr int units = C.head_dim_v / 8;
  for (int i = thread; i < rows * units; i += warpgroup_size) {
    const int query = first + i / units;
    if (i % units == 0) store_lse(t, query, -ptx::infinity());
    store_columns(out_row(t, query), i % units * 8, {0, 0, 0, 0});
  }
}

// ---- Entry ----

template <ForwardConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), C.blocks_per_sm)
    forward(const __grid_constant__ ForwardParams p) {
  static_assert(sizeof(ForwardShared<C>) == forward_shared_bytes(C));
  auto& shared = *reinterpret_cast<ForwardShared<C>*>(ptx::dynamic_shared());
  // Uniform over the warp, and the compiler is to know it.
  const int warp = static_cast<int>(ptx::shuffle(ptx::thread_index() / warp_size, 0));
  if (ptx::thread_index() == 0) {
    shared.k_ring.init(C.consumers() * 4);
    shared.v_ring.init(C.consumers() * 4);
    for (int w = 0; w < C.consumers(); ++w) shared.q_ring[w].init(4);
    shared.tiles.ring.init(C.consumers() * 4);
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
    consumer.run();
  }
}

}  // namespace tandem
