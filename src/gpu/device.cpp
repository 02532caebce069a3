#include "gpu/device.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>

#include "gpu/compiler.hpp"
#include "problem/stats.hpp"
#include "tandem/error.hpp"

namespace tandem::gpu {
namespace {

/// What is known of one device. Filled once; a process has few.
struct DeviceRecord {
  std::once_flag described;
  std::once_flag retained;
  DeviceProperties properties;
  abi::Context context = nullptr;
};

DeviceRecord& record_of(int device) {
  const int count = device_count();
  if (device < 0 || device >= count) {
    fail(Status::invalid_argument, "device index {} is not one of the {} CUDA devices; pass 0 to {}", device,
         count, count - 1);
  }
  static const std::unique_ptr<DeviceRecord[]> records(new DeviceRecord[static_cast<std::size_t>(count)]);
  return records[static_cast<std::size_t>(device)];
}

DeviceProperties describe(int device) {
  const Driver& d = driver();
  abi::Device handle = 0;
  check(d.device_get(&handle, device), "cuDeviceGet");
  DeviceProperties p;
  std::array<char, 256> name{};
  check(d.device_get_name(name.data(), static_cast<int>(name.size()), handle), "cuDeviceGetName");
  p.name = name.data();
  const auto attribute = [&](abi::DeviceAttribute which) {
    int value = 0;
    check(d.device_get_attribute(&value, which, handle), "cuDeviceGetAttribute");
    return value;
  };
  using enum abi::DeviceAttribute;
  p.multiprocessors = attribute(multiprocessor_count);
  p.major = attribute(compute_capability_major);
  p.minor = attribute(compute_capability_minor);
  p.shared_bytes_per_block = attribute(max_shared_memory_per_block_optin);
  p.clock_khz = attribute(clock_rate);
  p.memory_clock_khz = attribute(memory_clock_rate);
  p.memory_bus_bits = attribute(memory_bus_width);
  check(d.device_total_memory(&p.memory_bytes, handle), "cuDeviceTotalMem");
  return p;
}

/// Frees something in the context it belongs to. A driver that has gone, as at the end of a process, has
/// freed it already.
template <typename Free>
void release(int device, Free&& free) noexcept try {
  const ContextGuard guard(device);
  free();
} catch (const Error&) {
}

}  // namespace

std::string architecture_of(const DeviceProperties& p) {
  return is_hopper(p) ? hopper_architecture : fmt::format("sm_{}{}", p.major, p.minor);
}

int device_count() {
  static const int count = [] {
    int n = 0;
    check(driver().device_get_count(&n), "cuDeviceGetCount");
    return n;
  }();
  return count;
}

std::span<const DeviceProperties> described_devices() {
  static const std::array<DeviceProperties, 11> devices = {{
      {.name = "H100", .multiprocessors = 132, .major = 9, .minor = 0},
      {.name = "H100 PCIe", .multiprocessors = 114, .major = 9, .minor = 0},
      {.name = "H200", .multiprocessors = 132, .major = 9, .minor = 0},
      {.name = "GH200", .multiprocessors = 132, .major = 9, .minor = 0},
      {.name = "A100", .multiprocessors = 108, .major = 8, .minor = 0},
      {.name = "A10", .multiprocessors = 72, .major = 8, .minor = 6},
      {.name = "RTX 3090", .multiprocessors = 82, .major = 8, .minor = 6},
      {.name = "L4", .multiprocessors = 58, .major = 8, .minor = 9},
      {.name = "RTX 4090", .multiprocessors = 128, .major = 8, .minor = 9},
      {.name = "B200", .multiprocessors = 148, .major = 10, .minor = 0},
      {.name = "RTX 5090", .multiprocessors = 170, .major = 12, .minor = 0},
  }};
  return devices;
}

namespace {

/// The device that `device` describes; null of an index that is the driver's.
const DeviceProperties* described(int device) {
  const auto i = static_cast<std::size_t>(std::max(device - first_described, 0));
  return device >= first_described && i < described_devices().size() ? &described_devices()[i] : nullptr;
}

}  // namespace

std::string called(int device) {
  const DeviceProperties* known = described(device);
  return known != nullptr ? known->name : fmt::format("cuda:{}", device);
}

const DeviceProperties& properties(int device) {
  if (const DeviceProperties* known = described(device)) return *known;
  DeviceRecord& record = record_of(device);
  std::call_once(record.described, [&] { record.properties = describe(device); });
  return record.properties;
}

abi::Context primary_context(int device) {
  DeviceRecord& record = record_of(device);
  std::call_once(record.retained, [&] {
    abi::Device handle = 0;
    check(driver().device_get(&handle, device), "cuDeviceGet");
    check(driver().primary_context_retain(&record.context, handle), "cuDevicePrimaryCtxRetain");
  });
  return record.context;
}

ContextGuard::ContextGuard(int device) {
  const abi::Context wanted = primary_context(device);
  abi::Context current = nullptr;
  check(driver().context_get_current(&current), "cuCtxGetCurrent");
  if (current == wanted) return;
  check(driver().context_push(wanted), "cuCtxPushCurrent");
  pushed_ = true;
}

ContextGuard::~ContextGuard() {
  abi::Context ignored = nullptr;
  if (pushed_) driver().context_pop(&ignored);
}

Stream::Stream(int device) : device_(device) {
  const ContextGuard guard(device_);
  check(driver().stream_create(&stream_, abi::stream_non_blocking), "cuStreamCreate");
}

Stream::~Stream() {
  release(device_, [&] { driver().stream_destroy(stream_); });
}

void Stream::synchronize() const {
  gpu::synchronize(device_, stream_);
}

Event::Event(int device) : device_(device) {
  const ContextGuard guard(device_);
  check(driver().event_create(&event_, 0), "cuEventCreate");
}

Event::~Event() {
  release(device_, [&] { driver().event_destroy(event_); });
}

void Event::record(abi::Stream stream) {
  const ContextGuard guard(device_);
  check(driver().event_record(event_, stream), "cuEventRecord");
}

float Event::milliseconds_since(const Event& start) const {
  const ContextGuard guard(device_);
  check(driver().event_synchronize(event_), "cuEventSynchronize");
  float milliseconds = 0;
  check(driver().event_elapsed_time(&milliseconds, start.event_, event_), "cuEventElapsedTime");
  return milliseconds;
}

DeviceBuffer::DeviceBuffer(int device, std::size_t bytes) : device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  const ContextGuard guard(device);
  check(driver().memory_alloc(&address_, bytes), "cuMemAlloc");
}

DeviceBuffer::~DeviceBuffer() {
  if (address_ != 0) release(device_, [&] { driver().memory_free(address_); });
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : device_(other.device_),
      address_(std::exchange(other.address_, 0)),
      bytes_(std::exchange(other.bytes_, 0)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void DeviceBuffer::copy_from_host(const void* host, std::size_t bytes, abi::Stream stream,
                                  std::size_t offset) {
  if (bytes == 0) return;
  const ContextGuard guard(device_);
  check(driver().copy_to_device_async(address_ + offset, host, bytes, stream), "cuMemcpyHtoDAsync");
}

void DeviceBuffer::copy_to_host(void* host, std::size_t bytes, abi::Stream stream, std::size_t offset) const {
  if (bytes == 0) return;
  const ContextGuard guard(device_);
  check(driver().copy_to_host_async(host, address_ + offset, bytes, stream), "cuMemcpyDtoHAsync");
}

void DeviceBuffer::fill(unsigned char value, abi::Stream stream) {
  if (bytes_ == 0) return;
  const ContextGuard guard(device_);
  check(driver().memset_d8_async(address_, value, bytes_, stream), "cuMemsetD8Async");
}

void synchronize(int device, abi::Stream stream) {
  const ContextGuard guard(device);
  check(driver().stream_synchronize(stream), "cuStreamSynchronize");
}

}  // namespace tandem::gpu
