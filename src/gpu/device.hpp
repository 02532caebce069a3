// Devices, contexts, streams and device memory, as small owners and guards over the driver.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "gpu/driver.hpp"

namespace tandem::gpu {

struct DeviceProperties {
  std::string name;
  int multiprocessors = 0;
  int major = 0;  ///< compute capability
  int minor = 0;
  int shared_bytes_per_block = 0;  ///< dynamic, at most
  int clock_khz = 0;
  int memory_clock_khz = 0;
  int memory_bus_bits = 0;
  std::size_t memory_bytes = 0;
};

/// Whether the kernels for Hopper, compiled for sm_90a, run on it.
inline bool is_hopper(const DeviceProperties& p) {
  return p.major == 9 && p.minor == 0;
}
/// Whether any kernels do: those of the family sm80 need its instructions.
inline bool is_supported(const DeviceProperties& p) {
  return p.major >= 8;
}
/// What kernels are compiled for on it: "sm_90a", "sm_86".
std::string architecture_of(const DeviceProperties& p);

int device_count();

/// Properties of a device, asked for once. Throws Error (invalid_argument) for an index the driver does not
/// have. Those of a described device are known without a driver.
const DeviceProperties& properties(int device);

/// GPUs that a call can be planned for on any machine ("H200"), as far as plans depend on them. Their indices
/// are beyond any that a driver has, so that running on one is properties' usual error.
std::span<const DeviceProperties> described_devices();
constexpr int first_described = 1 << 20;

/// "cuda:1", or what a described device is called.
std::string called(int device);

/// The device's primary context, which the CUDA runtime and PyTorch use too; retained for the life of the
/// process.
abi::Context primary_context(int device);

/// Makes a device's primary context current and restores what was current before. Costs two driver calls, or
/// one where the context is current already.
class ContextGuard {
 public:
  explicit ContextGuard(int device);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_ = false;
};

/// A stream of its own that does not wait for the default stream.
class Stream {
 public:
  explicit Stream(int device);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  [[nodiscard]] abi::Stream get() const { return stream_; }
  void synchronize() const;

 private:
  int device_;
  abi::Stream stream_ = nullptr;
};

/// A point in a stream, for timing.
class Event {
 public:
  explicit Event(int device);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(abi::Stream stream);
  /// Milliseconds from `start` to this event, once both have happened (waits for them).
  [[nodiscard]] float milliseconds_since(const Event& start) const;

 private:
  int device_;
  abi::Event event_ = nullptr;
};

/// Device memory, 256-byte aligned. Allocation synchronises: for setup, tests and benchmarks, not for calls.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(int device, std::size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;

  [[nodiscard]] void* data() const { return reinterpret_cast<void*>(address_); }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

  /// Copies in stream order from and to host memory, starting `offset` bytes into the buffer. Pageable host
  /// memory may be reused at once after copy_from_host; copy_to_host needs the stream synchronised before its
  /// result is read.
  void copy_from_host(const void* host, std::size_t bytes, abi::Stream stream = nullptr,
                      std::size_t offset = 0);
  void copy_to_host(void* host, std::size_t bytes, abi::Stream stream = nullptr,
                    std::size_t offset = 0) const;
  void fill(unsigned char value, abi::Stream stream = nullptr);

 private:
  int device_ = 0;
  abi::DevicePointer address_ = 0;
  std::size_t bytes_ = 0;
};

/// Waits for everything on `stream` of `device`.
void synchronize(int device, abi::Stream stream = nullptr);

}  // namespace tandem::gpu
