#include "ops/eight_bit_backward/launch.hpp"

#include <algorithm>

#include "gpu/step_params.hpp"
#include "ops/eight_bit/launch.hpp"
#include "ops/quantize/axes.hpp"

namespace tandem::gpu {
namespace {

std::int64_t heads_of_batch(const Problem& p) {
  return p.batch * p.heads_kv;
}
/// Rows of the workspace's query blocks, of all heads.
std::int64_t workspace_rows(const Problem& p, const EightBitBackwardConfig& c) {
  return backward_rows_count(p, c.tiling.block_m) * c.tiling.block_m;
}
std::int64_t padded_keys(const Problem& p) {
  return key_axes(p).blocks * quant_block;
}

Strides row_strides(const QuantizedAxes& axes, std::int64_t head_dim) {
  const std::int64_t pitch = quantized_pitch(head_dim);
  return {.batch = axes.heads * axes.rows * pitch, .row = pitch, .head = axes.rows * pitch};
}

/// Operands of channels: by head of q, columns are the workspace's query blocks; of k, the keys of its axis.
TransposedOperand query_operand(unsigned char* data, std::int64_t head_dim, std::int64_t columns) {
  return {.data = data, .row = columns, .head = head_dim * columns, .batch = 0};
}
TransposedOperand key_operand(unsigned char* data, const Problem& p) {
  const std::int64_t head = p.head_dim_qk * padded_keys(p);
  return {.data = data, .row = padded_keys(p), .head = head, .batch = p.heads_kv * head};
}
TensorMap transposed_map(const Problem& p, Region region, const QuantizedAxes& axes, std::int64_t head_dim,
                         std::int64_t columns, int box, const Workspace& w, char* memory,
                         EncodeTensorMap encode) {
  LoadedMap map = quantized_map(region, axes, columns, columns, head_dim, head_dim, box,
                                static_cast<int>(head_dim), p.out.data);
  if (map.region != Region::none) map.spec.base = w.at(region, memory);
  return encode(map.spec);
}

/// The workspace's counters, in their order.
struct Counters {
  unsigned int* arrived;
  GradientMaxima maxima;
  unsigned int* tiles_added;
  unsigned int* dq_semaphores;
};
std::int64_t counters_bytes(const Problem& p, const EightBitBackwardConfig& c) {
  const std::int64_t semaphores = c.schedule.deterministic ? backward_rows_count(p, c.tiling.block_m) *
                                                                 EightBitBackwardConfig::dq_pieces()
                                                           : 0;
  return 4 * (5 * heads_of_batch(p) + (p.batch + 2) * p.heads_kv + semaphores);
}
Counters counters_at(const Problem& p, unsigned int* first) {
  const std::int64_t heads = heads_of_batch(p);
  unsigned int* const maxima = first + heads;
  unsigned int* const tiles_added = maxima + 4 * heads;
  return {.arrived = first,
          .maxima = {.dout = maxima,
                     .q_dout = maxima + heads,
                     .q_dlse = maxima + 2 * heads,
                     .v = maxima + 3 * heads},
          .tiles_added = tiles_added,
          .dq_semaphores = tiles_added + (p.batch + 2) * p.heads_kv};
}

}  // namespace

LoadedMaps eight_bit_backward_maps(const Problem& p, const EightBitBackwardConfig& c) {
  LoadedMaps maps;
  const auto rows = [&](Loaded which, Region region, const QuantizedAxes& axes, std::int64_t head_dim,
                        int box_rows) {
    maps[index_of(which)] =
        quantized_map(region, axes, head_dim, quantized_pitch(head_dim), axes.rows, axes.rows,
                      byte_strip_columns(as_int(head_dim)), box_rows, p.out.data);
  };
  rows(Loaded::q, Region::q_quantized, query_axes(p), p.head_dim_qk, c.tiling.block_m);
  rows(Loaded::k, Region::k_quantized, key_axes(p), p.head_dim_qk, c.tiling.block_n);
  rows(Loaded::v, Region::v_quantized, key_axes(p), p.head_dim_v, c.tiling.block_n);
  rows(Loaded::dout, Region::dout_quantized, query_axes(p), p.head_dim_v, c.tiling.block_m);
  return maps;
}

Workspace eight_bit_backward_workspace(const Problem& p, const EightBitBackwardConfig& c,
                                       const Recipe& recipe) {
  const QuantizedAxes q = query_axes(p);
  const QuantizedAxes k = key_axes(p);
  const std::int64_t rows = workspace_rows(p, c);
  const std::int64_t channels = quantize_channels(as_int(p.head_dim_qk));
  Workspace w = backward_workspace(p, c);
  w.reserve_counters(counters_bytes(p, c));
  w.reserve(Region::q_quantized, q.entries * row_strides(q, p.head_dim_qk).batch);
  w.reserve(Region::k_quantized, k.entries * row_strides(k, p.head_dim_qk).batch);
  w.reserve(Region::v_quantized, k.entries * row_strides(k, p.head_dim_v).batch);
  w.reserve(Region::dout_quantized, q.entries * row_strides(q, p.head_dim_v).batch);
  w.reserve(Region::q_transposed, rows * p.head_dim_qk);
  w.reserve(Region::dout_transposed, rows * p.head_dim_v);
  w.reserve(Region::k_transposed, k.entries * key_operand(nullptr, p).batch);
  w.reserve(Region::q_scales, 16 * rows / c.tiling.block_m);
  w.reserve(Region::k_scales, 4 * k.entries * k.heads * scales_of_head(k, false));
  w.reserve(Region::v_scales, 4 * k.entries * k.heads * scales_of_head(k, false));
  w.reserve(Region::row_factors, 4 * rows);
  if (recipe.smooth_k) {
    w.reserve(Region::mean, 4 * heads_of_batch(p) * channels);
    w.reserve(Region::sums, 4 * k.entries * k.heads * k.blocks * channels);
  }
  return w;
}

QuantizeItems gradient_items(const Problem& p) {
  const auto items_of = [](const QuantizedAxes& axes) {
    return as_int(axes.entries * axes.blocks * axes.heads);
  };
  QuantizeItems items;
  items.heads_per_item_q = items.heads_per_item_k = 1;
  items.q = items_of(query_axes(p));
  items.k = items.v = items_of(key_axes(p));
  return items;
}

namespace {

QuantizeParams quantize_params(const Problem& p, const Recipe& recipe, const Workspace& w, char* memory) {
  const QuantizeItems items = gradient_items(p);
  QuantizeParams params = make_quantize_params(p, recipe, w, memory);
  params.heads_per_item_q = items.heads_per_item_q;
  params.heads_per_item_k = items.heads_per_item_k;
  params.items_q = items.q;
  params.items_k = items.k;
  params.items_v = items.v;
  params.v.quantized_stride = row_strides(key_axes(p), p.head_dim_v);
  params.v.quantized_columns = as_int(quantized_pitch(p.head_dim_v));
  params.arrived = counters_at(p, w.at<unsigned int>(Region::counters, memory)).arrived;
  return params;
}

}  // namespace

EightBitBackwardParams make_eight_bit_backward_params(const Problem& p, const EightBitBackwardConfig& c,
                                                      const Recipe& recipe, const LoadedMaps& maps,
                                                      EncodeTensorMap encode, const Workspace& w,
                                                      char* memory) {
  const auto bytes = [&](Region region) { return w.at<unsigned char>(region, memory); };
  const Counters counters = counters_at(p, w.at<unsigned int>(Region::counters, memory));
  const QuantizedAxes q = query_axes(p);
  const std::int64_t columns = workspace_rows(p, c) / std::max<std::int64_t>(p.heads_q, 1);
  const QuantizedAxes heads{.entries = 1, .heads = p.heads_q, .rows = columns, .blocks = 0};
  const auto map = [&](Region region, const QuantizedAxes& axes, std::int64_t head_dim, std::int64_t of_head,
                       int box) {
    return transposed_map(p, region, axes, head_dim, of_head, box, w, memory, encode);
  };
  EightBitBackwardParams params{
      make_backward_params(p, c, maps, encode, w, memory),
      map(Region::q_transposed, heads, p.head_dim_qk, columns, c.tiling.block_m),
      map(Region::k_transposed, key_axes(p), p.head_dim_qk, padded_keys(p), c.tiling.block_n),
      map(Region::dout_transposed, heads, p.head_dim_v, columns, c.tiling.block_m),
      query_operand(bytes(Region::q_transposed), p.head_dim_qk, columns),
      key_operand(bytes(Region::k_transposed), p),
      query_operand(bytes(Region::dout_transposed), p.head_dim_v, columns),
      quantize_params(p, recipe, w, memory),
      {.source = p.dout.data,
       .stride = strides_of(p.dout),
       .quantized = bytes(Region::dout_quantized),
       .quantized_stride = row_strides(q, p.head_dim_v),
       .scales = nullptr,
       .scale_stride = {},
       .quantized_columns = as_int(quantized_pitch(p.head_dim_v)),
       .padded_rows = false,
       .nan_markers = false},
      counters.maxima,
      static_cast<const float*>(p.max_logits.data),
      strides_of(p.max_logits),
      w.at<float>(Region::q_scales, memory),
      w.at<float>(Region::row_factors, memory)};
  params.tiles_added = counters.tiles_added;
  params.dq_semaphores = counters.dq_semaphores;
  return params;
}

EightBitBackwardConfig eight_bit_main_config(EightBitBackwardConfig config) {
  config.f32_dq = false;
  return config;
}

EightBitBackwardConfig eight_bit_convert_config(const EightBitBackwardConfig& config) {
  EightBitBackwardConfig c;
  c.tiling = config.tiling;
  c.mask.varlen = config.mask.varlen;
  c.f32_dq = config.f32_dq;
  return c;
}

void fill_eight_bit_backward(StepParams& call, const Step& /*step*/) {
  const Steps& steps = call.steps();
  call.fill([&] {
    return make_eight_bit_backward_params(call.problem(), std::get<EightBitBackwardConfig>(steps.config),
                                          steps.recipe, call.maps(), call.encode(), steps.workspace,
                                          call.memory());
  });
}

void fill_mean_of_gradients(StepParams& call, const Step& /*step*/) {
  const Steps& steps = call.steps();
  call.fill([&] { return quantize_params(call.problem(), steps.recipe, steps.workspace, call.memory()); });
}

BlockShape gradient_keys_block(const KernelConfig& config) {
  return {.threads = quantize_threads, .shared_bytes = gradient_keys_bytes(std::get<QuantizeConfig>(config))};
}
BlockShape gradient_queries_block(const KernelConfig& config) {
  const int bytes = gradient_queries_bytes(std::get<QuantizeConfig>(config));
  return {.threads = quantize_threads, .shared_bytes = bytes};
}

BlockShape eight_bit_convert_block(const KernelConfig& config) {
  return {.threads = eight_bit_convert_threads(std::get<EightBitBackwardConfig>(config))};
}

BlockShape eight_bit_backward_block(const KernelConfig& config) {
  const auto& c = std::get<EightBitBackwardConfig>(config);
  return {.threads = EightBitBackwardConfig::threads(), .shared_bytes = backward_shared_bytes(c)};
}

}  // namespace tandem::gpu
