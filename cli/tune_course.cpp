#include "tune_course.hpp"

#include <fmt/core.h>

#include <cmath>

#include "values.hpp"

namespace tandem::cli {
namespace {

Operand contiguous(DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim, void* data) {
  return {.data = data,
          .dtype = dtype,
          .batch_stride = rows * heads * dim,
          .row_stride = heads * dim,
          .head_stride = dim};
}

}  // namespace

Problem tune_problem(const TuneShape& s) {
  Problem p;
  p.device = {.kind = Device::Kind::cuda, .index = tuned_device};
  p.batch = s.batch;
  p.heads_q = s.heads;
  p.heads_kv = s.heads_kv;
  p.rows_q = p.rows_k = s.seqlen;
  p.head_dim_qk = s.head_dim;
  p.head_dim_v = s.head_dim_v;
  p.window_left = s.window_left;
  p.window_right = s.causal ? 0 : -1;
  p.scale = 1.0F / std::sqrt(static_cast<float>(s.head_dim));
  p.q = contiguous(s.dtype, s.seqlen, s.heads, s.head_dim, nullptr);
  p.k = contiguous(s.dtype, s.seqlen, s.heads_kv, s.head_dim, nullptr);
  p.v = contiguous(s.dtype, s.seqlen, s.heads_kv, s.head_dim_v, nullptr);
  p.out = contiguous(s.dtype, s.seqlen, s.heads, s.head_dim_v, nullptr);
  p.lse = {.data = nullptr,
           .dtype = DType::f32,
           .batch_stride = s.heads * s.seqlen,
           .row_stride = 1,
           .head_stride = s.seqlen};
  return p;
}

gpu::DeviceBuffer random_tensor(DType dtype, std::int64_t elements, std::uint64_t seed) {
  constexpr std::int64_t most = std::int64_t{1} << 22;
  files::TensorData values(dtype, {std::min(elements, most)});
  fill_normal(values, seed);
  const std::size_t bytes = static_cast<std::size_t>(elements) * size_of(dtype);
  gpu::DeviceBuffer buffer(tuned_device, bytes);
  for (std::size_t at = 0; at < bytes; at += values.bytes().size()) {
    buffer.copy_from_host(values.bytes().data(), std::min(values.bytes().size(), bytes - at), nullptr, at);
  }
  gpu::synchronize(tuned_device);
  return buffer;
}

void require_hopper() {
  const gpu::DeviceProperties& properties = gpu::properties(tuned_device);
  if (gpu::is_supported(properties)) return;
  throw Error(Status::runtime,
              fmt::format("cuda:{} ({}) has compute capability {}.{}; the GPU kernels need 9.0 (Hopper)",
                          tuned_device, properties.name, properties.major, properties.minor));
}

RaceOutput race_output(const char* name, DType dtype, std::int64_t elements) {
  return {.name = name,
          .buffer = gpu::DeviceBuffer(tuned_device, static_cast<std::size_t>(elements) * size_of(dtype)),
          .dtype = dtype,
          .tolerance = dtype == DType::bf16  ? 4 * 0x1p-8
                       : dtype == DType::f16 ? 4 * 0x1p-11
                                             : 1e-5};
}

}  // namespace tandem::cli
