// What the warps of the backward kernel for sm_80 and later do with one query block, product by product, and
// how two warpgroups that halve its queries pass each other P and dS. backward.cuh has the order.
#pragma once

#include "ops/backward/sm80/backward_loader.cuh"
#include "ops/backward/sm80/config.hpp"
#include "ptx/barrier.cuh"
#include "tile/backward_scores.cuh"
#include "tile/warp_operands.cuh"

namespace tandem {

template <Sm80BackwardConfig C>
struct Sm80BackwardProducts : tile::BackwardScores<C, Sm80BackwardShared<C>> {
  using Shared = Sm80BackwardShared<C>;
  using Base = tile::BackwardScores<C, Shared>;
  using Base::Base;
  using Base::key_at;
  using Base::position;
  using Base::query_at;
  using Base::scores;
  using Base::shared;
  using Base::thread;
  using Base::warpgroup;

  static constexpr int units = C.key_units();
  using Scores = float[units][scores];
  using Packed = u32[units][scores / 2];
  static constexpr int gradient_slices = C.halves_queries() ? 2 : 1;  ///< slices of the columns of dK and dV
  static constexpr int key_columns = C.tiling.head_dim_qk / gradient_slices;
  static constexpr int value_columns = C.tiling.head_dim_v / gradient_slices;
  using KeyGradient = float[units][key_columns / 2];
  using ValueGradient = float[units][value_columns / 2];
  /// Units of 16 queries of dQ that a warp has, and columns of each. Of 64 queries two warps have 32, each
  /// with half of the columns, so that fewer operands are read; of a block of 32, 16, and of the widest heads
  /// with one buffer, where a causal mask spilled 8 bytes on sm_80.
  static constexpr int dq_units =
      C.tiling.block_m >= 64 && !(C.q_stages == 1 && C.tiling.head_dim_qk > 192) && C.dq_columns() % 32 == 0
          ? 2
          : 1;
  static constexpr int dq_warp_columns =
      dq_units == 2 || C.tiling.block_m < 64 ? C.dq_columns() / 2 : C.dq_columns();
  using QueryGradient = float[dq_units][dq_warp_columns / 2];

  using Base::q_at;

  /// The lane by a shuffle, from the one beside it, for the addresses of operands: what follows from a
  /// special register alone ptxas finds once, before the loop, and keeps in local memory.
  static TANDEM_DEVICE u32 operand_lane() { return ptx::shuffle_xor(ptx::lane_index_anew() ^ 1U, 1); }
  /// The warp's first row of the 64 of its warpgroup.
  TANDEM_DEVICE int warp_row() const { return thread / warp_size * 16; }
  TANDEM_DEVICE int gradient_part() const { return C.halves_queries() ? warpgroup : 0; }
  /// This warpgroup's first column of dK, and of dV.
  TANDEM_DEVICE int key_column_at() const { return C.halves_queries() ? warpgroup * key_columns : 0; }
  TANDEM_DEVICE int value_column_at() const { return C.halves_queries() ? warpgroup * value_columns : 0; }

  /// S^T = K Q^T, or dP^T = V dO^T.
  template <int head_dim, typename Keys, typename Queries>
  TANDEM_DEVICE void multiply_scores(Scores& s, Keys& keys, Queries& queries) {
    const u32 lane = operand_lane();
    const int first = C.owns_keys() ? key_at() : 0;
#pragma unroll
    for (int u = 0; u < units; ++u) tile::set_zero(s[u]);
#pragma unroll
    for (int step = 0; step < head_dim / 16; ++step) {
      u32 a[units][4];
#pragma unroll
      for (int u = 0; u < units; ++u)
        tile::load_rows_operand(keys, 64 * u, step, lane, a[u], static_cast<u32>(first + warp_row()));
#pragma unroll
      for (int n = 0; n < 2 * scores; n += 16) {
        u32 b[4];
        tile::load_columns_operand(queries, n, step, lane, b, static_cast<u32>(query_at()));
#pragma unroll
        for (int u = 0; u < units; ++u) tile::multiply_pair<C.tiling.element>(s[u] + n / 2, a[u], b);
      }
    }
  }

  /// dV += P^T dO, or dK += dS^T Q, of the queries from `first` on, and columns from `column` on.
  template <int n, typename Rows>
  TANDEM_DEVICE void multiply_gradient(float (&d)[units][n], const Packed& packed, Rows& rows,
                                       int first = 0) {
    const u32 lane = operand_lane();
    int column = 0;
    tile::OperandsFrom from = tile::OperandsFrom::columns<Rows, 2 * n>(gradient_part(), column);
    from.row += static_cast<u32>(first);
#pragma unroll
    for (int row = 0; row < 2 * scores; row += 16) {
#pragma unroll
      for (int col = 0; col < 2 * n; col += 16) {
        u32 b[4];
        tile::load_depth_operand(rows, row, column + col, lane, b, from.row, from.col);
#pragma unroll
        for (int u = 0; u < units; ++u) {
          const u32(&a)[4] = reinterpret_cast<const u32(&)[4]>(packed[u][row / 4]);
          tile::multiply_pair<C.tiling.element>(d[u] + col / 2, a, b);
        }
      }
    }
  }
  /// dK += dS^T Q of this warpgroup's columns, with dS of all queries from shared memory.
  TANDEM_DEVICE void multiply_halved_dk(KeyGradient& dk) {
    const u32 lane = operand_lane();
    int column = 0;
    const auto from =
        tile::OperandsFrom::columns<typename Shared::QTile, key_columns>(gradient_part(), column);
#pragma unroll
    for (int row = 0; row < C.tiling.block_m; row += 16) {
      u32 a[units][4];
#pragma unroll
      for (int u = 0; u < units; ++u)
        tile::load_rows_operand(shared.ds, 64 * u, row / 16, lane, a[u], static_cast<u32>(warp_row()));
#pragma unroll
      for (int col = 0; col < key_columns; col += 16) {
        u32 b[4];
        tile::load_depth_operand(shared.q[q_at.stage], row, column + col, lane, b, from.row, from.col);
#pragma unroll
        for (int u = 0; u < units; ++u) tile::multiply_pair<C.tiling.element>(dk[u] + col / 2, a[u], b);
      }
    }
  }

  /// Passes P^T of this warpgroup's queries to the other warpgroup, in the order in which threads hold it;
  /// and takes the other's. Of one place the first warpgroup's comes first. All threads call both.
  static constexpr int exchange_vectors = scores / 8;  ///< 16 bytes each
  static constexpr bool one_at_a_time = C.ds_in_dout;
  TANDEM_DEVICE ptx::Vec4* exchange_of(int of) {
    return shared.exchanged + (one_at_a_time ? 0 : of * units * exchange_vectors * warpgroup_size) + thread;
  }
  TANDEM_DEVICE void pass(const Packed& packed) {
    ptx::Vec4* const at = exchange_of(warpgroup);
#pragma unroll
    for (int i = 0; i < units * exchange_vectors; ++i) {
      const u32* const of = packed[i / exchange_vectors] + 4 * (i % exchange_vectors);
      ptx::store_shared(at + i * warpgroup_size, ptx::Vec4{of[0], of[1], of[2], of[3]});
    }
  }
  TANDEM_DEVICE void load(Packed& packed) {
    const ptx::Vec4* const at = exchange_of(warpgroup ^ 1);
#pragma unroll
    for (int i = 0; i < units * exchange_vectors; ++i) {
      const ptx::Vec4 of = ptx::load_shared(at + i * warpgroup_size);
      u32* const to = packed[i / exchange_vectors] + 4 * (i % exchange_vectors);
      to[0] = of.x;
      to[1] = of.y;
      to[2] = of.z;
      to[3] = of.w;
    }
  }
  TANDEM_DEVICE void hand_over(const Packed& packed) {
    if (!one_at_a_time || warpgroup == 0) pass(packed);
  }
  TANDEM_DEVICE void receive(Packed& other, const Packed& packed) {
    ptx::sync_block();
    if (!one_at_a_time || warpgroup == 1) load(other);
    if constexpr (one_at_a_time) {
      if (warpgroup == 1) pass(packed);
      ptx::sync_block();
      if (warpgroup == 0) load(other);
    }
  }

  /// dQ = dS K of a warp's queries and columns.
  TANDEM_DEVICE void multiply_dq(QueryGradient& dq) {
#pragma unroll
    for (int u = 0; u < dq_units; ++u) tile::set_zero(dq[u]);
    const u32 lane = operand_lane();
    int query = this->dq_row_group() * 64;
    int column = this->dq_column_at();
    if constexpr (dq_units == 2) {
      query += thread / 64 * 32;
      column += thread / warp_size % 2 * dq_warp_columns;
    } else if constexpr (C.tiling.block_m < 64) {
      query = warp_row() % C.tiling.block_m;
      column += thread / 64 * dq_warp_columns;
    } else {
      query += warp_row();
    }
#pragma unroll
    for (int key = 0; key < C.tiling.block_n; key += 16) {
      u32 a[dq_units][4];
#pragma unroll
      for (int u = 0; u < dq_units; ++u)
        tile::load_transposed_rows_operand(shared.ds, key, query + 16 * u, lane, a[u]);
#pragma unroll
      for (int col = 0; col < dq_warp_columns; col += 16) {
        u32 b[4];
        tile::load_depth_operand(shared.k, key, column + col, lane, b);
#pragma unroll
        for (int u = 0; u < dq_units; ++u) tile::multiply_pair<C.tiling.element>(dq[u] + col / 2, a[u], b);
      }
    }
  }

  /// Two queries of a key at a time. The swizzle of the tile keeps a warp's words in different banks.
  TANDEM_DEVICE void store_scores(const Packed& packed) {
    const u32 lane = ptx::lane_index_anew();
    const int first = C.owns_keys() ? key_at() : 0;
#pragma unroll
    for (int u = 0; u < units; ++u) {
#pragma unroll
      for (int j = 0; j < scores / 4; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int key = first + 64 * u + warp_row() + 8 * h;
          char* const unit = shared.ds.address(key, query_at() + 8 * j, lane / 4, 0);
          ptx::store_shared(reinterpret_cast<u32*>(unit) + lane % 4, packed[u][2 * j + h]);
        }
      }
    }
  }
};

}  // namespace tandem
