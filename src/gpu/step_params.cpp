#include "gpu/step_params.hpp"

#include "gpu/backward_params.hpp"
#include "gpu/eight_bit_forward_params.hpp"
#include "gpu/forward_params.hpp"
#include "gpu/pack_params.hpp"
#include "gpu/quantize_params.hpp"

namespace tandem::gpu {

StepParams::StepParams(const Steps& steps, char* memory, EncodeTensorMap encode)
    : steps_(steps), memory_(memory), encode_(encode), problem_(steps.problem) {
  for (const Loaded which : backward_loaded_tensors) {
    if (!steps.sources[index_of(which)].given() || memory == nullptr) continue;
    operand_of(problem_, which).data = steps.workspace.at(copy_of(which), memory);
  }
}

/// 0 before the launches; null where every tile has a thread block.
unsigned int* StepParams::tile_counter() const {
  const Workspace& w = steps_.workspace;
  return w.counter_bytes() > 0 ? w.at<unsigned int>(Region::counters, memory_) : nullptr;
}

PackParams StepParams::pack(Loaded tensor) const {
  LoadedTensor t = loaded_tensor(problem_, tensor);
  return make_pack_params({.operand = steps_.sources[index_of(tensor)],
                           .head_dim = t.head_dim,
                           .rows = t.rows,
                           .heads = t.heads,
                           .batch = t.batch},
                          t.operand.data);
}

ArrangeParams StepParams::dequantize() const {
  Problem codes = problem_;
  codes.k = steps_.sources[index_of(Loaded::k)];
  codes.v = steps_.sources[index_of(Loaded::v)];
  return make_dequantize_params(codes, problem_);
}

EightBitParams StepParams::eight_bit(const EightBitConfig& config) const {
  const LoadedMaps maps = placed(steps_.maps, steps_.workspace, memory_);
  if (config.transpose_v) {
    return make_brought_params(problem_, config, maps, encode_, steps_.multiprocessors, tile_counter());
  }
  return make_eight_bit_params(problem_, config, quantized_scales(steps_.recipe, steps_.workspace, memory_),
                               maps, encode_, steps_.multiprocessors, tile_counter());
}

const void* StepParams::of(const Step& step) {
  switch (step.kernel) {
    case Kernel::pack: return &filled_.emplace<PackParams>(pack(step.tensor));
    case Kernel::dequantize: return &filled_.emplace<ArrangeParams>(dequantize());
    case Kernel::mean_of_keys:
    case Kernel::largest_of_groups:
    case Kernel::quantize:
      if (!std::holds_alternative<QuantizeParams>(filled_)) {
        filled_ = make_quantize_params(problem_, steps_.recipe, steps_.workspace, memory_);
      }
      return &std::get<QuantizeParams>(filled_);
    case Kernel::arrange_codes:
      return &filled_.emplace<ArrangeParams>(make_arrange_params(
          problem_, make_quantize_params(problem_, steps_.recipe, steps_.workspace, memory_)));
    case Kernel::forward:
      return &filled_.emplace<ForwardParams>(make_forward_params(
          problem_, std::get<ForwardConfig>(step.config).tiling(),
          placed(steps_.maps, steps_.workspace, memory_), encode_, steps_.multiprocessors, tile_counter()));
    case Kernel::eight_bit_forward:
      return &filled_.emplace<EightBitParams>(eight_bit(std::get<EightBitConfig>(step.config)));
    case Kernel::backward_preprocess:
    case Kernel::backward:
    case Kernel::backward_convert:
    case Kernel::backward_sink:
      if (!std::holds_alternative<BackwardParams>(filled_)) {
        filled_ = make_backward_params(problem_, std::get<BackwardConfig>(steps_.config),
                                       placed(steps_.maps, steps_.workspace, memory_), encode_,
                                       steps_.workspace, memory_);
      }
      return &std::get<BackwardParams>(filled_);
  }
  return nullptr;
}

}  // namespace tandem::gpu
