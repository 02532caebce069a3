// What the Configs and Params of all kernels are made of.
// Plain aggregates: the same file is compiled by the host compiler and by NVRTC, and includes nothing of
// either.
#pragma once

namespace tandem {

/// 16-bit element types of the matrix products.
enum class Element : int { f16, bf16 };

/// 8-bit operands of the matrix products, by what A holds: B is e4m3 with e4m3, s8 with s8 and u8, u8 with
/// u8_u8.
enum class Bytes : int { e4m3, s8, u8, u8_u8 };

/// Shared-memory swizzle: 16-byte chunks are exchanged within rows of this many bytes, so that eight rows of
/// a column fall into different banks.
enum class Swizzle : int { b32, b64, b128 };

/// What scores go through before the mask. `raw` leaves a positive scale to the exponent's multiply-add;
/// `scaled` serves scales <= 0, where the largest raw score would not be the largest scaled one.
enum class ScoreTransform : int { raw, scaled, softcap };

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
};
constexpr int registers_at_launch(int threads) {
  return 65536 / threads > 248 ? 248 : 65536 / threads / 8 * 8;
}
constexpr RegisterSplit split_registers(int consumers) {
  const int at_launch = registers_at_launch(128 * (consumers + 1));
  const int producer = consumers == 3 ? 32 : 40;
  const int claimed = at_launch + (at_launch - producer) / consumers / 8 * 8;
  return {.producer = producer, .consumer = claimed > 248 ? 248 : claimed};
}
static_assert(split_registers(2).consumer == 232 && split_registers(3).consumer == 160);

/// The tiles of a forward kernel: what its tensor maps and its launch depend on.
struct Tiling {
  Element element;
  int head_dim_qk;  ///< padded to what the kernel takes
  int head_dim_v;
  int block_m;  ///< queries of a tile
  int block_n;  ///< keys of a block
};

/// What a kernel's walk over tiles of queries and blocks of keys is specialised by (tile/walk.cuh).
struct TileWalk {
  int block_m;   ///< queries of a tile
  int block_n;   ///< keys of a block
  bool causal;   ///< window_right is bounded: the right edge needs a mask
  bool local;    ///< window_left is bounded: the left edge needs a mask
  bool varlen;   ///< lengths differ by sequence
  bool dynamic;  ///< dynamic persistent scheduler; else static
};

/// What a kernel's epilogue is specialised by (tile/output.cuh).
struct OutputTile {
  Element element;
  int head_dim_v;
  int block_m;
};

/// These parts of the Config of a forward kernel, whose blocks have `block_n` keys.
template <typename Config>
constexpr Tiling tiling_of(const Config& c, int block_n) {
  return {.element = c.element,
          .head_dim_qk = c.head_dim_qk,
          .head_dim_v = c.head_dim_v,
          .block_m = c.block_m,
          .block_n = block_n};
}
template <typename Config>
constexpr TileWalk walk_of(const Config& c, int block_n) {
  return {.block_m = c.block_m,
          .block_n = block_n,
          .causal = c.causal,
          .local = c.local,
          .varlen = c.varlen,
          .dynamic = c.dynamic};
}
template <typename Config>
constexpr OutputTile output_of(const Config& c) {
  return {.element = c.element, .head_dim_v = c.head_dim_v, .block_m = c.block_m};
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

/// Columns of a strip of a shared-memory tile: 64 where `unit`, the columns that are used as one, allows.
constexpr int strip_columns(int unit) {
  return unit % 64 == 0 ? 64 : 32;
}

}  // namespace tandem
