#include "gpu/step_params.hpp"

#include <algorithm>

#include "gpu/backward_params.hpp"
#include "gpu/eight_bit_forward_params.hpp"
#include "gpu/forward_params.hpp"
#include "gpu/function_source.hpp"
#include "gpu/pack_params.hpp"
#include "gpu/quantize_params.hpp"

namespace tandem::gpu {

namespace {

/// What `make` gives, made where a variant keeps it.
template <typename Make>
struct InPlace {
  const Make& make;
  operator auto() const { return make(); }  // NOLINT(google-explicit-constructor)
};

ListedBlocks listed_of(const Problem& problem, const ForwardConfig& config) {
  return listed_blocks(problem, config.tiling);
}
ListedBlocks listed_of(const Problem& problem, const BackwardConfig& config) {
  return listed_query_blocks(problem, config);
}

}  // namespace

StepParams::StepParams(const Steps& steps, char* memory, EncodeTensorMap encode)
    : steps_(steps), memory_(memory), encode_(encode) {
  if (memory == nullptr) return;
  for (const Loaded which : backward_loaded_tensors) {
    if (!steps.sources[index_of(which)]) continue;
    if (!placed_problem_) placed_problem_ = steps.problem;
    operand_of(*placed_problem_, which).data = steps.workspace.at(copy_of(which), memory);
  }
  if (steps.q_scale) placed_problem_->q_scale.data = steps.workspace.at<float>(Region::q_scales, memory);
  const auto in_workspace = [](const auto& map) { return map && map->region != Region::none; };
  if (std::ranges::any_of(steps.maps, in_workspace)) {
    placed_maps_ = steps.maps;
    place(*placed_maps_, steps.workspace, memory);
  }
}

template <typename Params, typename Make>
const void* StepParams::fill(Make&& make) {
  return &filled_.emplace<Params>(InPlace<Make>{make});
}

/// 0 before the launches; null where every tile has a thread block.
unsigned int* StepParams::tile_counter() const {
  const Workspace& w = steps_.workspace;
  return w.counter_bytes() > 0 ? w.at<unsigned int>(Region::counters, memory_) : nullptr;
}

SplitParts StepParams::split_parts() const {
  const Workspace& w = steps_.workspace;
  const auto& config = std::get<ForwardConfig>(steps_.config);
  if (!config.schedule.split && !config.schedule.invariant) return {};
  return {.out = w.at<float>(Region::part_out, memory_),
          .sums = w.at<PartSum>(Region::part_sums, memory_),
          .division = steps_.work};
}

LoadedTensor StepParams::source_of(Loaded tensor) const {
  const LoadedTensor t = loaded_tensor(problem(), tensor);
  return {.operand = *steps_.sources[index_of(tensor)],
          .head_dim = t.head_dim,
          .rows = t.rows,
          .heads = t.heads,
          .batch = t.batch};
}

const void* StepParams::pack(const Step& step) {
  void* const target = operand_of(problem(), step.tensor).data;
  if (!std::get<PackConfig>(step.config).widens)
    return fill<PackParams>([&] { return make_pack_params(source_of(step.tensor), target); });
  return fill<WidenParams>([&] {
    return make_widen_params(problem(), source_of(step.tensor), steps_.q_scale.value_or(problem().q_scale),
                             target, steps_.workspace.at<float>(Region::q_scales, memory_));
  });
}

ArrangeParams StepParams::dequantize() const {
  Problem quantized = problem();
  quantized.k = *steps_.sources[index_of(Loaded::k)];
  quantized.v = *steps_.sources[index_of(Loaded::v)];
  return make_dequantize_params(quantized, problem());
}

QuantizeParams StepParams::quantize() const {
  return make_quantize_params(problem(), steps_.recipe, steps_.workspace, memory_);
}

EightBitParams StepParams::eight_bit(const EightBitConfig& config) const {
  if (config.transpose_v) {
    return make_caller_params(problem(), config, maps(), encode_, steps_.multiprocessors, tile_counter());
  }
  return make_eight_bit_params(problem(), config, quantized_scales(steps_.recipe, steps_.workspace, memory_),
                               maps(), encode_, steps_.multiprocessors, tile_counter());
}

/// What a call's functions read, and where the lists of the kernel before them are.
template <typename Config>
FunctionParams StepParams::functions(const Config& config) const {
  FunctionParams functions = function_params(functions_of(problem()));
  if (config.functions.block_lists) {
    functions.lists = listed_of(problem(), config).lists;
    functions.lists.data = steps_.workspace.at<unsigned int>(Region::block_lists, memory_);
  }
  return functions;
}

// Drivers before CUDA 12.1 take 4 KB of parameters.
static_assert(sizeof(WithCapturedGradients<WithAddresses<WithFunctions<BackwardParams>>>) <= 4096);

/// What kernels with functions are launched with, and where gradients of captured tensors are wanted with
/// those.
template <typename Params, typename Make>
const void* StepParams::fill_backward(const BackwardConfig& config, Make&& make) {
  if (!config.functions.captured_gradients) return fill<Params>(make);
  return fill<WithCapturedGradients<Params>>([&] {
    WithCapturedGradients<Params> params{make(), {}};
    set_captured_gradients(problem(), params.gradients);
    return params;
  });
}

/// All kernels of a backward call have the same; those around the main one read what lies before functions.
const void* StepParams::backward(const BackwardConfig& config) {
  const auto params = [&] {
    return make_backward_params(problem(), config, maps(), encode_, steps_.workspace, memory_);
  };
  if (const auto* filled = std::get_if<BackwardParams>(&filled_)) return filled;
  if (const auto* filled = std::get_if<Sm80BackwardParams>(&filled_)) return filled;
  if (const auto* filled = std::get_if<WithFunctions<BackwardParams>>(&filled_)) return filled;
  if (const auto* filled = std::get_if<WithAddresses<WithFunctions<BackwardParams>>>(&filled_)) return filled;
  using Functions = WithFunctions<BackwardParams>;
  if (const auto* filled = std::get_if<WithCapturedGradients<Functions>>(&filled_)) return filled;
  if (const auto* filled = std::get_if<WithCapturedGradients<WithAddresses<Functions>>>(&filled_))
    return filled;
  if (config.of_sm80()) {
    const auto sm80 = [&] {
      return make_sm80_backward_params(problem(), config, maps(), steps_.workspace, memory_);
    };
    if (!config.functions.given()) return fill<Sm80BackwardParams>(sm80);
    return fill_backward<WithAddresses<Functions>>(config,
                                                   [&] { return with_functions(sm80(), functions(config)); });
  }
  if (!config.functions.given()) return fill<BackwardParams>(params);
  return fill_backward<Functions>(config, [&] { return Functions{params(), functions(config)}; });
}

template <typename Params>
const void* StepParams::fill_forward(const Params& params) {
  auto& filled = filled_.emplace<Params>(params);
  forward_ = &filled;
  return &filled;
}

/// All kernels of a forward call have the same; `combine` and `list_blocks` read what lies before additions.
const void* StepParams::forward(const ForwardConfig& config) {
  if (forward_ != nullptr) return forward_;
  const ForwardParams params =
      make_forward_params(problem(), config.tiling, maps(), config.of_sm80() ? &no_tensor_map : encode_,
                          steps_.multiprocessors, config.of_sm80() ? nullptr : tile_counter(), split_parts());
  const auto fill_in = [&](const auto& all) { return fill_forward(all); };
  if (!config.functions.given()) return with_params_of(config, problem(), params, nullptr, fill_in);
  const FunctionParams read = functions(config);
  return with_params_of(config, problem(), params, &read, fill_in);
}

const void* StepParams::of(const Step& step) {
  switch (step.kernel) {
    case Kernel::pack: return pack(step);
    case Kernel::dequantize: return fill<ArrangeParams>([&] { return dequantize(); });
    case Kernel::mean_of_keys:
    case Kernel::largest_of_groups:
    case Kernel::quantize:
      if (const auto* filled = std::get_if<QuantizeParams>(&filled_)) return filled;
      return fill<QuantizeParams>([&] { return quantize(); });
    case Kernel::arrange_quantized:
      return fill<ArrangeParams>([&] { return make_arrange_params(problem(), quantize()); });
    case Kernel::list_blocks:
    case Kernel::sm80_forward:
    case Kernel::forward:
    case Kernel::forward_wide:
    case Kernel::decode: return forward(std::get<ForwardConfig>(step.config));
    case Kernel::combine: return forward_;
    case Kernel::eight_bit_forward:
      return fill<EightBitParams>([&] { return eight_bit(std::get<EightBitConfig>(step.config)); });
    case Kernel::clear_gradients: return fill<ClearParams>([&] { return make_clear_params(problem()); });
    case Kernel::list_query_blocks:
    case Kernel::backward_preprocess:
    case Kernel::backward:
    case Kernel::sm80_backward:
    case Kernel::backward_convert:
    case Kernel::backward_sink: return backward(std::get<BackwardConfig>(steps_.config));
    case Kernel::append:
    case Kernel::merge: break;  // of calls that have Params of their own
  }
  return nullptr;
}

}  // namespace tandem::gpu
