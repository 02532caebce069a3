// append_kv: arguments -> problem -> backend.
#include "cpu/cache/append.hpp"
#include "api/append_builder.hpp"
#include "api/trace.hpp"
#include "ops/plan_gpu.hpp"
#include "ops/run.hpp"

namespace tandem {

AppendProblem make_append_problem(const AppendArgs& args) {
  AppendBuilder builder(args);
  builder.sizes();
  builder.dtypes_and_device();
  builder.operands();
  builder.scales();
  builder.rotary();
  builder.queries();
  builder.outputs_and_contents();
  return builder.problem();
}

void append_kv(const AppendArgs& args, const Execution& execution) {
  const AppendProblem problem = make_append_problem(args);
  check::threads(execution.threads);
  if (problem.device.kind == Device::Kind::cuda) {
    const gpu::AppendSteps steps = plan_append(problem);
    const Trace trace(problem);
    gpu::run(steps, execution.stream);
    return;
  }
  const Trace trace(problem);
  cpu::append(problem, cpu::best_target(), execution.threads);
}

}  // namespace tandem
