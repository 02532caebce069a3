// Problems whose sums have very many terms of one sign: what is lost of each shows as a drift of the whole.
#pragma once

#include "call.hpp"

namespace tandem::harness {

/// Equal logits (with `raised`, the first key's is 0.125 above the others) for `rows` queries and `keys`
/// keys, so that every weight is 1 / keys: out is the sum of equal terms, and so is dq, whose keys lie on
/// two sides of the plane that their values' gradients change sign in.
Call many_keys(DType dtype, std::int64_t rows, std::int64_t keys, bool raised);

/// `rows` queries with the same two keys, half of its weight each: every query adds the same to dk and dv.
Call many_queries(DType dtype, std::int64_t rows);

}  // namespace tandem::harness
