// What host and device share of the kernel `decode`: the Config that specialises it. It is launched with what
// the forward kernel is.
#pragma once

#include "ops/forward/config.hpp"

namespace tandem {

/// Rows of a tile, and warps that share the keys of a block.
constexpr int decode_rows = 16;
constexpr int decode_warps = 4;

struct DecodeSchedule {
  static constexpr bool dynamic = false, pingpong = false, output_late = false, invariant = false;
  bool split = false;  ///< as ForwardSchedule has it
  /// CTAs of a cluster that share the keys of a tile, and merge what they have of it in shared memory, so
  /// that no kernel has to follow. With split the lengths decide on the device which of the two it is
  /// (takes_clusters).
  int cluster = 1;

  constexpr bool operator==(const DecodeSchedule&) const = default;
};

/// Everything that specialises the kernel `decode`, and what it answers to the code that it shares with the
/// forward kernel. Keys of 8 bits become 16-bit ones in registers.
struct DecodeConfig {
  static constexpr Family family = Family::sm90;
  static constexpr Functions functions{};
  static constexpr bool v_in_k = false, pairs = false;
  static constexpr int column_slices = 1;
  static constexpr int least_blocks = 2;  ///< what a merge has to read of them is worth as much
  /// A CTA in whose share a tile ends merges what others have of it. Else `combine` does.
  static constexpr bool merges_parts = true;

  Tiling tiling{.block_m = decode_rows, .block_n = 16 * decode_warps};
  int stages = 2;  ///< K tiles, and V tiles, in flight
  int q_stages = 2;
  Mask mask{.varlen = true};
  KeySource keys = KeySource::rows;
  ScoreTransform transform = ScoreTransform::raw;
  DecodeSchedule schedule{};
  OperandType key_type = OperandType::input;  ///< this and row_scales as ForwardConfig has them
  bool row_scales = false;

  constexpr bool operator==(const DecodeConfig&) const = default;
  [[nodiscard]] constexpr bool has_byte_keys() const { return key_type != OperandType::input; }
  [[nodiscard]] static constexpr int byte_stages() { return 0; }
  [[nodiscard]] constexpr int tile_stages() const { return stages; }
  [[nodiscard]] static constexpr int consumers() { return 1; }
  [[nodiscard]] constexpr int cluster() const { return schedule.cluster; }
  [[nodiscard]] static constexpr int warps_of_k() { return decode_warps; }
  [[nodiscard]] static constexpr int warps_of_v() { return decode_warps; }
  [[nodiscard]] static constexpr int threads() { return 32 * (decode_warps + 1); }
};

/// What warps exchange at a tile's end: O of so many columns at a time, and each row's reference and sum.
/// More columns would leave no room for a second CTA beside three stages; in clusters, for short calls, there
/// are two. Rows are so many floats apart that four of them lie in different banks.
constexpr int decode_columns_alone = 16;
constexpr int decode_columns(const DecodeConfig& c) {
  return c.cluster() == 1 ? decode_columns_alone : c.tiling.head_dim_v % 64 == 0 ? 64 : 32;
}
constexpr int decode_row_floats(const DecodeConfig& c) {
  return decode_columns(c) + 8;
}
/// What the CTAs of a cluster send each, of two tiles: their columns of O, references and sums; two barriers.
constexpr int decode_parts_bytes(const DecodeConfig& c) {
  return c.cluster() == 1 ? 0 : 2 * (decode_rows * (c.tiling.head_dim_v * 4 + c.cluster() * 8) + 8);
}

/// Which tile a CTA is to merge: a tile::TileIndex, and how many CTAs have a part.
constexpr int decode_ending_bytes = 40;

/// Dynamic shared memory of the kernel.
constexpr int forward_shared_bytes(const DecodeConfig& c) {
  const int ending = c.schedule.split ? decode_ending_bytes : 0;
  const int exchange = decode_warps * decode_rows * (decode_row_floats(c) + 2) * 4 + ending;
  return loaded_shared_bytes(c) + (exchange + decode_parts_bytes(c) + 1023) / 1024 * 1024;
}

/// CTAs of the kernel that an SM holds: 227 KB of shared memory are theirs, of which the system takes 1 KB
/// each. Two have 168 registers a thread, which hold an O of 160 columns.
constexpr int ctas_per_sm(const DecodeConfig& c) {
  return c.tiling.head_dim_v <= 160 && 2 * (forward_shared_bytes(c) + 1024) <= 228 * 1024 ? 2 : 1;
}

}  // namespace tandem
