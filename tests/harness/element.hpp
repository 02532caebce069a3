// Elements of every dtype as doubles, by the formats' definitions. The tests' own, so that a wrong conversion
// in the library cannot agree with itself.
#pragma once

#include <cstdint>

#include "tandem/tensor.hpp"

namespace tandem::harness {

/// Element `offset` of an array of `dtype`. Integers too.
double decode(DType dtype, const void* data, std::int64_t offset);
/// Elements from `offset` on.
void decode(DType dtype, const void* data, std::int64_t offset, std::int64_t count, double* values);

/// Stores `value`, rounded to nearest even; e4m3 saturates at 448 (it has no infinity).
void encode(DType dtype, void* data, std::int64_t offset, double value);

/// `value` as `dtype` would hold it.
double rounded(DType dtype, double value);

}  // namespace tandem::harness
