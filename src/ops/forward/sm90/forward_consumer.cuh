// A consumer warpgroup of the forward kernel, which computes O and LSE of 64 queries: its products, and what
// they read and release. forward_rows.cuh has the order of the pieces.
#pragma once

#include "ops/forward/config.hpp"
#include "ops/forward/sm90/forward_producer.cuh"
#include "ptx/barrier.cuh"
#include "tile/functions.cuh"
#include "tile/logits.cuh"
#include "tile/mask.cuh"
#include "tile/merged_output.cuh"
#include "tile/pingpong.cuh"
#include "tile/softmax.cuh"

namespace tandem {

template <ForwardConfig C>
struct ForwardConsumer {
  using Shared = ForwardShared<C>;
  static constexpr int scores = C.tiling.block_n / 2;
  static constexpr int outputs = C.tiling.head_dim_v / 2;

  const ForwardKernelParams<C>& p;
  Shared& shared;
  const int warpgroup;
  const int thread;  ///< in the warpgroup
  const int team;
  const tile::FragmentPosition position;
  const float scale_log2;
  typename tile::Ring<C.tile_stages()>::Position k_at, v_at;
  typename tile::Ring<C.q_stages>::Position q_at;
  tile::Output<C.tiling, C.schedule.invariant> output;
  ForwardTiles<C> tiles;
  /// Without a producer warp, warp 0 of the consumers loads.
  typename Select<C.schedule.specialised, ForwardNoLoader<C>, ForwardLoader<C>>::type loader;

  TANDEM_DEVICE ForwardConsumer(const ForwardKernelParams<C>& params, Shared& s, int warpgroup_, int thread_,
                                int team_ = 0)
      : p(params),
        shared(s),
        warpgroup(warpgroup_),
        thread(thread_),
        team(team_),
        position(thread_),
        scale_log2(tile::scale_log2_of<C.transform>(params)),
        output{{}, params, warpgroup_, thread_},
        tiles(params, s.tiles),
        loader(params, s) {}

  TANDEM_DEVICE bool warp_leader() const { return thread % warp_size == 0; }

  /// Products of the block whose K is read, which are there, times their keys' scales. All lanes have read
  /// these when the warp's first gives the tile back.
  TANDEM_DEVICE void finish_products(float (&s)[scores]) {
    ptx::pin_registers(s);
    if constexpr (C.row_scales) {
      tile::scale_columns(s, shared.key_scales.of_row[k_at.stage], position);
      ptx::sync_warp();
    }
  }
  /// Without a producer warp: loads one block. It is called after K of this block and V of the previous one
  /// have been released, whose buffers it fills.
  TANDEM_DEVICE void load_ahead() {
    if constexpr (!C.schedule.specialised) {
      if (warpgroup == 0 && thread < warp_size) loader.step();
      ptx::sync_warp();
    }
  }

  TANDEM_DEVICE void pingpong_wait() { tile::pingpong_wait<C.schedule.pingpong>(warpgroup); }
  TANDEM_DEVICE void pingpong_pass() { tile::pingpong_pass<C.schedule.pingpong, C.consumers()>(warpgroup); }

  /// Issues S = Q K^T.
  TANDEM_DEVICE void issue_scores(float (&s)[scores]) {
    const ptx::MatrixDescriptor q = shared.q[warpgroup][q_at.stage].k_major();
    const ptx::MatrixDescriptor k = shared.k[k_at.stage].k_major();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C.tiling.head_dim_qk / 16; ++step) {
      ptx::wgmma_shared<C.tiling.block_n, C.tiling.element, false>(
          s, q + Shared::QTile::k_major_offset(step), k + Shared::KTile::k_major_offset(step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Issues O (+)= P V.
  TANDEM_DEVICE void issue_output(float (&o)[outputs], const u32 (&probabilities)[scores / 2],
                                  bool accumulate) {
    const ptx::MatrixDescriptor v = shared.v[v_at.stage].mn_major();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C.tiling.block_n / 16; ++step) {
      ptx::wgmma_registers<C.tiling.head_dim_v, C.tiling.element, true>(
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

  /// Rows of V past the sequence's end may hold anything, and 0 * NaN is NaN: the consumers clear them in
  /// shared memory before the first product. Only the rightmost block has such rows, and only with varlen:
  /// otherwise TMA fills them with zeros.
  TANDEM_DEVICE void clear_v_tail(int valid_rows) {
    shared.v_ring.wait(v_at);
    tile::clear_tail<C.consumers()>(shared.v[v_at.stage], valid_rows, warpgroup, thread, team);
  }

  TANDEM_DEVICE void run() {
    load_ahead();
    tile::QueryTile t;
    bool more = find(t);
    while (more) {
      if (t.blocks.first < t.blocks.end) {
        more = compute(t);
      } else {
        output.template store_unseeing<C.schedule.split>(t.index, t.part);
        more = find(t);
      }
    }
  }
  /// The epilogue.
  TANDEM_DEVICE void store(const tile::TileIndex& t, float (&o)[outputs], tile::OnlineSoftmax& softmax,
                           int part, const tile::MergePlace& place) {
    if constexpr (!C.functions.hide()) tile::find_infinite<C.mask>(softmax, output, t);
    if constexpr (C.has_byte_keys()) {
      const float v_scale = tile::scale_of(p.v_scale, p, t);
#pragma unroll
      for (int i = 0; i < outputs; ++i) o[i] *= v_scale;
    }
    tile::DroppedRows<C.functions.dropout, C.functions.dropout_places>().scale_kept(o, p);
    output.template store<C.schedule.split>(t, o, softmax, part, place);
  }
  TANDEM_DEVICE bool find(tile::QueryTile& t) {
    return tiles.template next<false>(t, warp_leader());
  }
  TANDEM_DEVICE bool compute(tile::QueryTile& t);
};

}  // namespace tandem
