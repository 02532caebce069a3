// Scratch memory of a call, and copies of tensors that TMA cannot read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/device.hpp"
#include "problem/problem.hpp"

namespace tandem::gpu {

constexpr std::size_t scratch_alignment = 256;

/// Scratch memory in stream order, or the caller's.
class Scratch {
 public:
  /// `bytes` are allocated only if `given` is null.
  Scratch(void* given, std::size_t bytes, abi::Stream stream);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  [[nodiscard]] char* data() const { return reinterpret_cast<char*>(address_); }

 private:
  abi::DevicePointer address_ = 0;
  abi::Stream stream_;
  bool owned_ = false;
};

/// One tensor to be packed, and its extents.
struct Packing {
  Operand* operand;
  std::int64_t batch, rows, heads, head_dim;

  [[nodiscard]] std::int64_t pitch() const { return (head_dim + 7) / 8 * 8; }
  /// Of the copy, up to the next one.
  [[nodiscard]] std::size_t bytes() const {
    return (static_cast<std::size_t>(batch * rows * heads * pitch()) * 2 + scratch_alignment - 1) /
           scratch_alignment * scratch_alignment;
  }
};

/// Copies the tensor to `target` and points its operand there.
void pack(const Packing& tensor, char* target, int device, abi::Stream stream);

}  // namespace tandem::gpu
