// Host time of one forward call on a GPU, in microseconds: what a user's thread pays before the next line
// runs.
//
//   gpu_overhead [--json]
//
// Each figure is the least mean over 50 batches of 100 calls; the stream is drained between batches, so that
// a full launch queue never blocks. The problem is the smallest there is: the device is not what is measured.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>

#include "api/make_problem.hpp"
#include "gpu/device.hpp"
#include "gpu/step_params.hpp"
#include "gpu/tensor_map.hpp"
#include "ops/plan_gpu.hpp"
#include "ops/run.hpp"
#include "tandem/attention.hpp"

namespace {

using namespace tandem;

constexpr int batches = 50;
constexpr int calls = 100;

double microseconds(const std::function<void()>& call, gpu::abi::Stream stream) {
  double best = std::numeric_limits<double>::infinity();
  for (int b = 0; b < batches; ++b) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) call();
    const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - start;
    gpu::synchronize(0, stream);
    best = std::min(best, spent.count() / calls);
  }
  return best;
}

int run(bool json) {
  constexpr Device cuda{.kind = Device::Kind::cuda, .index = 0};
  constexpr std::int64_t rows = 128;
  constexpr std::int64_t dim = 128;
  const gpu::Stream stream(0);
  gpu::DeviceBuffer memory(0, 4 * rows * dim * 2);
  memory.fill(0);
  const auto at = [&](std::size_t i) { return static_cast<char*>(memory.data()) + i * rows * dim * 2; };
  ForwardArgs args;
  args.q = ConstTensor(at(0), DType::bf16, {1, rows, 1, dim}, cuda);
  args.k = ConstTensor(at(1), DType::bf16, {1, rows, 1, dim}, cuda);
  args.v = ConstTensor(at(2), DType::bf16, {1, rows, 1, dim}, cuda);
  args.out = Tensor(at(3), DType::bf16, {1, rows, 1, dim}, cuda);
  const Execution execution{.stream = stream.get()};

  forward(args, execution);  // loads, or compiles, the kernel
  gpu::synchronize(0, stream.get());
  const double whole = microseconds([&] { forward(args, execution); }, stream.get());
  const double planning = microseconds([&] { (void)workspace_bytes(args, execution); }, stream.get());
  const gpu::ContextGuard guard(0);  // tensor maps are encoded in a context
  const Problem problem = make_problem(args, Memory::present);
  const gpu::Steps steps = *plan_gpu(problem).gpu;
  const double backend = microseconds([&] { gpu::run(steps, stream.get(), nullptr); }, stream.get());
  const double params = microseconds(
      [&] {
        gpu::StepParams filled(steps, nullptr, gpu::encode_tensor_map);
        for (const gpu::Step& step : steps.list) (void)filled.of(step);
      },
      stream.get());
  const std::string name = gpu::properties(0).name;
  if (json) {
    fmt::print(
        "{{\"device\": \"{}\", \"call_us\": {:.2f}, \"checks_and_plan_us\": {:.2f}, \"backend_us\": {:.2f}, "
        "\"params_us\": {:.2f}}}\n",
        name, whole, planning, backend, params);
  } else {
    fmt::print(
        "{}: a call {:.2f} us, of which argument checks and plan {:.2f}, backend {:.2f} (of which params "
        "{:.2f})\n",
        name, whole, planning, backend, params);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  return run(argc > 1 && std::strcmp(argv[1], "--json") == 0);
} catch (const std::exception& e) {
  fmt::print(stderr, "gpu_overhead: {}\n", e.what());
  return 1;
}
