// Configs that kernels of every family have variants of.
#pragma once

#include "ops/forward/config.hpp"

namespace tandem::kernel_tests {

using enum Element;
using enum KeySource;
using enum ScoreTransform;

/// With an out in f32.
template <typename Config>
constexpr Config f32_out(Config c) {
  c.tiling.f32_out = true;
  return c;
}
/// With the largest logit of each row.
template <typename Config>
constexpr Config with_maxima(Config c) {
  c.tiling.max_logits = true;
  return c;
}
/// With an output gate.
template <typename Config>
constexpr Config gated(Config c) {
  c.tiling.gate = true;
  return c;
}
/// Of calls with a split size.
template <typename Config>
constexpr Config with_split_size(Config c) {
  c.schedule.invariant = true;
  return c;
}
/// With a mask by sequence.
template <typename Config>
constexpr Config by_sequence(Config c) {
  c.mask.by_sequence = true;
  return c;
}

}  // namespace tandem::kernel_tests
