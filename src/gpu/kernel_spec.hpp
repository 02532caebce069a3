// What the host must know of a kernel, in one record, and what a Config makes of it: the C++20 expression
// that NVRTC instantiates, and the shape of its thread blocks.
#pragma once

#include <string>
#include <string_view>
#include <variant>

#include "gpu/compiler.hpp"
#include "ops/backward/sm80/config.hpp"
#include "ops/cache/config.hpp"
#include "ops/decode/config.hpp"
#include "ops/eight_bit/config.hpp"
#include "ops/eight_bit_backward/config.hpp"
#include "ops/forward/sm80/config.hpp"
#include "ops/latent/config.hpp"
#include "ops/pack/config.hpp"
#include "ops/quantize/config.hpp"
#include "ops/split/config.hpp"

namespace tandem::gpu {

/// The Config of any kernel.
using KernelConfig = std::variant<ForwardConfig, Sm80ForwardConfig, DecodeConfig, LatentConfig, CombineConfig,
                                  EightBitConfig, BackwardConfig, Sm80BackwardConfig, EightBitBackwardConfig,
                                  QuantizeConfig, PackConfig, AppendConfig, MergeConfig>;

/// f of a Config of one of the kernels that compute the forward pass of 16 bits.
template <typename F>
auto visit_forward(const KernelConfig& config, F&& f) {
  if (const auto* c = std::get_if<DecodeConfig>(&config)) return f(*c);
  if (const auto* c = std::get_if<LatentConfig>(&config)) return f(*c);
  if (const auto* c = std::get_if<Sm80ForwardConfig>(&config)) return f(*c);
  return f(std::get<ForwardConfig>(config));
}
/// f of a Config of the 16-bit backward kernels.
template <typename F>
auto visit_backward(const KernelConfig& config, F&& f) {
  if (const auto* c = std::get_if<Sm80BackwardConfig>(&config)) return f(*c);
  return f(std::get<BackwardConfig>(config));
}

/// "tandem::ForwardConfig{.element = tandem::Element::bf16, .head_dim_qk = 128, ...}": valid C++20 that gives
/// `config` back.
std::string expression_of(const KernelConfig& config);

/// The thread blocks of a launch.
struct BlockShape {
  int threads = 128;
  int shared_bytes = 0;  ///< dynamic shared memory
  int cluster = 1;       ///< blocks of a cluster
};

struct Step;
class StepParams;

/// A kernel. Each is a constant in namespace kernels, declared beside the function that fills in its Params;
/// a Config of a new type is also listed in KernelConfig.
struct KernelSpec {
  const char* header;  ///< its source, under src/
  const char* entry;   ///< its name in namespace tandem, that of a template on a Config
  BlockShape (*block)(const KernelConfig& config);
  /// Gives StepParams::fill what the kernel is launched with, the same for all kernels of a call that have
  /// this function. Null where the call has Params of its own (ops/run.cpp).
  void (*params)(StepParams& call, const Step& step) = nullptr;

  /// The kernel as `config`, one of its kind, specialises it.
  [[nodiscard]] KernelName name(const KernelConfig& config) const;
};

}  // namespace tandem::gpu
