// A libcuda.so.1 of our own: the driver functions that Tandem calls, on host memory, writing down what was
// asked. With it the host side of the GPU backend is tested where there is no GPU. Kernels are not run.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "config/trace.hpp"
#include "gpu/abi.hpp"
#include "ops/forward/config.hpp"

namespace tandem::gpu::fake {

struct Launch {
  abi::LaunchConfig config;
  std::vector<abi::LaunchAttribute> attributes;
  std::string symbol;
  ForwardParams params;  ///< where the kernel is a forward one
};

struct Driver {
  int devices = 2;
  int major = 9;
  int minor = 0;
  std::array<int, 2> shared_bytes = {232448, 232448};  ///< a CTA's at most, of each device
  /// The next call of this name fails with this result.
  std::string failing;
  abi::Result failure = 0;

  std::vector<std::string> calls;  ///< names, in order, without those that only ask
  std::vector<Launch> launches;
  std::vector<const char*> images;    ///< of modules that were loaded
  std::vector<abi::Context> current;  ///< the stack of contexts of the one thread that tests
  bool capturing = false;             ///< every stream
  int live_allocations = 0;
  std::size_t allocated_bytes = 0;  ///< since the start
  TraceTarget trace_target = {};    ///< the only global variable of every module
};

/// The state behind the functions.
Driver& state();

}  // namespace tandem::gpu::fake

/// state() by a name that dlsym finds.
extern "C" __attribute__((visibility("default"))) tandem::gpu::fake::Driver* fake_driver_state();
