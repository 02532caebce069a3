#include "gpu/lengths.hpp"

#include <algorithm>

#include "gpu/device.hpp"

namespace tandem::gpu {

std::vector<std::int64_t> read_lengths(const Lengths& lengths, std::int64_t count, int device) {
  const ContextGuard guard(device);
  check(driver().context_synchronize(), "cuCtxSynchronize");
  const std::size_t bytes = lengths.wide ? sizeof(std::int64_t) : sizeof(std::int32_t);
  // One copy where the values lie side by side, else one each.
  const std::int64_t runs = lengths.stride == 1 ? 1 : count;
  const std::size_t run_bytes = static_cast<std::size_t>(count / std::max<std::int64_t>(runs, 1)) * bytes;
  std::vector<std::byte> raw(static_cast<std::size_t>(count) * bytes);
  for (std::int64_t i = 0; i < runs && !raw.empty(); ++i) {
    const auto from = reinterpret_cast<abi::DevicePointer>(lengths.data) + i * lengths.stride * bytes;
    check(driver().copy_to_host(raw.data() + i * bytes, from, run_bytes), "cuMemcpyDtoH");
  }
  const Lengths host{.data = raw.data(), .wide = lengths.wide, .stride = 1};
  std::vector<std::int64_t> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) values[static_cast<std::size_t>(i)] = host[i];
  return values;
}

}  // namespace tandem::gpu
