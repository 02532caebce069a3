// The forward pass in `tandem tune`.
#include <memory>

#include "call.hpp"
#include "gpu/forward.hpp"
#include "gpu/kernel_name.hpp"
#include "plan/forward_plan.hpp"
#include "tune_course.hpp"

namespace tandem::cli {
namespace {

/// What the shape decides, or the problem's features.
constexpr std::string_view fixed_fields[] = {"element", "head_dim_qk", "head_dim_v", "causal",
                                             "local",   "transform",   "ragged"};

/// What the launches of a course stand on.
struct Memory {
  Problem problem;
  std::vector<ForwardConfig> configs;
  gpu::DeviceBuffer q, k, v, workspace;
};

}  // namespace

template <>
Candidates<ForwardConfig> candidates_of(const TuneShape& shape, const std::vector<FieldValues>& fields,
                                        std::size_t most) {
  return legal_candidates(choose_forward_config(tune_problem(shape)), forward_objection, fixed_fields, fields,
                          most);
}

RaceCourse course_of(const TuneShape& s, const std::vector<ForwardConfig>& configs) {
  require_hopper();
  auto memory = std::make_shared<Memory>();
  Problem& p = memory->problem;
  p = tune_problem(s);
  memory->configs = configs;
  memory->q = random_tensor(s.dtype, s.batch * s.seqlen * s.heads * s.head_dim, 1);
  memory->k = random_tensor(s.dtype, s.batch * s.seqlen * s.heads_kv * s.head_dim, 2);
  memory->v = random_tensor(s.dtype, s.batch * s.seqlen * s.heads_kv * s.head_dim_v, 3);
  p.q.data = memory->q.data();
  p.k.data = memory->k.data();
  p.v.data = memory->v.data();

  RaceCourse course;
  const std::int64_t rows = s.batch * s.seqlen * s.heads;
  course.outputs.push_back(race_output("out", s.dtype, rows * s.head_dim_v));
  course.outputs.push_back(race_output("lse", DType::f32, rows));
  p.out.data = course.outputs[0].buffer.data();
  p.lse.data = course.outputs[1].buffer.data();
  std::size_t workspace = 0;
  for (const ForwardConfig& config : configs) {
    course.kernels.push_back(gpu::kernel_name(config));
    workspace = std::max(workspace, gpu::forward_workspace_bytes(p, config));
  }
  memory->workspace = gpu::DeviceBuffer(tuned_device, std::max<std::size_t>(workspace, 1));
  course.launch = [memory](std::size_t i) {
    gpu::forward(memory->problem, memory->configs[i], nullptr, memory->workspace.data());
  };
  course.flops = 2.0 * counted_pairs(p, s.seqlen, s.seqlen) *
                 static_cast<double>(s.batch * s.heads * (s.head_dim + s.head_dim_v));
  return course;
}

}  // namespace tandem::cli
