// From a Problem and a Config to what the forward kernel is launched with. Pure: needs no driver, so that the
// emulator's tests use it too.
#pragma once

#include <type_traits>

#include "gpu/param_fields.hpp"
#include "gpu/steps.hpp"
#include "problem/problem.hpp"

namespace tandem::gpu {

/// The tensors that TMA reads.
constexpr std::array<Loaded, 3> forward_loaded_tensors = {Loaded::q, Loaded::k, Loaded::v};

/// How a kernel with this `tiling` reads a tensor: dimensions (head_dim, rows, heads, batch), boxes of one
/// strip of columns by 64 rows (q), block_n rows (k, v) or the part of a page that goes into a block. Of q
/// with heads as rows: dimensions (head_dim, heads, rows, batch), boxes of the heads and queries that 64 rows
/// of a tile have. Whether TMA can is for tma_can_read to say.
TensorMapSpec forward_tensor_map(const Problem& problem, const Tiling& tiling, Loaded which);

/// The maps of q, k and v, read in place.
LoadedMaps forward_maps(const Problem& problem, const Tiling& tiling);

/// How a forward launch divides its work.
template <typename Config>
WorkDivision divide_work(const Problem& problem, const Config& config, int multiprocessors);

/// Where the partial results of splits go.
struct SplitParts {
  float* out = nullptr;
  PartSum* sums = nullptr;
  WorkDivision division;
};

/// What all kernels are launched with. `encode` makes the tensor maps; `sms`, those of the device, sets how
/// many heads' causal tiles are interleaved.
ForwardParams make_forward_params(const Problem& problem, const Tiling& tiling, const LoadedMaps& maps,
                                  EncodeTensorMap encode, int sms, unsigned int* tile_counter,
                                  const SplitParts& parts = {});

/// Scales by (batch, KV head), and below by row; each null where the scales are of the other kind.
HeadScales head_scales_of(const Scales& scales);
/// The factors of scores by (batch, KV head): k's, or where the plan has made e4m3 queries 16-bit ones what
/// stands in q_scale, theirs or the product of both.
HeadScales score_scales_of(const Problem& problem);
RowScales row_scales_of(const Scales& scales);
/// In place of `encode` for kernels that read tensors by their addresses.
TensorMap no_tensor_map(const TensorMapSpec& spec);

/// What a kernel that writes max_logits is launched with.
ForwardParamsWithMaxima with_maxima(const Problem& problem, const ForwardParams& params);

/// What a kernel that reads a gate is launched with.
ForwardParamsWithGate with_gate(const Problem& problem, const ForwardParams& params);

/// Calls f(params) with what a kernel of this Config is launched with: `params` and what its mask, its keys,
/// its family and `functions`, null where it has none, add.
template <typename Config, typename F>
auto with_params_of(const Config& config, const Problem& p, const ForwardParams& params,
                    const FunctionParams* functions, F&& f) {
  if (functions != nullptr) {  // with 16-bit keys and one mask for all sequences alone
    const auto with_functions = [&](const auto& plain) {
      const WithFunctions<std::remove_cvref_t<decltype(plain)>> all{plain, *functions};
      if constexpr (Config::family == Family::sm80) {
        return f(WithValueAddress<std::remove_cvref_t<decltype(all)>>{all, p.v.data, strides_of(p.v)});
      } else {
        return f(all);
      }
    };
    return config.tiling.gate ? with_functions(with_gate(p, params)) : with_functions(params);
  }
  const auto with_mask = [&](const auto& all) {
    if (config.has_byte_keys()) {
      const WithKeyScales<std::remove_cvref_t<decltype(all)>> scaled{all, score_scales_of(p),
                                                                     head_scales_of(p.v_scale)};
      if (!config.row_scales) return f(scaled);
      return f(WithRowScales<std::remove_cvref_t<decltype(scaled)>>{scaled, row_scales_of(p.k_scale),
                                                                    row_scales_of(p.v_scale)});
    }
    if constexpr (Config::family == Family::sm80) {
      return f(WithValueAddress<std::remove_cvref_t<decltype(all)>>{all, p.v.data, strides_of(p.v)});
    } else if (config.keys == KeySource::gathered_pages) {
      return f(WithValueAddress<std::remove_cvref_t<decltype(all)>>{all, p.v.data, strides_of(p.v)});
    }
    return f(all);
  };
  if (config.tiling.gate) return with_mask(with_gate(p, params));
  if (config.tiling.max_logits) return with_mask(with_maxima(p, params));
  if (!config.mask.by_sequence) return with_mask(params);
  return with_mask(ForwardParamsBySequence{params, lengths_of(p.causal_by_sequence)});
}

/// Tiles of the launch, or a bound where lengths are known on the device only: blocks beyond them have
/// nothing to do.
std::int64_t forward_tile_count(const Problem& problem, const Tiling& tiling);

void fill_forward(StepParams& call, const Step& step);
BlockShape forward_block(const KernelConfig& config);
BlockShape combine_block(const KernelConfig& config);

namespace kernels {
inline constexpr KernelSpec forward{.header = "ops/forward/sm90/forward.cuh",
                                    .entry = "forward",
                                    .block = forward_block,
                                    .params = fill_forward};
inline constexpr KernelSpec forward_wide{.header = "ops/latent/sm90/forward_wide.cuh",
                                         .entry = "forward_wide",
                                         .block = forward_block,
                                         .params = fill_forward};
inline constexpr KernelSpec sm80_forward{.header = "ops/forward/sm80/forward.cuh",
                                         .entry = "sm80_forward",
                                         .block = forward_block,
                                         .params = fill_forward};
inline constexpr KernelSpec decode{.header = "ops/decode/sm90/decode.cuh",
                                   .entry = "decode",
                                   .block = forward_block,
                                   .params = fill_forward};
inline constexpr KernelSpec combine{.header = "ops/split/common/combine.cuh",
                                    .entry = "combine",
                                    .block = combine_block,
                                    .params = fill_forward};
inline constexpr KernelSpec list_blocks{.header = "ops/functions/common/block_lists.cuh",
                                        .entry = "list_blocks",
                                        .block =
                                            [](const KernelConfig&) {
                                              return BlockShape{.threads = list_threads,
                                                                .shared_bytes = list_shared_bytes};
                                            },
                                        .params = fill_forward};
}  // namespace kernels

/// The main kernel of the forward pass.
inline const KernelSpec& kernel_of(const ForwardConfig& /*config*/) {
  return kernels::forward;
}
inline const KernelSpec& kernel_of(const Sm80ForwardConfig& /*config*/) {
  return kernels::sm80_forward;
}
inline const KernelSpec& kernel_of(const LatentConfig& /*config*/) {
  return kernels::forward_wide;
}
inline const KernelSpec& kernel_of(const DecodeConfig& /*config*/) {
  return kernels::decode;
}

}  // namespace tandem::gpu
