// What a checked tensor becomes in a problem.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/effective.hpp"
#include "tandem/tensor.hpp"

namespace tandem {

/// Given operands have an address, empty ones too.
inline void* address_of(const ConstTensor& t) {
  if (!t.given()) return nullptr;
  return const_cast<void*>(t.data != nullptr ? t.data : &nowhere);
}

/// The stride of a dimension; 0 where its size leaves one index, whatever the user's odd stride says.
inline std::int64_t stride_of(const ConstTensor& t, std::size_t dim) {
  return t.shape[dim] > 1 ? t.stride[dim] : 0;
}

}  // namespace tandem
