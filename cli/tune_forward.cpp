// The forward pass in `tandem tune`.
#include <algorithm>
#include <memory>
#include <numeric>
#include <random>

#include "api/make_problem.hpp"
#include "ops/forward/launch.hpp"
#include "ops/plan_gpu.hpp"
#include "ops/run.hpp"
#include "tune_course.hpp"

namespace tandem::cli {
namespace {

/// What the launches of a course stand on.
struct Memory {
  gpu::DeviceBuffer q, k, v, page_table, workspace;
  std::vector<gpu::Steps> steps;  ///< by Config
};

/// Pages in a random order, as a cache that has served for a while has them.
gpu::DeviceBuffer random_pages(std::int64_t count) {
  std::vector<std::int32_t> pages(static_cast<std::size_t>(count));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(1));
  const std::size_t bytes = pages.size() * sizeof(pages[0]);
  gpu::DeviceBuffer buffer(tuned_device.index, bytes);
  buffer.copy_from_host(pages.data(), bytes, nullptr, 0);
  gpu::synchronize(tuned_device.index);
  return buffer;
}

}  // namespace

gpu::KernelConfig planned_forward(const TuneShape& shape) {
  ForwardArgs args = forward_args(shape, described_device);
  if (shape.v_in_k) args.k.data = args.v.data = &shape;  // an address, which nothing reads
  return plan_gpu(make_problem(args, tandem::Memory::described)).gpu->config;
}

template <typename Config>
RaceCourse forward_course(const TuneShape& s, const std::vector<Config>& configs) {
  require_hopper();
  auto memory = std::make_shared<Memory>();
  const std::int64_t rows = s.batch * s.queries * s.heads;
  const std::int64_t key_rows = s.batch * s.seqlen * s.heads_kv;
  memory->q = random_tensor(s.dtype, rows * s.head_dim, 1);
  memory->k = random_tensor(s.dtype, key_rows * s.head_dim, 2);
  if (!s.v_in_k) memory->v = random_tensor(s.dtype, key_rows * s.head_dim_v, 3);
  if (s.page_size > 0) memory->page_table = random_pages(s.batch * s.seqlen / s.page_size);

  RaceCourse course;
  course.outputs.push_back(race_output("out", s.dtype, rows * s.head_dim_v));
  course.outputs.push_back(race_output("lse", DType::f32, rows));
  ForwardArgs args = forward_args(s, tuned_device);
  args.q.data = memory->q.data();
  args.k.data = memory->k.data();
  args.v.data = s.v_in_k ? args.k.data : memory->v.data();
  if (s.page_size > 0) args.page_table.data = memory->page_table.data();
  args.out.data = course.outputs[0].buffer.data();
  args.lse.data = course.outputs[1].buffer.data();
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
  course.flops = 2.0 * counted_pairs(window_of(p, 0), s.queries, s.seqlen) *
                 static_cast<double>(s.batch * s.heads * (s.head_dim + s.head_dim_v));
  return course;
}
template RaceCourse forward_course(const TuneShape& s, const std::vector<ForwardConfig>& configs);
template RaceCourse forward_course(const TuneShape& s, const std::vector<Sm80ForwardConfig>& configs);
template RaceCourse forward_course(const TuneShape& s, const std::vector<DecodeConfig>& configs);
template RaceCourse forward_course(const TuneShape& s, const std::vector<LatentConfig>& configs);

}  // namespace tandem::cli
