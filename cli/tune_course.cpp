#include "tune_course.hpp"

#include <fmt/core.h>

#include "values.hpp"

namespace tandem::cli {
ForwardArgs forward_args(const TuneShape& s, Device device) {
  ForwardArgs args;
  const bool paged = s.page_size > 0;
  const std::int64_t pages = paged ? s.seqlen / s.page_size : 0;
  const std::int64_t entries = paged ? s.batch * pages : s.batch;
  const std::int64_t rows = paged ? s.page_size : s.seqlen;
  args.q = ConstTensor(nullptr, s.dtype, {s.batch, s.queries, s.heads, s.head_dim}, device);
  args.k = ConstTensor(nullptr, s.dtype, {entries, rows, s.heads_kv, s.head_dim}, device);
  args.v = ConstTensor(nullptr, s.dtype, {entries, rows, s.heads_kv, s.head_dim_v}, device);
  if (s.v_in_k) args.v.stride = args.k.stride;
  if (paged) args.page_table = ConstTensor(nullptr, DType::i32, {s.batch, pages}, device);
  args.out = Tensor(nullptr, s.dtype, {s.batch, s.queries, s.heads, s.head_dim_v}, device);
  args.lse = Tensor(nullptr, DType::f32, {s.batch, s.heads, s.queries}, device);
  args.options.causal = s.causal;
  args.options.window_left = s.window_left;
  return args;
}

BackwardArgs backward_args(const TuneShape& s, Device device) {
  const ForwardArgs forward = forward_args(s, device);
  BackwardArgs args;
  static_cast<AttentionInputs&>(args) = forward;
  args.options = forward.options;
  args.out = forward.out;
  args.lse = forward.lse;
  args.dout = forward.out;
  args.dq = Tensor(nullptr, s.dtype, {s.batch, s.seqlen, s.heads, s.head_dim}, device);
  args.dk = Tensor(nullptr, s.dtype, {s.batch, s.seqlen, s.heads_kv, s.head_dim}, device);
  args.dv = Tensor(nullptr, s.dtype, {s.batch, s.seqlen, s.heads_kv, s.head_dim_v}, device);
  return args;
}

gpu::DeviceBuffer random_tensor(DType dtype, std::int64_t elements, std::uint64_t seed) {
  constexpr std::int64_t most = std::int64_t{1} << 22;
  files::TensorData values(dtype, {std::min(elements, most)});
  fill_normal(values, seed);
  const std::size_t bytes = static_cast<std::size_t>(elements) * size_of(dtype);
  gpu::DeviceBuffer buffer(tuned_device.index, bytes);
  for (std::size_t at = 0; at < bytes; at += values.bytes().size()) {
    buffer.copy_from_host(values.bytes().data(), std::min(values.bytes().size(), bytes - at), nullptr, at);
  }
  gpu::synchronize(tuned_device.index);
  return buffer;
}

void require_hopper() {
  const gpu::DeviceProperties& properties = gpu::properties(tuned_device.index);
  if (gpu::is_hopper(properties)) return;
  throw Error(Status::runtime,
              fmt::format("cuda:{} ({}) has compute capability {}.{}; the GPU kernels need 9.0 (Hopper)",
                          tuned_device.index, properties.name, properties.major, properties.minor));
}

RaceOutput race_output(const char* name, DType dtype, std::int64_t elements) {
  return {
      .name = name,
      .buffer = gpu::DeviceBuffer(tuned_device.index, static_cast<std::size_t>(elements) * size_of(dtype)),
      .dtype = dtype,
      .tolerance = dtype == DType::bf16  ? 4 * 0x1p-8
                   : dtype == DType::f16 ? 4 * 0x1p-11
                                         : 1e-5};
}

}  // namespace tandem::cli
