// Elements of 16 bits of a row that is no whole vectors, or whose vectors are not aligned.
#pragma once

#include "ptx/memory.cuh"

namespace tandem::tile {

/// Eight elements of a row from `col` on. Those past its end, and those of rows that are not in use, are 0.
TANDEM_DEVICE ptx::Vec4 load_elements(const u16* row, int col, int columns, bool used) {
  if (!used) return {0, 0, 0, 0};
  u32 elements[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) elements[i] = col + i < columns ? ptx::load_global(row + col + i) : 0;
  return {elements[0] | elements[1] << 16, elements[2] | elements[3] << 16, elements[4] | elements[5] << 16,
          elements[6] | elements[7] << 16};
}

}  // namespace tandem::tile
