// Operands of one warp's products (ptx/mma.cuh), out of tiles in shared memory that TMA or cp.async has
// filled. Rows are multiples of 8, columns of 16.
//
// `lane` is an int or a u32. A u32 makes one register of what the lane adds to all addresses of a kind: the
// kernels of sm80. An int makes each address from its row and column: `decode`, as it has been measured, and
// operands for which the forward kernel of sm80 has no such register.
#pragma once

#include "ptx/mma.cuh"
#include "tile/shared_tile.cuh"

namespace tandem::tile {

/// Where a warp's part of a tile begins, for a `lane` that is a u32: rows that are multiples of 8, and
/// columns of 16 that are less than a strip and more than those that its products add. They are in the lane's
/// register.
struct OperandsFrom {
  u32 row = 0;
  u32 col = 0;

  /// Part `part` of a tile's columns, `width` each. `rest`: what of it is not in the register.
  template <typename Tile, int width>
  static TANDEM_DEVICE OperandsFrom columns(int part, int& rest) {
    rest = 0;
    const auto number = static_cast<u32>(part);
    if constexpr (width % Tile::strip_cols == 0)
      return {number * (width / Tile::strip_cols * Tile::row_count)};
    if constexpr (2 * width == Tile::strip_cols) return {0, number * width};
    rest = part * width;
    return {};
  }
};

/// The address of row `row + lane_row`, column `col + lane_col`.
template <typename Tile>
TANDEM_DEVICE char* operand_address(Tile& tile, int row, int col, int lane_row, int lane_col) {
  return tile.address(row + lane_row, col + lane_col);
}
template <typename Tile>
TANDEM_DEVICE char* operand_address(Tile& tile, int row, int col, u32 lane_row, u32 lane_col) {
  return tile.address(row, col, lane_row, lane_col);
}

/// A: rows [row, row + 16) of the tile, columns 16 * step onwards.
template <typename Tile, typename Lane>
TANDEM_DEVICE void load_rows_operand(Tile& tile, int row, int step, Lane lane, u32 (&a)[4], Lane row_from = 0,
                                     Lane col_from = 0) {
  ptx::ldmatrix_x4(operand_address(tile, row, 16 * step, row_from + lane % 16, col_from + lane / 16 * 8), a);
}

/// A of a tile that lies transposed: its rows are the tile's columns [col, col + 16), its depth rows
/// [row, row + 16). Of dS in dS K.
template <typename Tile, typename Lane>
TANDEM_DEVICE void load_transposed_rows_operand(Tile& tile, int row, int col, Lane lane, u32 (&a)[4]) {
  ptx::ldmatrix_x4_transposed(operand_address(tile, row, col, lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8), a);
}

/// B of two products whose columns are rows [row, row + 8) and [row + 8, row + 16) of the tile, and whose
/// depth is columns 16 * step onwards: words 0 and 1 for the first, 2 and 3 for the second. Of K in Q K^T.
template <typename Tile, typename Lane>
TANDEM_DEVICE void load_columns_operand(Tile& tile, int row, int step, Lane lane, u32 (&b)[4],
                                        Lane row_from = 0, Lane col_from = 0) {
  ptx::ldmatrix_x4(
      operand_address(tile, row, 16 * step, row_from + lane % 8 + lane / 16 * 8, col_from + lane / 8 % 2 * 8),
      b);
}

/// B of two products whose depth is rows [row, row + 16) of the tile, and whose columns are the tile's
/// columns [col, col + 8) and [col + 8, col + 16). Of V in P V.
template <typename Tile, typename Lane>
TANDEM_DEVICE void load_depth_operand(Tile& tile, int row, int col, Lane lane, u32 (&b)[4], Lane row_from = 0,
                                      Lane col_from = 0) {
  ptx::ldmatrix_x4_transposed(operand_address(tile, row, col, row_from + lane % 16, col_from + lane / 16 * 8),
                              b);
}

/// The two products of such a B: 16 columns of D.
template <Element element>
TANDEM_DEVICE void multiply_pair(float* d, const u32 (&a)[4], const u32 (&b)[4]) {
  ptx::mma<element>(d, a, b[0], b[1]);
  ptx::mma<element>(d + 4, a, b[2], b[3]);
}

}  // namespace tandem::tile
