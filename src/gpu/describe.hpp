// What the GPU backend finds on this machine.
#pragma once

#include <string>
#include <vector>

namespace tandem::gpu {

struct DeviceSummary {
  std::string name;
  std::string capability;  ///< "9.0"
  int multiprocessors = 0;
  int clock_mhz = 0;
  std::size_t memory_bytes = 0;
  bool supported = false;  ///< there are kernels for it ...
  std::string kernels;     ///< ... "sm90", those for Hopper, or "sm80", in 16 bits; else empty
  std::string portable;    ///< why those are PTX of compute_80 (why_portable); else empty
};

struct Description {
  std::string driver;  ///< "13.0", or why there is none
  std::vector<DeviceSummary> devices;
  std::string compiler;         ///< "NVRTC 13.0 (path)", or why there is none
  std::string cache_directory;  ///< empty: kernels are not kept
  std::string cache_refusal;    ///< why the directory is not used; empty if it is
  std::size_t shipped_kernels = 0;
};

/// Never throws for what is missing: the fields say why. Opens the driver and the compiler.
Description describe();

}  // namespace tandem::gpu
