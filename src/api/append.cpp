// append_kv: arguments -> job -> backend.
#include "cpu/append.hpp"
#include "api/append_builder.hpp"
#include "api/trace.hpp"
#include "gpu/run.hpp"
#include "plan/plan_gpu.hpp"

namespace tandem {

AppendJob make_append_job(const AppendArgs& args) {
  AppendBuilder builder(args);
  builder.sizes();
  builder.dtypes_and_device();
  builder.operands();
  builder.scales();
  builder.rotary();
  builder.queries();
  builder.outputs_and_contents();
  return builder.job();
}

void append_kv(const AppendArgs& args, const Execution& execution) {
  const AppendJob job = make_append_job(args);
  check::threads(execution.threads);
  if (job.device.kind == Device::Kind::cuda) {
    const gpu::AppendSteps steps = plan_append(job);
    const Trace trace(job);
    gpu::run(steps, execution.stream);
    return;
  }
  const Trace trace(job);
  cpu::append(job, cpu::best_target(), execution.threads);
}

}  // namespace tandem
