#include "ops/eight_bit/launch.hpp"

#include <algorithm>
#include <cmath>

#include "gpu/param_fields.hpp"
#include "gpu/step_params.hpp"

namespace tandem::gpu {
namespace {

constexpr std::byte nowhere{};

ScaleArray array_of(const float* data, const QuantizedAxes& axes, bool by_row) {
  return {.data = data, .stride = scale_strides(axes, by_row)};
}

/// The caller's quantized values, in boxes of a strip of columns by 64 rows (q) or a block of keys. Strips of
/// V are those that are transposed.
TensorMapSpec caller_map(const Problem& p, const EightBitConfig& config, Loaded which) {
  const int strip = which == Loaded::v ? value_strip_columns : byte_strip_columns(config.tiling.head_dim_qk);
  return rows_tensor_map(loaded_tensor(p, which), config.tiling.element, strip,
                         which == Loaded::q ? 64 : quant_block, p.out.data);
}

ScaleArray array_of(const Scales& s) {
  return {.data = s.data,
          .stride = {.batch = s.batch_stride, .head = s.head_stride, .group = s.group_stride}};
}

/// What both share. 16-bit q and k are none of the kernel's.
ForwardParams params_of_quantized(const Problem& p, const EightBitConfig& config, const LoadedMaps& maps,
                                  EncodeTensorMap encode, int sms, unsigned int* tile_counter) {
  ForwardParams params = make_forward_params(p, config.tiling, maps, encode, sms, tile_counter);
  params.q_data = params.k_data = nullptr;
  params.q_stride = params.k_stride = {};
  return params;
}

}  // namespace

LoadedMap quantized_map(Region region, const QuantizedAxes& axes, std::int64_t columns, std::int64_t pitch,
                        std::int64_t lines_read, std::int64_t lines, int strip, int box_lines,
                        const void* nearby) {
  const bool empty = axes.entries * axes.heads * columns * lines == 0;
  const auto near = reinterpret_cast<std::uintptr_t>(nearby) / 16 * 16;
  const auto at_least = [](std::int64_t n, std::int64_t low) { return std::max(n, low); };
  TensorMapSpec spec;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): rounding an address down takes the way through an integer
  spec.base = empty ? reinterpret_cast<const void*>(near) : &nowhere;
  spec.rank = 4;
  spec.element_bytes = 1;
  spec.dims = {at_least(columns, 1), at_least(lines_read, 1), at_least(axes.heads, 1),
               at_least(axes.entries, 1)};
  spec.strides = {at_least(pitch, 16), at_least(pitch * lines, 16), at_least(pitch * lines * axes.heads, 16)};
  spec.box = {strip, box_lines, 1, 1};
  spec.swizzle = strip == 128 ? Swizzle::b128 : Swizzle::b64;
  return {.spec = spec, .region = empty ? Region::none : region};
}

QuantizedScales quantized_scales(const Recipe& recipe, const Workspace& workspace, char* memory) {
  return {.q = workspace.at<float>(Region::q_scales, memory),
          .k = workspace.at<float>(Region::k_scales, memory),
          .v = workspace.at<float>(Region::v_scales, memory),
          .shift = recipe.smooth_k ? workspace.at<float>(Region::shift, memory) : nullptr};
}

bool can_read_quantized(const Problem& problem, const EightBitConfig& config) {
  return std::ranges::all_of(forward_loaded_tensors,
                             [&](Loaded which) { return tma_can_read(caller_map(problem, config, which)); });
}

void reserve_transposed(Workspace& workspace, const Problem& p, const EightBitConfig& config) {
  const QuantizedAxes k = key_axes(p);
  const std::int64_t blocks = k.entries * k.heads * k.blocks;
  // The counters of tiles and of claims, then those of heads and of blocks.
  workspace.reserve_counters((2 + p.batch * k.heads + blocks) * std::int64_t{sizeof(unsigned int)});
  workspace.reserve(Region::v_quantized, blocks * quant_block * config.tiling.head_dim_v);
}

TransposedValues transposed_values(const Problem& p, const Workspace& workspace, char* memory) {
  auto* const counters = workspace.at<unsigned int>(Region::counters, memory);
  return {.data = workspace.at<unsigned char>(Region::v_quantized, memory),
          .claimed = counters + 1,
          .heads = counters + 2,
          .blocks = counters + 2 + p.batch * p.heads_kv,
          .axis_blocks = as_int(key_axes(p).blocks)};
}

LoadedMaps eight_bit_maps(const Problem& p, const EightBitConfig& config) {
  LoadedMaps maps;
  const QuantizedAxes q = query_axes(p);
  const QuantizedAxes k = key_axes(p);
  const auto rows_map = [&](Loaded which, Region region, const QuantizedAxes& axes, int box_rows) {
    return config.in_place
               ? LoadedMap{.spec = caller_map(p, config, which)}
               : quantized_map(region, axes, p.head_dim_qk, quantized_pitch(p.head_dim_qk), axes.rows,
                               axes.rows, byte_strip_columns(config.tiling.head_dim_qk), box_rows,
                               p.out.data);
  };
  maps[index_of(Loaded::q)] = rows_map(Loaded::q, Region::q_quantized, q, 64);
  maps[index_of(Loaded::k)] = rows_map(Loaded::k, Region::k_quantized, k, quant_block);
  const std::int64_t padded_keys = k.blocks * quant_block;
  maps[index_of(Loaded::v)] =
      config.in_place
          ? LoadedMap{.spec = caller_map(p, config, Loaded::v)}
          : quantized_map(Region::v_quantized, k, padded_keys, padded_keys, p.head_dim_v,
                          quantized_pitch(p.head_dim_v), quant_block, config.tiling.head_dim_v, p.out.data);
  return maps;
}

EightBitParams make_caller_params(const Problem& p, const EightBitConfig& config, const LoadedMaps& maps,
                                  const TransposedValues& transposed, EncodeTensorMap encode, int sms,
                                  unsigned int* tile_counter) {
  return {.forward = params_of_quantized(p, config, maps, encode, sms, tile_counter),
          .q_scales = array_of(p.q_scale),
          .k_scales = array_of(p.k_scale),
          .v_scales = array_of(p.v_scale),
          .shift = {},
          .q_scale_heads = as_int(p.q_scale.heads),
          .transposed = transposed};
}

EightBitParams make_eight_bit_params(const Problem& p, const EightBitConfig& config,
                                     const QuantizedScales& scales, const LoadedMaps& maps,
                                     EncodeTensorMap encode, int sms, unsigned int* tile_counter) {
  const QuantizedAxes q = query_axes(p);
  const QuantizedAxes k = key_axes(p);
  EightBitParams params{.forward = params_of_quantized(p, config, maps, encode, sms, tile_counter),
                        .q_scales = array_of(scales.q, q, config.row_scales),
                        .k_scales = array_of(scales.k, k, config.row_scales),
                        .v_scales = array_of(scales.v, k, config.v_row_scales),
                        .shift = array_of(scales.shift, q, true),
                        .q_scale_heads = 1,
                        .transposed = {}};
  params.forward.score.scale = std::abs(p.scale);  // the sign is q's
  return params;
}

EightBitParamsWithMaxima with_maxima(const Problem& p, const EightBitParams& params) {
  return {.forward = with_maxima(p, params.forward),
          .q_scales = params.q_scales,
          .k_scales = params.k_scales,
          .v_scales = params.v_scales,
          .shift = params.shift,
          .q_scale_heads = params.q_scale_heads,
          .transposed = params.transposed};
}

void fill_eight_bit_forward(StepParams& call, const Step& /*step*/) {
  const Steps& steps = call.steps();
  const auto& config = std::get<EightBitConfig>(steps.config);
  const auto make = [&] {
    if (config.in_place) {
      return make_caller_params(call.problem(), config, call.maps(),
                                transposed_values(call.problem(), steps.workspace, call.memory()),
                                call.encode(), steps.multiprocessors, call.tile_counter());
    }
    return make_eight_bit_params(call.problem(), config,
                                 quantized_scales(steps.recipe, steps.workspace, call.memory()), call.maps(),
                                 call.encode(), steps.multiprocessors, call.tile_counter());
  };
  if (config.tiling.max_logits) {
    call.fill([&] { return with_maxima(call.problem(), make()); });
  } else {
    call.fill(make);
  }
}

}  // namespace tandem::gpu
