// The backward pass in `tandem tune`.
#include <memory>

#include "api/make_problem.hpp"
#include "ops/backward/launch.hpp"
#include "ops/plan_gpu.hpp"
#include "ops/run.hpp"
#include "tune_course.hpp"

namespace tandem::cli {
namespace {

/// What the launches of a course stand on.
struct Memory {
  gpu::DeviceBuffer q, k, v, out, lse, dout, workspace;
  std::vector<gpu::Steps> steps;  ///< by Config
};

}  // namespace

gpu::KernelConfig planned_backward(const TuneShape& shape) {
  return plan_gpu(make_problem(backward_args(shape, described_device), tandem::Memory::described))
      .gpu->config;
}

template <typename Config>
RaceCourse backward_course(const TuneShape& s, const std::vector<Config>& configs) {
  require_hopper();
  auto memory = std::make_shared<Memory>();
  const std::int64_t rows_q = s.batch * s.seqlen * s.heads;
  const std::int64_t rows_k = s.batch * s.seqlen * s.heads_kv;
  memory->q = random_tensor(s.dtype, rows_q * s.head_dim, 1);
  memory->k = random_tensor(s.dtype, rows_k * s.head_dim, 2);
  memory->v = random_tensor(s.dtype, rows_k * s.head_dim_v, 3);
  memory->dout = random_tensor(s.dtype, rows_q * s.head_dim_v, 4);
  memory->out = random_tensor(s.dtype, rows_q * s.head_dim_v, 5);
  memory->lse = random_tensor(DType::f32, rows_q, 6);

  RaceCourse course;
  course.outputs.push_back(race_output("dq", s.dtype, rows_q * s.head_dim));
  course.outputs.push_back(race_output("dk", s.dtype, rows_k * s.head_dim));
  course.outputs.push_back(race_output("dv", s.dtype, rows_k * s.head_dim_v));
  ForwardArgs forward = forward_args(s, tuned_device);
  BackwardArgs args = backward_args(s, tuned_device);
  args.q.data = forward.q.data = memory->q.data();
  args.k.data = forward.k.data = memory->k.data();
  args.v.data = forward.v.data = memory->v.data();
  args.out.data = forward.out.data = memory->out.data();
  args.lse.data = forward.lse.data = memory->lse.data();
  args.dout.data = memory->dout.data();
  args.dq.data = course.outputs[0].buffer.data();
  args.dk.data = course.outputs[1].buffer.data();
  args.dv.data = course.outputs[2].buffer.data();
  tandem::forward(forward);
  const Problem p = make_problem(args, tandem::Memory::present);
  std::size_t workspace = 0;
  for (const Config& config : configs) {
    course.kernels.push_back(gpu::kernel_of(config).name(config));
    const gpu::KernelConfig wanted = config;
    memory->steps.push_back(*plan_gpu(p, &wanted).gpu);
    workspace = std::max(workspace, memory->steps.back().workspace.bytes());
  }
  memory->workspace = gpu::DeviceBuffer(tuned_device.index, std::max<std::size_t>(workspace, 1));
  course.launch = [memory](std::size_t i) { gpu::run(memory->steps[i], nullptr, memory->workspace.data()); };
  course.flops = 5.0 * counted_pairs(window_of(p, 0), s.seqlen, s.seqlen) *
                 static_cast<double>(s.batch * s.heads * (s.head_dim + s.head_dim_v));
  return course;
}
template RaceCourse backward_course(const TuneShape& s, const std::vector<BackwardConfig>& configs);
template RaceCourse backward_course(const TuneShape& s, const std::vector<Sm80BackwardConfig>& configs);

}  // namespace tandem::cli
