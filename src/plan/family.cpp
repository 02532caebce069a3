#include "plan/family.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "tandem/error.hpp"

namespace tandem {

FamilyChoice choose_family(const gpu::DeviceProperties& device) {
  const char* const set = std::getenv("TANDEM_KERNELS");
  const std::string_view wish = set == nullptr ? "" : set;
  if (!wish.empty() && wish != "sm80" && wish != "sm90") {
    throw Error(Status::unsupported,
                fmt::format("TANDEM_KERNELS is {}; it may be sm80, sm90, or unset for the GPU's own", wish));
  }
  if (!gpu::is_supported(device)) {
    throw Error(
        Status::unsupported,
        fmt::format("{} has compute capability {}.{}; the GPU kernels need 8.0 (Ampere) or later; copy "
                    "the tensors to the CPU",
                    device.name, device.major, device.minor));
  }
  if (gpu::is_hopper(device)) {
    if (wish == "sm80") return {Family::sm80, "TANDEM_KERNELS asks for them"};
    return {Family::sm90, "compute capability 9.0 has WGMMA and TMA"};
  }
  if (wish == "sm90") {
    throw Error(
        Status::unsupported,
        fmt::format("TANDEM_KERNELS=sm90 asks for kernels that compute capability 9.0 alone runs, {} has "
                    "{}.{}; unset it",
                    device.name, device.major, device.minor));
  }
  return {Family::sm80, fmt::format("compute capability {}.{} has no WGMMA", device.major, device.minor)};
}

FamilyChoice choose_family(const Problem& p) {
  FamilyChoice choice = choose_family(gpu::properties(p.device.index));
  constexpr int narrow = 128;
  if (choice.family == Family::sm90 && p.pass == Pass::backward && p.wants_captured_gradients() &&
      std::max(p.head_dim_qk, p.head_dim_v) > narrow) {
    return {Family::sm80, "captured_gradients with head dimensions above 128 take them on Hopper, too"};
  }
  return choice;
}

int shared_bytes_per_sm(const gpu::DeviceProperties& device) {
  constexpr int kilobyte = 1024;
  if (device.major == 8) return (device.minor == 0 || device.minor == 7 ? 164 : 100) * kilobyte;
  return (device.major >= 9 && device.major <= 11 ? 228 : 100) * kilobyte;
}

}  // namespace tandem
