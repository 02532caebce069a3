// The kernels that `tandem trace` can run in the emulator: compiled into the program, one for each Config.
#pragma once

#include <span>

#include "ops/forward/config.hpp"
#include "trace/model.hpp"

namespace tandem::cli::trace {

struct EmulatedKernel {
  ForwardConfig config;
  void (*kernel)(ForwardParams);
  Names (*names)();  ///< from where its barriers lie in shared memory
};

/// In three files so that they compile side by side.
std::span<const EmulatedKernel> narrow_kernels();
std::span<const EmulatedKernel> wide_kernels();
std::span<const EmulatedKernel> widest_kernels();

}  // namespace tandem::cli::trace
