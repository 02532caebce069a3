// What host and device share of the kernel `sm80_forward`: the Config that specialises it, and what it is
// launched with beside what the forward kernel is.
#pragma once

#include "ops/forward/config.hpp"

namespace tandem {

struct Sm80ForwardSchedule {
  static constexpr bool dynamic = false;  ///< the GPU assigns CTAs of a tile each to SMs
  bool split = false;                     ///< this and `invariant` as ForwardSchedule has them
  bool invariant = false;

  constexpr bool operator==(const Sm80ForwardSchedule&) const = default;
};

/// Everything that specialises the kernel `sm80_forward`, and what it answers to the code that it shares with
/// the forward kernel. Each CTA has one Q, all of its warps load, and all compute.
struct Sm80ForwardConfig {
  static constexpr Family family = Family::sm80;
  static constexpr OperandType key_type = OperandType::input;
  static constexpr bool row_scales = false, v_in_k = false, pairs = false;
  static constexpr int column_slices = 1;
  static constexpr int least_blocks = 1;

  Tiling tiling{};  ///< head dimensions: multiples of 32; block_n: a multiple of 16
  int stages = 1;   ///< K tiles, and V tiles, in flight
  Mask mask{};
  KeySource keys = KeySource::rows;
  ScoreTransform transform = ScoreTransform::raw;
  Sm80ForwardSchedule schedule{};
  Functions functions{};

  constexpr bool operator==(const Sm80ForwardConfig&) const = default;
  /// Units of 64 rows that four warps compute, 16 rows each. With two of them what ldmatrix reads of K and V
  /// serves twice as many products; from a head_dim_v of 129 on registers hold the output of one.
  [[nodiscard]] constexpr int units_a_warp() const {
    return tiling.head_dim_v <= 128 && tiling.block_m % 128 == 0 ? 2 : 1;
  }
  /// Q stays in registers, where a thread's 255 have room for it beside S and O.
  [[nodiscard]] constexpr bool keeps_q() const {
    const int q = units_a_warp() * tiling.head_dim_qk / 4;
    const int s_and_o = units_a_warp() * (tiling.block_n + tiling.head_dim_v) / 2;
    return q <= 32 && q + s_and_o + 48 <= 255;
  }
  [[nodiscard]] static constexpr bool has_byte_keys() { return false; }
  [[nodiscard]] constexpr int units() const { return tiling.block_m / 64; }
  [[nodiscard]] static constexpr int cluster() { return 1; }
  [[nodiscard]] constexpr int threads() const { return 128 * units() / units_a_warp(); }
};

/// Dynamic shared memory of the kernel: tiles, and a description of the tile of queries.
constexpr int forward_shared_bytes(const Sm80ForwardConfig& c) {
  const int kv_columns = c.tiling.head_dim_qk + c.tiling.head_dim_v;
  return 2 * (c.tiling.block_m * c.tiling.head_dim_qk + c.stages * c.tiling.block_n * kv_columns) + 1024;
}

/// CTAs that the registers of an SM hold: GPUs differ in the shared memory that it has.
constexpr int ctas_per_sm(const Sm80ForwardConfig& c) {
  return c.threads() <= 128 ? 2 : 1;
}

}  // namespace tandem
