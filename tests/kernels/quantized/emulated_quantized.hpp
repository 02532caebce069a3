// Whole 8-bit forward calls in the emulator: codes and scales made by the CPU's quantiser, the GPU backend's
// own Params and tensor maps, the kernels as host code.
#pragma once

#include <cstdint>
#include <span>

#include "harness/call.hpp"
#include "kernels/quantized_config.hpp"

namespace tandem::kernel_tests {

/// An 8-bit forward kernel that was compiled for the emulator.
struct EmulatedQuantized {
  QuantizedConfig config;
  void (*kernel)(QuantizedParams);
};

/// Every Config family, in three files so that they compile side by side.
std::span<const EmulatedQuantized> narrow_quantized();
std::span<const EmulatedQuantized> wide_quantized();
std::span<const EmulatedQuantized> widest_quantized();

/// The recipe that a Config computes. K's mean is removed, and rotations are done, where all of it is
/// allowed.
Recipe recipe_of(const QuantizedConfig& config);

/// A random problem that `config` can run, small enough for the emulator.
harness::Case random_quantized_case(std::uint64_t seed, const QuantizedConfig& config);

/// Runs one kernel on the call's inputs. Throws emulator::Fault.
void run_quantized(const EmulatedQuantized& kernel, harness::Call& call, std::uint64_t interleaving);

}  // namespace tandem::kernel_tests
