// What each step of a call is launched with. Pure: needs no driver.
#pragma once

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
  PackParams pack(Loaded tensor) const;
  ArrangeParams dequantize() const;
  EightBitParams eight_bit(const EightBitConfig& config) const;
  unsigned int* tile_counter() const;

  const Steps& steps_;
  char* memory_;
  EncodeTensorMap encode_;
  Problem problem_;  ///< with the addresses of operands in the workspace
  std::variant<std::monostate, PackParams, QuantizeParams, ArrangeParams, ForwardParams, EightBitParams,
               BackwardParams>
      filled_;
};

}  // namespace tandem::gpu
