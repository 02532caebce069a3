// Whole 8-bit forward calls in the emulator: quantized values and scales made by the CPU's quantiser, the GPU
// backend's own Params and tensor maps, the kernels as host code.
#pragma once

#include <cstdint>
#include <span>

#include "harness/call.hpp"
#include "ops/eight_bit/config.hpp"

namespace tandem::kernel_tests {

/// An 8-bit forward kernel that was compiled for the emulator.
struct EmulatedEightBit {
  EightBitConfig config;
  void (*kernel)(EightBitParams);
  void (*with_maxima)(EightBitParamsWithMaxima) = nullptr;  ///< in its place, where it writes max_logits
};

/// Every Config family, in three files so that they compile side by side.
std::span<const EmulatedEightBit> narrow_eight_bit();
std::span<const EmulatedEightBit> wide_eight_bit();
std::span<const EmulatedEightBit> widest_eight_bit();

/// The recipe that a Config computes. K's mean is removed, and rotations are done, where all of it is
/// allowed.
Recipe recipe_of(const EightBitConfig& config);

/// A random problem that `config` can run, small enough for the emulator.
harness::Case random_eight_bit_case(std::uint64_t seed, const EightBitConfig& config);

/// Runs one kernel on the call's inputs. Throws emulator::Fault.
void run_eight_bit(const EmulatedEightBit& kernel, harness::Call& call, std::uint64_t interleaving);

}  // namespace tandem::kernel_tests
