// The scratch memory of a call on a GPU.
#pragma once

#include <cstddef>

#include "gpu/device.hpp"

namespace tandem::gpu {

/// The caller's memory, or memory that is allocated and freed in stream order. The device's context is
/// current for as long as it lives.
class Scratch {
 public:
  /// `bytes` are allocated only if `given` is null.
  Scratch(void* given, std::size_t bytes, abi::Stream stream)
      : address_(reinterpret_cast<abi::DevicePointer>(given)), stream_(stream) {
    if (given != nullptr || bytes == 0) return;
    check(driver().memory_alloc_async(&address_, bytes, stream), "cuMemAllocAsync");
    owned_ = true;
  }
  ~Scratch() {
    if (owned_) driver().memory_free_async(address_, stream_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  [[nodiscard]] char* data() const { return reinterpret_cast<char*>(address_); }

 private:
  abi::DevicePointer address_ = 0;
  abi::Stream stream_;
  bool owned_ = false;
};

}  // namespace tandem::gpu
