// Tensor views: a pointer, a shape and strides. Tandem never owns tensor memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace tandem {

/// Element types. Values are stable: they are part of the C interface.
enum class DType : int { f32 = 0, f16 = 1, bf16 = 2, e4m3 = 3, i32 = 4, i64 = 5, s8 = 6 };

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32: return 4;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::e4m3:
    case DType::s8: return 1;
    case DType::i64: return 8;
  }
  return 0;
}

/// The usual short name: "f32", "bf16", ...
constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::e4m3: return "e4m3";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
    case DType::s8: return "s8";
  }
  return "unknown";
}

/// Where a tensor's memory lives.
struct Device {
  enum class Kind : int { cpu = 0, cuda = 1 };
  Kind kind = Kind::cpu;
  int index = 0;  ///< CUDA device ordinal; 0 on the CPU
  friend constexpr bool operator==(Device, Device) = default;
};

/// A strided view of up to four dimensions. `data == nullptr` with rank 0 means "not given".
/// Strides are in elements; only the last dimension must be contiguous.
template <typename Void>
struct BasicTensor {
  static_assert(std::is_void_v<Void>);
  static constexpr int max_rank = 4;

  Void* data = nullptr;
  DType dtype = DType::f32;
  int rank = 0;
  std::array<std::int64_t, max_rank> shape{};
  std::array<std::int64_t, max_rank> stride{};
  Device device{};

  BasicTensor() = default;

  /// A contiguous (row-major) view. More than four dimensions leave `rank` too large for any argument to
  /// accept.
  BasicTensor(Void* data_, DType dtype_, std::initializer_list<std::int64_t> shape_, Device device_ = {})
      : data(data_), dtype(dtype_), rank(static_cast<int>(shape_.size())), device(device_) {
    int i = 0;
    for (std::int64_t n : shape_) {
      if (i < max_rank) shape[static_cast<std::size_t>(i++)] = n;
    }
    // Unsigned, since sizes are checked only when the view is used: their product may overflow here.
    std::uint64_t step = 1;
    while (i-- > 0) {
      stride[static_cast<std::size_t>(i)] = static_cast<std::int64_t>(step);
      step *= static_cast<std::uint64_t>(shape[static_cast<std::size_t>(i)]);
    }
  }

  /// A mutable view is also a constant one.
  template <typename Other>
  requires(std::is_const_v<Void> && !std::is_const_v<Other>)
      BasicTensor(const BasicTensor<Other>& o)  // implicit: a view conversion like that of std::span
      : data(o.data), dtype(o.dtype), rank(o.rank), shape(o.shape), stride(o.stride), device(o.device) {}

  /// True if the tensor was given at all (an empty tensor was given; a default-constructed one was not).
  [[nodiscard]] bool given() const { return rank > 0; }
  /// The number of elements, modulo 2^64 in a shape that no memory holds.
  [[nodiscard]] std::int64_t numel() const {
    std::uint64_t n = rank > 0 ? 1 : 0;
    for (int i = 0; i < rank && i < max_rank; ++i)
      n *= static_cast<std::uint64_t>(shape[static_cast<std::size_t>(i)]);
    return static_cast<std::int64_t>(n);
  }
};

/// Views of memory that a call writes, and of memory that it only reads.
using Tensor = BasicTensor<void>;
using ConstTensor = BasicTensor<const void>;

}  // namespace tandem
