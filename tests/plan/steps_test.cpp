// What a call on a GPU consists of, without a driver.
#include "ops/steps.hpp"
#include "ops/quantize/launch.hpp"

#include <gtest/gtest.h>

#include "api/make_problem.hpp"
#include "gpu/device.hpp"
#include "gpu/step_params.hpp"
#include "harness/error_of.hpp"
#include "ops/plan_gpu.hpp"

namespace tandem {
namespace {

using gpu::Region;

constexpr Device cuda{.kind = Device::Kind::cuda, .index = gpu::first_described};
alignas(256) std::byte memory[512];

/// (batch 2, heads 8 over 2, head_dim 128) in bf16, without memory: TMA can read it.
ForwardArgs forward_args(std::int64_t seqlen_q = 300, std::int64_t seqlen_k = 300) {
  ForwardArgs a;
  a.q = ConstTensor(nullptr, DType::bf16, {2, seqlen_q, 8, 128}, cuda);
  a.k = ConstTensor(nullptr, DType::bf16, {2, seqlen_k, 2, 128}, cuda);
  a.v = ConstTensor(nullptr, DType::bf16, {2, seqlen_k, 2, 128}, cuda);
  a.out = Tensor(nullptr, DType::bf16, {2, seqlen_q, 8, 128}, cuda);
  return a;
}

BackwardArgs backward_args() {
  const ForwardArgs f = forward_args();
  BackwardArgs a;
  static_cast<AttentionInputs&>(a) = f;
  a.out = a.dout = f.out;
  a.lse = Tensor(nullptr, DType::f32, {2, 8, 300}, cuda);
  a.dq = Tensor(nullptr, DType::bf16, {2, 300, 8, 128}, cuda);
  a.dk = a.dv = Tensor(nullptr, DType::bf16, {2, 300, 2, 128}, cuda);
  return a;
}

template <typename Args>
gpu::Steps steps_of(const Args& args) {
  return *plan_gpu(make_problem(args, Memory::described)).gpu;
}

std::vector<std::string_view> kernels_of(const gpu::Steps& steps) {
  std::vector<std::string_view> kernels;
  for (const gpu::Step& step : steps.list) kernels.push_back(step.kernel->entry);
  return kernels;
}
using Kernels = std::vector<std::string_view>;

int encoded = 0;
TensorMap count(const TensorMapSpec& spec) {
  EXPECT_EQ(tma_objection(spec), nullptr);
  ++encoded;
  TensorMap map{};
  map.opaque[0] = reinterpret_cast<std::uintptr_t>(spec.base);
  return map;
}

TEST(Steps, AForwardCallIsOneLaunchWithoutAWorkspace) {
  const gpu::Steps steps = steps_of(forward_args());
  EXPECT_EQ(kernels_of(steps), Kernels{"forward"});
  EXPECT_EQ(steps.workspace.bytes(), 0U);
  EXPECT_EQ(steps.list.begin()->grid, 2U * 8 * 3);
}

TEST(Steps, WhatTmaCannotReadIsPackedFirst) {
  ForwardArgs args = forward_args();
  args.k.data = memory + 2;
  const gpu::Steps steps = steps_of(args);
  ASSERT_EQ(kernels_of(steps), (Kernels{"pack", "forward"}));
  EXPECT_EQ(steps.list.begin()->tensor, gpu::Loaded::k);
  EXPECT_EQ(steps.workspace.bytes(), 2U * 300 * 2 * 128 * 2);
  char* const workspace = reinterpret_cast<char*>(memory) + 256;
  gpu::StepParams params(steps, workspace, count);
  const auto* pack = static_cast<const PackParams*>(params.of(steps.list.all()[0]));
  EXPECT_EQ(pack->source, memory + 2);
  EXPECT_EQ(pack->target, workspace);
  const auto* forward = static_cast<const ForwardParams*>(params.of(steps.list.all()[1]));
  EXPECT_EQ(forward->k.opaque[0], reinterpret_cast<std::uintptr_t>(workspace));
  EXPECT_EQ(forward->k_data, workspace);
}

TEST(Steps, MixedCallsFoldTheHeadsOfWhatIsDequantised) {
  ForwardArgs args = forward_args(1, 1000);
  args.k.dtype = args.v.dtype = DType::e4m3;
  args.k.stride[1] += 8;  // TMA cannot read it
  const gpu::Steps steps = steps_of(args);
  EXPECT_EQ(kernels_of(steps), (Kernels{"dequantize", "decode"}));
  EXPECT_EQ(steps.problem.rows_q, 4);
  EXPECT_EQ(steps.problem.heads_q, 2);
  EXPECT_EQ(steps.problem.k.dtype, DType::bf16);
  EXPECT_EQ(steps.sources[gpu::index_of(gpu::Loaded::k)]->dtype, DType::e4m3);
  EXPECT_EQ(steps.maps[gpu::index_of(gpu::Loaded::v)]->region, Region::v);
  EXPECT_EQ(steps.workspace.bytes(), 2U * 2 * 1000 * 2 * 128 * 2);  // keys and values
}

TEST(Steps, EightBitKeysOfFewQueriesAreReadInPlace) {
  ForwardArgs args = forward_args(1, 8192);
  args.k.dtype = args.v.dtype = DType::e4m3;
  static float scales[4];
  args.v_scale = ConstTensor(scales, DType::f32, {2, 2}, cuda);
  const gpu::Steps steps = steps_of(args);
  ASSERT_EQ(kernels_of(steps), Kernels{"decode"});
  const auto& config = std::get<DecodeConfig>(steps.config);
  EXPECT_TRUE(config.schedule.split);
  EXPECT_EQ(config.key_type, OperandType::e4m3);
  EXPECT_EQ(config.transform, ScoreTransform::scaled);
  EXPECT_EQ(steps.maps[gpu::index_of(gpu::Loaded::k)]->spec.element_bytes, 1);
  EXPECT_EQ(steps.maps[gpu::index_of(gpu::Loaded::k)]->spec.box[0], 128);
  EXPECT_EQ(steps.maps[gpu::index_of(gpu::Loaded::q)]->spec.box[0], 64);
  std::vector<char> workspace(steps.workspace.bytes());
  gpu::StepParams params(steps, workspace.data(), count);
  const auto* forward = static_cast<const MixedForwardParams*>(params.of(steps.list.all()[0]));
  EXPECT_EQ(forward->v_scale.data, scales);
  EXPECT_EQ(forward->v_scale.batch_stride, 2);
  EXPECT_EQ(forward->k_scale.data, nullptr);
  // Behind the sums of each part's rows there is a flag for each part.
  const int parts = 2 * forward->split_ctas;
  EXPECT_EQ(steps.work.part_sums, parts * (decode_rows + 1));
  EXPECT_EQ(steps.work.combine_ctas, 0);
}

TEST(Steps, ClustersAreToldHowManyRowsTheyMerge) {
  const Problem problem = make_problem(forward_args(1, 1000), Memory::described);
  DecodeConfig config = std::get<DecodeConfig>(plan_gpu(problem).gpu->config);
  config.schedule = {.split = false, .cluster = 4};
  const gpu::KernelConfig wanted = config;
  const gpu::Steps steps = *plan_gpu(problem, &wanted).gpu;
  ASSERT_EQ(kernels_of(steps), Kernels{"decode"});
  EXPECT_EQ(steps.list.begin()->grid, 2U * 2 * 4);  // sequences, heads of keys, CTAs of a cluster
  gpu::StepParams params(steps, nullptr, count);
  EXPECT_EQ(static_cast<const ForwardParams*>(params.of(*steps.list.begin()))->part_rows, 4);
}

/// One scale for each row and head is read beside its row, in a cache and in a dense tensor of few queries.
TEST(Steps, ScalesByRowAreReadInPlace) {
  for (const bool cache : {true, false}) {
    ForwardArgs args = forward_args(1, 8192);
    args.k.dtype = args.v.dtype = DType::s8;
    static std::int32_t numbers[2];
    if (cache) args.leftpad_k = ConstTensor(numbers, DType::i32, {2}, cuda);
    static float scales[1];
    args.v_scale = ConstTensor(scales, DType::f32, {2, 2, 8192}, cuda);
    const gpu::Steps steps = steps_of(args);
    ASSERT_EQ(kernels_of(steps), Kernels{"decode"});
    EXPECT_TRUE(std::get<DecodeConfig>(steps.config).row_scales);
    std::vector<char> workspace(steps.workspace.bytes());
    gpu::StepParams params(steps, workspace.data(), count);
    const auto* forward =
        static_cast<const WithRowScales<MixedForwardParams>*>(params.of(steps.list.all()[0]));
    EXPECT_EQ(forward->k_row_scale.data, nullptr);
    EXPECT_EQ(forward->v_row_scale.data, scales);
    EXPECT_EQ(forward->v_row_scale.stride.batch, 2 * 8192);
    EXPECT_EQ(forward->v_row_scale.stride.row, 1);
    EXPECT_EQ(forward->v_row_scale.stride.head, 8192);
    EXPECT_EQ(forward->v_scale.data, nullptr);
  }
}

/// e4m3 queries become 16-bit ones first; what scores are multiplied by is the product of both scales, in the
/// workspace, or the one that is given.
TEST(Steps, QueriesOfEightBitsAreWidened) {
  ForwardArgs args = forward_args(1, 8192);
  args.q.dtype = args.k.dtype = args.v.dtype = DType::e4m3;
  static std::int32_t numbers[2];
  args.leftpad_k = ConstTensor(numbers, DType::i32, {2}, cuda);
  static float of_q[4];
  static float of_k[4];
  args.q_scale = ConstTensor(of_q, DType::f32, {2, 2}, cuda);
  for (const bool both : {false, true}) {
    if (both) args.k_scale = ConstTensor(of_k, DType::f32, {2, 2}, cuda);
    const gpu::Steps steps = steps_of(args);
    ASSERT_EQ(kernels_of(steps), (Kernels{"pack", "decode"}));
    EXPECT_TRUE(std::get<PackConfig>(steps.list.all()[0].config).widens);
    EXPECT_EQ(std::get<DecodeConfig>(steps.config).key_type, OperandType::e4m3);
    std::vector<char> workspace(steps.workspace.bytes());
    gpu::StepParams params(steps, workspace.data(), count);
    const auto widen = *static_cast<const WidenParams*>(params.of(steps.list.all()[0]));
    EXPECT_EQ(widen.source, steps.sources[gpu::index_of(gpu::Loaded::q)]->data);
    EXPECT_EQ(widen.target, steps.workspace.at(Region::q, workspace.data()));
    EXPECT_EQ(widen.product, both ? steps.workspace.at<float>(Region::q_scales, workspace.data()) : nullptr);
    EXPECT_EQ(widen.q_scale.data, of_q);
    const auto* forward = static_cast<const MixedForwardParams*>(params.of(steps.list.all()[1]));
    EXPECT_EQ(forward->k_scale.data, both ? widen.product : of_q);
    EXPECT_EQ(forward->q_data, widen.target);
  }
}

/// What many queries read would be converted once a tile of them; a split size and lengths ask for one way.
TEST(Steps, EightBitKeysOfManyQueriesAreDequantizedUnlessBitsOrACacheForbidIt) {
  ForwardArgs args = forward_args(300, 300);
  args.k.dtype = args.v.dtype = DType::s8;
  EXPECT_EQ(kernels_of(steps_of(args)), (Kernels{"dequantize", "forward"}));
  args.options.split_size = 128;
  EXPECT_EQ(kernels_of(steps_of(args)), Kernels{"forward"});
  args.options.split_size = 0;
  static std::int32_t numbers[2];
  args.seqused_k = ConstTensor(numbers, DType::i32, {2}, cuda);
  EXPECT_EQ(kernels_of(steps_of(args)), Kernels{"forward"});
  args.cache_batch_idx = ConstTensor(numbers, DType::i32, {2}, cuda);
  EXPECT_EQ(kernels_of(steps_of(args)), Kernels{"forward"});
  args.v.stride[1] += 8;
  EXPECT_EQ(error_of(Status::unsupported, [&] { steps_of(args); }),
            "v of a cache in s8 cannot be read by TMA: a stride is not a multiple of 16 bytes; lay it out "
            "so that it can, keep the cache in bf16, or copy the tensors to the CPU");
}

TEST(Steps, FewQueriesShareTheirKeysWhereTilesAreFewOrLengthsDiffer) {
  const auto kernels = [](std::int64_t seqlen_q, std::int64_t seqlen_k, std::int64_t batch, bool lengths) {
    ForwardArgs args = forward_args(seqlen_q, seqlen_k);
    args.q.shape[0] = args.k.shape[0] = args.v.shape[0] = args.out.shape[0] = batch;
    static std::int32_t used[1000];
    if (lengths) args.seqused_k = Tensor(used, DType::i32, {batch}, args.q.device);
    const gpu::Steps steps = steps_of(args);
    Kernels all = kernels_of(steps);
    const auto* const config = std::get_if<DecodeConfig>(&steps.config);
    if (config != nullptr && config->schedule.split) all.emplace_back("shares");
    return all;
  };
  const Kernels whole{"decode"};
  const Kernels shared{"decode", "shares"};
  EXPECT_EQ(kernels(1, 8192, 1, false), shared);
  EXPECT_EQ(kernels(1, 255, 1, false), whole);
  EXPECT_EQ(kernels(4, 8192, 1, false), shared);
  EXPECT_EQ(kernels(5, 8192, 1, false), (Kernels{"forward", "combine"}));  // 20 rows
  EXPECT_EQ(kernels(65, 8192, 1, false), Kernels{"forward"});
  EXPECT_EQ(kernels(1, 8192, 64, false), whole);  // 128 tiles occupy all multiprocessors
  EXPECT_EQ(kernels(1, 8192, 64, true), shared);  // but one may be longer than all others
  EXPECT_EQ(kernels(1, 8192, 1000, true), whole);
}

TEST(Steps, EightBitsAreMadeAndThenAttended) {
  ForwardArgs args = forward_args();
  args.options.precision = Precision::fp8;
  const gpu::Steps steps = steps_of(args);
  ASSERT_EQ(kernels_of(steps), (Kernels{"mean_of_keys", "quantize", "eight_bit_forward"}));
  EXPECT_FALSE(steps.list.all()[0].programmatic);
  EXPECT_TRUE(steps.list.all()[1].programmatic);
  EXPECT_TRUE(steps.list.all()[2].programmatic);
  EXPECT_EQ(steps.list.all()[0].grid, 2U * 2 * 3);
  EXPECT_EQ(steps.list.all()[1].grid, 2U * (8 + 2 + 2) * 3);
  EXPECT_EQ(steps.workspace.counter_bytes(), 4U + 4 * 2 * 2);  // tiles, then sums by (batch, KV head)
  args.q.dtype = args.k.dtype = args.v.dtype = DType::e4m3;
  const gpu::Steps in_place = steps_of(args);
  EXPECT_EQ(kernels_of(in_place), Kernels{"eight_bit_forward"});
  // Tiles and claims, then finished strips by (batch, KV head), and by these and block.
  EXPECT_EQ(in_place.workspace.counter_bytes(), 4U * (2 + 2 * 2 + 2 * 2 * 3));
  args.k.stride[1] += 8;  // TMA cannot read it
  EXPECT_EQ(kernels_of(steps_of(args)), (Kernels{"arrange_quantized", "eight_bit_forward"}));
}

TEST(Steps, BackwardLaunchesWhatIsWanted) {
  BackwardArgs args = backward_args();
  EXPECT_EQ(kernels_of(steps_of(args)), (Kernels{"backward_preprocess", "backward", "backward_convert"}));
  args.dq = {};
  args.dout.data = memory + 2;
  args.options.deterministic = true;
  const gpu::Steps steps = steps_of(args);
  ASSERT_EQ(kernels_of(steps), (Kernels{"pack", "backward_preprocess", "backward"}));
  EXPECT_TRUE(steps.list.all()[2].resident);
  EXPECT_FALSE(steps.list.all()[2].programmatic);
  const std::size_t bytes = steps.workspace.bytes();
  args.dk = {};  // the kernel writes one head's rows of it to the workspace
  EXPECT_EQ(kernels_of(steps_of(args)), (Kernels{"pack", "backward_preprocess", "backward"}));
  EXPECT_EQ(steps_of(args).workspace.bytes(), bytes + 300 * 128 * 2);
  args.dv = {};
  args.sink = args.dsink = Tensor(nullptr, DType::f32, {8}, cuda);
  EXPECT_EQ(kernels_of(steps_of(args)), (Kernels{"pack", "backward_preprocess", "backward_sink"}));
}

/// Gradients of captured tensors are cleared before anything else, whatever there is to add; wide heads take
/// the other kernels.
TEST(Steps, GradientsOfCapturedTensorsAreClearedFirst) {
  constexpr int first[] = {0};
  const std::vector<ConstTensor> captured{ConstTensor(memory, DType::f32, {8}, cuda)};
  const Function f =
      Function::parse("add(s, mul(t0[h], real(sub(k, q))))", Function::Kind::score, captured, first);
  Tensor wanted(memory + 256, DType::f32, {8}, cuda);
  BackwardArgs args = backward_args();
  args.score_function = &f;
  args.captured_gradients = {&wanted, 1};
  const gpu::Steps steps = steps_of(args);
  EXPECT_EQ(kernels_of(steps),
            (Kernels{"clear_gradients", "backward_preprocess", "backward", "backward_convert"}));
  std::vector<char> workspace(steps.workspace.bytes() + 256);
  gpu::StepParams params(
      steps, workspace.data() + (256 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 256), count);
  const auto cleared = *static_cast<const ClearParams*>(params.of(steps.list.all()[0]));
  EXPECT_EQ(cleared.counts[0], 8);
  EXPECT_EQ(cleared.counts[1], 0);
  params.of(steps.list.all()[1]);
  const auto* const main = static_cast<const WithCapturedGradients<WithFunctions<BackwardParams>>*>(
      params.of(steps.list.all()[2]));
  EXPECT_EQ(main->gradients[0].data, wanted.data);
  EXPECT_EQ(main->gradients[0].strides[0], 4);
  args.dq = args.dk = args.dv = {};
  EXPECT_EQ(kernels_of(steps_of(args)), (Kernels{"clear_gradients", "backward_preprocess", "backward"}));
  Problem p = make_problem(args, Memory::described);
  p.head_dim_v = 192;
  EXPECT_EQ(kernels_of(*plan_gpu(p).gpu),
            (Kernels{"clear_gradients", "backward_preprocess", "sm80_backward"}));
  p.rows_q = p.rows_k = 0;
  EXPECT_EQ(kernels_of(*plan_gpu(p).gpu), Kernels{"clear_gradients"});
}

TEST(Steps, MapsAreEncodedOnceACall) {
  const auto count_of = [](const gpu::Steps& steps) {
    std::vector<char> workspace(steps.workspace.bytes() + 256);
    gpu::StepParams params(
        steps, workspace.data() + (256 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 256), count);
    encoded = 0;
    for (const gpu::Step& step : steps.list) EXPECT_NE(params.of(step), nullptr);
    return encoded;
  };
  ForwardArgs args = forward_args();
  EXPECT_EQ(count_of(steps_of(args)), 3);
  args.options.precision = Precision::int8;
  EXPECT_EQ(count_of(steps_of(args)), 3);
  EXPECT_EQ(count_of(steps_of(backward_args())), 4);
}

TEST(Steps, AnEmptyCallHasNone) {
  ForwardArgs args = forward_args(0);
  args.k.data = memory + 2;
  EXPECT_TRUE(steps_of(args).list.empty());
  args.options.precision = Precision::fp8;
  EXPECT_TRUE(steps_of(args).list.empty());
  EXPECT_EQ(steps_of(args).workspace.bytes(), 0U);
}

TEST(Steps, TakeAConfigThatIsWanted) {
  const Problem p = make_problem(forward_args(), Memory::described);
  gpu::KernelConfig wanted = plan_gpu(p).gpu->config;
  std::get<ForwardConfig>(wanted).tiling.block_m = 64;
  const Plan plan = plan_gpu(p, &wanted);
  EXPECT_EQ(plan.gpu->config, wanted);
  ASSERT_EQ(plan.gpu->list.size(), 1U);
  EXPECT_EQ(plan.gpu->list.begin()->config, wanted);
  EXPECT_EQ(plan.gpu->list.begin()->grid, 2U * 8 * 5);
}

TEST(Steps, QuantizeFindsTheLargestOfHeadsFirst) {
  QuantizeProblem problem;
  problem.device = cuda;
  problem.batch = 2;
  problem.rows = 300;
  problem.heads = 3;
  problem.head_dim = 64;
  problem.x = {.data = memory, .dtype = DType::bf16};
  problem.codes = {.data = memory, .dtype = DType::e4m3};
  problem.group = ScaleGroup::head;
  const gpu::QuantizeSteps steps = plan_quantize(problem);
  ASSERT_EQ(steps.list.size(), 2U);
  EXPECT_EQ(steps.list.all()[0].kernel, &gpu::kernels::largest_of_groups);
  EXPECT_EQ(steps.list.all()[1].kernel, &gpu::kernels::quantize);
  EXPECT_FALSE(steps.list.all()[1].programmatic);
  EXPECT_EQ(steps.list.all()[1].grid, 2U * 3 * 3);
  EXPECT_EQ(steps.workspace.counter_bytes(), 2U * 3 * 8);
}

}  // namespace
}  // namespace tandem
