// What host and device share of the backward kernels: their Config and Params.
#pragma once

#include "config/types.hpp"
#include "ops/functions/config.hpp"

namespace tandem {

/// The tiles of the backward kernels. A tile is block_n keys of each CTA of its cluster; the kernel loops
/// over the blocks of block_m queries that see them. Head dimensions are padded to what backward/plan.hpp
/// allows.
struct BackwardTiling {
  Element element = Element::bf16;
  int head_dim_qk = 128;
  int head_dim_v = 128;
  int block_m = 64;
  int block_n = 128;

  constexpr bool operator==(const BackwardTiling&) const = default;
  /// A block of dQ is divided into so many pieces: first its rows, by 64 where it has so many, then its
  /// columns.
  [[nodiscard]] constexpr int row_groups() const { return block_m < 64 ? 1 : block_m / 64; }
  [[nodiscard]] constexpr int dq_columns(int pieces) const { return head_dim_qk / (pieces / row_groups()); }
};

/// The order of work in the main backward kernel.
struct BackwardSchedule {
  bool pingpong = false;       ///< one warpgroup's arithmetic runs under the other's products
  bool staggered = false;      ///< full attention: each key tile starts at another query block
  bool deterministic = false;  ///< key tiles add to dQ in a fixed order
  /// Ping-pong goes on from a key tile to the next one, whose K comes meanwhile. (Otherwise the warpgroups
  /// finish a tile one after the other, and begin the next so.)
  bool overlaps_tiles = false;
  /// Long causal sequences of groups: tiles take each query block for all heads of the group, and the last
  /// blocks first.
  bool turned = false;

  constexpr bool operator==(const BackwardSchedule&) const = default;
};

/// Everything that specialises Hopper's backward kernels. If block_n is 64 keys a warpgroup, each warpgroup
/// owns the dK and dV of its keys. Wide heads leave no registers for that: block_n is 64 then, one warpgroup
/// computes P and dV, and the other dS and dK. Constants answer what shared code asks of Sm80BackwardConfig,
/// too.
struct BackwardConfig {
  static constexpr Family family = Family::sm90;
  static constexpr int consumers = 2;  ///< warpgroups
  /// Whether a CTA keeps in shared memory how far it has come with its tiles.
  static constexpr bool keeps_progress = false;
  /// Whether the main kernel adds to f32 sums of dQ that the preprocess kernel has cleared; else the first
  /// tile stores them.
  static constexpr bool clears_sums = false;

  BackwardTiling tiling{};
  int cluster = 1;      ///< CTAs that exchange dS: each computes its columns of dQ over the keys of all
  int q_stages = 2;     ///< blocks of Q in flight
  int dout_stages = 2;  ///< blocks of dO in flight
  int dq_slices = 1;    ///< a block of dQ passes through shared memory in so many slices
  Mask mask{};
  ScoreTransform transform = ScoreTransform::raw;
  BackwardSchedule schedule{};
  bool f32_dq = false;  ///< dq is f32, and so are dk and dv; of the kernel that writes them alone
  bool f32_dk_dv = false;
  Functions functions{};  ///< with them the kernel is launched with WithFunctions

  constexpr bool operator==(const BackwardConfig&) const = default;
  [[nodiscard]] static constexpr int threads() { return 128 * (consumers + 1); }
  [[nodiscard]] static constexpr RegisterSplit registers() { return split_registers(consumers); }
  /// P and dS differ by more than a factor of the row: dS is made from P times a slope, or before dropout.
  [[nodiscard]] constexpr bool sloped() const {
    return transform != ScoreTransform::raw || functions.score_function || functions.dropout;
  }
  /// P stays in f32 until dS is made from it, so that dS is rounded once. At 128 by 128 columns with
  /// ping-pong ptxas (NVRTC 13.0) serialises the products then, and a slope or functions leave no registers
  /// for it.
  [[nodiscard]] constexpr bool keeps_p() const {
    const bool full = schedule.pingpong && tiling.head_dim_qk + tiling.head_dim_v > 192;
    return owns_keys() && !sloped() && !functions.given() && !full;
  }
  /// Every warpgroup computes dK and dV of 64 keys; otherwise they divide those of the same 64.
  [[nodiscard]] constexpr bool owns_keys() const { return tiling.block_n == 64 * consumers; }
  [[nodiscard]] static constexpr bool halves_queries() { return false; }
  [[nodiscard]] static constexpr int key_units() { return 1; }
  /// Buffers of K. With two, of which 227 KB leave little, LSE comes with dO, of which there are fewer.
  [[nodiscard]] constexpr int key_stages() const { return schedule.overlaps_tiles ? 2 : 1; }
  [[nodiscard]] constexpr int lse_stages() const { return schedule.overlaps_tiles ? dout_stages : q_stages; }
  /// Keys of a tile: those of all CTAs of a cluster.
  [[nodiscard]] constexpr int tile_keys() const { return tiling.block_n * cluster; }
  /// The warpgroups of all CTAs of a cluster divide a block of dQ.
  [[nodiscard]] constexpr int dq_pieces() const { return consumers * cluster; }
  [[nodiscard]] constexpr int dq_columns() const { return tiling.dq_columns(dq_pieces()); }
  /// Widths of the strips of the tiles of Q and K, and of V and dO: no warpgroup's columns begin inside one.
  [[nodiscard]] constexpr int strip_qk() const {
    return strip_columns(tiling.head_dim_qk % 64 == 0 ? dq_columns() : tiling.head_dim_qk);
  }
  [[nodiscard]] constexpr int strip_v() const { return strip_columns(tiling.head_dim_v); }
  /// f32 values of 64 rows of dQ that one warpgroup has, and those that it hands to TMA at a time.
  [[nodiscard]] constexpr int dq_values() const { return 64 * dq_columns(); }
  [[nodiscard]] constexpr int dq_slice() const { return dq_values() / dq_slices; }
};

/// Threads of a CTA of the preprocess and convert kernels: a warpgroup for each piece of dQ, so that a
/// warpgroup of the conversion reads what one warpgroup wrote.
constexpr int backward_rows_threads(const auto& c) {
  return 128 * c.dq_pieces();
}

/// The kernel that sums dsink.
constexpr int backward_sink_threads = 512;
constexpr int backward_sink_shared_bytes = 4 * backward_sink_threads;

/// Bytes that say to the consumers what a tile is, where tiles overlap.
constexpr int described_tile_bytes = 80;

/// Dynamic shared memory of the main backward kernel: K and V; the rings of Q and dO with LSE and delta; dS
/// twice (or dS and P); dQ; the keys' scales and a word for each warp; the pairs of 8-byte barriers; tiles
/// that overlap.
constexpr int backward_shared_bytes(const BackwardConfig& c) {
  const int kv_tiles = c.tiling.block_n * (c.key_stages() * c.tiling.head_dim_qk + c.tiling.head_dim_v) * 2;
  const int other_keys = (c.cluster - 1) * c.tiling.block_n * c.tiling.head_dim_qk / c.cluster * 2;
  const int q_tiles = c.q_stages * c.tiling.block_m * c.tiling.head_dim_qk * 2;
  const int dout_tiles = c.dout_stages * c.tiling.block_m * c.tiling.head_dim_v * 2;
  const int scores = (c.cluster + 1) * c.tiling.block_n * c.tiling.block_m * 2;
  const int dq = 4 * BackwardConfig::consumers * c.dq_slice();
  const int rows = 4 * (c.tiling.block_m * (c.lse_stages() + c.dout_stages) + c.tiling.block_n +
                        4 * BackwardConfig::consumers);
  const int barriers = 16 * (c.q_stages + c.dout_stages + c.key_stages() + 2);
  const int described = c.schedule.overlaps_tiles ? c.key_stages() * described_tile_bytes : 0;
  const int bytes = kv_tiles + other_keys + q_tiles + dout_tiles + scores + dq + rows + barriers + described;
  return (bytes + 1023) / 1024 * 1024;
}

/// What the kernels of one backward call are launched with. The workspace is addressed by query blocks, of
/// which each head has `q_blocks`. If q is packed, those of sequence b begin at number begin_q / block_m + b
/// + 1 (rows before the first sequence come first); otherwise at b * ceil(rows_q / block_m).
struct BackwardParams {
  TensorMap q, k, v, dout_map;  ///< as ForwardParams has them
  const void *out, *dout;
  void *dq, *dk, *dv;
  const float* lse;
  const float* dlse;  ///< may be null
  const float* sink;  ///< may be null, and dsink too
  float* dsink;
  Strides out_stride, dout_stride, dq_stride, dk_stride, dv_stride, lse_stride, dlse_stride;
  long long sink_stride, dsink_stride;
  LengthArray cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  float* lse_log2;  ///< workspace: LSE * log2(e); +inf for rows that see no key
  float* delta;     ///< workspace: row sums of dO * O, minus dLSE; 0 for rows that see no key or a NaN
  float* dq_sum;    ///< workspace: block_m * head_dim_qk values a query block, by dq_slice
  /// Workspace: a semaphore for each warpgroup's piece of each query block of dQ. It counts key tiles that
  /// have added to the piece, or says whether one has stored it (backward_producer.cuh).
  unsigned int* dq_semaphores;
  /// Workspace: by (sequence, KV head), how many tiles dQ writer warps have finished. Rows that belong to no
  /// sequence count as two more sequences, as VarlenBlocks numbers them.
  unsigned int* tiles_added;
  int batch;
  int heads_q;
  int heads_kv;
  int rows_q;
  int rows_k;
  int head_dim_qk;  ///< the true ones
  int head_dim_v;
  int m_blocks;      ///< blocks of block_m queries in rows_q (equal lengths)
  int n_blocks;      ///< tiles of tile_keys() keys in rows_k (equal lengths)
  int q_blocks;      ///< a head's blocks in the workspace
  int window_left;   ///< INT_MAX: unbounded
  int window_right;  ///< INT_MAX: unbounded
  ScoreOptions score;
  bool packed_q;
  bool packed_k;
  bool pairs;         ///< causal tiles are assigned in pairs (backward_order.cuh)
  bool rows_vectors;  ///< rows of out and dout allow 16-byte loads
  bool dq_vectors;    ///< rows of dq allow 16-byte stores
  bool dk_vectors;
  bool dv_vectors;
  unsigned char added;  ///< f32 gradients that are added to what is there: added_dq, added_dk, added_dv
};

/// What the preprocess kernel of a call with an output gate is launched with. `dout` is the gradient of O, in
/// the workspace, which this kernel makes for those behind it.
struct GatedBackwardParams : BackwardParams {
  const void *gate, *gated_dout;  ///< the latter the gradient of out
  void* dgate;                    ///< may be null
  Strides gate_stride, gated_dout_stride, dgate_stride;
  bool gate_vectors;  ///< rows of all three allow 16-byte loads and stores
};

constexpr unsigned char added_dq = 1;
constexpr unsigned char added_dk = 2;
constexpr unsigned char added_dv = 4;

}  // namespace tandem
