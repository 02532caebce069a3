// What host and device share of the 8-bit backward kernels: their Config and Params.
#pragma once

#include "ops/backward/config.hpp"
#include "ops/quantize/config.hpp"

namespace tandem {

struct EightBitBackwardSchedule {
  static constexpr bool pingpong = true, overlaps_tiles = false, turned = false;
  bool staggered = false;      ///< full attention: each key tile starts at another query block
  bool deterministic = false;  ///< key tiles add to dQ in a fixed order

  constexpr bool operator==(const EightBitBackwardSchedule&) const = default;
};

/// Queries at a time: 64, and of heads of 64 dimensions 128. Whatever does not grow with the scores is then
/// done half as often, and there are registers for it.
constexpr int gradient_queries(int head_dim) {
  return head_dim <= 64 ? 128 : 64;
}

/// Everything that specialises the main kernel of the 8-bit backward pass, and what it answers to the code
/// that it shares with the 16-bit one's. A tile is 128 keys, 64 for each warpgroup.
struct EightBitBackwardConfig {
  static constexpr Family family = Family::sm90;
  static constexpr int consumers = 2;  ///< warpgroups
  static constexpr int cluster = 1;
  static constexpr int dq_slices = 1;
  static constexpr int dout_stages = 1;  ///< has no meaning: dO comes with Q
  static constexpr bool keeps_progress = false;
  static constexpr bool clears_sums = true;
  static constexpr ScoreTransform transform = ScoreTransform::raw;
  static constexpr Functions functions{};

  BackwardTiling tiling{};  ///< `element` is that of the gradients
  int q_stages = 3;         ///< blocks of Q and dO in flight
  Mask mask{};
  EightBitBackwardSchedule schedule{};
  bool f32_dq = false;  ///< as BackwardConfig has it, and f32_dk_dv
  bool f32_dk_dv = false;

  constexpr bool operator==(const EightBitBackwardConfig&) const = default;
  [[nodiscard]] static constexpr int threads() { return 128 * (consumers + 1); }
  /// Consumers have dK, dV, S, dQ or dP, and packed P and dS in flight at the same time, of 64 queries 208
  /// registers: in fewer than 240 ptxas (NVRTC 13.0) serialises the products. The producer's warps spill for
  /// it. Of 128 queries there are at most 192.
  [[nodiscard]] constexpr RegisterSplit registers() const {
    if (tiling.block_m == 64) return {.producer = 24, .consumer = 240};
    return {.producer = 40, .consumer = 232};
  }
  [[nodiscard]] static constexpr bool sloped() { return false; }
  [[nodiscard]] static constexpr bool keeps_p() { return true; }
  [[nodiscard]] static constexpr bool owns_keys() { return true; }
  [[nodiscard]] static constexpr bool halves_queries() { return false; }
  [[nodiscard]] static constexpr int key_units() { return 1; }
  [[nodiscard]] static constexpr int key_stages() { return 1; }
  [[nodiscard]] constexpr int tile_keys() const { return tiling.block_n; }
  [[nodiscard]] static constexpr int dq_pieces() { return consumers; }
  [[nodiscard]] constexpr int dq_columns() const { return tiling.dq_columns(dq_pieces()); }
  [[nodiscard]] constexpr int dq_values() const { return 64 * dq_columns(); }
  [[nodiscard]] constexpr int dq_slice() const { return dq_values(); }
};

/// P is rounded as 256 P / r, dS as 2^-10 dS / (r E): with 256 from P, 2^-18 are on dP and delta. dV, dK and
/// dQ are multiplied by what remains, dQ's keys being twice K over its scale.
constexpr float dp_factor = 0x1p-18F;
constexpr float dv_factor = 0x1p-8F;
constexpr float dk_factor = 0x1p10F;
constexpr float dq_factor = 0x1p9F;

/// Dynamic shared memory of the main kernel: K twice (rows, and transposed) and V; the ring of Q and dO, both
/// twice, with LSE, delta and Q's scale; dS twice; dQ; what the tile's scales make; the pairs of barriers.
constexpr int backward_shared_bytes(const EightBitBackwardConfig& c) {
  const int keys = c.tiling.block_n * (2 * c.tiling.head_dim_qk + c.tiling.head_dim_v);
  const int queries = c.tiling.block_m * 2 * (c.tiling.head_dim_qk + c.tiling.head_dim_v + 4) + 16;
  const int scores = 2 * c.tiling.block_n * c.tiling.block_m;
  const int dq = 4 * EightBitBackwardConfig::consumers * c.dq_slice();
  const int rest = 16 * (EightBitBackwardConfig::consumers + 1 + c.q_stages);
  return (keys + c.q_stages * queries + scores + dq + rest + 1023) / 1024 * 1024;
}

/// Threads of the kernel that writes dq: a warpgroup for 64 queries of a head.
constexpr int eight_bit_convert_threads(const EightBitBackwardConfig& c) {
  return 128 * c.tiling.row_groups();
}
/// Dynamic shared memory of the quantiser's kernels: largest values, four of each warp; the rotation's signs
/// of pairs of 128 channels; K's mean.
constexpr int gradient_maxima_bytes = 4 * 4 * (quantize_threads / 32);
constexpr int gradient_signs_bytes = 4 * 128 / 2;
constexpr int gradient_rows_bytes(const QuantizeConfig& c) {
  return gradient_maxima_bytes + gradient_signs_bytes + 4 * quantize_channels(c.head_dim_qk);
}
/// That of keys has a tile on its way to being transposed.
constexpr int gradient_keys_bytes(const QuantizeConfig& c) {
  return gradient_rows_bytes(c) + quant_block * quantize_channels(c.head_dim_qk);
}
/// That of queries has rows of dO, O and Q, and three numbers of each thread.
constexpr int gradient_queries_bytes(const QuantizeConfig& c) {
  return gradient_rows_bytes(c) + 4 * 3 * quantize_threads +
         2 * quant_block * (quantize_channels(c.head_dim_qk) + 2 * quantize_channels(c.head_dim_v));
}

/// Operands of the products that run over rows, in e4m3: channels are rows, and what the tensor's rows were
/// is contiguous.
struct TransposedOperand {
  unsigned char* data;
  long long row;    ///< bytes from channel to channel
  long long head;   ///< from head to head
  long long batch;  ///< k: from batch entry to batch entry
};

/// Largest values by (batch, KV head), as bits of f32; 0 before the first launch. |x| is a row's Euclidean
/// norm, r the root of its largest P.
struct GradientMaxima {
  unsigned int* dout;    ///< |dO| r
  unsigned int* q_dout;  ///< the largest |Q| r of a block times its largest |dO|
  unsigned int* q_dlse;  ///< the largest |Q| r of a block times its largest |dLSE|
  unsigned int* v;       ///< scales of V
};

/// What the kernels of one 8-bit backward call are launched with. `q`, `k`, `v` and `dout_map` are maps of s8
/// rows. `lse_log2` and `delta` have a row's terms as the recipe has them (docs/numerics.md): what is taken
/// off the exponent of 256 P / r, and 2^-18 delta / E.
struct EightBitBackwardParams : BackwardParams {
  TensorMap q_transposed, k_transposed, dout_transposed;  ///< maps of the operands below
  TransposedOperand q_t, k_t, dout_t;  ///< q's and dout's columns are the workspace's query blocks
  QuantizeParams quantize;             ///< q, k and v, all as rows; q's scales are in q_scales
  QuantizedTensor dout8;               ///< dO as rows
  GradientMaxima maxima;
  const float* max_logits;  ///< a row's largest logit
  Strides max_logits_stride;
  float* q_scales;     ///< by query block of the workspace, four each: Q's scale, 2^-18 of dO's over E
  float* row_factors;  ///< by row of the workspace: r E, which dQ is multiplied by
};

}  // namespace tandem
