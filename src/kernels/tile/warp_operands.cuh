// Operands of one warp's products (ptx/mma.cuh), out of tiles in shared memory that TMA or cp.async has
// filled.
#pragma once

#include "kernels/ptx/mma.cuh"
#include "kernels/tile/shared_tile.cuh"

namespace tandem::tile {

/// A: rows [row, row + 16) of the tile, columns 16 * step onwards.
template <typename Tile>
TANDEM_DEVICE void load_rows_operand(Tile& tile, int row, int step, int lane, u32 (&a)[4]) {
  ptx::ldmatrix_x4(tile.address(row + lane % 16, 16 * step + lane / 16 * 8), a);
}

/// A of a tile that lies transposed: its rows are the tile's columns [col, col + 16), its depth rows
/// [row, row + 16). Of dS in dS K.
template <typename Tile>
TANDEM_DEVICE void load_transposed_rows_operand(Tile& tile, int row, int col, int lane, u32 (&a)[4]) {
  ptx::ldmatrix_x4_transposed(tile.address(row + lane % 8 + lane / 16 * 8, col + lane / 8 % 2 * 8), a);
}

/// B of two products whose columns are rows [row, row + 8) and [row + 8, row + 16) of the tile, and whose
/// depth is columns 16 * step onwards: words 0 and 1 for the first, 2 and 3 for the second. Of K in Q K^T.
template <typename Tile>
TANDEM_DEVICE void load_columns_operand(Tile& tile, int row, int step, int lane, u32 (&b)[4]) {
  ptx::ldmatrix_x4(tile.address(row + lane % 8 + lane / 16 * 8, 16 * step + lane / 8 % 2 * 8), b);
}

/// B of two products whose depth is rows [row, row + 16) of the tile, and whose columns are the tile's
/// columns [col, col + 8) and [col + 8, col + 16). Of V in P V.
template <typename Tile>
TANDEM_DEVICE void load_depth_operand(Tile& tile, int row, int col, int lane, u32 (&b)[4]) {
  ptx::ldmatrix_x4_transposed(tile.address(row + lane % 16, col + lane / 16 * 8), b);
}

/// The two products of such a B: 16 columns of D.
template <Element element>
TANDEM_DEVICE void multiply_pair(float* d, const u32 (&a)[4], const u32 (&b)[4]) {
  ptx::mma<element>(d, a, b[0], b[1]);
  ptx::mma<element>(d + 4, a, b[2], b[3]);
}

}  // namespace tandem::tile
