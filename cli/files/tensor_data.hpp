// A tensor that owns its memory: what the readers return and the program computes into.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tandem/tensor.hpp"

namespace tandem::files {

/// Owned, contiguous, 64-byte aligned (a cache line and an AVX-512 register). New memory is not initialised.
class TensorData {
 public:
  TensorData() = default;
  /// Shape of 1 to 4 dimensions, none negative. Throws std::bad_alloc.
  TensorData(DType dtype, std::vector<std::int64_t> shape) : dtype_(dtype), shape_(std::move(shape)) {
    bytes_ = size_of(dtype);
    for (const std::int64_t n : shape_) {
      // An address space has 2^47 bytes: what overflows 64 bits cannot be had.
      if (__builtin_mul_overflow(bytes_, static_cast<std::size_t>(n), &bytes_)) throw std::bad_alloc();
    }
    // One byte at least, so that an empty tensor has an address too.
    memory_.reset(static_cast<std::byte*>(::operator new(bytes_ + 1, alignment)));
  }

  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] const std::vector<std::int64_t>& shape() const { return shape_; }
  [[nodiscard]] std::span<std::byte> bytes() { return {memory_.get(), bytes_}; }
  [[nodiscard]] std::span<const std::byte> bytes() const { return {memory_.get(), bytes_}; }
  [[nodiscard]] std::int64_t numel() const { return static_cast<std::int64_t>(bytes_ / size_of(dtype_)); }

  /// A copy, asked for by name: tensors are large.
  [[nodiscard]] TensorData clone() const {
    TensorData copy(dtype_, shape_);
    std::memcpy(copy.memory_.get(), memory_.get(), bytes_);
    return copy;
  }

  [[nodiscard]] Tensor view() { return make_view<void>(memory_.get()); }
  [[nodiscard]] ConstTensor view() const { return make_view<const void>(memory_.get()); }

 private:
  static constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, alignment); }
  };

  template <typename Void>
  [[nodiscard]] BasicTensor<Void> make_view(Void* data) const {
    BasicTensor<Void> t;
    t.data = data;
    t.dtype = dtype_;
    t.rank = static_cast<int>(shape_.size());
    std::int64_t step = 1;
    for (std::size_t i = shape_.size(); i-- > 0;) {
      t.shape[i] = shape_[i];
      t.stride[i] = step;
      step *= shape_[i];
    }
    return t;
  }

  DType dtype_ = DType::f32;
  std::vector<std::int64_t> shape_;
  std::size_t bytes_ = 0;
  std::unique_ptr<std::byte, Free> memory_;
};

/// A tensor to be written: contiguous, under this name.
struct NamedTensor {
  std::string name;
  ConstTensor tensor;
};

}  // namespace tandem::files
