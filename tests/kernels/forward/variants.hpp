// Configs that kernels of every family have variants of.
#pragma once

#include "ops/forward/config.hpp"

namespace tandem::kernel_tests {

/// With an out in f32.
constexpr ForwardConfig f32_out(ForwardConfig c) {
  c.tiling.f32_out = true;
  return c;
}
/// Of calls with a split size.
constexpr ForwardConfig with_split_size(ForwardConfig c) {
  c.schedule.invariant = true;
  return c;
}
/// With a mask by sequence.
constexpr ForwardConfig by_sequence(ForwardConfig c) {
  c.mask.by_sequence = true;
  return c;
}

}  // namespace tandem::kernel_tests
