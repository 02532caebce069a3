#include "gpu/quantize_tensor.hpp"

#include <climits>

#include "gpu/packing.hpp"
#include "gpu/param_fields.hpp"
#include "gpu/quantize.hpp"
#include "tandem/error.hpp"

namespace tandem::gpu {
namespace {

ScaleStrides scale_strides_of(const Operand& o) {
  return {.batch = o.batch_stride, .head = o.head_stride, .group = o.row_stride};
}

/// A head without rows has a scale and a mean too: one unit finds them.
std::int64_t blocks_of_head(const QuantizeJob& job) {
  return std::max<std::int64_t>(1, blocks_of(job.rows, quant_block));
}

/// Scratch memory: what has to be 0 before the launches, largest magnitudes and counters, then sums.
struct TensorSpace {
  std::size_t arrived = 0;
  std::size_t sums = 0;
  std::size_t bytes = 0;
};
TensorSpace space_of(const QuantizeJob& job) {
  const auto heads = static_cast<std::size_t>(job.batch * job.heads);
  TensorSpace s;
  if (exceeds_block(job.group)) s.arrived = heads * sizeof(GroupLargest);
  s.sums = s.arrived;
  if (!job.mean.given()) {
    s.bytes = s.sums;
    return s;
  }
  s.sums = (s.arrived + heads * sizeof(unsigned int) + 15) / 16 * 16;
  const auto channels = static_cast<std::size_t>(quantize_channels(as_int(job.head_dim)));
  s.bytes = s.sums + heads * static_cast<std::size_t>(blocks_of_head(job)) * channels * sizeof(float);
  return s;
}

}  // namespace

QuantizeConfig tensor_config(const QuantizeJob& job) {
  QuantizeConfig c;
  c.element = job.x.dtype == DType::f16 ? Element::f16 : Element::bf16;
  c.head_dim_qk = as_int(job.head_dim);
  c.head_dim_v = c.head_dim_qk;
  c.qk = job.codes.dtype == DType::s8 ? Codes::s8 : Codes::e4m3;
  c.pv = Codes::input;
  c.qk_scales = job.group;
  c.rotate_qk = job.rotate;
  c.smooth_k = job.mean.given();
  c.rotary = job.cos.given();
  c.interleaved = c.rotary && job.interleaved;
  c.vectors = allows_vectors(job.x, job.head_dim) && allows_code_vectors(job.codes, job.head_dim);
  return c;
}

std::size_t tensor_zero_bytes(const QuantizeJob& job) {
  return space_of(job).sums;
}

std::size_t tensor_scratch_bytes(const QuantizeJob& job) {
  return space_of(job).bytes;
}

QuantizeParams make_tensor_params(const QuantizeJob& job, char* scratch) {
  const TensorSpace space = space_of(job);
  QuantizeParams params{};
  params.k = {.source = job.x.data,
              .stride = strides_of(job.x),
              .codes = static_cast<unsigned char*>(job.codes.data),
              .code_stride = strides_of(job.codes),
              .scales = static_cast<float*>(job.scales.data),
              .scale_stride = scale_strides_of(job.scales),
              .code_columns = as_int(job.head_dim),
              .padded_rows = false,
              .marks_rows = job.marks_rows};
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
  params.together_q = params.together_k = 1;
  params.units_k = as_int(job.batch * job.heads * blocks_of_head(job));
  params.mean_all_keys = INT_MAX;
  params.largest = reinterpret_cast<GroupLargest*>(scratch);
  if (job.mean.given()) {
    params.mean = static_cast<float*>(job.mean.data);
    params.mean_stride = scale_strides_of(job.mean);
    params.arrived = reinterpret_cast<unsigned int*>(scratch + space.arrived);
    params.sums = reinterpret_cast<float*>(scratch + space.sums);
  }
  return params;
}

void quantize_tensor(const QuantizeJob& job, void* stream_handle) {
  if (job.x.dtype == DType::f32) {
    throw Error(Status::unsupported,
                "quantize has no GPU kernel for f32; convert x to f16 or bf16, or copy it to the CPU");
  }
  const int device = job.device.index;
  const auto stream = static_cast<abi::Stream>(stream_handle);
  const auto set_zero = [&](void* data, std::size_t bytes) {
    if (bytes == 0) return;
    check(driver().memset_d8_async(reinterpret_cast<abi::DevicePointer>(data), 0, bytes, stream),
          "cuMemsetD8Async");
  };
  if (job.batch * job.heads == 0) {
    const ContextGuard guard(device);
    if (job.group == ScaleGroup::tensor) set_zero(job.scales.data, sizeof(float));
    return;
  }
  const QuantizeKernels kernels = quantize_kernels(device, tensor_config(job));
  const ContextGuard guard(device);
  const Scratch scratch(nullptr, tensor_scratch_bytes(job), stream);
  set_zero(scratch.data(), tensor_zero_bytes(job));
  launch_quantizer(kernels, make_tensor_params(job, scratch.data()), device, stream);
}

}  // namespace tandem::gpu
