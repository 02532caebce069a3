// Compiles the kernel that merges the parts of a forward kernel, of either family.
#pragma once

#include "forward/emulated_forward.hpp"
#include "ops/split/common/combine.cuh"

namespace tandem::kernel_tests {

template <auto config>
constexpr auto combine_of() -> void (*)(ForwardParams) {
  if constexpr (has_combine<config>) return &tandem::combine<combine_config(config)>;
  return nullptr;
}

}  // namespace tandem::kernel_tests
