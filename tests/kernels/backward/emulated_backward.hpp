// Whole backward calls in the emulator: the GPU backend's own Params and tensor maps, the kernels as host
// code.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "emulated_call.hpp"
#include "gpu/kernel_spec.hpp"
#include "harness/call.hpp"

namespace tandem::kernel_tests {

struct AnyFunctions;

/// What tests ask of a backward Config, of whatever type.
struct EmulatedBackwardConfig {
  template <typename Config>
  constexpr EmulatedBackwardConfig(const Config& c)  // NOLINT(google-explicit-constructor)
      : of_kernel(c),
        tiling(c.tiling),
        tile_keys(c.tile_keys()),
        mask(c.mask),
        transform(c.transform),
        deterministic(c.schedule.deterministic),
        keeps_p(c.keeps_p()),
        turned(c.schedule.turned),
        f32_dq(c.f32_dq),
        f32_dk_dv(c.f32_dk_dv),
        functions(c.functions) {}

  [[nodiscard]] std::string describe() const {
    return gpu::visit_backward(of_kernel, [](const auto& c) { return kernel_tests::describe(c); });
  }

  gpu::KernelConfig of_kernel;
  BackwardTiling tiling;
  int tile_keys;
  Mask mask;
  ScoreTransform transform;
  bool deterministic, keeps_p, turned, f32_dq, f32_dk_dv;
  Functions functions;
};

/// The kernels of a backward Config, compiled for the emulator.
struct EmulatedBackward {
  EmulatedBackwardConfig config;
  void (*preprocess)(BackwardParams);
  void (*gated)(GatedBackwardParams);  ///< in its place, of calls with an output gate
  void (*main)(BackwardParams);        ///< null where it has functions
  void (*convert)(BackwardParams);
  void (*sink)(BackwardParams);
  void (*functions)(WithFunctions<BackwardParams>) = nullptr;
  void (*sm80)(Sm80BackwardParams) = nullptr;  ///< of that family, in place of `main`
  void (*sm80_functions)(WithAddresses<WithFunctions<BackwardParams>>) = nullptr;  ///< and of `functions`
  void (*lists)(WithFunctions<BackwardParams>) = nullptr;  ///< before a kernel that visits listed blocks
  /// Where they add to gradients of captured tensors.
  void (*captured)(WithCapturedGradients<WithFunctions<BackwardParams>>) = nullptr;
  void (*sm80_captured)(WithCapturedGradients<WithAddresses<WithFunctions<BackwardParams>>>) = nullptr;
};

/// Every Config family, in four files so that they compile side by side.
std::span<const EmulatedBackward> sm80_backwards();
std::span<const EmulatedBackward> narrow_backwards();
std::span<const EmulatedBackward> wide_backwards();
std::span<const EmulatedBackward> widest_backwards();
/// For bounds on the head dimension, element types and softcap, that know every mask and any lengths; the
/// narrowest first.
std::span<const EmulatedBackward> general_backwards();
std::span<const EmulatedBackward> general_sm80_backwards();
/// With gradients in f32: dq, dk and dv, or all.
std::span<const EmulatedBackward> f32_backwards();
std::span<const EmulatedBackward> f32_sm80_backwards();

/// The same with functions of scores, which run any that was printed (functions/any_function.hpp).
std::span<const EmulatedBackward> function_backwards();
/// Those of equal lengths, which visit listed query blocks.
std::span<const EmulatedBackward> function_backwards_of_lists();
/// Those of the family sm80, with lists and without.
std::span<const EmulatedBackward> function_sm80_backwards();
std::span<const EmulatedBackward> function_sm80_backwards_of_lists();

/// Those with gradients of captured tensors, of both families.
std::span<const EmulatedBackward> captured_backwards();
std::span<const EmulatedBackward> captured_sm80_backwards();

/// Those with dropout.
std::span<const EmulatedBackward> dropout_backwards();
std::span<const EmulatedBackward> dropout_sm80_backwards();

/// A random problem that `config` can run, small enough for the emulator, with every feature that the Config
/// allows.
harness::Case random_backward_case(std::uint64_t seed, const EmulatedBackwardConfig& config);

/// How a call is emulated.
struct EmulatedRun {
  std::uint64_t seed = 0;                   ///< of the interleaving
  unsigned blocks = 2;                      ///< SMs of the GPU: a CTA has several tiles
  unsigned host_threads = 1;                ///< blocks that run at once; those that wait for each other must
  const AnyFunctions* functions = nullptr;  ///< in place of the call's own
  /// Called with the lists of query blocks, once they are made.
  std::function<void(std::span<unsigned int>)> with_lists = {};
  bool clears = true;           ///< gradients of captured tensors, before the main kernel adds to them
  bool convert_beside = false;  ///< the conversion begins before the main kernel, on a thread of its own
};

/// Fills in call's gradients from its out and lse. Throws emulator::Fault.
void run_backward(const EmulatedBackward& kernels, harness::Call& call, const EmulatedRun& run);

}  // namespace tandem::kernel_tests
