// Configs of the kernel `decode`.
#pragma once

#include "forward/families.hpp"

namespace tandem::kernel_tests {

constexpr DecodeConfig decoding(Element element, int head_dim, KeySource keys, bool split, bool heads_as_rows,
                                ScoreTransform transform = ScoreTransform::raw) {
  return {.tiling = {.element = element,
                     .head_dim_qk = head_dim,
                     .head_dim_v = head_dim == 192 ? 128 : head_dim,
                     .block_m = decode_rows,
                     .block_n = 64,
                     .heads_as_rows = heads_as_rows},
          .mask = {.causal = true, .local = true, .varlen = true},
          .keys = keys,
          .transform = transform,
          .schedule = {.split = split}};
}

/// CTAs of clusters that share a tile's keys, and merge what they have of it.
constexpr DecodeConfig in_cluster(int ctas, DecodeConfig c) {
  c.schedule = {.split = false, .cluster = ctas};
  return c;
}
/// Such clusters, or shares of all keys, as the lengths decide.
constexpr DecodeConfig either(int ctas, DecodeConfig c) {
  c.schedule = {.split = true, .cluster = ctas};
  return c;
}

}  // namespace tandem::kernel_tests
