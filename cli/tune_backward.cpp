// The backward pass in `tandem tune`.
#include <memory>

#include "call.hpp"
#include "gpu/backward.hpp"
#include "gpu/forward.hpp"
#include "gpu/kernel_name.hpp"
#include "plan/backward_plan.hpp"
#include "plan/forward_plan.hpp"
#include "tune_course.hpp"

namespace tandem::cli {
namespace {

/// What the shape decides, or the problem's features. A fixed order may be had or not.
constexpr std::string_view fixed_fields[] = {"element", "head_dim_qk", "head_dim_v", "causal",
                                             "local",   "softcap",     "ragged"};

/// What the launches of a course stand on.
struct Memory {
  Problem problem;
  std::vector<BackwardConfig> configs;
  gpu::DeviceBuffer q, k, v, out, lse, dout, workspace;
};

}  // namespace

template <>
Candidates<BackwardConfig> candidates_of(const TuneShape& shape, const std::vector<FieldValues>& fields,
                                         std::size_t most) {
  return legal_candidates(choose_backward_config(tune_problem(shape)), backward_objection, fixed_fields,
                          fields, most);
}

RaceCourse course_of(const TuneShape& s, const std::vector<BackwardConfig>& configs) {
  require_hopper();
  auto memory = std::make_shared<Memory>();
  Problem& p = memory->problem;
  p = tune_problem(s);
  memory->configs = configs;
  const std::int64_t rows_q = s.batch * s.seqlen * s.heads;
  const std::int64_t rows_k = s.batch * s.seqlen * s.heads_kv;
  memory->q = random_tensor(s.dtype, rows_q * s.head_dim, 1);
  memory->k = random_tensor(s.dtype, rows_k * s.head_dim, 2);
  memory->v = random_tensor(s.dtype, rows_k * s.head_dim_v, 3);
  memory->dout = random_tensor(s.dtype, rows_q * s.head_dim_v, 4);
  memory->out = random_tensor(s.dtype, rows_q * s.head_dim_v, 5);
  memory->lse = random_tensor(DType::f32, rows_q, 6);
  p.q.data = memory->q.data();
  p.k.data = memory->k.data();
  p.v.data = memory->v.data();
  p.out.data = memory->out.data();
  p.lse.data = memory->lse.data();
  gpu::forward(p, choose_forward_config(p), nullptr, nullptr);
  p.dout = p.out;
  p.dout.data = memory->dout.data();

  RaceCourse course;
  course.outputs.push_back(race_output("dq", s.dtype, rows_q * s.head_dim));
  course.outputs.push_back(race_output("dk", s.dtype, rows_k * s.head_dim));
  course.outputs.push_back(race_output("dv", s.dtype, rows_k * s.head_dim_v));
  p.dq = p.q;
  p.dk = p.k;
  p.dv = p.v;
  p.dq.data = course.outputs[0].buffer.data();
  p.dk.data = course.outputs[1].buffer.data();
  p.dv.data = course.outputs[2].buffer.data();
  std::size_t workspace = 0;
  for (const BackwardConfig& config : configs) {
    course.kernels.push_back(gpu::kernel_name(gpu::Kernel::backward, config));
    workspace = std::max(workspace, gpu::backward_workspace_bytes(p, config));
  }
  memory->workspace = gpu::DeviceBuffer(tuned_device, std::max<std::size_t>(workspace, 1));
  course.launch = [memory](std::size_t i) {
    gpu::backward(memory->problem, memory->configs[i], nullptr, memory->workspace.data());
  };
  course.flops = 5.0 * counted_pairs(p, s.seqlen, s.seqlen) *
                 static_cast<double>(s.batch * s.heads * (s.head_dim + s.head_dim_v));
  return course;
}

}  // namespace tandem::cli
