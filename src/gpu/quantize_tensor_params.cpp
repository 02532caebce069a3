#include "gpu/quantize_tensor_params.hpp"

#include <climits>

#include "gpu/param_fields.hpp"

namespace tandem::gpu {
namespace {

ScaleStrides scale_strides_of(const Operand& o) {
  return {.batch = o.batch_stride, .head = o.head_stride, .group = o.row_stride};
}

std::int64_t blocks_of_head(const QuantizeJob& job) {
  return std::max<std::int64_t>(1, blocks_of(job.rows, quant_block));
}

/// Largest magnitudes, which come before the counters.
std::int64_t largest_bytes(const QuantizeJob& job) {
  return exceeds_block(job.group) ? job.batch * job.heads * std::int64_t{sizeof(GroupLargest)} : 0;
}

}  // namespace

Workspace tensor_workspace(const QuantizeJob& job) {
  constexpr std::size_t alignment = 16;
  const std::int64_t heads = job.batch * job.heads;
  Workspace w;
  w.take_counters(largest_bytes(job) + (job.mean.given() ? 4 * heads : 0), alignment);
  if (job.mean.given()) {
    w.take(Region::sums, 4 * heads * blocks_of_head(job) * quantize_channels(as_int(job.head_dim)),
           alignment);
  }
  return w;
}

std::int64_t tensor_items(const QuantizeJob& job) {
  return job.batch * job.heads * blocks_of_head(job);
}

QuantizeParams make_tensor_params(const QuantizeJob& job, const Workspace& workspace, char* memory) {
  QuantizeParams params{};
  params.k = {.source = job.x.data,
              .stride = strides_of(job.x),
              .codes = static_cast<unsigned char*>(job.codes.data),
              .code_stride = strides_of(job.codes),
              .scales = static_cast<float*>(job.scales.data),
              .scale_stride = scale_strides_of(job.scales),
              .code_columns = as_int(job.head_dim),
              .padded_rows = false,
              .nan_markers = job.nan_markers};
  if (job.cos.given()) {
    params.rotary = {.cos = static_cast<const float*>(job.cos.data),
                     .sin = static_cast<const float*>(job.sin.data),
                     .cos_stride = job.cos.row_stride,
                     .sin_stride = job.sin.row_stride,
                     .dim = as_int(job.rotary_dim)};
  }
  params.batch = as_int(job.batch);
  params.heads_q = params.heads_kv = as_int(job.heads);
  params.group = 1;
  params.rows_k = as_int(job.rows);
  params.blocks_k = params.axis_blocks_k = as_int(blocks_of_head(job));
  params.heads_per_item_q = params.heads_per_item_k = 1;
  params.items_k = as_int(tensor_items(job));
  params.mean_all_keys = INT_MAX;
  params.largest = workspace.at<GroupLargest>(Region::counters, memory);
  if (job.mean.given()) {
    params.mean = static_cast<float*>(job.mean.data);
    params.mean_stride = scale_strides_of(job.mean);
    params.arrived =
        reinterpret_cast<unsigned int*>(workspace.at(Region::counters, memory) + largest_bytes(job));
    params.sums = workspace.at<float>(Region::sums, memory);
  }
  return params;
}

}  // namespace tandem::gpu
