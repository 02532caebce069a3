#include "ops/run.hpp"

#include "gpu/launch.hpp"
#include "gpu/scratch.hpp"
#include "gpu/step_params.hpp"
#include "gpu/tensor_map.hpp"
#include "ops/cache/launch.hpp"
#include "ops/quantize/tensor_launch.hpp"
#include "tandem/error.hpp"

namespace tandem::gpu {
namespace {

void set_zero(void* data, std::size_t bytes, abi::Stream stream) {
  if (bytes == 0) return;
  check(driver().memset_d8_async(reinterpret_cast<abi::DevicePointer>(data), 0, bytes, stream),
        "cuMemsetD8Async");
}

/// `fill` takes the memory and gives what has `of(step)`, the parameter of a step.
template <typename Fill>
void launch_all(const StepList& list, const Workspace& workspace, int device, abi::Stream stream, void* given,
                Fill&& fill, const CallFunctions& functions = {}) {
  std::array<LoadedKernel, most_steps> kernels;
  for (std::size_t i = 0; i < list.size(); ++i) {
    kernels[i] = loaded_kernel(device, *list.all()[i].kernel, list.all()[i].config, functions);
  }
  const ContextGuard guard(device);
  const Scratch scratch(given, workspace.bytes(), stream);
  set_zero(workspace.at(Region::counters, scratch.data()), workspace.counter_bytes(), stream);
  auto params = fill(scratch.data());
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Step& step = list.all()[i];
    const BlockShape shape = step.kernel->block(step.config);
    launch(kernels[i],
           {.grid = step.grid,
            .threads = static_cast<unsigned int>(shape.threads),
            .stream = stream,
            .cluster = static_cast<unsigned int>(shape.cluster),
            .programmatic = step.programmatic && properties(device).major >= 9,
            .resident = step.resident},
           params.of(step));
  }
}

/// The parameters of a call whose kernels share them.
template <typename Params>
struct SharedParams {
  Params params;
  const void* of(const Step& /*step*/) const { return &params; }
};

}  // namespace

void run(const Steps& steps, void* stream, void* workspace) {
  if (steps.list.empty()) return;
  launch_all(
      steps.list, steps.workspace, steps.problem.device.index, static_cast<abi::Stream>(stream), workspace,
      [&](char* memory) { return StepParams(steps, memory, encode_tensor_map); },
      functions_of(steps.problem));
}

void run(const QuantizeSteps& steps, void* stream_handle) {
  const QuantizeProblem& problem = steps.problem;
  const auto stream = static_cast<abi::Stream>(stream_handle);
  if (problem.batch * problem.heads == 0) {
    const ContextGuard guard(problem.device.index);
    if (problem.group == ScaleGroup::tensor) set_zero(problem.scales.data, sizeof(float), stream);
    return;
  }
  launch_all(steps.list, steps.workspace, problem.device.index, stream, nullptr, [&](char* memory) {
    return SharedParams<QuantizeParams>{make_tensor_params(problem, steps.workspace, memory)};
  });
}

void run(const AppendSteps& steps, void* stream) {
  if (steps.list.empty()) return;
  launch_all(steps.list, {}, steps.problem.device.index, static_cast<abi::Stream>(stream), nullptr,
             [&](char* /*memory*/) {
               return SharedParams<AppendParams>{make_append_params(steps.problem, steps.list.begin()->grid)};
             });
}

void run(const MergeSteps& steps, void* stream) {
  if (steps.list.empty()) return;
  launch_all(steps.list, {}, steps.problem.device.index, static_cast<abi::Stream>(stream), nullptr,
             [&](char* /*memory*/) { return SharedParams<MergeParams>{make_merge_params(steps.problem)}; });
}

}  // namespace tandem::gpu
