// The forward kernel of heads wider than 256 columns, whose O no warpgroup has registers for: two consumer
// warpgroups share a tile of 64 rows. Of each block each scores half of the keys, and computes half of the
// columns of O. They tell each other their rows' maxima, so that both have one reference, and exchange P
// through shared memory.
//
// Where V is the first columns of K (multi-head latent attention), one tile serves both products.
// docs/kernels/wide-heads.md has the arithmetic.
#pragma once

#include "kernels/config/forward.hpp"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/registers.cuh"
#include "kernels/sm90/forward_producer.cuh"
#include "kernels/tile/logits.cuh"
#include "kernels/tile/mask.cuh"
#include "kernels/tile/output.cuh"
#include "kernels/tile/pingpong.cuh"
#include "kernels/tile/softmax.cuh"

namespace tandem {

// ---- Shared storage ----

template <ForwardConfig C>
struct WideShared {
  using ScoreTile = tile::SharedTile<64, C.tiling.block_n>;

  ForwardShared<C> in;
  struct alignas(1024) Exchange {
    ScoreTile probabilities;
    float references[wide_parts][64];  ///< of a block's scores, by the warpgroup that has them
    float sums[wide_parts][64];        ///< of a tile's exponentials
  } exchange;
};

// ---- Consumer ----

template <ForwardConfig C>
struct WideConsumer {
  using Shared = WideShared<C>;
  static constexpr int keys = C.tiling.block_n / wide_parts;  ///< of a block, that this warpgroup scores
  static constexpr int scores = keys / 2;
  static constexpr int columns = C.tiling.head_dim_v / wide_parts;  ///< of O
  static constexpr int outputs = columns / 2;
  static constexpr int threads = wide_parts * warpgroup_size;

  const ForwardParams& p;
  Shared& shared;
  const int part;    ///< warpgroup
  const int thread;  ///< in the warpgroup
  const tile::FragmentPosition position;
  const float scale_log2;
  typename tile::Ring<C.stages>::Position k_at, v_at;
  typename tile::Ring<C.q_stages>::Position q_at;
  tile::Output<C.tiling, false, columns> output;
  ForwardTiles<C> tiles;

  TANDEM_DEVICE WideConsumer(const ForwardParams& params, Shared& s, int part_, int thread_)
      : p(params),
        shared(s),
        part(part_),
        thread(thread_),
        position(thread_),
        scale_log2((C.transform == ScoreTransform::raw ? params.scale : 1.0F) * tile::log2_e),
        output{{part_ * columns}, params, 0, thread_},
        tiles(params, s.in.tiles) {}

  TANDEM_DEVICE bool warp_leader() const { return thread % warp_size == 0; }
  /// Both warpgroups meet.
  TANDEM_DEVICE void meet() { ptx::named_barrier_sync(tile::barrier_consumers, threads); }

  template <typename Ring, typename Position>
  TANDEM_DEVICE void release(Ring& ring, Position& at) {
    if (warp_leader()) ring.release(at);
    at.advance();
  }
  /// The tile that V is in, and its place in the ring.
  TANDEM_DEVICE auto& values() {
    if constexpr (C.v_in_k) {
      return shared.in.k[v_at.stage];
    } else {
      return shared.in.v[v_at.stage];
    }
  }
  /// P V of the last block has read V.
  TANDEM_DEVICE void release_values() {
    if constexpr (C.v_in_k) {
      release(shared.in.k_ring, v_at);
    } else {
      release(shared.in.v_ring, v_at);
    }
  }

  /// S = Q K^T of this warpgroup's keys.
  TANDEM_DEVICE void issue_scores(float (&s)[scores]) {
    using QTile = typename ForwardShared<C>::QTile;
    using KTile = typename ForwardShared<C>::KTile;
    const ptx::MatrixDescriptor q = shared.in.q[0][q_at.stage].k_major();
    const ptx::MatrixDescriptor k =
        shared.in.k[k_at.stage].k_major() + static_cast<u32>(part * keys) * KTile::row_bytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C.tiling.head_dim_qk / 16; ++step) {
      ptx::wgmma_shared<keys, C.tiling.element, false>(s, q + QTile::k_major_offset(step),
                                                       k + KTile::k_major_offset(step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// O += P V of this warpgroup's columns.
  TANDEM_DEVICE void issue_output(float (&o)[outputs]) {
    auto& from = values();
    const ptx::MatrixDescriptor probabilities = shared.exchange.probabilities.k_major();
    const ptx::MatrixDescriptor v =
        from.mn_major() + static_cast<u32>(part * columns / from.strip_cols) * from.strip_bytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C.tiling.block_n / 16; ++step) {
      ptx::wgmma_shared<columns, C.tiling.element, true>(
          o, probabilities + Shared::ScoreTile::k_major_offset(step), v + from.mn_major_offset(step), true);
    }
    ptx::wgmma_commit();
  }

  /// What the rows' references become by a block's scores, which both warpgroups tell each other.
  TANDEM_DEVICE void find_references(const float (&s)[scores], float (&references)[2]) {
    tile::OnlineSoftmax own;
    float unused[2];
    own.update(s, unused, scale_log2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (thread % 4 == 0)
        ptx::store_shared(&shared.exchange.references[part][position.row(h)], own.reference[h]);
    }
    meet();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      references[h] = ptx::fmax(own.reference[h],
                                ptx::load_shared(&shared.exchange.references[part ^ 1][position.row(h)]));
    }
  }

  TANDEM_DEVICE void store_probabilities(const float (&s)[scores]) {
    u32 packed[scores / 2];
    tile::convert<C.tiling.element>(packed, s);
    const int lane = thread % warp_size;
    const int row = thread / warp_size * 16 + lane % 16;
    const int col = part * keys + lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < keys / 16; ++j) {
      ptx::stmatrix_x4(shared.exchange.probabilities.address(row, col + 16 * j), packed[4 * j],
                       packed[4 * j + 1], packed[4 * j + 2], packed[4 * j + 3]);
    }
  }

  TANDEM_DEVICE void run() {
    tile::QueryTile t;
    while (tiles.template next<false>(t, warp_leader())) {
      if (t.blocks.first < t.blocks.end) {
        compute(t);
      } else if (part == 0) {
        store_empty(t);
      }
    }
  }
  TANDEM_DEVICE void store_empty(const tile::QueryTile& t) {
    tile::Output<C.tiling> whole{{}, p, 0, thread};
    if (C.schedule.split && t.part != tile::whole_tile) {
      whole.store_empty_part(t.index, t.part);
    } else {
      whole.store_empty(t.index);
    }
  }
  TANDEM_DEVICE void compute(const tile::QueryTile& t);
  TANDEM_DEVICE void step(const tile::QueryTile& t, int block, bool masked, float (&o)[outputs],
                          tile::OnlineSoftmax& softmax);
};

template <ForwardConfig C>
TANDEM_DEVICE void WideConsumer<C>::compute(const tile::QueryTile& t) {
  const int first = tile::first_query<C.tiling>(p, t.index.m, 0);
  const tile::BlockRange inner =
      tile::BlockRange::of<C.tiling.block_n>(t.visible, first, first + tile::queries_of_unit<C.tiling>(p));
  float o[outputs];
#pragma unroll
  for (float& x : o) x = 0.0F;
  tile::OnlineSoftmax softmax;
  shared.in.q_ring[0].wait(q_at);
  for (int block = t.blocks.end - 1; block >= t.blocks.first; --block) {
    step(t, block, block >= inner.inner_end || block < inner.inner_first, o, softmax);
  }
  release(shared.in.q_ring[0], q_at);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = tile::sum_of_quad(softmax.sum[h]);
    if (thread % 4 == 0) ptx::store_shared(&shared.exchange.sums[part][position.row(h)], sum);
    softmax.sum[h] = sum;
  }
  ptx::wgmma_wait<0>();
  ptx::pin_registers(o);
  release_values();
  meet();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float all = softmax.sum[h] + ptx::load_shared(&shared.exchange.sums[part ^ 1][position.row(h)]);
    softmax.sum[h] = thread % 4 == 0 ? all : 0.0F;  // a quad has it once
  }
  if (C.schedule.split && t.part != tile::whole_tile) {
    output.store_part(t.index, o, softmax, t.part);
  } else {
    output.store(t.index, o, softmax);
  }
}

/// One block of keys. P V of the block before is under way when it begins, and that of this one when it ends.
template <ForwardConfig C>
TANDEM_DEVICE void WideConsumer<C>::step(const tile::QueryTile& t, int block, bool masked,
                                         float (&o)[outputs], tile::OnlineSoftmax& softmax) {
  const int key = block * C.tiling.block_n;
  float s[scores];
  shared.in.k_ring.wait(k_at);
  issue_scores(s);
  ptx::wgmma_wait<0>();
  ptx::pin_registers(s);
  ptx::pin_registers(o);
  if (block < t.blocks.end - 1) release_values();
  if constexpr (C.v_in_k) {
    k_at.advance();
  } else {
    release(shared.in.k_ring, k_at);
  }
  tile::transform_scores<C.transform>(s, p.scale, p.softcap);
  if (masked) {
    tile::apply_mask(s, t.visible, tile::first_query<C.tiling>(p, t.index.m, 0), key + part * keys,
                     tile::query_position<C.tiling>(p, position));
  }
  float references[2];
  float rescale[2];
  float total[2];
  find_references(s, references);  // both have read K, and P of the block before
#pragma unroll
  for (int h = 0; h < 2; ++h) softmax.raise(h, references[h], rescale[h]);
  softmax.exponentials(s, total, scale_log2, [](int) {});
  softmax.add(total, rescale);
  store_probabilities(s);
  if constexpr (!C.v_in_k) shared.in.v_ring.wait(v_at);
  // Rows of V past the sequence's end may hold anything, and 0 * NaN is NaN. Without varlen TMA has filled
  // them with zeros.
  if (C.mask.varlen && key + C.tiling.block_n > t.index.seqlen_k) {
    values().zero_rows(max(t.index.seqlen_k - key, 0), part * warpgroup_size + thread, threads);
  }
  ptx::fence_async_shared();
  // In most blocks no row's maximum moves. A NaN, too, is not 1.
  if (ptx::any_lane(!(rescale[0] == 1.0F && rescale[1] == 1.0F))) {
#pragma unroll
    for (int i = 0; i < outputs; ++i) o[i] *= rescale[i / 2 % 2];
  }
  meet();  // P is there, of both
  issue_output(o);
}

// ---- Entry ----

template <ForwardConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), 1) forward_wide(const __grid_constant__ ForwardParams p) {
  static_assert(sizeof(WideShared<C>) == forward_shared_bytes(C));
  auto& shared = *reinterpret_cast<WideShared<C>*>(ptx::dynamic_shared());
  // The shuffle lets ptxas know that the number is uniform over the warp.
  const int warp = static_cast<int>(ptx::shuffle(ptx::thread_index() / warp_size, 0));
  if (ptx::thread_index() == 0) shared.in.init();
  for (auto& q : shared.in.q[0]) {
    tile::clear_unfilled<C.tiling>(q, p, static_cast<int>(ptx::thread_index()), C.threads());
  }
  ptx::sync_block();
  if constexpr (C.schedule.split) ptx::launch_next_grid();
  if (warp < 4) {
    ptx::release_registers<C.registers().producer>();
    if (warp == 0) {
      ForwardLoader<C> loader(p, shared.in);
      while (loader.step()) {
      }
    }
  } else {
    ptx::claim_registers<C.registers().consumer>();
    WideConsumer<C>(p, shared, warp / 4 - 1, static_cast<int>(ptx::thread_index()) % warpgroup_size).run();
  }
}

}  // namespace tandem
