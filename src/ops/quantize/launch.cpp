#include "ops/quantize/launch.hpp"

#include "gpu/param_fields.hpp"
#include "gpu/step_params.hpp"
#include "ops/quantize/axes.hpp"

namespace tandem::gpu {
namespace {

bool by_row(ScaleGroup group) {
  return group == ScaleGroup::row;
}

Strides row_strides(const QuantizedAxes& e, std::int64_t head_dim) {
  const std::int64_t pitch = quantized_pitch(head_dim);
  return {.batch = e.heads * e.rows * pitch, .row = pitch, .head = e.rows * pitch};
}
Strides channel_strides(const QuantizedAxes& e, std::int64_t head_dim) {
  const std::int64_t keys = e.blocks * quant_block;
  const std::int64_t head = quantized_pitch(head_dim) * keys;
  return {.batch = e.heads * head, .row = keys, .head = head};
}
std::int64_t items_of(const QuantizedAxes& e, std::int64_t heads_per_item = 1) {
  return e.entries * e.blocks * ((e.heads + heads_per_item - 1) / heads_per_item);
}
/// Heads of a work item: as many as fill 128 rows with packed sequences of the mean length, in segments of at
/// least 16 rows (1024 sequences of 16 rows, 16 heads: 6912 work items, instead of 55,296 with a head each).
int heads_per_item(std::int64_t rows, std::int64_t batch, bool packed) {
  if (!packed || batch == 0) return 1;
  int segment = 16;
  while (segment < quant_block && segment * batch < rows) segment *= 2;
  return quant_block / segment;
}

/// Params with lengths, extents and work items, without tensors.
QuantizeParams extents_of(const Problem& p, const QuantizeItems& items) {
  QuantizeParams params{};
  params.cu_seqlens_q = lengths_of(p.cu_seqlens_q);
  params.cu_seqlens_k = lengths_of(p.cu_seqlens_k);
  params.seqused_q = lengths_of(p.seqused_q);
  params.seqused_k = lengths_of(p.seqused_k);
  params.batch = as_int(p.batch);
  params.heads_q = as_int(p.heads_q);
  params.heads_kv = as_int(p.heads_kv);
  params.group = as_int(p.group());
  params.rows_q = as_int(p.rows_q);
  params.rows_k = as_int(p.rows_k);
  params.blocks_q = as_int(blocks_of(p.rows_q, quant_block));
  params.blocks_k = as_int(blocks_of(p.rows_k, quant_block));
  params.axis_blocks_k = as_int(key_axes(p).blocks);
  params.heads_per_item_q = items.heads_per_item_q;
  params.heads_per_item_k = items.heads_per_item_k;
  params.items_q = items.q;
  params.items_k = items.k;
  params.items_v = items.v;
  params.scale = p.scale;
  params.packed_q = p.packed_q;
  params.packed_k = p.packed_k;
  return params;
}

CallerScales caller_scales(const Scales& s) {
  return {.data = s.data,
          .stride = {.batch = s.batch_stride, .head = s.head_stride, .group = s.group_stride},
          .heads = as_int(s.heads),
          .by_row = s.group == ScaleGroup::row};
}

}  // namespace

Workspace quantized_workspace(const Problem& p, const Recipe& r) {
  const QuantizedAxes q = query_axes(p);
  const QuantizedAxes k = key_axes(p);
  const std::int64_t channels = quantize_channels(as_int(p.head_dim_qk));
  Workspace w;
  w.reserve(Region::q_quantized, q.entries * row_strides(q, p.head_dim_qk).batch);
  w.reserve(Region::k_quantized, k.entries * row_strides(k, p.head_dim_qk).batch);
  w.reserve(Region::q_scales, 4 * q.entries * q.heads * scales_of_head(q, by_row(r.qk_scales)));
  w.reserve(Region::k_scales, 4 * k.entries * k.heads * scales_of_head(k, by_row(r.qk_scales)));
  w.reserve(Region::v_quantized, k.entries * channel_strides(k, p.head_dim_v).batch);
  w.reserve(Region::v_scales, 4 * k.entries * k.heads * scales_of_head(k, by_row(r.v_scales)));
  // The attention kernel's counter of tiles, then those of K's sums.
  w.reserve_counters(4 + (r.smooth_k ? 4 * p.batch * k.heads : 0));
  if (r.smooth_k) {
    w.reserve(Region::shift, 4 * q.entries * q.heads * scales_of_head(q, true));
    w.reserve(Region::mean, 4 * p.batch * k.heads * channels);
    w.reserve(Region::sums, 4 * k.entries * k.heads * k.blocks * channels);
  }
  return w;
}

QuantizeItems quantize_items(const Problem& p) {
  QuantizeItems items;
  if (!p.quantized_inputs()) {
    items.heads_per_item_q = heads_per_item(p.rows_q, p.batch, p.packed_q);
    items.heads_per_item_k = heads_per_item(p.rows_k, p.batch, p.packed_k);
  }
  items.v = as_int(items_of(key_axes(p), items.heads_per_item_k));
  items.q = as_int(items_of(query_axes(p), items.heads_per_item_q));
  items.k = items.v;
  return items;
}

QuantizeItems dequantize_items(const Problem& p) {
  const int items = as_int(items_of(key_axes(p)));
  return {.k = items, .v = items};
}

QuantizeParams make_quantize_params(const Problem& p, const Recipe& r, const Workspace& w, char* memory) {
  const QuantizedAxes q = query_axes(p);
  const QuantizedAxes k = key_axes(p);
  const std::int64_t channels = quantize_channels(as_int(p.head_dim_qk));
  const auto floats = [&](Region region) { return w.at<float>(region, memory); };
  const auto quantized = [&](Region region) { return w.at<unsigned char>(region, memory); };
  QuantizeParams params = extents_of(p, quantize_items(p));
  params.q = {.source = p.q.data,
              .stride = strides_of(p.q),
              .quantized = quantized(Region::q_quantized),
              .quantized_stride = row_strides(q, p.head_dim_qk),
              .scales = floats(Region::q_scales),
              .scale_stride = scale_strides(q, by_row(r.qk_scales)),
              .quantized_columns = as_int(quantized_pitch(p.head_dim_qk)),
              .padded_rows = true,
              .nan_markers = true};
  params.k = {.source = p.k.data,
              .stride = strides_of(p.k),
              .quantized = quantized(Region::k_quantized),
              .quantized_stride = row_strides(k, p.head_dim_qk),
              .scales = floats(Region::k_scales),
              .scale_stride = scale_strides(k, by_row(r.qk_scales)),
              .quantized_columns = as_int(quantized_pitch(p.head_dim_qk)),
              .padded_rows = true,
              .nan_markers = true};
  params.v = {.source = p.v.data,
              .stride = strides_of(p.v),
              .quantized = quantized(Region::v_quantized),
              .quantized_stride = channel_strides(k, p.head_dim_v),
              .scales = floats(Region::v_scales),
              .scale_stride = scale_strides(k, by_row(r.v_scales)),
              .quantized_columns = 0,
              .padded_rows = true,
              .nan_markers = false};
  if (r.smooth_k) {
    params.shift = floats(Region::shift);
    params.shift_stride = scale_strides(q, true);
    params.mean = floats(Region::mean);
    params.mean_stride = {.batch = k.heads * channels, .head = channels, .group = 1};
    params.sums = floats(Region::sums);
    params.mean_all_keys = mean_all_keys;
    params.arrived = w.at<unsigned int>(Region::counters, memory) + 1;
  }
  return params;
}

ArrangeParams make_arrange_params(const Problem& p, const QuantizeParams& params) {
  return {.quantize = params,
          .q_scale = caller_scales(p.q_scale),
          .k_scale = caller_scales(p.k_scale),
          .v_scale = caller_scales(p.v_scale)};
}

ArrangeParams make_dequantize_params(const Problem& p, const Problem& dequantized) {
  const auto tensor = [](const Operand& from, const Operand& to) {
    QuantizedTensor t{};
    t.source = from.data;
    t.stride = strides_of(from);
    t.quantized = static_cast<unsigned char*>(to.data);
    t.quantized_stride = strides_of(to);
    return t;
  };
  QuantizeParams params = extents_of(p, dequantize_items(p));
  params.k = tensor(p.k, dequantized.k);
  params.v = tensor(p.v, dequantized.v);
  return {.quantize = params,
          .q_scale = {},
          .k_scale = caller_scales(p.k_scale),
          .v_scale = caller_scales(p.v_scale)};
}

void fill_dequantize(StepParams& call, const Step& /*step*/) {
  Problem quantized = call.problem();
  quantized.k = *call.steps().sources[index_of(Loaded::k)];
  quantized.v = *call.steps().sources[index_of(Loaded::v)];
  call.fill([&] { return make_dequantize_params(quantized, call.problem()); });
}

namespace {
QuantizeParams params_of(const StepParams& call) {
  const Steps& steps = call.steps();
  return make_quantize_params(call.problem(), steps.recipe, steps.workspace, call.memory());
}
}  // namespace

void fill_quantize(StepParams& call, const Step& /*step*/) {
  call.fill([&] { return params_of(call); });
}

void fill_arrange_quantized(StepParams& call, const Step& /*step*/) {
  call.fill([&] { return make_arrange_params(call.problem(), params_of(call)); });
}

BlockShape mean_block(const KernelConfig& config) {
  const auto& c = std::get<QuantizeConfig>(config);
  return {.threads = mean_threads(c), .shared_bytes = mean_shared_bytes(c)};
}
BlockShape quantize_block(const KernelConfig& config) {
  const auto& c = std::get<QuantizeConfig>(config);
  return {.threads = c.threads(), .shared_bytes = quantize_shared_bytes(c)};
}
BlockShape arrange_block(const KernelConfig& config) {
  return {.threads = quantize_threads,
          .shared_bytes = arrange_shared_bytes(std::get<QuantizeConfig>(config))};
}

}  // namespace tandem::gpu
