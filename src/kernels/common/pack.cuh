// Copies a tensor of 16-bit elements whose layout TMA cannot read into one that TMA can read: rows of heads
// of `pitch` elements, without gaps. Bound by memory: one read and one write of the tensor.
#pragma once

#include "kernels/config/pack.hpp"
#include "kernels/ptx/memory.cuh"

namespace tandem {

template <PackConfig C>
TANDEM_KERNEL __launch_bounds__(pack_threads) pack(const __grid_constant__ PackParams p) {
  const i64 units_a_row = p.pitch / 8;
  const i64 units = static_cast<i64>(p.batch) * p.rows * p.heads * units_a_row;
  const i64 step = static_cast<i64>(ptx::grid_size()) * pack_threads;
  for (i64 i = static_cast<i64>(ptx::block_index()) * pack_threads + ptx::thread_index(); i < units;
       i += step) {
    // Neighbouring threads take neighbouring units of a row, so that their reads and writes are runs.
    const i64 line = i / units_a_row;
    const int col = static_cast<int>(i - line * units_a_row) * 8;
    const i64 batch_row = line / p.heads;
    const i64 head = line - batch_row * p.heads;
    const i64 batch = batch_row / p.rows;
    const i64 row = batch_row - batch * p.rows;
    const u16* source = static_cast<const u16*>(p.source) + batch * p.stride.batch + row * p.stride.row +
                        head * p.stride.head + col;
    u32 words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (C.paired) {
        words[j] = col + 2 * j < p.head_dim ? ptx::load_global(reinterpret_cast<const u32*>(source) + j) : 0;
      } else {
        const u32 low = col + 2 * j < p.head_dim ? ptx::load_global(source + 2 * j) : 0;
        const u32 high = col + 2 * j + 1 < p.head_dim ? ptx::load_global(source + 2 * j + 1) : 0;
        words[j] = low | high << 16;
      }
    }
    ptx::store_global(static_cast<ptx::Vec4*>(p.target) + i,
                      ptx::Vec4{words[0], words[1], words[2], words[3]});
  }
}

}  // namespace tandem
