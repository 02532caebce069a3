// What host and device share of the kernel that copies a tensor into a layout that TMA can read, queries of
// e4m3 as 16-bit ones.
#pragma once

#include "ops/forward/config.hpp"

namespace tandem {

/// Specialises the kernel that copies a tensor into a layout that TMA reads.
struct PackConfig {
  /// Base and strides are even, and so is head_dim: elements are read in pairs. Those of 8 bits: all are
  /// multiples of 8, and so many are read at once.
  bool paired = false;
  bool widens = false;              ///< elements are e4m3, and become (WidenParams):
  Element element = Element::bf16;  ///< which has all of their values

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

/// Makes 16-bit queries of e4m3. Their scale is a factor of the scores as k's is: where both have one, the
/// kernel writes the products, (sequences, heads_kv).
struct WidenParams : PackParams {
  HeadScales q_scale, k_scale;
  float* product;  ///< null: it is not asked for
  int sequences;
  int heads_kv;
};

}  // namespace tandem
