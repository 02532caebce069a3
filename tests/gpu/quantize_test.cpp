// The quantiser on a GPU, against the CPU's: every bit of quantized values and scales. What the emulator
// cannot tell is how the hardware rounds to e4m3 and divides.
#include "ops/quantize/launch.hpp"

#include "gpu/device.hpp"
#include "ops/quantize/plan.hpp"
#include "ops/run.hpp"
#include "ops/steps.hpp"

#include "gpu_cases.hpp"
#include "harness/call.hpp"
#include "problem/recipe_of.hpp"
#include "quantize_check.hpp"

namespace tandem::gpu {
namespace {

using harness::Box;
using harness::Call;
using harness::Case;

/// The call's tensors on the device, byte for byte.
class OnDevice {
 public:
  Problem problem(const Call& call) {
    Problem p = call.problem();
    p.device = {.kind = Device::Kind::cuda, .index = 0};
    p.q.data = copy(call.q);
    p.k.data = copy(call.k);
    p.v.data = copy(call.v);
    p.cu_seqlens_q.data = copy(call.cu_seqlens_q);
    p.cu_seqlens_k.data = copy(call.cu_seqlens_k);
    p.seqused_q.data = copy(call.seqused_q);
    p.seqused_k.data = copy(call.seqused_k);
    return p;
  }

 private:
  void* copy(const Box& box) {
    if (!box.given()) return nullptr;
    buffers_.emplace_back(0, box.bytes().size());
    buffers_.back().copy_from_host(box.bytes().data(), box.bytes().size());
    return static_cast<std::byte*>(buffers_.back().data()) +
           (static_cast<const std::byte*>(box.view().data) - box.bytes().data());
  }
  std::vector<DeviceBuffer> buffers_;
};

void check_on_gpu(const Call& call, const Recipe& recipe) {
  OnDevice device;
  const Problem p = device.problem(call);
  Steps steps;
  steps.problem = p;
  steps.recipe = recipe;
  steps.multiprocessors = properties(0).multiprocessors;
  steps.workspace = quantized_workspace(p, recipe);
  add_quantizer(steps, choose_quantize_config(CallFacts(p), recipe));
  DeviceBuffer scratch(0, steps.workspace.bytes());
  scratch.fill(0xff);  // NaN
  run(steps, nullptr, scratch.data());
  std::vector<char> result(steps.workspace.bytes());
  scratch.copy_to_host(result.data(), result.size());
  synchronize(0);
  kernel_tests::check_quantized(call, recipe,
                                make_quantize_params(call.problem(), recipe, steps.workspace, result.data()));
}

class Quantiser : public GpuTest, public testing::WithParamInterface<Precision> {
 protected:
  static void check(const Case& c) {
    const Call call(c);
    check_on_gpu(call, recipe_of(GetParam(), false));
    check_on_gpu(call, recipe_of(GetParam(), true));
  }
};

TEST_P(Quantiser, GivesTheCpusBits) {
  for (const auto& [d, d_v] : {std::pair{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}}) {
    SCOPED_TRACE(d);
    check(kernel_tests::quantize_case(d == 96 ? DType::f16 : DType::bf16, d, d_v));
  }
}

TEST_P(Quantiser, TakesSequencesOfAnyLengths) {
  Case c = kernel_tests::quantize_case(DType::bf16, 128, 64);
  kernel_tests::make_varlen(c);
  check(c);
  c.used_k.clear();
  c.packed_q = c.packed_k = false;
  c.seqlen_q = c.seqlen_k = 2100;  // several CTAs find one mean
  c.used_k = {2100, 0, 1, 2047, 129};
  check(c);
}

TEST_P(Quantiser, TakesManyShortSequences) {
  for (const int d : {64, 128}) {
    Case c = kernel_tests::quantize_case(DType::bf16, d, d);
    kernel_tests::make_short(c);
    check(c);
  }
}

TEST_P(Quantiser, TakesAnyLayoutAndHeadDimension) {
  Case c = kernel_tests::quantize_case(DType::f16, 77, 33);
  kernel_tests::make_unaligned(c);
  check(c);
  check(kernel_tests::quantize_case(DType::bf16, 72, 40));
}

TEST_P(Quantiser, KnowsWhatIsNoNumber) {
  Call call(kernel_tests::quantize_case(DType::bf16, 64, 64));
  kernel_tests::set_no_numbers(call);
  check_on_gpu(call, recipe_of(GetParam(), false));
  check_on_gpu(call, recipe_of(GetParam(), true));
}

INSTANTIATE_TEST_SUITE_P(Precisions, Quantiser, testing::Values(Precision::fp8, Precision::int8));

}  // namespace
}  // namespace tandem::gpu
