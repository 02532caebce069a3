#pragma once

#include <functional>
#include <string>

#include "launch.hpp"

namespace tandem::kernel_tests {

/// The text of the fault that a run ends in, or "".
template <typename Run>
std::string fault_of(const Run& run) {
  try {
    run();
  } catch (const emulator::Fault& fault) {
    return fault.what();
  }
  return "";
}
inline std::string fault_of(const std::function<void()>& kernel, const emulator::Grid& grid,
                            const emulator::Options& options = {}) {
  return fault_of([&] { emulator::launch(kernel, grid, options); });
}

}  // namespace tandem::kernel_tests
