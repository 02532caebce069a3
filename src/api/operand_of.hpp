// What a checked tensor becomes in a problem.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/effective.hpp"
#include "problem/problem.hpp"
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

/// The arguments are the dimensions that stand for batch, row (or block) and head; -1 where there is none.
inline Operand operand_of(const ConstTensor& t, int batch, int row, int head) {
  const auto stride = [&](int dim) { return dim < 0 ? 0 : stride_of(t, static_cast<std::size_t>(dim)); };
  return {.data = address_of(t),
          .dtype = t.dtype,
          .batch_stride = stride(batch),
          .row_stride = stride(row),
          .head_stride = stride(head)};
}

inline Lengths lengths_of(const ConstTensor& t) {
  return {.data = address_of(t), .wide = t.dtype == DType::i64, .stride = stride_of(t, 0)};
}

/// `cache` is (pages, page_size, heads, head_dim).
inline Pages pages_of(const ConstTensor& table, const ConstTensor& cache) {
  return {.table = address_of(table),
          .wide = table.dtype == DType::i64,
          .batch_stride = stride_of(table, 0),
          .stride = stride_of(table, 1),
          .per_sequence = table.shape[1],
          .count = cache.shape[0],
          .page_size = cache.shape[1]};
}

}  // namespace tandem
