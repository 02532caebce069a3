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

}  // namespace tandem::kernel_tests
