// A tensor that owns its memory: any layout a user may bring, between guards that notice a stray access.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tandem/tensor.hpp"

namespace tandem::harness {

/// Bytes between two inaccessible pages: a touch outside faults at once. Pages never touched take no memory,
/// so a buffer may be far larger than the machine.
class GuardedBytes {
 public:
  explicit GuardedBytes(std::size_t size);
  ~GuardedBytes();
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;

  /// The first byte; page aligned. `size()` is rounded up to whole pages.
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// How a Box lays its elements out.
struct Layout {
  /// Physical order of the dimensions, outermost first; empty is the logical order. The last dimension is the
  /// innermost one, but of scales.
  std::vector<int> order;
  /// Dimensions with stride 0 (inputs only), as a bit mask.
  unsigned expanded = 0;
  /// Elements between one innermost row and the next that belong to somebody else.
  std::int64_t pad = 0;
  /// The tensor is slice `slice` of `slices` along the dimension outside the innermost two: a fused QKV.
  std::int64_t slices = 1;
  std::int64_t slice = 0;
  /// Elements from a 64-byte boundary to the first element.
  std::int64_t base_offset = 0;
  /// The last element ends where an inaccessible page begins (base_offset is then ignored).
  bool ends_at_guard = false;
  /// Dimensions of size 1 get a stride that nobody may use.
  bool odd_unit_strides = false;
  /// Too large to fill: what lies between the elements is neither poisoned nor checked.
  bool sparse = false;
};

/// A tensor and its memory. All elements, and what lies between and around them, start as NaN (inputs) or as
/// a pattern around NaN elements (outputs).
class Box {
 public:
  Box() = default;  ///< "not given"
  Box(DType dtype, std::vector<std::int64_t> shape, const Layout& layout, bool output);

  [[nodiscard]] bool given() const { return bytes_ != nullptr; }
  [[nodiscard]] const Tensor& view() const { return view_; }
  [[nodiscard]] std::int64_t numel() const { return view_.numel(); }
  [[nodiscard]] DType dtype() const { return view_.dtype; }
  [[nodiscard]] const GuardedBytes& bytes() const { return *bytes_; }

  /// The element at a logical (row-major) index.
  [[nodiscard]] double get(std::int64_t index) const;
  void set(std::int64_t index, double value);
  /// The first `count` columns of the tensor, in the same memory.
  [[nodiscard]] Box first_columns(std::int64_t count) const;
  /// All elements in logical order.
  [[nodiscard]] std::vector<double> values() const;
  void set_all(const std::vector<double>& values);
  /// The bytes of all elements in logical order, for bitwise comparison.
  [[nodiscard]] std::vector<std::byte> raw() const;

  /// Outputs: makes every element NaN again.
  void poison();
  /// Remembers the memory as it is now; `changed_outside` and `changed` compare with it.
  void snapshot();
  /// A byte outside the elements has changed since the snapshot; empty if none has, else where.
  [[nodiscard]] std::string changed_outside() const;
  /// Any byte has changed since the snapshot.
  [[nodiscard]] bool changed() const;

 private:
  [[nodiscard]] std::int64_t offset(std::int64_t index) const;
  /// Calls f(logical index, offset) of the first element of every contiguous innermost row; of every element
  /// where the last dimension is not contiguous.
  template <typename F>
  void for_each_row(const F& f) const;
  [[nodiscard]] std::int64_t row_length() const;

  Tensor view_;
  Layout layout_;
  std::shared_ptr<GuardedBytes> bytes_;
  std::vector<std::byte> snapshot_;
};

}  // namespace tandem::harness
