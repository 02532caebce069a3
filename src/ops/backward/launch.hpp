// From a Problem and a Config to what the backward kernels are launched with. Pure: needs no driver, so that
// the emulator's tests use it too.
#pragma once

#include <array>
#include <cstddef>

#include "config/tensor_map_spec.hpp"
#include "gpu/kernel_spec.hpp"
#include "gpu/param_fields.hpp"
#include "problem/problem.hpp"

namespace tandem::gpu {

/// The tensors that TMA reads.
constexpr std::array<Loaded, 4> backward_loaded_tensors = {Loaded::q, Loaded::k, Loaded::v, Loaded::dout};

// Config is that of either family: BackwardConfig or Sm80BackwardConfig.

/// How the kernel of `config` reads a tensor. Whether TMA can is for tma_can_read to say.
template <typename Config>
TensorMapSpec backward_tensor_map(const Problem& problem, const Config& config, Loaded which);

/// The maps of q, k, v and dout, read in place.
template <typename Config>
LoadedMaps backward_maps(const Problem& problem, const Config& config);

/// What the kernels of `config` work in, linear in the number of queries: LSE and delta, f32 sums of dQ and
/// their semaphores. Nothing needs to be set beforehand.
template <typename Config>
Workspace backward_workspace(const Problem& problem, const Config& config);

/// What all kernels of the call are launched with. `memory` is that of `workspace`, which begins with
/// backward_workspace.
template <typename Config>
BackwardParams make_backward_params(const Problem& problem, const Config& config, const LoadedMaps& maps,
                                    EncodeTensorMap encode, const Workspace& workspace, char* memory);

/// Parameters of the kernels of the family sm80, whose main kernel reads tensors by their addresses.
Sm80BackwardParams make_sm80_backward_params(const Problem& problem, const Sm80BackwardConfig& config,
                                             const LoadedMaps& maps, const Workspace& workspace,
                                             char* memory);
/// Parameters with functions.
WithFunctions<BackwardParams> with_functions(const BackwardParams& params, const FunctionParams& functions);
WithAddresses<WithFunctions<BackwardParams>> with_functions(const Sm80BackwardParams& params,
                                                            const FunctionParams& functions);

/// Key tiles of the main kernel's launch, and thread blocks of those around it, or bounds where lengths are
/// known on the device only.
std::int64_t backward_tile_count(const Problem& problem, int tile_keys);
std::int64_t backward_rows_count(const Problem& problem, int block_m);

/// Whether causal tiles are assigned in pairs (backward_order.cuh): not with many more keys than queries and
/// few tiles or heads.
bool causal_pairs(const Problem& problem, int tile_keys);

/// Thread blocks of the main kernel's launch on a device of so many SMs.
template <typename Config>
std::int64_t backward_grid(const Problem& problem, const Config& config, int multiprocessors);

/// The Configs of the call's kernels: what a kernel does not read at its default, so that one compiled kernel
/// serves several. First the main kernel's:
template <typename Config>
Config backward_main_config(Config config) {
  config.f32_dq = false;
  return config;
}
/// The Configs of the kernels around it, which serve all masks, and of the one among them that writes dq.
template <typename Config>
Config backward_rows_config(Config c) {
  constexpr Config defaults;
  c.mask.causal = c.mask.local = false;
  c.transform = defaults.transform;
  c.f32_dq = c.f32_dk_dv = false;
  c.functions = {.mask_function = c.functions.given()};  // any of them may hide all keys of a query
  c.q_stages = defaults.q_stages;
  c.dout_stages = defaults.dout_stages;
  if constexpr (std::is_same_v<Config, BackwardConfig>) {
    c.dq_slices = defaults.dq_slices;
    c.schedule.pingpong = c.schedule.staggered = c.schedule.overlaps_tiles = c.schedule.turned = false;
  }
  return c;
}
template <typename Config>
Config backward_convert_config(const Config& config) {
  Config c = backward_rows_config(config);
  c.f32_dq = config.f32_dq;
  return c;
}

/// What the preprocess kernel of a call with an output gate is launched with. The problem's dout is the
/// gradient of O, in the workspace, and `gated_dout` that of out.
GatedBackwardParams with_gate(const Problem& problem, const Operand& gated_dout,
                              const BackwardParams& params);

void fill_backward(StepParams& call, const Step& step);
void fill_gated_preprocess(StepParams& call, const Step& step);
void fill_clear_gradients(StepParams& call, const Step& step);
BlockShape backward_block(const KernelConfig& config);
BlockShape backward_rows_block(const KernelConfig& config);

namespace kernels {
inline constexpr KernelSpec clear_gradients{
    .header = "ops/functions/common/clear_gradients.cuh",
    .entry = "clear_gradients",
    .block = [](const KernelConfig&) { return BlockShape{.threads = clear_threads}; },
    .params = fill_clear_gradients};
inline constexpr KernelSpec list_query_blocks{.header = "ops/functions/common/block_lists.cuh",
                                              .entry = "list_query_blocks",
                                              .block =
                                                  [](const KernelConfig&) {
                                                    return BlockShape{.threads = list_threads,
                                                                      .shared_bytes = list_shared_bytes};
                                                  },
                                              .params = fill_backward};
inline constexpr KernelSpec backward_preprocess{.header = "ops/backward/common/preprocess.cuh",
                                                .entry = "backward_preprocess",
                                                .block = backward_rows_block,
                                                .params = fill_backward};
inline constexpr KernelSpec backward_gated_preprocess{.header = "ops/backward/common/preprocess.cuh",
                                                      .entry = "backward_gated_preprocess",
                                                      .block = backward_rows_block,
                                                      .params = fill_gated_preprocess};
inline constexpr KernelSpec backward{.header = "ops/backward/sm90/backward.cuh",
                                     .entry = "backward",
                                     .block = backward_block,
                                     .params = fill_backward};
inline constexpr KernelSpec sm80_backward{.header = "ops/backward/sm80/backward.cuh",
                                          .entry = "sm80_backward",
                                          .block = backward_block,
                                          .params = fill_backward};
inline constexpr KernelSpec backward_convert{.header = "ops/backward/common/convert.cuh",
                                             .entry = "backward_convert",
                                             .block = backward_rows_block,
                                             .params = fill_backward};
inline constexpr KernelSpec backward_sink{.header = "ops/backward/common/convert.cuh",
                                          .entry = "backward_sink",
                                          .block =
                                              [](const KernelConfig&) {
                                                return BlockShape{.threads = backward_sink_threads,
                                                                  .shared_bytes = backward_sink_shared_bytes};
                                              },
                                          .params = fill_backward};
}  // namespace kernels

/// The main kernel of the backward pass.
inline const KernelSpec& kernel_of(const BackwardConfig& /*config*/) {
  return kernels::backward;
}
inline const KernelSpec& kernel_of(const Sm80BackwardConfig& /*config*/) {
  return kernels::sm80_backward;
}

}  // namespace tandem::gpu
