// Copies a tensor of 16-bit elements whose layout TMA cannot read into one that TMA can read: rows of heads
// of `pitch` elements, without gaps. Bound by memory: one read and one write of the tensor. Queries of e4m3
// become 16-bit ones on the way, exactly.
#pragma once

#include "ops/pack/config.hpp"
#include "ptx/memory.cuh"
#include "tile/select.cuh"
#include "tile/widen.cuh"

namespace tandem {

template <PackConfig C>
using PackKernelParams = typename Select<C.widens, WidenParams, PackParams>::type;

/// Eight elements of a row, from column `col` on, as 16-bit ones. Those past its end are 0.
template <PackConfig C>
TANDEM_DEVICE ptx::Vec4 load_eight(const u16* source, int col, int head_dim) {
  u32 words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if constexpr (C.paired) {
      words[j] = col + 2 * j < head_dim ? ptx::load_global(reinterpret_cast<const u32*>(source) + j) : 0;
    } else {
      const u32 low = col + 2 * j < head_dim ? ptx::load_global(source + 2 * j) : 0;
      const u32 high = col + 2 * j + 1 < head_dim ? ptx::load_global(source + 2 * j + 1) : 0;
      words[j] = low | high << 16;
    }
  }
  return {words[0], words[1], words[2], words[3]};
}
template <PackConfig C>
TANDEM_DEVICE ptx::Vec4 load_eight(const u8* source, int col, int head_dim) {
  u32 bytes[2] = {0, 0};
  if constexpr (C.paired) {
    const u64 both = ptx::load_global(reinterpret_cast<const u64*>(source));
    bytes[0] = static_cast<u32>(both);
    bytes[1] = static_cast<u32>(both >> 32);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (col + i < head_dim) bytes[i / 4] |= static_cast<u32>(ptx::load_global(source + i)) << (8 * (i % 4));
    }
  }
  ptx::Vec4 words;
  tile::widen_four<OperandType::e4m3, C.element>(words.x, words.y, bytes[0]);
  tile::widen_four<OperandType::e4m3, C.element>(words.z, words.w, bytes[1]);
  return words;
}

/// The factors of scores by (batch, KV head), where q and k have a scale each.
TANDEM_DEVICE void multiply_scales(const WidenParams& p, i64 first, i64 step) {
  if (p.product == nullptr) return;
  for (i64 i = first; i < static_cast<i64>(p.sequences) * p.heads_kv; i += step) {
    const i64 batch = i / p.heads_kv;
    const i64 head = i - batch * p.heads_kv;
    const auto at = [&](const HeadScales& scales) {
      return ptx::load_global(scales.data + batch * scales.batch_stride + head * scales.head_stride);
    };
    ptx::store_global(p.product + i, at(p.q_scale) * at(p.k_scale));
  }
}

template <PackConfig C>
TANDEM_KERNEL __launch_bounds__(pack_threads) pack(const __grid_constant__ PackKernelParams<C> p) {
  const i64 vectors_a_row = p.pitch / 8;
  const i64 vectors = static_cast<i64>(p.batch) * p.rows * p.heads * vectors_a_row;
  const i64 step = static_cast<i64>(ptx::grid_size()) * pack_threads;
  const i64 first = static_cast<i64>(ptx::block_index()) * pack_threads + ptx::thread_index();
  if constexpr (C.widens) multiply_scales(p, first, step);
  for (i64 i = first; i < vectors; i += step) {
    // Neighbouring threads take neighbouring vectors of a row, so that their reads and writes are runs.
    const i64 line = i / vectors_a_row;
    const int col = static_cast<int>(i - line * vectors_a_row) * 8;
    const i64 batch_row = line / p.heads;
    const i64 head = line - batch_row * p.heads;
    const i64 batch = batch_row / p.rows;
    const i64 row = batch_row - batch * p.rows;
    using Source = typename Select<C.widens, u8, u16>::type;
    const Source* source = static_cast<const Source*>(p.source) + batch * p.stride.batch +
                           row * p.stride.row + head * p.stride.head + col;
    ptx::store_global(static_cast<ptx::Vec4*>(p.target) + i, load_eight<C>(source, col, p.head_dim));
  }
}

}  // namespace tandem
