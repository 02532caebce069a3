// What host and device share of the kernel that copies a tensor into a layout that TMA can read.
#pragma once

#include "kernels/config/types.hpp"

namespace tandem {

/// Specialises the kernel that copies a tensor into a layout that TMA reads.
struct PackConfig {
  bool paired = false;  ///< base and strides are even, and so is head_dim: elements are read in pairs

  constexpr bool operator==(const PackConfig&) const = default;
};

constexpr int pack_threads = 256;

struct PackParams {
  const void* source;  ///< 16-bit elements at `stride`
  Strides stride;
  void* target;  ///< (batch, rows, heads, pitch), 16-byte aligned
  int batch;
  int rows;
  int heads;
  int head_dim;
  int pitch;  ///< head_dim rounded up to 8; the difference is filled with zeros
};

}  // namespace tandem
