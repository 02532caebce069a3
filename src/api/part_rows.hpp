// Rows of the tensors of a part, and the calls that these rows take.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "tandem/parts.hpp"

namespace tandem {

/// Throws Error (invalid_argument) for places that cannot be, after the tensors have been checked.
PartCall call_of(const PartInputs& args);

/// The view whose first element is another one. Tensors that are only described have no memory.
template <typename View>
View moved(View t, std::int64_t elements) {
  using Byte = std::conditional_t<std::is_same_v<View, Tensor>, std::byte, const std::byte>;
  if (t.data != nullptr) {
    t.data = static_cast<Byte*>(t.data) + elements * static_cast<std::int64_t>(size_of(t.dtype));
  }
  return t;
}

/// Rows of a tensor (batch, rows, heads, head_dim), as a view of its memory. Of one not given: not given.
template <typename View>
View rows_of(View t, const Piece& rows) {
  if (!t.given()) return t;
  t.shape[1] = rows.count;
  return moved(t, rows.first * t.stride[1]);
}

/// The same of lse or its gradient, (batch, heads, rows).
template <typename View>
View columns_of(View t, const Piece& rows) {
  if (!t.given()) return t;
  t.shape[2] = rows.count;
  return moved(t, rows.first * t.stride[2]);
}

/// Calls that give these rows what rows without a visible pair have.
inline PartCall without_keys(const Piece& queries) {
  PartCall call;
  call.queries = queries;
  return call;
}
inline PartCall without_queries(const Piece& keys) {
  PartCall call;
  call.keys = keys;
  return call;
}

/// The rows before and behind those of a call, of `count` rows.
inline std::array<Piece, 2> others(const Piece& rows, std::int64_t count) {
  const std::int64_t end = rows.first + rows.count;
  return {Piece{0, rows.first}, Piece{end, count - end}};
}

}  // namespace tandem
