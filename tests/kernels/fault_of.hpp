#pragma once

#include <functional>
#include <string>

#include "launch.hpp"

namespace tandem::kernel_tests {

/// The fault's text, or "" if the kernel ran.
inline std::string fault_of(const std::function<void()>& kernel, const emulator::Grid& grid,
                            const emulator::Options& options = {}) {
  try {
    emulator::launch(kernel, grid, options);
  } catch (const emulator::Fault& fault) {
    return fault.what();
  }
  return "";
}

}  // namespace tandem::kernel_tests
