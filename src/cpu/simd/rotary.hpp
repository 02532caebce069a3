// The rotary embedding of a row.
#pragma once

#include "cpu/simd/vec.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// Channel pairs (a, b) among the first `dim` become (a cos - b sin, b cos + a sin). Products are rounded
/// before they are added, as on the GPU: for sources that are compiled without contraction.
TANDEM_INLINE void embed_row(float* row, const float* cos, const float* sin, int dim, bool interleaved) {
  const int half = dim / 2;
  for (int c = 0; c < half; ++c) {
    float& first = row[interleaved ? 2 * c : c];
    float& second = row[interleaved ? 2 * c + 1 : c + half];
    const float a = first;
    const float b = second;
    first = a * cos[c] - b * sin[c];
    second = b * cos[c] + a * sin[c];
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
