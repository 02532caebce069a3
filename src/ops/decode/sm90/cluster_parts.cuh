// What the CTAs of a cluster that share a tile's keys send each other at its end. Each has some columns of O
// to merge, of all rows, and gets these of every CTA, itself included, with each row's reference and sum.
// Stores into a peer's shared memory are credited to its mbarrier, so that one crossing is all that there is
// to wait for.
//
// There are two buffers, for tiles of even and odd number. Who sends for a tile has had the parts of the tile
// before from all peers, each of which had read what it got for the one before that: it may be overwritten.
#pragma once

#include "ops/decode/config.hpp"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"
#include "tile/softmax.cuh"

namespace tandem {

template <DecodeConfig C, bool used = (C.cluster() > 1)>
struct ClusterParts {
  static constexpr int ctas = C.cluster();
  static constexpr int columns = C.tiling.head_dim_v / ctas;  ///< that a CTA merges

  struct Buffer {
    alignas(16) float out[ctas][decode_rows][columns];
    PartSum sum[ctas][decode_rows];
  } of_tile[2];
  ptx::Mbarrier full[2];

  TANDEM_DEVICE void init() {
    for (ptx::Mbarrier& bar : full) ptx::mbarrier_init(bar, 1);
  }
};
template <DecodeConfig C>
struct ClusterParts<C, false> {
  TANDEM_DEVICE void init() {}
};

/// A consumer thread's view of them, from tile to tile.
template <DecodeConfig C>
struct ClusterMerge {
  using Parts = ClusterParts<C>;

  Parts& parts;
  const int rank = static_cast<int>(ptx::block_index()) % Parts::ctas;
  tile::RingPosition<2> at;
  bool met = false;  ///< the peers have begun

  TANDEM_DEVICE explicit ClusterMerge(Parts& p) : parts(p) {}

  /// All threads of the CTA call, before they send or end.
  TANDEM_DEVICE void meet() {
    if (!met) ptx::wait_cluster();
    met = true;
  }
  /// One thread, in each tile: `rows` rows will come.
  TANDEM_DEVICE void expect(int rows) {
    constexpr int of_row = C.tiling.head_dim_v * 4 + Parts::ctas * static_cast<int>(sizeof(PartSum));
    ptx::mbarrier_arrive_expect(parts.full[at.stage], static_cast<u32>(rows * of_row));
  }
  TANDEM_DEVICE void send_sum(int to, int row, const PartSum& sum) {
    auto* const target = reinterpret_cast<ptx::Float2*>(&parts.of_tile[at.stage].sum[rank][row]);
    ptx::store_async(static_cast<u32>(to), target, {sum.reference, sum.sum}, parts.full[at.stage]);
  }
  /// Four columns of O, from `col` on.
  TANDEM_DEVICE void send(int row, int col, const ptx::Float4& sum) {
    auto* const target =
        reinterpret_cast<ptx::Float4*>(&parts.of_tile[at.stage].out[rank][row][col % Parts::columns]);
    ptx::store_async(static_cast<u32>(col / Parts::columns), target, sum, parts.full[at.stage]);
  }

  /// What all CTAs have of two columns of a row, the `col`-th of this CTA's and the next.
  struct Merged {
    tile::RowSum row;
    ptx::Float2 out;
  };
  TANDEM_DEVICE Merged merge(int row, int col) const {
    const typename Parts::Buffer& from = parts.of_tile[at.stage];
    ptx::Float2 sums[Parts::ctas];
    float top = -ptx::infinity();
#pragma unroll
    for (int c = 0; c < Parts::ctas; ++c) {
      sums[c] = ptx::load_shared(reinterpret_cast<const ptx::Float2*>(&from.sum[c][row]));
      top = ptx::fmax(top, sums[c].x);
    }
    Merged all{{{top, 0.0F}}, {0.0F, 0.0F}};
#pragma unroll
    for (int c = 0; c < Parts::ctas; ++c) {
      const float weight = tile::OnlineSoftmax::rescaled(sums[c].x, top);
      all.row.sum = ptx::fma(sums[c].y, weight, all.row.sum);
      const auto [x, y] = ptx::load_shared(reinterpret_cast<const ptx::Float2*>(&from.out[c][row][col]));
      all.out = {ptx::fma(x, weight, all.out.x), ptx::fma(y, weight, all.out.y)};
    }
    return all;
  }
};
template <DecodeConfig C>
requires(C.cluster() == 1) struct ClusterMerge<C> {
  TANDEM_DEVICE explicit ClusterMerge(ClusterParts<C>&) {}
  TANDEM_DEVICE void meet() {}
};

}  // namespace tandem
