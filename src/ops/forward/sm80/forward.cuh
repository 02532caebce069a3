// The forward pass in the instructions that every GPU from Ampere on has: mma.sync, ldmatrix, cp.async.
//
// A CTA computes one tile of queries, or several one after the other; the GPU deals CTAs to SMs. All warps
// load and all compute: K of the next block comes in under the softmax and P V of this one, V under Q K^T.
// Each warp owns 16 rows of every 64, with one or two units of 64 rows, and all keys of a block, so that its
// softmax needs no other warp. Where registers allow, an SM holds two CTAs, of which one multiplies while the
// other computes exponentials. docs/kernels/sm80.md has the arithmetic.
#pragma once

#include "ops/forward/sm80/config.hpp"
#include "ops/forward/sm80/forward_loader.cuh"
#include "ptx/barrier.cuh"
#include "tile/functions.cuh"
#include "tile/logits.cuh"
#include "tile/mask.cuh"
#include "tile/merged_output.cuh"
#include "tile/softmax.cuh"
#include "tile/warp_operands.cuh"

namespace tandem {

// ---- Consumer ----

template <Sm80ForwardConfig C>
struct Sm80Forward {
  using Shared = Sm80ForwardShared<C>;
  static constexpr int units = C.units_a_warp();
  static constexpr int scores = C.tiling.block_n / 2;      ///< scores of a unit that a thread has
  static constexpr int outputs = C.tiling.head_dim_v / 2;  ///< values of a unit's O that a thread has
  static constexpr int steps = C.tiling.head_dim_qk / 16;
  static constexpr bool keeps_q = C.keeps_q();
  static_assert(C.tiling.block_n % 16 == 0);

  /// The exponentials of all units are one basic block, in which O is always rescaled: ptxas then has one
  /// unit's work to place among the other's exponentials, or O's. At 65 to 128 columns two units' registers
  /// have no room for it, and of few queries memory bounds the time.
  static constexpr bool flat = !C.functions.given() && !C.schedule.split && !C.schedule.invariant &&
                               (units == 2 ? outputs <= 32 : outputs > 64);

  /// How operands of Q are addressed (tile/warp_operands.cuh): with a register of it, O and S of two units at
  /// 128 columns do not fit.
  using QueryLane = typename Select<(units == 2 && outputs > 32 && scores > 16), int, u32>::type;
  /// How operands of K are addressed: with lists of blocks or dropout, and with sequences' lengths and one
  /// buffer, ptxas has no register for it.
  using KeyLane = typename Select<(units == 2 && (C.functions.block_lists || C.functions.dropout ||
                                                  (flat && C.mask.varlen && C.stages == 1))),
                                  int, u32>::type;

  using Scores = float[units][scores];
  using Probabilities = u32[units][scores / 2];
  using Outputs = float[units][outputs];
  using Queries = u32[keeps_q ? steps : 1][units][4];

  const Sm80KernelParams<C>& p;
  Shared& shared;
  const int warp;
  const float scale_log2;
  Sm80ForwardLoader<C> loader;
  ForwardTiles<C> tiles;

  TANDEM_DEVICE Sm80Forward(const Sm80KernelParams<C>& params, Shared& s, int warp_)
      : p(params),
        shared(s),
        warp(warp_),
        scale_log2(tile::scale_log2_of<C.transform>(params)),
        loader{params, s},
        // A static scheduler has nothing in shared memory.
        tiles(params, reinterpret_cast<tile::DynamicScheduler::Shared&>(s)) {}

  /// Where the thread is in its warp, and among the four warps of its units: found anew where it is needed,
  /// so that it takes no registers around the loop.
  static TANDEM_DEVICE int lane() { return static_cast<int>(ptx::lane_index_anew()); }
  /// The lane by a shuffle, from the one beside it, for the addresses of operands: what follows from a
  /// special register alone ptxas finds once, before the loop, and keeps in local memory.
  static TANDEM_DEVICE u32 operand_lane() { return ptx::shuffle_xor(ptx::lane_index_anew() ^ 1U, 1); }
  TANDEM_DEVICE int thread() const { return warp % 4 * warp_size + lane(); }
  /// Unit `i` of this warp, in the tile.
  TANDEM_DEVICE int unit(int i) const { return i * (C.threads() / warpgroup_size) + warp / 4; }
  TANDEM_DEVICE int first_query(const tile::QueryTile& t, int i) const {
    return tile::first_query<C.tiling>(p, t.index.m, unit(i));
  }
  TANDEM_DEVICE auto output(int i) const {
    return tile::Output<C.tiling, C.schedule.invariant>{{}, p, unit(i), thread()};
  }

  /// The tile that is computed.
  TANDEM_DEVICE tile::QueryTile current() const { return ptx::load_shared(&shared.tile); }

  TANDEM_DEVICE void run() {
    tile::QueryTile t;
    while (tiles.template next<false>(t, false)) {
      if (t.blocks.first >= t.blocks.end) {
        store_empty(t);
        continue;
      }
      ptx::sync_block();  // all have read what the last tile left
      loader.begin(t);
      compute(t.blocks.end - 1);
    }
  }
  TANDEM_DEVICE void compute(int visit);
  TANDEM_DEVICE void load_queries(Queries& q, int step, u32 lane);
  TANDEM_DEVICE void multiply_keys(Scores& s, Queries& q, int stage);
  TANDEM_DEVICE void add_block(int visit, Scores& s, Probabilities& probabilities, Outputs& o,
                               tile::OnlineSoftmax (&softmax)[units]);
  TANDEM_DEVICE void hide(float (&s)[scores], const tile::QueryTile& t, int u, int key);
  TANDEM_DEVICE void exponentiate(const tile::QueryTile& t, int u, int key, float (&s)[scores],
                                  u32 (&probabilities)[scores / 2], float (&o)[outputs],
                                  tile::OnlineSoftmax& softmax);
  TANDEM_DEVICE void apply_functions(float (&s)[scores], const tile::QueryTile& t, int u, int key, bool full);
  TANDEM_DEVICE void drop(float (&s)[scores], const tile::QueryTile& t, int u, int key);
  TANDEM_DEVICE void multiply_values(Outputs& o, const Probabilities& probabilities, int stage);
  TANDEM_DEVICE void store(Outputs& o, const tile::OnlineSoftmax (&softmax)[units]);
  TANDEM_DEVICE void store_empty(const tile::QueryTile& t);
};

/// The tile that has begun to load, from its last block of keys to its first.
template <Sm80ForwardConfig C>
TANDEM_DEVICE void Sm80Forward<C>::compute(int visit) {
  Outputs o;
  tile::OnlineSoftmax softmax[units];
#pragma unroll
  for (int u = 0; u < units; ++u) tile::set_zero(o[u]);
  Queries q;
  loader.wait();
  if constexpr (keeps_q) {
#pragma unroll
    for (int step = 0; step < steps; ++step) load_queries(q, step, static_cast<u32>(lane()));
  }
  int stage = 0;
#pragma unroll 1
  for (const int first = current().blocks.first; visit >= first; --visit) {
    loader.wait();  // all have read the last block's V
    // The buffer of the block before this one is the next that V takes, and this one's the next of K.
    loader.load_v(visit - (C.stages - 1), stage == 0 ? C.stages - 1 : stage - 1);
    Scores s;
    multiply_keys(s, q, stage);
    loader.wait();
    loader.load_k(visit - C.stages, stage);
    Probabilities probabilities;
    add_block(visit, s, probabilities, o, softmax);
    multiply_values(o, probabilities, stage);
    stage = stage + 1 == C.stages ? 0 : stage + 1;
  }
  store(o, softmax);
}

/// Q of a step, 16 columns of it, of all units.
template <Sm80ForwardConfig C>
TANDEM_DEVICE void Sm80Forward<C>::load_queries(Queries& q, int step, u32 lane) {
#pragma unroll
  for (int u = 0; u < units; ++u) {
    tile::load_rows_operand(shared.q[unit(u)], warp % 4 * 16, step, static_cast<QueryLane>(lane),
                            q[keeps_q ? step : 0][u]);
  }
}

/// S = Q K^T.
template <Sm80ForwardConfig C>
TANDEM_DEVICE void Sm80Forward<C>::multiply_keys(Scores& s, Queries& q, int stage) {
#pragma unroll
  for (int u = 0; u < units; ++u) tile::set_zero(s[u]);
  auto& keys = shared.k[stage];
  const u32 lane = operand_lane();
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    if constexpr (!keeps_q) load_queries(q, step, lane);
#pragma unroll
    for (int n = 0; n < C.tiling.block_n; n += 16) {
      u32 k[4];
      tile::load_columns_operand(keys, n, step, static_cast<KeyLane>(lane), k);
#pragma unroll
      for (int u = 0; u < units; ++u) {
        const u32(&a)[4] = q[keeps_q ? step : 0][u];
        tile::multiply_pair<C.tiling.element>(s[u] + n / 2, a, k);
      }
    }
  }
}

/// The caller's functions on the scores of a unit and the block that begins with `key`. What they need of
/// rows is made again in each block: registers are for O and S.
template <Sm80ForwardConfig C>
TANDEM_DEVICE void Sm80Forward<C>::apply_functions(float (&s)[scores], const tile::QueryTile& t, int u,
                                                   int key, bool full) {
  if (full && !C.functions.score_function) return;
  const tile::FragmentPosition position(thread());
  tile::FunctionRows<C.functions> rows;
  rows.function_sequence = {&p.functions, t.index.batch, t.index.seqlen_q, t.index.seqlen_k};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const tile::TileRow row = tile::row_at<C.tiling>(p, t.index, first_query(t, u), position.row(h));
    rows.function_rows[h] =
        tile::FunctionRows<C.functions>::User::row(rows.function_sequence, row.head, row.query);
  }
  rows.apply(s, key + position.first_col, full);
}

/// Dropout, on exponentials that are in the softmax's sum.
template <Sm80ForwardConfig C>
TANDEM_DEVICE void Sm80Forward<C>::drop(float (&s)[scores], const tile::QueryTile& t, int u, int key) {
  const tile::FragmentPosition position(thread());
  tile::DroppedRows<true, C.functions.dropout_places> rows;
  const tile::TileRow row = tile::row_at<C.tiling>(p, t.index, first_query(t, u), position.row(rows.odd()));
  rows.set_dropped(p.functions.dropout, t.index.batch, row.head, row.query);
  rows.drop(s, key + position.first_col, p);
}

/// From scores to exponentials, with O rescaled where a row's maximum has moved.
template <Sm80ForwardConfig C>
TANDEM_DEVICE void Sm80Forward<C>::add_block(int visit, Scores& s, Probabilities& probabilities, Outputs& o,
                                             tile::OnlineSoftmax (&softmax)[units]) {
  const tile::QueryTile t = current();
  const auto [block, whole] = tile::key_visit<C.functions, true>(p, t.index, visit);
  const bool masked = t.blocks.needs_mask(block);
  const int key = block * C.tiling.block_n;
#pragma unroll
  for (int u = 0; u < units; ++u) {
    tile::transform_scores<C.transform>(s[u], p.score);
    if constexpr (C.functions.given()) apply_functions(s[u], t, u, key, whole);
    if constexpr (!flat) {
      if (masked) hide(s[u], t, u, key);
      exponentiate(t, u, key, s[u], probabilities[u], o[u], softmax[u]);
    }
  }
  if constexpr (flat) {
    if (masked) {
#pragma unroll
      for (int u = 0; u < units; ++u) hide(s[u], t, u, key);
    }
#pragma unroll
    for (int u = 0; u < units; ++u) exponentiate(t, u, key, s[u], probabilities[u], o[u], softmax[u]);
  }
}

/// The mask, on the scores of a unit and the block that begins with `key`.
template <Sm80ForwardConfig C>
TANDEM_DEVICE void Sm80Forward<C>::hide(float (&s)[scores], const tile::QueryTile& t, int u, int key) {
  tile::apply_mask(s, t.visible, first_query(t, u), key,
                   tile::query_position<C.tiling>(p, tile::FragmentPosition(thread())));
}

/// From logits to exponentials of unit `u`, with O rescaled.
template <Sm80ForwardConfig C>
TANDEM_DEVICE void Sm80Forward<C>::exponentiate(const tile::QueryTile& t, int u, int key, float (&s)[scores],
                                                u32 (&probabilities)[scores / 2], float (&o)[outputs],
                                                tile::OnlineSoftmax& softmax) {
  float rescale[2];
  softmax.add_block(s, rescale, scale_log2);
  if constexpr (C.functions.dropout) drop(s, t, u, key);
  tile::convert<C.tiling.element>(probabilities, s);
  if constexpr (flat) {
    tile::scale_rows(o, rescale);
  } else {
    tile::scale_moved_rows(o, rescale);
  }
}

/// O += P V. Rows of V that do not exist are zeros.
template <Sm80ForwardConfig C>
TANDEM_DEVICE void Sm80Forward<C>::multiply_values(Outputs& o, const Probabilities& probabilities,
                                                   int stage) {
  auto& values = shared.v[stage];
  const u32 lane = operand_lane();
#pragma unroll
  for (int n = 0; n < C.tiling.block_n; n += 16) {
#pragma unroll
    for (int col = 0; col < C.tiling.head_dim_v; col += 16) {
      u32 v[4];
      tile::load_depth_operand(values, n, col, lane, v);
#pragma unroll
      for (int u = 0; u < units; ++u) {
        const u32(&a)[4] = reinterpret_cast<const u32(&)[4]>(probabilities[u][n / 4]);
        tile::multiply_pair<C.tiling.element>(o[u] + col / 2, a, v);
      }
    }
  }
}

/// The epilogue.
template <Sm80ForwardConfig C>
TANDEM_DEVICE void Sm80Forward<C>::store(Outputs& o, const tile::OnlineSoftmax (&softmax)[units]) {
  const tile::QueryTile t = current();
#pragma unroll
  for (int u = 0; u < units; ++u) {
    tile::DroppedRows<C.functions.dropout, C.functions.dropout_places>().scale_kept(o[u], p);
    output(u).template store<C.schedule.split>(t.index, o[u], softmax[u], t.part, t.split);
  }
}

template <Sm80ForwardConfig C>
TANDEM_DEVICE void Sm80Forward<C>::store_empty(const tile::QueryTile& t) {
#pragma unroll
  for (int u = 0; u < units; ++u) output(u).template store_unseeing<C.schedule.split>(t.index, t.part);
}

// ---- Entry ----

template <Sm80ForwardConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), ctas_per_sm(C))
    sm80_forward(const __grid_constant__ Sm80KernelParams<C> p) {
  static_assert(sizeof(Sm80ForwardShared<C>) == forward_shared_bytes(C));
  auto& shared = *reinterpret_cast<Sm80ForwardShared<C>*>(ptx::dynamic_shared());
  if constexpr (C.schedule.split) ptx::launch_next_grid();
  const int warp = ptx::warp_index();
  Sm80Forward<C>(p, shared, warp).run();
}

}  // namespace tandem
