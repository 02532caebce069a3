// Configs of kernels that read K and V of 8 bits beside a 16-bit Q.
#pragma once

#include "forward/families.hpp"

namespace tandem::kernel_tests {

/// Pages of single rows take 128 columns. One warpgroup where thread blocks share key blocks, or for wide
/// heads.
constexpr ForwardConfig mixed(Element element, OperandType type, KeySource keys, bool split,
                              int head_dim = 128, ScoreTransform transform = ScoreTransform::scaled) {
  const bool one = split || head_dim > 128;
  return {.tiling = {.element = element,
                     .head_dim_qk = head_dim,
                     .head_dim_v = head_dim,
                     .block_m = one ? 64 : 128,
                     .block_n = head_dim == 256 ? 32 : 64},
          .stages = split ? 3 : 1,
          .mask = {.causal = true, .local = true, .varlen = true},
          .keys = keys,
          .transform = transform,
          .schedule = {.dynamic = !split, .pingpong = !one, .split = split},
          .key_type = type};
}

/// A scale for each key and KV head.
template <typename Config>
constexpr Config by_row(Config c) {
  c.row_scales = true;
  return c;
}

/// Query heads that share keys are rows of a tile.
constexpr ForwardConfig grouped(ForwardConfig c) {
  c.tiling.heads_as_rows = true;
  return c;
}

constexpr OperandType e4m3 = OperandType::e4m3;
constexpr OperandType s8 = OperandType::s8;

}  // namespace tandem::kernel_tests
