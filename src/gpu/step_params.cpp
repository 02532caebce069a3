#include "gpu/step_params.hpp"

#include <algorithm>

namespace tandem::gpu {

StepParams::StepParams(const Steps& steps, char* memory, EncodeTensorMap encoder)
    : steps_(steps), memory_(memory), encode_(encoder) {
  if (memory == nullptr) return;
  for (std::size_t i = 0; i < loaded_count; ++i) {
    if (!steps.sources[i]) continue;
    if (!placed_problem_) placed_problem_ = steps.problem;
    const auto which = static_cast<Loaded>(i);
    operand_of(*placed_problem_, which).data = at<char>(copy_of(which));
  }
  if (steps.q_scale) placed_problem_->q_scale.data = at<float>(Region::q_scales);
  const auto in_workspace = [](const auto& map) { return map && map->region != Region::none; };
  if (std::ranges::any_of(steps.maps, in_workspace)) {
    placed_maps_ = steps.maps;
    place(*placed_maps_, steps.workspace, memory);
  }
}

FunctionParams StepParams::functions(const ListedBlocks& listed) const {
  FunctionParams functions = function_params(functions_of(problem()));
  if (listed.count > 0) {
    functions.lists = listed.lists;
    functions.lists.data = at<unsigned int>(Region::block_lists);
  }
  return functions;
}

const void* StepParams::of(const Step& step) {
  if (filled_by_ != step.kernel->params || tensor_ != step.tensor) step.kernel->params(*this, step);
  filled_by_ = step.kernel->params;
  tensor_ = step.tensor;
  return filled_;
}

}  // namespace tandem::gpu
