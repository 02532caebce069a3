// Which keys K's mean is taken over, in which order: all, or of longer sequences a sample
// (problem/recipe.hpp).
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/eight_bit/tile.hpp"

namespace tandem::cpu {

struct MeanKeys {
  std::int64_t keys;  ///< keys that the sequence has
  bool sampled;

  MeanKeys(std::int64_t keys_, bool may_be_sampled)
      : keys(keys_), sampled(may_be_sampled && keys_ > mean_all_keys) {}

  /// How many there are.
  [[nodiscard]] std::int64_t count() const { return sampled ? sampled_keys(static_cast<int>(keys)) : keys; }
  /// Every so manieth block has sums: those of a sample are of the keys up to the next one that has.
  [[nodiscard]] std::int64_t step() const { return sampled ? mean_step : 1; }

  /// Adds the channels of block `block`'s keys to `sums`; rows_at(first, count) describes rows.
  template <typename RowsAt>
  void add(const QuantizeKernel& kernel, std::int64_t block, float* sums, const RowsAt& rows_at) const {
    const std::int64_t first = block * quant_block;
    if (!sampled) {
      kernel.sum_channels(rows_at(first, std::min<std::int64_t>(quant_block, keys - first)), sums);
      return;
    }
    for (int i = 0; i < quant_block && first + sampled_key(i) < keys; ++i) {
      kernel.sum_channels(rows_at(first + sampled_key(i), 1), sums);
    }
  }
};

}  // namespace tandem::cpu
