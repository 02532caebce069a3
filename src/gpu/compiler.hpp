// NVRTC, opened at run time, and what it makes of a kernel.
#pragma once

#include <string>
#include <vector>

#include "gpu/sources.hpp"

namespace tandem::gpu {

/// What kernels are compiled for on Hopper, with the instructions that it alone has.
constexpr const char* hopper_architecture = "sm_90a";
/// The instructions that every GPU from Ampere on has, in PTX that its driver compiles.
constexpr const char* portable_architecture = "compute_80";

/// Names one specialised kernel: the file it is in, the expression that instantiates it, and for what.
struct KernelName {
  std::string header;                              ///< "ops/forward/sm90/forward.cuh"
  std::string expression;                          ///< "tandem::forward<tandem::ForwardConfig{...}>"
  std::string architecture = hopper_architecture;  ///< that it is compiled for
  std::string functions = {};  ///< text behind the file: the caller's functions that it is compiled with
  friend bool operator==(const KernelName&, const KernelName&) = default;
};

/// What ptxas said of a kernel. Local memory is slow: spills and stack frames cost time.
struct KernelUsage {
  int registers = 0;
  int stack_bytes = 0;
  int spill_store_bytes = 0;
  int spill_load_bytes = 0;
  /// ptxas found WGMMAs whose registers it could not leave alone, and waits after each: no overlap is
  /// left.
  int serialised = 0;
};

struct CompiledKernel {
  std::vector<char> image;  ///< a cubin; or PTX, which ends with a 0
  std::string symbol;       ///< the mangled name in the image
  KernelUsage usage;        ///< what a cubin's kernel uses

  [[nodiscard]] bool is_ptx() const { return !image.empty() && image.front() != '\x7f'; }
};

/// An NVRTC library that has been opened.
struct CompilerInfo {
  int major = 0;
  int minor = 0;
  std::string path;  ///< the file it was opened from
};

/// The compiler, opened at the first call: from TANDEM_NVRTC (a file; an Error if it cannot be opened), else
/// libnvrtc.so.13 or .12 from the process, the system path, the nvidia wheels beside the Python package, or
/// /usr/local/cuda. Throws Error (unsupported), naming what was tried, if there is none.
const CompilerInfo& compiler();

/// Why compiler() would throw, or an empty string. Never throws.
std::string why_no_compiler();

/// Why nothing can be compiled for an architecture: there is no compiler, or it is older than the
/// architecture. Empty if it can. Never throws.
std::string why_not_compiled_for(const std::string& architecture);

/// The options every kernel is compiled with, behind that of its architecture.
std::string architecture_option(const KernelName& name);
std::span<const char* const> compile_options();

/// Compiles a kernel to a cubin for its architecture, or to PTX for a virtual one ("compute_80").
/// Thread-safe. Throws Error (runtime) with the compiler's log if it is refused. `sources` defaults to the
/// library's own.
CompiledKernel compile(const KernelName& name, std::span<const Source> sources = device_sources());

/// Finds ptxas's report of `symbol` in a log made with --ptxas-options=-v.
KernelUsage parse_usage(const std::string& log);

}  // namespace tandem::gpu
