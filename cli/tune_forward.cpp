#include "tune_forward.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "api/problem.hpp"
#include "call.hpp"
#include "gpu/forward.hpp"
#include "gpu/kernel_name.hpp"
#include "plan/forward_plan.hpp"
#include "values.hpp"

namespace tandem::cli {
namespace {

constexpr int device = 0;

/// What the shape decides, or the problem's features.
constexpr std::array fixed_fields = {"element", "head_dim_qk", "head_dim_v", "causal",
                                     "local",   "transform",   "ragged"};

Operand contiguous(DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim, void* data) {
  return {.data = data,
          .dtype = dtype,
          .batch_stride = rows * heads * dim,
          .row_stride = heads * dim,
          .head_stride = dim};
}

Problem problem_of(const TuneShape& s) {
  Problem p;
  p.device = {.kind = Device::Kind::cuda, .index = device};
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
  return p;
}

/// Normal numbers: four million drawn, then repeated.
gpu::DeviceBuffer random_tensor(DType dtype, std::int64_t elements, std::uint64_t seed) {
  constexpr std::int64_t most = std::int64_t{1} << 22;
  files::TensorData values(dtype, {std::min(elements, most)});
  fill_normal(values, seed);
  const std::size_t bytes = static_cast<std::size_t>(elements) * size_of(dtype);
  gpu::DeviceBuffer buffer(device, bytes);
  for (std::size_t at = 0; at < bytes; at += values.bytes().size()) {
    buffer.copy_from_host(values.bytes().data(), std::min(values.bytes().size(), bytes - at), nullptr, at);
  }
  gpu::synchronize(device);
  return buffer;
}

/// What the launches of a course stand on.
struct Memory {
  Problem problem;
  std::vector<ForwardConfig> configs;
  gpu::DeviceBuffer q, k, v, workspace;
};

}  // namespace

ForwardCandidates forward_candidates(const TuneShape& shape, const std::vector<FieldValues>& fields,
                                     std::size_t most) {
  for (const FieldValues& wanted : fields) {
    if (std::ranges::find(fixed_fields, wanted.field) != fixed_fields.end()) {
      throw Error(Status::invalid_argument,
                  fmt::format("the field {} follows from the shape; leave it out", wanted.field));
    }
  }
  ForwardCandidates found;
  found.configs = {choose_forward_config(problem_of(shape))};
  for (const ForwardConfig& config : combinations(found.configs[0], fields)) {
    if (!forward_objection(config).empty()) {
      ++found.illegal;
    } else if (std::ranges::find(found.configs, config) == found.configs.end()) {
      found.configs.push_back(config);
    }
  }
  if (found.configs.size() > most) {
    throw Error(Status::invalid_argument,
                fmt::format("{} Configs are legal, more than --most {}; name fewer values, or raise it",
                            found.configs.size(), most));
  }
  return found;
}

RaceCourse forward_course(const TuneShape& s, const std::vector<ForwardConfig>& configs) {
  const gpu::DeviceProperties& properties = gpu::properties(device);
  if (!gpu::is_supported(properties)) {
    throw Error(Status::unsupported,
                fmt::format("cuda:{} ({}) has compute capability {}.{}; the GPU kernels need 9.0 (Hopper)",
                            device, properties.name, properties.major, properties.minor));
  }
  auto memory = std::make_shared<Memory>();
  Problem& p = memory->problem;
  p = problem_of(s);
  memory->configs = configs;
  memory->q = random_tensor(s.dtype, s.batch * s.seqlen * s.heads * s.head_dim, 1);
  memory->k = random_tensor(s.dtype, s.batch * s.seqlen * s.heads_kv * s.head_dim, 2);
  memory->v = random_tensor(s.dtype, s.batch * s.seqlen * s.heads_kv * s.head_dim_v, 3);
  p.q.data = memory->q.data();
  p.k.data = memory->k.data();
  p.v.data = memory->v.data();

  RaceCourse course;
  const std::int64_t rows = s.batch * s.seqlen * s.heads;
  const double epsilon = s.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
  course.outputs.push_back(
      {.name = "out",
       .buffer = gpu::DeviceBuffer(device, static_cast<std::size_t>(rows * s.head_dim_v) * size_of(s.dtype)),
       .dtype = s.dtype,
       .tolerance = 4 * epsilon});
  course.outputs.push_back({.name = "lse",
                            .buffer = gpu::DeviceBuffer(device, static_cast<std::size_t>(rows) * 4),
                            .dtype = DType::f32,
                            .tolerance = 1e-5});
  p.out.data = course.outputs[0].buffer.data();
  p.lse = {.data = course.outputs[1].buffer.data(),
           .dtype = DType::f32,
           .batch_stride = s.heads * s.seqlen,
           .row_stride = 1,
           .head_stride = s.seqlen};
  std::size_t workspace = 0;
  for (const ForwardConfig& config : configs) {
    course.kernels.push_back(gpu::kernel_name(config));
    workspace = std::max(workspace, gpu::forward_workspace_bytes(p, config));
  }
  memory->workspace = gpu::DeviceBuffer(device, std::max<std::size_t>(workspace, 1));
  course.launch = [memory](std::size_t i) {
    gpu::forward(memory->problem, memory->configs[i], nullptr, memory->workspace.data());
  };
  course.flops = 2.0 * counted_pairs(p, s.seqlen, s.seqlen) *
                 static_cast<double>(s.batch * s.heads * (s.head_dim + s.head_dim_v));
  return course;
}

}  // namespace tandem::cli
