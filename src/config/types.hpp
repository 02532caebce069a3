// What the Configs and Params of all kernels are made of.
// Plain aggregates: the same file is compiled by the host compiler and by NVRTC, and includes nothing of
// either.
#pragma once

#include "problem/score_options.hpp"

namespace tandem {

/// 16-bit element types of the matrix products.
enum class Element : int { f16, bf16 };

/// The kernels there are of one operation, by the first architecture that has their instructions. `sm90`:
/// WGMMA and TMA, which compute capability 9.0 alone has. `sm80`: mma.sync, ldmatrix and cp.async, of all
/// from 8.0 on.
enum class Family : int { sm90, sm80 };

/// 8-bit operands of the matrix products, by what A holds: B is e4m3 with e4m3, s8 with s8 and u8, u8 with
/// u8_u8.
enum class Bytes : int { e4m3, s8, u8, u8_u8 };

/// Shared-memory swizzle: 16-byte chunks are exchanged within rows of this many bytes, so that eight rows of
/// a column fall into different banks.
enum class Swizzle : int { b32, b64, b128 };

/// A TMA tensor map (CUtensorMap): 128 opaque bytes that the driver encodes.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

/// Registers that a thread of each role has after setmaxnreg has moved them. A CTA starts with the largest
/// multiple of 8 that gives every thread the same. The registers that the producer's 128 threads release must
/// cover what the consumers claim: otherwise the claim waits for ever.
struct RegisterSplit {
  int producer;
  int consumer;
  int converter = 0;  ///< a third role, where there is one
  int scorer = 0;     ///< the same
};
constexpr int registers_at_launch(int threads) {
  return 65536 / threads > 248 ? 248 : 65536 / threads / 8 * 8;
}
constexpr RegisterSplit split_registers(int consumers) {
  const int at_launch = registers_at_launch(128 * (consumers + 1));
  // One consumer warpgroup leaves registers for all; a producer of pages with splits takes more than 40.
  const int producer = consumers == 1 ? 128 : consumers >= 3 ? 32 : 40;
  const int claimed = at_launch + (at_launch - producer) / consumers / 8 * 8;
  return {.producer = producer, .consumer = claimed > 248 ? 248 : claimed};
}
static_assert(split_registers(2).consumer == 232 && split_registers(3).consumer == 160);

/// Registers with a warpgroup that converts what is loaded, beside one or two consumer warpgroups.
constexpr RegisterSplit split_registers_with_converter(int consumers) {
  if (consumers == 1) return {.producer = 96, .consumer = 240, .converter = 128};
  return {.producer = 40, .consumer = 208, .converter = 56};
}
static_assert(40 + 56 + 2 * 208 <= 4 * registers_at_launch(512) &&
              96 + 128 + 240 <= 3 * registers_at_launch(384));

// ---- The parts of Configs: what a loader, a walk, a softmax or an epilogue is specialised by ----

/// The tiles of a kernel. Head dimensions are padded to what the kernel takes.
struct Tiling {
  Element element =
      Element::bf16;  ///< type of Q, K, V and O; on quantized values of O, and of V where it has 16 bits
  int head_dim_qk = 128;
  int head_dim_v = 128;
  int block_m = 128;  ///< rows of a tile: 64 x consumer warpgroups, or 16 in the kernel `decode`
  int block_n = 128;  ///< keys of a block
  /// Rows are (query, head): query heads that share keys are rows of one tile, as tile/rows.cuh has them.
  /// Else a tile's rows are queries of one head.
  bool heads_as_rows = false;
  bool f32_out = false;  ///< out is f32, as results that are merged elsewhere want it; else it is `element`
  bool max_logits = false;  ///< each row's largest logit is written, which every block then finds
  bool gate = false;        ///< out is multiplied by the sigmoid of a gate

  constexpr bool operator==(const Tiling&) const = default;
  /// Rows that one box of Q fills: those of a warpgroup, or of the tile where it has fewer.
  [[nodiscard]] constexpr int unit() const { return block_m < 64 ? block_m : 64; }
};

/// Which keys a query sees, as far as kernels are specialised by it.
struct Mask {
  bool causal = false;  ///< window_right is bounded: the right edge needs a mask
  bool local = false;   ///< window_left is bounded: the left edge needs a mask
  /// Lengths differ by sequence (cu_seqlens or seqused), and rows past a sequence's end may hold anything.
  bool varlen = false;
  /// With `causal`: window_right of some sequences is 0, as ForwardParamsBySequence has it.
  bool by_sequence = false;

  constexpr bool operator==(const Mask&) const = default;
};

/// Where a kernel finds keys and values. `rows`: consecutive keys of a sequence are consecutive rows of k and
/// v. `entries`: so they are, of the entry that cache_batch_idx names, behind leftpad_k rows. `pages`: they
/// are rows of pages, in the order of a page table; `padded_pages`: behind leftpad_k rows of those;
/// `gathered_pages`: as `pages`, copied row by row by the threads of a warpgroup, not box by box by TMA. All
/// but the first go with Mask::varlen.
enum class KeySource : int { rows, entries, pages, padded_pages, gathered_pages };
constexpr bool in_pages(KeySource keys) {
  return keys == KeySource::pages || keys == KeySource::padded_pages || keys == KeySource::gathered_pages;
}

/// Strides in elements, of a tensor addressed by (batch, row, head).
struct Strides {
  long long batch;
  long long row;
  long long head;
};

/// Row counts or offsets on the device, i32 or i64 (wide), as the user gave them; null data: not given.
struct LengthArray {
  const void* data;
  long long stride;
  bool wide;
};

/// Which page holds which keys of a sequence: entries i32 or i64 (wide), as the user gave them.
struct PageTable {
  const void* data;
  long long batch_stride;
  long long stride;
  int count;      ///< pages of the cache
  int page_size;  ///< rows of one
  int box_rows;   ///< that one box of TMA loads: divides page_size and block_n
  bool wide;
};

/// Columns of a strip of a shared-memory tile: 64 where `unit`, the columns that are used as one, allows.
constexpr int strip_columns(int unit) {
  return unit % 64 == 0 ? 64 : 32;
}

}  // namespace tandem
