// Operands of one warp's products with K and V, in tiles of 16 bits or of 8, for the kernel `decode`. What
// one ldmatrix loads is `columns` columns of 16 keys, the operands of `steps` pairs of products.
//
// Bytes become 16-bit elements in registers. ldmatrix moves words of 16 bits, so that of bytes a lane gets
// four neighbours where a product's operand has two and two: columns are taken in another order. In Q K^T
// they are the depth, a sum whose order is free as long as Q has it too: Q is arranged once a tile. In P V it
// is the order of O's columns in registers, which the epilogue has to know.
#pragma once

#include "tile/byte_tile.cuh"
#include "tile/fragment.cuh"
#include "tile/warp_operands.cuh"
#include "tile/widen.cuh"

namespace tandem::tile {

template <Element element, OperandType type>
struct KeyOperands {
  static constexpr int columns = 32;
  static constexpr int steps = 2;

  /// Puts the columns of Q in the order that its products with K take: of 16 columns those of a lane of a
  /// quad, four neighbours, at the two places where ldmatrix finds its words. `threads` threads share the
  /// tile, and synchronise before and after it.
  template <int rows, int cols>
  static TANDEM_DEVICE void arrange_queries(SharedTile<rows, cols>& q, int thread, int threads) {
    for (int i = thread; i < rows * (cols / 16); i += threads) {
      auto* const left = reinterpret_cast<ptx::Vec4*>(q.address(i % rows, i / rows * 16));
      auto* const right = reinterpret_cast<ptx::Vec4*>(q.address(i % rows, i / rows * 16 + 8));
      const ptx::Vec4 a = ptx::load_shared(left);
      const ptx::Vec4 b = ptx::load_shared(right);
      ptx::store_shared(left, ptx::Vec4{a.x, a.z, b.x, b.z});
      ptx::store_shared(right, ptx::Vec4{a.y, a.w, b.y, b.w});
    }
    ptx::fence_async_shared();  // TMA writes the next tile's there
  }
  /// Q, arranged, from column `col` on.
  template <typename Queries>
  static TANDEM_DEVICE void load_queries(Queries& q, int col, int lane, u32 (&a)[steps][4]) {
#pragma unroll
    for (int s = 0; s < steps; ++s) load_rows_operand(q, 0, col / 16 + s, lane, a[s]);
  }

  /// Operands of K in Q K^T: rows [row, row + 16), from column `col` on.
  template <typename Keys>
  static TANDEM_DEVICE void load_keys(const Keys& keys, int row, int col, int lane, u32 (&b)[steps][4]) {
    u32 w[4];
    ptx::ldmatrix_x4(keys.data + Keys::place(row + lane % 8 + lane / 16 * 8, col + lane / 8 % 2 * 16), w);
#pragma unroll
    for (int i = 0; i < 4; ++i) widen_four<type, element>(b[i % 2][i / 2 * 2], b[i % 2][i / 2 * 2 + 1], w[i]);
  }

  /// Operands of V in P V: rows [row, row + 16), from column `col` on, times `scales`: none, or those of
  /// the lane's rows 2 i, 2 i + 1 and the same + 8, where i is the lane's number in its quad.
  template <typename Values, typename... Scales>
  static TANDEM_DEVICE void load_values(const Values& values, int row, int col, int lane, u32 (&b)[steps][4],
                                        const Scales&... scales) {
    u32 w[4];
    ptx::ldmatrix_x4_transposed(values.data + Values::place(row + lane % 16, col + lane / 16 * 16), w);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Two columns of a key, and of the next one: two keys of a column, and of the next one.
      const u32 by_column = ptx::permute_bytes(w[i], 0, 0x3120U);
      widen_four<type, element>(b[i / 2][i % 2], b[i / 2][2 + i % 2], by_column, scales[i % 2]...);
    }
  }

  /// O with the values of two neighbouring columns side by side.
  template <int n>
  static TANDEM_DEVICE void put_in_order(float (&o)[n]) {
#pragma unroll
    for (int i = 0; i < n; i += 8) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = o[i + 2 * h + 1];
        o[i + 2 * h + 1] = o[i + 4 + 2 * h];
        o[i + 4 + 2 * h] = x;
      }
    }
  }
  /// The column of pair `j` of a row, of O in order.
  static TANDEM_DEVICE int output_col(const FragmentPosition& position, int j) {
    return 2 * position.first_col + j / 2 * 16 + j % 2 * 2;
  }
};

template <Element element>
struct KeyOperands<element, OperandType::input> {
  static constexpr int columns = 16;
  static constexpr int steps = 1;

  template <typename Queries>
  static TANDEM_DEVICE void load_queries(Queries& q, int col, int lane, u32 (&a)[steps][4]) {
    load_rows_operand(q, 0, col / 16, lane, a[0]);
  }
  template <typename Keys>
  static TANDEM_DEVICE void load_keys(Keys& keys, int row, int col, int lane, u32 (&b)[steps][4]) {
    load_columns_operand(keys, row, col / 16, lane, b[0]);
  }
  template <typename Values>
  static TANDEM_DEVICE void load_values(Values& values, int row, int col, int lane, u32 (&b)[steps][4]) {
    load_depth_operand(values, row, col, lane, b[0]);
  }
  template <int n>
  static TANDEM_DEVICE void put_in_order(float (&)[n]) {}
  static TANDEM_DEVICE int output_col(const FragmentPosition& position, int j) { return position.col(j); }
};

}  // namespace tandem::tile
