#include "ops/quantize/tensor_launch.hpp"

#include <climits>

#include "gpu/param_fields.hpp"

namespace tandem::gpu {
namespace {

ScaleStrides scale_strides_of(const Operand& o) {
  return {.batch = o.batch_stride, .head = o.head_stride, .group = o.row_stride};
}

std::int64_t blocks_of_head(const QuantizeProblem& problem) {
  return std::max<std::int64_t>(1, blocks_of(problem.rows, quant_block));
}

/// Largest magnitudes, which come before the counters.
std::int64_t largest_bytes(const QuantizeProblem& problem) {
  return exceeds_block(problem.group) ? problem.batch * problem.heads * std::int64_t{sizeof(GroupLargest)}
                                      : 0;
}

}  // namespace

Workspace tensor_workspace(const QuantizeProblem& problem) {
  constexpr std::size_t alignment = 16;
  const std::int64_t heads = problem.batch * problem.heads;
  Workspace w;
  w.reserve_counters(largest_bytes(problem) + (problem.mean.given() ? 4 * heads : 0), alignment);
  if (problem.mean.given()) {
    w.reserve(Region::sums, 4 * heads * blocks_of_head(problem) * quantize_channels(as_int(problem.head_dim)),
              alignment);
  }
  return w;
}

std::int64_t tensor_items(const QuantizeProblem& problem) {
  return problem.batch * problem.heads * blocks_of_head(problem);
}

QuantizeParams make_tensor_params(const QuantizeProblem& problem, const Workspace& workspace, char* memory) {
  QuantizeParams params{};
  params.k = {.source = problem.x.data,
              .stride = strides_of(problem.x),
              .quantized = static_cast<unsigned char*>(problem.codes.data),
              .quantized_stride = strides_of(problem.codes),
              .scales = static_cast<float*>(problem.scales.data),
              .scale_stride = scale_strides_of(problem.scales),
              .quantized_columns = as_int(problem.head_dim),
              .padded_rows = false,
              .nan_markers = problem.nan_markers};
  params.batch = as_int(problem.batch);
  params.heads_q = params.heads_kv = as_int(problem.heads);
  params.group = 1;
  params.rows_k = as_int(problem.rows);
  params.blocks_k = params.axis_blocks_k = as_int(blocks_of_head(problem));
  params.heads_per_item_q = params.heads_per_item_k = 1;
  params.items_k = as_int(tensor_items(problem));
  params.mean_all_keys = INT_MAX;
  params.largest = workspace.at<GroupLargest>(Region::counters, memory);
  if (problem.mean.given()) {
    params.mean = static_cast<float*>(problem.mean.data);
    params.mean_stride = scale_strides_of(problem.mean);
    params.arrived =
        reinterpret_cast<unsigned int*>(workspace.at(Region::counters, memory) + largest_bytes(problem));
    params.sums = workspace.at<float>(Region::sums, memory);
  }
  return params;
}

}  // namespace tandem::gpu
