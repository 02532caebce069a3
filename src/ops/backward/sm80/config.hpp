// What host and device share of the kernel `sm80_backward` and those around it: their Config, and what the
// main one is launched with beside what Hopper's is.
#pragma once

#include "ops/backward/config.hpp"

namespace tandem {

struct Sm80BackwardSchedule {
  static constexpr bool pingpong = false, staggered = false, overlaps_tiles = false, turned = false;
  bool deterministic = false;  ///< key tiles add to dQ in a fixed order

  constexpr bool operator==(const Sm80BackwardSchedule&) const = default;
};

/// Everything that specialises the backward kernels of the family sm80, and what it answers to the code that
/// they share with Hopper's. If block_n is 64 keys a warpgroup and not `halved`, each warpgroup owns the dK
/// and dV of its keys; otherwise each has the scores of half of a block's queries, and half of the columns of
/// dK and dV.
struct Sm80BackwardConfig {
  static constexpr Family family = Family::sm80;
  static constexpr int consumers = 2;  ///< warpgroups, all of which load, too
  static constexpr int cluster = 1;
  static constexpr bool keeps_progress = true;  ///< and reads the size of the grid anew: registers are short
  static constexpr bool clears_sums = true;

  BackwardTiling tiling{};
  int q_stages = 2;     ///< blocks of Q in flight
  int dout_stages = 2;  ///< blocks of dO in flight
  Mask mask{};
  ScoreTransform transform = ScoreTransform::raw;
  Sm80BackwardSchedule schedule{};
  bool ds_in_dout = false;  ///< dS takes dO's place in shared memory, once dV has its products
  bool halved = false;      ///< warpgroups divide the work on the same keys of 128, too
  bool f32_dq = false;      ///< as BackwardConfig has it, and f32_dk_dv
  bool f32_dk_dv = false;
  Functions functions{};

  constexpr bool operator==(const Sm80BackwardConfig&) const = default;
  [[nodiscard]] static constexpr int threads() { return 128 * consumers; }
  [[nodiscard]] constexpr bool sloped() const {
    return transform != ScoreTransform::raw || functions.score_function || functions.dropout;
  }
  [[nodiscard]] static constexpr bool keeps_p() { return false; }
  [[nodiscard]] constexpr bool owns_keys() const { return tiling.block_n == 64 * consumers && !halved; }
  [[nodiscard]] constexpr bool halves_queries() const { return !owns_keys(); }
  /// Units of 64 keys of which each warp has 16.
  [[nodiscard]] constexpr int key_units() const { return halves_queries() ? tiling.block_n / 64 : 1; }
  [[nodiscard]] constexpr int tile_keys() const { return tiling.block_n; }
  [[nodiscard]] static constexpr int key_stages() { return 1; }
  [[nodiscard]] static constexpr int dq_pieces() { return consumers; }
  [[nodiscard]] constexpr int dq_columns() const { return tiling.dq_columns(dq_pieces()); }
  [[nodiscard]] constexpr int dq_values() const { return 64 * dq_columns(); }
  [[nodiscard]] constexpr int strip_qk() const { return strip_columns(tiling.head_dim_qk); }
  [[nodiscard]] constexpr int strip_v() const { return strip_columns(tiling.head_dim_v); }
};

/// Where warpgroups halve the queries: P of their halves, which they pass each other; one half at a time
/// where shared memory is so short that dS takes dO's place.
constexpr int exchanged_bytes(const Sm80BackwardConfig& c) {
  if (!c.halves_queries()) return 0;
  return c.tiling.block_n * c.tiling.block_m * (c.ds_in_dout ? 1 : 2);
}

/// Dynamic shared memory of the main kernel: K and V; Q and dO with LSE and delta; dS, where dO does not
/// leave its place for it; exchanged P; the keys' scales and a word for each warp; a description of the tile.
constexpr int backward_shared_bytes(const Sm80BackwardConfig& c) {
  const int kv_tiles = c.tiling.block_n * (c.tiling.head_dim_qk + c.tiling.head_dim_v) * 2;
  const int q_tiles = c.q_stages * c.tiling.block_m * c.tiling.head_dim_qk * 2;
  const int dout_tiles = c.dout_stages * c.tiling.block_m * c.tiling.head_dim_v * 2;
  const int scores = c.tiling.block_n * c.tiling.block_m * 2;
  const int ds = !c.ds_in_dout ? scores : scores > dout_tiles ? scores - dout_tiles : 0;
  const int rows = 4 * (c.tiling.block_m * (c.q_stages + c.dout_stages) + c.tiling.block_n +
                        4 * Sm80BackwardConfig::consumers);
  return (kv_tiles + q_tiles + dout_tiles + ds + exchanged_bytes(c) + rows + 128 + 1023) / 1024 * 1024;
}

/// The main kernel reads no tensor map. Behind functions, which `list_query_blocks` reads too.
template <typename Params>
struct WithAddresses : Params {
  const void *q_data, *k_data, *v_data;
  Strides q_stride, k_stride, v_stride;
};
using Sm80BackwardParams = WithAddresses<BackwardParams>;

}  // namespace tandem
