// Problem + device -> Plan.
#include "ops/plan.hpp"
#include "ops/backward/launch.hpp"
#include "ops/eight_bit/launch.hpp"
#include "ops/forward/launch.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "api/make_problem.hpp"
#include "gpu/device.hpp"
#include "harness/environment.hpp"
#include "harness/error_of.hpp"
#include "tandem/attention.hpp"

namespace tandem {
namespace {

/// Shapes without memory: a Plan depends on nothing else.
ForwardArgs forward_args(std::int64_t seqlen_k, Device device = {}) {
  ForwardArgs a;
  a.q = ConstTensor(nullptr, DType::bf16, {2, 64, 8, 64}, device);
  a.k = ConstTensor(nullptr, DType::bf16, {2, seqlen_k, 2, 64}, device);
  a.v = ConstTensor(nullptr, DType::bf16, {2, seqlen_k, 2, 64}, device);
  a.out = Tensor(nullptr, DType::bf16, {2, 64, 8, 64}, device);
  return a;
}

Plan plan_of(const ForwardArgs& args, const Execution& execution = {}) {
  return make_plan(make_problem(args, Memory::described), execution);
}

/// Whether one of the reasons for the plan of forward_args(64) contains `text`.
bool mentions(const std::string& text, const Execution& execution = {}) {
  const Problem problem = make_problem(forward_args(64), Memory::described);
  const std::vector<std::string> given = reasons(problem, make_plan(problem, execution), execution);
  return std::any_of(given.begin(), given.end(),
                     [&](const std::string& reason) { return reason.find(text) != std::string::npos; });
}

TEST(Plan, RunsCpuTensorsOnTheCpu) {
  const Plan plan = plan_of(forward_args(64));
  EXPECT_EQ(plan.backend, Device::Kind::cpu);
  EXPECT_GT(plan.cpu->config.block_q, 0);
  EXPECT_GT(plan.cpu->config.block_k, 0);
  EXPECT_GE(plan.cpu->config.threads, 1);
  EXPECT_TRUE(mentions("backend cpu: the tensors are on the CPU"));
}

TEST(Plan, HasTheProblemThatTheCpuKernelsSee) {
  const Plan plain = plan_of(forward_args(64));
  EXPECT_FALSE(plain.cpu->mixed.has_value());
  EXPECT_EQ(plain.cpu->problem.k.dtype, DType::bf16);

  ForwardArgs args = forward_args(64);
  args.k.dtype = args.v.dtype = DType::e4m3;
  const Plan direct = plan_of(args);  // scales that are factors of the logits and of out
  EXPECT_FALSE(direct.cpu->mixed.has_value());
  EXPECT_EQ(direct.cpu->problem.k.dtype, DType::e4m3);

  static float scales[2 * 2 * 1] = {};
  args.k_scale = Tensor(scales, DType::f32, {2, 2, 1});  // by block
  const Plan mixed = plan_of(args);
  ASSERT_TRUE(mixed.cpu->mixed.has_value());
  EXPECT_EQ(mixed.cpu->mixed->k.dtype, DType::e4m3);
  EXPECT_FALSE(mixed.cpu->problem.mixed());
  EXPECT_EQ(mixed.cpu->problem.k.dtype, DType::bf16);
  EXPECT_EQ(mixed.cpu->problem.v.dtype, DType::bf16);
  constexpr std::size_t elements = 2 * 64 * 2 * 64;  // of k, and of v
  EXPECT_GE(mixed.workspace_bytes, plain.workspace_bytes + 2 * elements * size_of(DType::bf16));
}

TEST(Plan, TakesTheThreadCountGiven) {
  const Plan plan = plan_of(forward_args(64), {.threads = 3});
  EXPECT_EQ(plan.cpu->config.threads, 3);
  EXPECT_TRUE(mentions("threads 3: what the caller asked for", {.threads = 3}));
  EXPECT_TRUE(mentions("OMP_NUM_THREADS, or every core this process may use"));
}

TEST(Plan, TakesTheTargetOfTheEnvironment) {
  const harness::Environment target("TANDEM_CPU_TARGET", "portable");
  const Plan plan = plan_of(forward_args(64));
  EXPECT_EQ(plan.cpu->config.target, cpu::Target::portable);
  EXPECT_TRUE(mentions("target portable: TANDEM_CPU_TARGET asks for it"));
}

TEST(Plan, RefusesATargetThatIsNotThere) {
  const harness::Environment target("TANDEM_CPU_TARGET", "abacus");
  EXPECT_EQ(error_of(Status::unsupported, [] { plan_of(forward_args(64)); })
                .find("TANDEM_CPU_TARGET is 'abacus', which this build or this processor does not have"),
            0);
}

TEST(Plan, NamesTheRecipeOfAPrecision) {
  ForwardArgs args = forward_args(64);
  args.options.precision = Precision::int8;
  args.options.strict = true;
  const Problem problem = make_problem(args, Memory::described);
  EXPECT_EQ(reasons(problem, make_plan(problem, {}), {}).back(),
            "precision int8, strict: Q K^T in s8, one scale a row, rotated; P V in s8, one scale a row of V, "
            "rotated, promoted every 1 tile(s)");
}

TEST(Plan, EightBitMemoryIsLinear) {
  ForwardArgs args = forward_args(4096);
  args.options.precision = Precision::int8;
  const std::size_t small = plan_of(args, {.threads = 2}).workspace_bytes;
  args = forward_args(8192);
  args.options.precision = Precision::int8;
  const std::size_t large = plan_of(args, {.threads = 2}).workspace_bytes;
  EXPECT_GT(large, small);
  EXPECT_LE(large - small,
            std::size_t{2} * 4096 * (64 + 64 + 16));  // a store for each thread: quantized values and scales
}

/// The message of the error that planning 8-bit values on a GPU ends in.
std::string refusal_of_quantized(Precision precision, DType out) {
  const Device device{.kind = Device::Kind::cuda, .index = gpu::first_described};
  ForwardArgs args = forward_args(65, device);
  args.q = ConstTensor(nullptr, DType::e4m3, {2, 65, 8, 64}, device);
  args.k.dtype = args.v.dtype = DType::e4m3;
  args.out = Tensor(nullptr, out, {2, 65, 8, 64}, device);
  args.options.precision = precision;
  return error_of(Status::unsupported, [&] { plan_of(args); });
}

TEST(Plan, QuantizedInputsOnAGpuNeedAPrecisionAndSixteenBitsOut) {
  EXPECT_EQ(
      refusal_of_quantized(Precision::exact, DType::bf16),
      "e4m3 with precision exact has no GPU kernel for more than 64 queries a sequence on k and v that are "
      "no cache, for functions, or for rows that are no multiples of 16 bytes; pass precision fp8, or copy "
      "the tensors to the CPU");
  EXPECT_EQ(
      refusal_of_quantized(Precision::exact, DType::f32),
      "out in f32 of q in e4m3 with precision exact has no GPU kernel; make it bf16 or f16, or copy the "
      "tensors to the CPU");
  EXPECT_EQ(
      refusal_of_quantized(Precision::fp8, DType::f32),
      "out in f32 with precision fp8 has no GPU kernel; make it bf16 or f16, leave the precision exact, or "
      "copy the tensors to the CPU");
}

ForwardArgs args_of_heads(std::int64_t d_qk, std::int64_t d_v, Device device = {}) {
  ForwardArgs a;
  a.q = ConstTensor(nullptr, DType::bf16, {2, 64, 8, d_qk}, device);
  a.k = ConstTensor(nullptr, DType::bf16, {2, 64, 2, d_qk}, device);
  a.v = ConstTensor(nullptr, DType::bf16, {2, 64, 2, d_v}, device);
  a.out = Tensor(nullptr, DType::bf16, {2, 64, 8, d_v}, device);
  return a;
}

/// Tensors that are only described may be one tensor or several: a workspace is enough for either.
TEST(Plan, TensorsWithoutAnAddressMayBeOneOrSeveral) {
  const Device device{.kind = Device::Kind::cuda, .index = gpu::first_described};
  const auto at = [](int place) { return reinterpret_cast<const void*>(std::uintptr_t{1} << (30 + place)); };
  for (const std::int64_t queries : {1, 4, 64, 1000}) {
    ForwardArgs args;
    args.q = ConstTensor(nullptr, DType::bf16, {2, queries, 8, 512}, device);
    args.k = args.v = ConstTensor(nullptr, DType::bf16, {2, 4096, 2, 512}, device);
    args.out = Tensor(nullptr, DType::bf16, {2, queries, 8, 512}, device);
    const std::size_t described = workspace_bytes(args);
    args.k.data = at(0);
    args.v.data = at(0);
    const std::size_t joined = workspace_bytes(args);
    args.v.data = at(1);
    EXPECT_EQ(described, std::max(joined, workspace_bytes(args))) << queries << " queries";
  }
  const Function causal = Function::parse("le(k, q)", Function::Kind::mask);
  for (const bool used : {false, true}) {
    ForwardArgs args;
    args.q = ConstTensor(nullptr, DType::bf16, {6000, 8, 64}, device);
    args.k = args.v = ConstTensor(nullptr, DType::bf16, {6000, 2, 64}, device);
    args.out = Tensor(nullptr, DType::bf16, {6000, 8, 64}, device);
    args.cu_seqlens_q = args.cu_seqlens_k = ConstTensor(nullptr, DType::i32, {201}, device);
    if (used) args.seqused_q = args.seqused_k = ConstTensor(nullptr, DType::i32, {200}, device);
    args.mask_function = &causal;
    const std::size_t described = workspace_bytes(args);
    args.cu_seqlens_q.data = args.cu_seqlens_k.data = at(0);
    if (used) args.seqused_q.data = args.seqused_k.data = at(1);
    const std::size_t joined = workspace_bytes(args);
    args.cu_seqlens_k.data = at(2);
    EXPECT_EQ(described, std::max(joined, workspace_bytes(args)));
  }
}

/// The message of the error that planning heads of these dimensions on a GPU ends in.
std::string refusal_of_heads(std::int64_t d_qk, std::int64_t d_v) {
  return error_of(Status::unsupported,
                  [&] { plan_of(args_of_heads(d_qk, d_v, {.kind = Device::Kind::cuda, .index = 0})); });
}

TEST(Plan, WideHeadsRunOnTheGpuUpToWhatSharedMemoryHolds) {
  EXPECT_EQ(refusal_of_heads(576, 512).find("head_dim"), std::string::npos);
  EXPECT_EQ(
      refusal_of_heads(584, 512),
      "head_dim 584 is above 576, the most of the GPU kernels; copy the tensors to the CPU, which takes up "
      "to 1024");
  EXPECT_EQ(
      refusal_of_heads(64, 520),
      "head_dim_v 520 is above 512, the most of the GPU kernels; copy the tensors to the CPU, which takes "
      "up to 1024");
  EXPECT_EQ(plan_of(args_of_heads(576, 512)).backend, Device::Kind::cpu);
}

TEST(Plan, WideHeadsSayWhatASplitSizeDoes) {
  ForwardArgs args = args_of_heads(576, 512, {.kind = Device::Kind::cuda, .index = gpu::first_described});
  EXPECT_EQ(explain(args).find("split size"), std::string::npos);
  args.options.split_size = 128;
  EXPECT_NE(explain(args).find("a fixed split size"), std::string::npos);
}

/// The message of the error that explaining this call ends in.
template <typename Args>
std::string refusal(const Args& args) {
  return error_of(Status::unsupported, [&] { return explain(args); });
}

TEST(Plan, GradientsAndResultsInF32) {
  for (const Device device : {Device{}, Device{.kind = Device::Kind::cuda, .index = gpu::first_described}}) {
    const bool on_gpu = device.kind == Device::Kind::cuda;
    ForwardArgs forward = forward_args(64, device);
    BackwardArgs backward;
    static_cast<AttentionInputs&>(backward) = forward;
    backward.out = backward.dout = forward.out;
    backward.lse = ConstTensor(nullptr, DType::f32, {2, 8, 64}, device);
    backward.dv = Tensor(nullptr, DType::f32, {2, 64, 2, 64}, device);
    EXPECT_EQ(refusal(backward), "");
    backward.accumulate_dk_dv = true;
    EXPECT_EQ(refusal(backward), "");
    if (on_gpu) {
      EXPECT_NE(explain(backward).find("dq is written in bf16; dk and dv are added to what there is, in f32"),
                std::string::npos);
    }
    EXPECT_EQ(explain(forward).find("out in f32"), std::string::npos);
    forward.out.dtype = DType::f32;
    EXPECT_EQ(refusal(forward), "");
    EXPECT_NE(explain(forward).find("out in f32"), std::string::npos);
  }
}

/// CTAs of the persistent kernel of a plan.
unsigned persistent_ctas(const Problem& problem, int sm_limit) {
  unsigned most = 0;
  const Plan plan = make_plan(problem, {.sm_limit = sm_limit});
  for (const gpu::Step& step : plan.gpu->list) {
    const bool persistent = step.kernel == &gpu::kernels::forward || step.kernel == &gpu::kernels::backward ||
                            step.kernel == &gpu::kernels::eight_bit_forward;
    if (persistent) most = step.grid;
  }
  return most;
}

TEST(Plan, HasTheGridsOfSoManySms) {
  const Device device{.kind = Device::Kind::cuda, .index = gpu::first_described};
  ForwardArgs forward = forward_args(4096, device);
  forward.q = ConstTensor(nullptr, DType::bf16, {2, 4096, 8, 64}, device);
  forward.out = Tensor(nullptr, DType::bf16, {2, 4096, 8, 64}, device);
  BackwardArgs backward;
  static_cast<AttentionInputs&>(backward) = forward;
  backward.out = backward.dout = forward.out;
  backward.lse = ConstTensor(nullptr, DType::f32, {2, 8, 4096}, device);
  backward.dk = Tensor(nullptr, DType::bf16, {2, 4096, 2, 64}, device);
  ForwardArgs eight_bit = forward;
  eight_bit.options.precision = Precision::fp8;
  const unsigned sms = static_cast<unsigned>(gpu::properties(gpu::first_described).multiprocessors);
  for (const Problem& problem :
       {make_problem(forward, Memory::described), make_problem(backward, Memory::described),
        make_problem(eight_bit, Memory::described)}) {
    const unsigned all = persistent_ctas(problem, 0);
    EXPECT_GT(all, 0U);
    EXPECT_LE(all, sms);
    EXPECT_EQ(persistent_ctas(problem, 1000), all);
    EXPECT_EQ(persistent_ctas(problem, 40), 40U);
    EXPECT_EQ(persistent_ctas(problem, 1), 1U);
  }
  EXPECT_NE(
      explain(forward, {.sm_limit = 40}).find("sm_limit 40: persistent grids are those of a GPU with 40"),
      std::string::npos);
}

/// The kernels sm80 forward have a CTA for each tile; backward they are persistent, too.
TEST(Plan, HasNoForwardOfTheFamilySm80OnSoManySms) {
  const harness::Environment family("TANDEM_KERNELS", "sm80");
  const Device device{.kind = Device::Kind::cuda, .index = gpu::first_described};
  const Problem problem = make_problem(forward_args(64, device), Memory::described);
  EXPECT_NO_THROW(make_plan(problem, {.sm_limit = 1000}));
  EXPECT_NE(error_of(Status::unsupported, [&] { make_plan(problem, {.sm_limit = 40}); })
                .find("sm_limit is 40, but the forward kernels sm80"),
            std::string::npos);
}

/// A mask by sequence has kernels of its own, and those of 8 bits and of functions none.
TEST(Plan, MaskBySequenceOnAGpu) {
  const Device device{.kind = Device::Kind::cuda, .index = gpu::first_described};
  ForwardArgs args = forward_args(64, device);
  args.causal_by_sequence = ConstTensor(nullptr, DType::i32, {2}, device);
  EXPECT_EQ(refusal(args), "");
  EXPECT_NE(explain(args).find("right 0 where causal_by_sequence is not 0 and unbounded elsewhere"),
            std::string::npos);
  args.options.precision = Precision::fp8;
  EXPECT_EQ(refusal(args),
            "causal_by_sequence with precision fp8 has no GPU kernel; leave the precision exact, or copy the "
            "tensors to the CPU");
  args.options.precision = Precision::exact;
  const Function mask = Function::parse("le(k, q)", Function::Kind::mask, {});
  args.mask_function = &mask;
  EXPECT_EQ(refusal(args),
            "causal_by_sequence with a score or mask function, or dropout, has no "
            "GPU kernel; let a mask function "
            "read the mask of each batch entry, or copy the tensors to the CPU");
}

TEST(Plan, IndicesHaveNoGpuKernel) {
  const Device device{.kind = Device::Kind::cuda, .index = gpu::first_described};
  ForwardArgs args = forward_args(64, device);
  args.indices = ConstTensor(nullptr, DType::i32, {args.q.shape[0], args.q.shape[1], 32}, device);
  EXPECT_EQ(
      refusal(args),
      "indices have no GPU kernel yet; on a cache tandem.flash_mla takes them, as pages of one row, or copy "
      "the tensors to the CPU");
}

TEST(Plan, IsMadeForGpusThatAreNotThere) {
  int index = gpu::first_described;
  for (const gpu::DeviceProperties& device : gpu::described_devices()) {
    EXPECT_TRUE(gpu::is_supported(device));
    EXPECT_EQ(gpu::called(index), device.name);
    const ForwardArgs args = forward_args(1 << 20, {.kind = Device::Kind::cuda, .index = index++});
    EXPECT_EQ(plan_of(args).backend, Device::Kind::cuda);
    EXPECT_NE(explain(args).find("the tensors are on " + device.name + "\n"), std::string::npos);
  }
  EXPECT_EQ(gpu::called(1), "cuda:1");
}

TEST(Plan, OfAGpuThatIsNotThereIsNotRun) {
  std::array<std::uint16_t, 2 * 4 * 64> memory{};  // q, k and v; then out
  memory.back() = 7;
  const Device device{.kind = Device::Kind::cuda, .index = gpu::first_described};
  ForwardArgs args;
  args.q = args.k = args.v = ConstTensor(memory.data(), DType::bf16, {1, 4, 1, 64}, device);
  args.out = Tensor(memory.data() + 4 * 64, DType::bf16, {1, 4, 1, 64}, device);
  EXPECT_THROW(forward(args), Error);
  EXPECT_EQ(memory.back(), 7);
  args.q.device.index = args.k.device.index = args.v.device.index = args.out.device.index = 1 << 21;
  EXPECT_THROW(explain(args), Error);  // past those that are known
}

TEST(Plan, NeedsMemoryByThreadsNotBySequenceLength) {
  const std::size_t small = plan_of(forward_args(1024), {.threads = 2}).workspace_bytes;
  EXPECT_EQ(plan_of(forward_args(std::int64_t{1} << 30), {.threads = 2}).workspace_bytes, small);
  const std::size_t more_threads = plan_of(forward_args(1024), {.threads = 4}).workspace_bytes;
  EXPECT_GT(more_threads, small);
  EXPECT_LE(more_threads, 2 * small);
}

}  // namespace
}  // namespace tandem
