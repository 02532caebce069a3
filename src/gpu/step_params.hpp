// What each step of a call is launched with. Pure: needs no driver.
#pragma once

#include <new>
#include <optional>
#include <type_traits>

#include "gpu/function_source.hpp"
#include "gpu/steps.hpp"

namespace tandem::gpu {

/// The Params of a call's steps, asked for in their order, and what they are made of. Kernels that share
/// theirs have them filled in once.
class StepParams {
 public:
  /// `memory` is that of the workspace. `steps` must outlive this.
  StepParams(const Steps& steps, char* memory, EncodeTensorMap encoder);

  /// The kernel's one parameter. Valid until the next call.
  const void* of(const Step& step);

  /// For KernelSpec::params: keeps what `make` gives, made in place.
  template <typename Make>
  void fill(Make&& make) {
    using Params = std::invoke_result_t<Make>;
    static_assert(sizeof(Params) <= sizeof(filled_) && std::is_trivially_destructible_v<Params>);
    ::new (static_cast<void*>(filled_)) Params(make());
  }

  [[nodiscard]] const Steps& steps() const { return steps_; }
  [[nodiscard]] const Problem& problem() const { return placed_problem_ ? *placed_problem_ : steps_.problem; }
  [[nodiscard]] const LoadedMaps& maps() const { return placed_maps_ ? *placed_maps_ : steps_.maps; }
  [[nodiscard]] EncodeTensorMap encode() const { return encode_; }
  [[nodiscard]] char* memory() const { return memory_; }
  template <typename T>
  [[nodiscard]] T* at(Region region) const {
    return steps_.workspace.at<T>(region, memory_);
  }
  /// 0 before the launches; null where every tile has a thread block.
  [[nodiscard]] unsigned int* tile_counter() const {
    return steps_.workspace.counter_bytes() > 0 ? at<unsigned int>(Region::counters) : nullptr;
  }
  /// What the call's functions read, and the lists that a kernel before has made, if any.
  [[nodiscard]] FunctionParams functions(const ListedBlocks& listed) const;

 private:
  const Steps& steps_;
  char* memory_;
  EncodeTensorMap encode_;
  /// Where any of them is in the workspace: the problem and the maps with their addresses there.
  std::optional<Problem> placed_problem_;
  std::optional<LoadedMaps> placed_maps_;
  void (*filled_by_)(StepParams&, const Step&) = nullptr;
  Loaded tensor_ = Loaded::q;      ///< Step::tensor of what is filled in
  alignas(64) char filled_[4096];  // drivers before CUDA 12.1 take no more
};

}  // namespace tandem::gpu
