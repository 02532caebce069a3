// Whole forward calls in the emulator: the GPU backend's own Params and tensor maps, the kernels as host
// code.
#pragma once

#include <array>
#include <cstdint>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>

#include "emulated_call.hpp"
#include "harness/runner.hpp"
#include "launch.hpp"
#include "ops/forward/config.hpp"
#include "ops/forward/launch.hpp"

namespace tandem::kernel_tests {

struct AnyFunctions;

/// What tests ask of a forward kernel's Config, of whatever type.
struct EmulatedConfig {
  template <typename Config>
  constexpr EmulatedConfig(const Config& c)  // NOLINT(google-explicit-constructor)
      : of_kernel(c),
        tiling(c.tiling),
        mask(c.mask),
        keys(c.keys),
        transform(c.transform),
        split(c.schedule.split),
        invariant(c.schedule.invariant),
        family(c.family),
        key_type(c.key_type),
        row_scales(c.row_scales),
        v_in_k(c.v_in_k),
        pairs(c.pairs),
        functions(c.functions) {}

  [[nodiscard]] bool has_byte_keys() const { return key_type != OperandType::input; }
  [[nodiscard]] std::string describe() const {
    return gpu::visit_forward(of_kernel, [](const auto& c) { return kernel_tests::describe(c); });
  }

  gpu::KernelConfig of_kernel;
  Tiling tiling;
  Mask mask;
  KeySource keys;
  ScoreTransform transform;
  bool split, invariant;
  Family family;
  OperandType key_type;
  bool row_scales, v_in_k, pairs;
  Functions functions;
};

/// A forward kernel that was compiled for the emulator.
struct EmulatedForward {
  EmulatedConfig config;
  /// Launches it with `params` and what the Config adds to them; `functions` is null where it has none.
  void (*launch)(const Problem& p, const ForwardParams& params, const FunctionParams* functions,
                 const emulator::Grid& grid, const emulator::Options& options);
  /// Of a Config with splits, launched with what the kernel was.
  void (*combine)(const Problem& p, const ForwardParams& params, const emulator::Grid& grid,
                  const emulator::Options& options) = nullptr;
  decltype(launch) lists = nullptr;  ///< before a kernel that visits listed blocks
};

/// For lists of tests; GoogleTest would else print thousands of objects byte by byte, in each test's process.
inline void PrintTo(const EmulatedForward& kernel, std::ostream* out) {
  *out << kernel.config.describe();
}

/// What EmulatedForward::launch does, for a kernel that takes `Params`, or what of them lies before
/// additions.
template <auto config, typename Params>
void launch_forward(void (*kernel)(Params), const Problem& p, const ForwardParams& params,
                    const FunctionParams* functions, const emulator::Grid& grid,
                    const emulator::Options& options) {
  bool launched = false;
  gpu::with_params_of(config, p, params, functions, [&](const auto& all) {
    if constexpr (std::is_convertible_v<decltype(all), Params>) {
      if (!std::is_same_v<std::remove_cvref_t<decltype(all)>, Params> && functions == nullptr) return;
      emulator::launch(kernel, static_cast<const Params&>(all), grid, options);
      launched = true;
    }
  });
  if (!launched) throw std::logic_error("the kernel is launched with other parameters");
}

/// Every Config family, in three files so that they compile side by side.
std::span<const EmulatedForward> narrow_forwards();
std::span<const EmulatedForward> wide_forwards();
std::span<const EmulatedForward> widest_forwards();
/// Those for tiles of few key blocks.
std::span<const EmulatedForward> short_tile_forwards();
/// One for each element type, score transform and bound on the head dimension, that knows every mask and any
/// lengths.
std::span<const EmulatedForward> general_forwards();
/// Those that write the largest logit of each row, in tiles of every kind.
std::span<const EmulatedForward> maxima_forwards();
/// Those with an output gate, in tiles of every kind; with functions and dropout; and of the family sm80.
std::span<const EmulatedForward> gated_forwards();
std::span<const EmulatedForward> gated_function_forwards();
std::span<const EmulatedForward> gated_sm80_forwards();
/// Those whose thread blocks share the key blocks of tiles, with what merges the parts.
std::span<const EmulatedForward> split_forwards();
/// The same on keys of 8 bits: those that share, and those that do not.
std::span<const EmulatedForward> mixed_split_forwards();
std::span<const EmulatedForward> mixed_forwards();
/// Those with a scale for each key and KV head: that share, that do not, and with heads as rows.
std::span<const EmulatedForward> row_scales_split_forwards();
std::span<const EmulatedForward> row_scales_forwards();
std::span<const EmulatedForward> row_scales_heads_as_rows_forwards();
/// Those of the family sm80: every shape of its tiles; those that know every mask and any lengths; the same
/// whose thread blocks share keys; and those with heads as rows.
std::span<const EmulatedForward> sm80_forwards();
std::span<const EmulatedForward> general_sm80_forwards();
std::span<const EmulatedForward> split_sm80_forwards();
std::span<const EmulatedForward> grouped_sm80_forwards();
/// Those with functions of scores, which run any that was printed (functions/any_function.hpp): of many
/// queries, and of few.
std::span<const EmulatedForward> function_forwards();
std::span<const EmulatedForward> function_forwards_of_few();
/// The same of equal lengths, whose kernels visit listed key blocks.
std::span<const EmulatedForward> function_forwards_of_lists();
/// Those of the family sm80: of many queries, of few, and with lists.
std::span<const EmulatedForward> function_sm80_forwards();
std::span<const EmulatedForward> function_sm80_forwards_of_few();
std::span<const EmulatedForward> function_sm80_forwards_of_lists();
/// Those with dropout, and of few queries.
std::span<const EmulatedForward> dropout_forwards();
std::span<const EmulatedForward> dropout_forwards_of_few();
std::span<const EmulatedForward> dropout_sm80_forwards();
std::span<const EmulatedForward> dropout_sm80_forwards_of_few();
/// Those of tiles of 16 rows.
std::span<const EmulatedForward> decode_forwards();
std::span<const EmulatedForward> decode_bytes_forwards();

/// Those of the kernel `forward_wide`.
std::span<const EmulatedForward> wide_heads_forwards();
/// The same in clusters of two CTAs.
std::span<const EmulatedForward> pair_forwards();
/// The same up to the widest heads, with every mask and any lengths, for the contract.
std::span<const EmulatedForward> widest_heads_forwards();

/// A random problem that `config` can run, small enough for the emulator, with every feature that the Config
/// allows.
harness::Case random_forward_case(std::uint64_t seed, const EmulatedConfig& config);

/// Those whose tiles have query heads of several queries as rows, for few queries of grouped heads.
std::span<const EmulatedForward> heads_as_rows_forwards();
std::span<const EmulatedForward> mixed_heads_as_rows_forwards();

/// Runs one kernel; gradients are the CPU's, from its outputs. Throws emulator::Fault.
class EmulatorRunner : public harness::Runner {
 public:
  explicit EmulatorRunner(const EmulatedForward& kernel) : kernel_(kernel) {}
  [[nodiscard]] std::string name() const override { return "emulator " + kernel_.config.describe(); }
  [[nodiscard]] std::string refuses(const harness::Case& spec) const override;
  [[nodiscard]] bool splits() const { return kernel_.config.split; }
  /// The calls that it takes ask for max_logits.
  [[nodiscard]] bool finds_maxima() const { return kernel_.config.tiling.max_logits; }
  [[nodiscard]] bool in_cluster() const {
    const auto* const decode = std::get_if<DecodeConfig>(&kernel_.config.of_kernel);
    return decode != nullptr && decode->cluster() > 1;
  }
  void forward(harness::Call& call) override;
  void backward(harness::Call& call) override;

  const AnyFunctions* functions = nullptr;  ///< in place of the call's own
  std::uint64_t seed = 0;                   ///< of the interleaving
  unsigned blocks = 2;                      ///< of the grid: a block has many tiles, as on a GPU
  unsigned split_blocks = 5;                ///< the same where blocks share tiles
  std::vector<unsigned int> lists;          ///< of key blocks, that the last call has made
  int sms = 2;                              ///< for the order of tiles: few, so that some heads come in order

 private:
  /// Runs the kernel, and says with what.
  [[nodiscard]] ForwardParams launch_forward(const Problem& p, const gpu::SplitParts& parts,
                                             unsigned int* tile_counter, const emulator::Options& options);
  void launch_with_functions(const Problem& p, const ForwardParams& params, const emulator::Grid& grid,
                             emulator::Options options);

  EmulatedForward kernel_;
};

}  // namespace tandem::kernel_tests
