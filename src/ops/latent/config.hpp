// What host and device share of the kernel `forward_wide`: the Config that specialises it. It is launched
// with what the forward kernel is.
#pragma once

#include "ops/forward/config.hpp"

namespace tandem {

struct LatentSchedule {
  static constexpr bool pingpong = false, output_late = false;
  bool dynamic = false;  ///< this and the others as ForwardSchedule has them
  bool split = false;
  bool invariant = false;

  constexpr bool operator==(const LatentSchedule&) const = default;
};

/// Everything that specialises the kernel `forward_wide`, of heads of more than 256 columns, and what it
/// answers to the code that it shares with the forward kernel.
struct LatentConfig {
  static constexpr Family family = Family::sm90;
  static constexpr OperandType key_type = OperandType::input;
  static constexpr bool row_scales = false;
  static constexpr Functions functions{};
  static constexpr int column_slices = 2;  ///< warpgroups that share the columns of O, beside one that scores
  static constexpr int least_blocks = 4;   ///< a partial result is as large as two blocks of keys

  Tiling tiling{.block_m = 64, .block_n = 64};
  int stages = 2;  ///< K tiles, and V tiles, in flight
  int q_stages = 1;
  Mask mask{};
  KeySource keys = KeySource::rows;
  ScoreTransform transform = ScoreTransform::raw;
  LatentSchedule schedule{};
  bool v_in_k = false;  ///< V is the first columns of K, and not loaded
  /// With split, heads as rows and V in K: the CTAs of a cluster of two have two tiles of the same keys, and
  /// each loads half of these for both.
  bool pairs = false;

  constexpr bool operator==(const LatentConfig&) const = default;
  [[nodiscard]] static constexpr bool has_byte_keys() { return false; }
  [[nodiscard]] static constexpr int byte_stages() { return 0; }
  [[nodiscard]] constexpr int tile_stages() const { return stages; }
  [[nodiscard]] static constexpr int consumers() { return 1; }
  /// CTAs of a cluster, which have one share of the line of key blocks (tile/split.cuh).
  [[nodiscard]] constexpr int cluster() const { return pairs ? 2 : 1; }
  [[nodiscard]] static constexpr int warps_of_k() { return 4; }
  [[nodiscard]] static constexpr int warps_of_v() { return 4 * column_slices; }
  [[nodiscard]] static constexpr int threads() { return 128 * (column_slices + 2); }
  [[nodiscard]] static constexpr RegisterSplit registers() {
    return {.producer = 56, .consumer = 176, .scorer = 104};
  }
};
constexpr int latent_slices = LatentConfig::column_slices;

/// Columns of a product with V. A CTA of four warpgroups begins with 128 registers a thread, for which ptxas
/// refuses wider ones.
constexpr int wide_product_columns(const LatentConfig& c) {
  return c.tiling.head_dim_v / latent_slices % 128 == 0 ? 128 : 64;
}
/// Groups of strips of K in which it scores, whether V is in K or a copy of it (sm90/key_groups.cuh): one, if
/// V has more columns.
constexpr int key_groups(const LatentConfig& c) {
  if (c.tiling.head_dim_v > c.tiling.head_dim_qk) return 1;
  return c.tiling.head_dim_v / wide_product_columns(c) + (c.tiling.head_dim_qk > c.tiling.head_dim_v ? 1 : 0);
}

/// Groups that are loaded by themselves.
constexpr int loaded_key_groups(const LatentConfig& c) {
  return c.v_in_k ? key_groups(c) : 1;
}

/// Dynamic shared memory of the kernel.
constexpr int forward_shared_bytes(const LatentConfig& c) {
  const int exchange = c.tiling.block_m * c.tiling.block_n * 2 + 3 * 64 * 4 + 256;
  return loaded_shared_bytes(c, loaded_key_groups(c)) + (exchange + 1023) / 1024 * 1024;
}
constexpr int ctas_per_sm(const LatentConfig& /*c*/) {
  return 1;
}

}  // namespace tandem
