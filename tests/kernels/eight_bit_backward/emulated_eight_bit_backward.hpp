// Whole 8-bit backward calls in the emulator: the GPU backend's own Params and tensor maps, the kernels as
// host code.
#pragma once

#include <cstdint>
#include <span>

#include "emulated_call.hpp"
#include "harness/call.hpp"
#include "ops/eight_bit_backward/config.hpp"

namespace tandem::kernel_tests {

/// The kernels of a Config, compiled for the emulator.
struct EmulatedEightBitBackward {
  EightBitBackwardConfig config;
  QuantizeConfig quantizer;
  void (*mean)(QuantizeParams);
  void (*keys)(EightBitBackwardParams);
  void (*queries)(EightBitBackwardParams);
  void (*main)(EightBitBackwardParams);
  void (*convert)(EightBitBackwardParams);
};

/// A Config of each kind.
std::span<const EmulatedEightBitBackward> eight_bit_backwards();
/// Those with every mask and any lengths, in a file of their own so that they compile side by side.
std::span<const EmulatedEightBitBackward> general_eight_bit_backwards();
std::span<const EmulatedEightBitBackward> narrow_eight_bit_backwards();  ///< of heads of 64 dimensions

/// harness::Case::f32_gradients as the kernels write them.
constexpr unsigned f32_gradients_of(const EightBitBackwardConfig& c) {
  return (c.f32_dq ? 1U : 0U) | (c.f32_dk_dv ? 6U : 0U);
}

/// A random problem that `config` can run, small enough for the emulator, with every feature that the Config
/// allows.
harness::Case random_eight_bit_backward_case(std::uint64_t seed, const EmulatedEightBitBackward& kernels);

/// How a call is emulated.
struct EightBitBackwardRun {
  std::uint64_t seed = 0;       ///< of the interleaving
  unsigned blocks = 2;          ///< SMs of the GPU: a CTA has several tiles
  unsigned host_threads = 2;    ///< blocks that run at once
  bool convert_beside = false;  ///< the conversion begins before the main kernel, on a thread of its own
};

/// Fills in call's gradients from its out, lse and max_logits. Throws emulator::Fault.
void run_eight_bit_backward(const EmulatedEightBitBackward& kernels, harness::Call& call,
                            const EightBitBackwardRun& run);

}  // namespace tandem::kernel_tests
