// The rules that hold for any one tensor argument. Each function throws Error (invalid_argument) with the
// rule, the value that broke it and what to do, or returns.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "problem/stats.hpp"
#include "tandem/tensor.hpp"

namespace tandem::check {

template <typename... Values>
[[noreturn]] void invalid(fmt::format_string<Values...> format, Values&&... values) {
  fail(Status::invalid_argument, format, std::forward<Values>(values)...);
}

/// A tensor and the name the user knows it by.
struct Argument {
  const char* name;
  ConstTensor tensor;

  [[nodiscard]] bool given() const { return tensor.given(); }
  [[nodiscard]] std::int64_t size(int dim) const { return tensor.shape[static_cast<std::size_t>(dim)]; }
  [[nodiscard]] std::int64_t stride(int dim) const { return tensor.stride[static_cast<std::size_t>(dim)]; }
  [[nodiscard]] std::int64_t last_size() const { return size(tensor.rank - 1); }
};

/// "(2, 128, 8, 64)"; a tuple of one is "(8)".
std::string tuple(const std::int64_t* values, int count);
std::string shape_of(const ConstTensor& tensor);
/// "cpu" or "cuda:1".
std::string name_of(Device device);

/// The argument is there. `symbols` is the shape it should have, as in the documentation.
void given(const Argument& a, std::string_view symbols);

/// A tensor not given has neither data nor dimensions.
void consistent(const Argument& a);

void rank(const Argument& a, int rank, std::string_view symbols);

/// The shape is `expected`, which the documentation calls `symbols`.
void shape(const Argument& a, std::initializer_list<std::int64_t> expected, std::string_view symbols);

/// A tensor's shape as the documentation calls it, with cu_seqlens and without.
struct Symbols {
  const char* packed;
  const char* batched;
};
/// `batched` is the shape with the batch first; `packed` tensors have the dimensions behind it.
void shape(const Argument& a, bool packed, std::initializer_list<std::int64_t> batched,
           const Symbols& symbols);

void dtype(const Argument& a, std::initializer_list<DType> allowed);
void same_dtype(const Argument& a, const Argument& like);
/// The tensor is on a CPU or a CUDA device, which is returned.
Device device(const Argument& a);
void same_device(const Argument& a, const Argument& like);

/// Sizes are not negative, and every offset, in bytes, fits 63 bits.
void extent(const Argument& a);

/// A non-empty tensor has an address, and the address is a multiple of the element size.
void memory(const Argument& a);

void last_dimension_contiguous(const Argument& a);

/// No two elements of an output share memory. Layouts whose dimensions nest (any slice, transpose or
/// permutation of a contiguous tensor) pass.
void no_self_overlap(const Argument& a);

/// No output shares memory with another, or with an input: a kernel may read any input after it has begun to
/// write. Elements count, not the bytes between them: an output may be a slice of a buffer of whose other
/// slices the inputs are. Tensors without data or elements share nothing.
void separate(std::initializer_list<Argument> outputs, std::initializer_list<Argument> inputs,
              std::span<const Argument> more_inputs = {});

/// Both arguments are given, or neither is.
void together(const Argument& a, const Argument& b);

/// `table` is (batch, pages a sequence) of pages in `cache`; returns the rows that a sequence's pages have
/// together. `symbols` is its shape.
std::int64_t page_table(const Argument& table, const Argument& cache, std::int64_t batch,
                        std::string_view symbols);

/// A rotary embedding's table has a row a position; returns rotary_dim, twice its columns, which rows of
/// `head_dim` must hold.
std::int64_t rotary_dim(const Argument& table, std::int64_t head_dim);

/// A bound of a sliding window: -1 or more.
void window_bound(const char* name, std::int64_t value);

/// A number of threads that a system has to give, or 0.
void threads(int count);

}  // namespace tandem::check
