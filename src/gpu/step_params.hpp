// What each step of a call is launched with. Pure: needs no driver.
#pragma once

#include <optional>
#include <variant>

#include "gpu/steps.hpp"

namespace tandem::gpu {

/// The Params of a call's steps, asked for in their order. Steps that share theirs have them filled in once.
class StepParams {
 public:
  /// `memory` is that of the workspace. `steps` must outlive this.
  StepParams(const Steps& steps, char* memory, EncodeTensorMap encode);

  /// The kernel's one parameter. Valid until the next call.
  const void* of(const Step& step);

 private:
  const Problem& problem() const { return placed_problem_ ? *placed_problem_ : steps_.problem; }
  const LoadedMaps& maps() const { return placed_maps_ ? *placed_maps_ : steps_.maps; }
  LoadedTensor source_of(Loaded tensor) const;
  const void* pack(const Step& step);
  ArrangeParams dequantize() const;
  QuantizeParams quantize() const;
  EightBitParams eight_bit(const EightBitConfig& config) const;
  unsigned int* tile_counter() const;
  SplitParts split_parts() const;
  const void* forward(const ForwardConfig& config);
  template <typename Config>
  FunctionParams functions(const Config& config) const;
  template <typename Params>
  const void* fill_forward(const Params& params);
  const void* backward(const BackwardConfig& config);
  template <typename Params, typename Make>
  const void* fill(Make&& make);
  template <typename Params, typename Make>
  const void* fill_backward(const BackwardConfig& config, Make&& make);

  const Steps& steps_;
  char* memory_;
  EncodeTensorMap encode_;
  /// Where any of them is in the workspace: the problem and the maps with their addresses there.
  std::optional<Problem> placed_problem_;
  std::optional<LoadedMaps> placed_maps_;
  std::variant<std::monostate, PackParams, WidenParams, QuantizeParams, ArrangeParams, ForwardParams,
               ForwardParamsBySequence, MixedForwardParams, WithKeyScales<ForwardParamsBySequence>,
               WithRowScales<MixedForwardParams>, WithRowScales<WithKeyScales<ForwardParamsBySequence>>,
               Sm80ForwardParams, WithValueAddress<ForwardParamsBySequence>, WithFunctions<ForwardParams>,
               WithValueAddress<WithFunctions<ForwardParams>>, EightBitParams, BackwardParams,
               Sm80BackwardParams, WithFunctions<BackwardParams>,
               WithAddresses<WithFunctions<BackwardParams>>, ClearParams,
               WithCapturedGradients<WithFunctions<BackwardParams>>,
               WithCapturedGradients<WithAddresses<WithFunctions<BackwardParams>>>>
      filled_;
  const ForwardParams* forward_ = nullptr;  ///< in filled_, once a forward kernel's are there
};

}  // namespace tandem::gpu
