#include "ops/steps.hpp"

#include <algorithm>

#include "gpu/function_source.hpp"
#include "ops/backward/launch.hpp"
#include "ops/eight_bit/launch.hpp"
#include "ops/eight_bit_backward/launch.hpp"
#include "ops/forward/launch.hpp"
#include "ops/pack/launch.hpp"
#include "ops/quantize/launch.hpp"
#include "ops/quantize/tensor_launch.hpp"
#include "problem/mixed.hpp"

namespace tandem {
namespace {

namespace kernels = gpu::kernels;
using gpu::index_of;
using gpu::Loaded;
using gpu::Region;
using gpu::Steps;

unsigned int grid_of(std::int64_t blocks) {
  return static_cast<unsigned int>(blocks);
}

/// One CTA an SM, or one a tile where there are fewer.
unsigned int persistent_grid(std::int64_t tiles, const Steps& steps) {
  return grid_of(std::min<std::int64_t>(tiles, steps.multiprocessors));
}

/// Packs a tensor that TMA cannot read by its map in steps.maps, and gives it the copy's, `map_of(problem)`.
template <typename MapOf>
void make_loadable(Steps& steps, Loaded which, MapOf&& map_of) {
  std::optional<gpu::LoadedMap>& map = steps.maps[index_of(which)];
  std::optional<Operand>& source = steps.sources[index_of(which)];
  const gpu::LoadedTensor tensor = gpu::loaded_tensor(steps.problem, which);
  if (source) {  // it is dequantised to the workspace
    if (!tensor.empty()) map->region = gpu::copy_of(which);
    return;
  }
  if (tma_can_read(map->spec)) return;
  source = tensor.operand;
  steps.list.add({.kernel = &kernels::pack,
                  .config = gpu::pack_config(tensor),
                  .grid = grid_of(gpu::pack_grid(tensor, steps.multiprocessors)),
                  .tensor = which});
  steps.workspace.reserve(gpu::copy_of(which), gpu::packed_bytes(tensor));
  gpu::operand_of(steps.problem, which) = gpu::packed_operand(tensor);
  map = {.spec = map_of(steps.problem), .region = gpu::copy_of(which)};
}

/// The quantiser's launches on k, and on q and v where `items` has them, in one order for every caller.
/// Whether there is one.
bool add_quantize_launches(gpu::StepList& list, const QuantizeConfig& config, std::int64_t items_k,
                           std::int64_t items, int multiprocessors) {
  bool before = false;  // a launch that the next one may overlap the end of
  if (config.smooth_k && items_k > 0) {
    list.add({.kernel = &kernels::mean_of_keys, .config = mean_config(config), .grid = grid_of(items_k)});
    before = true;
  }
  if (exceeds_block(config.qk_scales) && items_k > 0) {
    list.add({.kernel = &kernels::largest_of_groups, .config = config, .grid = grid_of(items_k)});
    before = false;  // the quantiser does not wait for it
  }
  if (items == 0) return false;
  // Thread blocks are persistent, each with the loads of its next item under way: as many as the device
  // holds.
  const std::int64_t most = std::int64_t{multiprocessors} * config.blocks_per_sm();
  list.add({.kernel = &kernels::quantize,
            .config = config,
            .grid = grid_of(std::min(items, most)),
            .programmatic = before});
  return true;
}

template <typename Config>
void add_forward_of(Steps& steps, const Config& config) {
  steps.config = config;
  const std::int64_t tiles = gpu::forward_tile_count(steps.problem, config.tiling);
  if (tiles == 0) {
    steps.list.clear();
    steps.workspace = {};
    return;
  }
  // CTAs take tiles from a counter, which must be cleared first: 2 us of the host's time, and scratch memory.
  // A grid with a CTA for every tile needs none.
  if (config.schedule.dynamic && tiles > steps.multiprocessors)
    steps.workspace.reserve_counters(sizeof(unsigned int));
  steps.maps = gpu::forward_maps(steps.problem, config.tiling);
  for (const Loaded which : gpu::forward_loaded_tensors) {
    if (which == Loaded::v && config.v_in_k) {  // never loaded, but every map has to describe something
      steps.maps[index_of(which)] = steps.maps[index_of(Loaded::k)];
      continue;
    }
    make_loadable(steps, which,
                  [&](const Problem& p) { return gpu::forward_tensor_map(p, config.tiling, which); });
  }
  const gpu::WorkDivision& work = steps.work = gpu::divide_work(steps.problem, config, steps.multiprocessors);
  if (work.part_outputs > 0) {
    steps.workspace.reserve(Region::part_out, work.part_outputs * std::int64_t{sizeof(float)});
    steps.workspace.reserve(Region::part_sums, work.part_sums * std::int64_t{sizeof(PartSum)});
  }
  if (config.functions.block_lists) {
    const gpu::ListedBlocks listed = gpu::listed_blocks(steps.problem, config.tiling);
    steps.workspace.reserve(Region::block_lists, listed.bytes());
    steps.list.add({.kernel = &kernels::list_blocks, .config = config, .grid = grid_of(listed.count)});
  }
  steps.list.add({.kernel = &gpu::kernel_of(config), .config = config, .grid = grid_of(work.ctas)});
  if (work.combine_ctas == 0) return;
  steps.list.add({.kernel = &kernels::combine,
                  .config = combine_config(config),
                  .grid = grid_of(work.combine_ctas),
                  .programmatic = true});
}

}  // namespace

void add_forward(Steps& steps, const gpu::KernelConfig& config) {
  gpu::visit_forward(config, [&](const auto& c) { add_forward_of(steps, c); });
}

void add_widened_queries(Steps& steps, const Problem& asked) {
  Problem& p = steps.problem;
  Operand source = p.q;
  source.dtype = asked.q.dtype;
  steps.sources[index_of(Loaded::q)] = source;
  const gpu::LoadedTensor of_problem = gpu::loaded_tensor(p, Loaded::q);
  const gpu::LoadedTensor q{.operand = source,
                            .head_dim = of_problem.head_dim,
                            .rows = of_problem.rows,
                            .heads = of_problem.heads,
                            .batch = of_problem.batch};
  steps.workspace.reserve(Region::q, gpu::packed_bytes(q));
  steps.list.add({.kernel = &kernels::pack,
                  .config = gpu::pack_config(q, p.q.dtype == DType::f16 ? Element::f16 : Element::bf16),
                  .grid = grid_of(gpu::pack_grid(q, steps.multiprocessors)),
                  .tensor = Loaded::q});
  const Operand packed = gpu::packed_operand(of_problem);
  p.q = packed;
  if (!gpu::multiplies_scales(p.q_scale, p.k_scale)) return;
  steps.workspace.reserve(Region::q_scales, 4 * p.batch * p.heads_kv);
  steps.q_scale = p.q_scale;
  p.q_scale.batch_stride = p.heads_kv;
  p.q_scale.head_stride = 1;
}

void add_dequantize(Steps& steps, const Problem& problem, const QuantizeConfig& config) {
  const MixedSpace space = mixed_space(problem);
  steps.workspace.reserve(Region::k, static_cast<std::int64_t>(space.v));
  steps.workspace.reserve(Region::v, static_cast<std::int64_t>(space.bytes - space.v));
  steps.sources[index_of(Loaded::k)] = problem.k;
  steps.sources[index_of(Loaded::v)] = problem.v;
  steps.problem.k_scale = problem.k_scale;
  steps.problem.v_scale = problem.v_scale;
  const std::int64_t items = gpu::dequantize_items(problem).total();
  if (items > 0) steps.list.add({.kernel = &kernels::dequantize, .config = config, .grid = grid_of(items)});
}

bool add_quantizer(Steps& steps, const QuantizeConfig& config) {
  const gpu::QuantizeItems items = gpu::quantize_items(steps.problem);
  if (!steps.problem.quantized_inputs()) {
    return add_quantize_launches(steps.list, config, items.k, items.total(), steps.multiprocessors);
  }
  if (items.total() == 0) return false;
  steps.list.add({.kernel = &kernels::arrange_quantized, .config = config, .grid = grid_of(items.total())});
  return true;
}

void add_eight_bit(Steps& steps, const EightBitConfig& config, const QuantizeConfig& quantizer) {
  steps.config = config;
  const std::int64_t tiles = gpu::forward_tile_count(steps.problem, config.tiling);
  if (tiles == 0) return;
  if (config.in_place) {
    gpu::reserve_transposed(steps.workspace, steps.problem, config);
  } else {
    steps.workspace = gpu::quantized_workspace(steps.problem, steps.recipe);
  }
  steps.maps = gpu::eight_bit_maps(steps.problem, config);
  const bool quantized = !config.in_place && add_quantizer(steps, quantizer);
  steps.list.add({.kernel = &kernels::eight_bit_forward,
                  .config = config,
                  .grid = persistent_grid(tiles, steps),
                  .programmatic = quantized});
}

namespace {

/// Behind an output gate dout is the gradient of O, which the preprocess kernel makes.
void make_dout(Steps& steps) {
  const Operand gated = steps.problem.dout;
  const gpu::LoadedTensor tensor = gpu::loaded_tensor(steps.problem, Loaded::dout);
  steps.workspace.reserve(Region::dout, gpu::packed_bytes(tensor));
  const Operand made = gpu::packed_operand(tensor);
  steps.problem.dout = made;
  steps.sources[index_of(Loaded::dout)] = gated;
}

template <typename Config>
void add_backward_of(Steps& steps, const Config& config) {
  steps.config = config;
  const Problem& p = steps.problem;
  const std::int64_t rows = gpu::backward_rows_count(p, config.tiling.block_m);
  const bool wants_dq = p.dq.given();
  const bool captured = p.wants_captured_gradients();
  const bool wants_main = wants_dq || p.dk.given() || p.dv.given() || captured;
  const std::int64_t tiles = wants_main ? gpu::backward_tile_count(p, config.tile_keys()) : 0;
  const bool sinks = p.dsink != nullptr && p.heads_q > 0;
  // First, so that a grid that may start early waits for a launch behind it.
  if (captured) {
    steps.list.add({.kernel = &kernels::clear_gradients,
                    .config = BackwardConfig{},
                    .grid = grid_of(gpu::clear_grid(p, steps.multiprocessors))});
  }
  if (rows == 0 && tiles == 0 && !sinks) return;
  steps.workspace = gpu::backward_workspace(p, config);
  if (p.gate.given()) make_dout(steps);
  steps.maps = gpu::backward_maps(p, config);
  for (const Loaded which : gpu::backward_loaded_tensors) {
    make_loadable(steps, which, [&](const Problem& q) { return gpu::backward_tensor_map(q, config, which); });
  }
  // Before the preprocess kernel, whose end the main kernel waits for.
  if (config.functions.block_lists && tiles > 0) {
    const gpu::ListedBlocks listed = gpu::listed_query_blocks(p, config.tile_keys(), config.tiling.block_m);
    steps.workspace.reserve(Region::block_lists, listed.bytes());
    steps.list.add({.kernel = &kernels::list_query_blocks, .config = config, .grid = grid_of(listed.count)});
  }
  const Config rows_config = gpu::backward_rows_config(config);
  const gpu::KernelSpec& preprocess =
      p.gate.given() ? kernels::backward_gated_preprocess : kernels::backward_preprocess;
  if (rows > 0) steps.list.add({.kernel = &preprocess, .config = rows_config, .grid = grid_of(rows)});
  if (tiles > 0) {
    steps.list.add({.kernel = &gpu::kernel_of(config),
                    .config = gpu::backward_main_config(config),
                    .grid = grid_of(gpu::backward_grid(p, config, steps.multiprocessors)),
                    // In a fixed order CTAs wait for others. Beside another such grid, half of each being
                    // resident, none would end. Such a launch cannot be programmatic, too. And a dO that the
                    // kernel before makes is loaded before CTAs wait for that kernel.
                    .programmatic = rows > 0 && !config.schedule.deterministic && !p.gate.given(),
                    .resident = config.schedule.deterministic});
  }
  if (rows > 0 && wants_dq) {
    steps.list.add({.kernel = &kernels::backward_convert,
                    .config = gpu::backward_convert_config(config),
                    .grid = grid_of(rows),
                    .programmatic = true});
  }
  if (sinks)
    steps.list.add({.kernel = &kernels::backward_sink, .config = rows_config, .grid = grid_of(p.heads_q)});
}

}  // namespace

void add_backward(Steps& steps, const gpu::KernelConfig& config) {
  gpu::visit_backward(config, [&](const auto& c) { add_backward_of(steps, c); });
}

void add_eight_bit_backward(Steps& steps, const EightBitBackwardConfig& config,
                            const QuantizeConfig& quantizer) {
  steps.config = config;
  const Problem& p = steps.problem;
  const std::int64_t rows = gpu::backward_rows_count(p, config.tiling.block_m);
  const bool wants_main = p.dq.given() || p.dk.given() || p.dv.given();
  const std::int64_t tiles = wants_main ? gpu::backward_tile_count(p, config.tile_keys()) : 0;
  if (!wants_main || (rows == 0 && tiles == 0)) return;
  steps.workspace = gpu::eight_bit_backward_workspace(p, config, steps.recipe);
  steps.maps = gpu::eight_bit_backward_maps(p, config);
  const gpu::QuantizeItems items = gpu::gradient_items(p);
  const auto add = [&](const gpu::KernelSpec& kernel, const gpu::KernelConfig& c, std::int64_t grid) {
    if (grid > 0) steps.list.add({.kernel = &kernel, .config = c, .grid = grid_of(grid)});
  };
  if (quantizer.smooth_k) add(kernels::mean_of_gradients, mean_config(quantizer), items.k);
  add(kernels::quantize_keys, quantizer, items.total());
  add(kernels::quantize_queries, quantizer, items.q);
  if (tiles > 0) {
    steps.list.add({.kernel = &kernels::eight_bit_backward,
                    .config = gpu::eight_bit_main_config(config),
                    .grid = grid_of(gpu::backward_grid(p, config, steps.multiprocessors)),
                    // As of the 16-bit kernel.
                    .programmatic = items.q > 0 && !config.schedule.deterministic,
                    .resident = config.schedule.deterministic});
  }
  if (rows > 0 && p.dq.given()) {
    steps.list.add({.kernel = &kernels::eight_bit_convert,
                    .config = gpu::eight_bit_convert_config(config),
                    .grid = grid_of(rows),
                    .programmatic = tiles > 0});
  }
}

gpu::QuantizeSteps quantize_steps(const QuantizeProblem& problem, const QuantizeConfig& config,
                                  int multiprocessors) {
  gpu::QuantizeSteps steps;
  steps.problem = problem;
  steps.workspace = gpu::tensor_workspace(problem);
  const std::int64_t items = gpu::tensor_items(problem);
  add_quantize_launches(steps.list, config, items, items, multiprocessors);
  return steps;
}

}  // namespace tandem
