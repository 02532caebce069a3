// The portable part of the shipped set: what it has, and which calls it serves.
#include "ops/portable_set.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "api/make_problem.hpp"
#include "gpu/steps.hpp"
#include "ops/backward/sm80_plan.hpp"
#include "ops/forward/sm80_plan.hpp"
#include "tandem/attention.hpp"

namespace tandem {
namespace {

constexpr Device cuda{.kind = Device::Kind::cuda, .index = 0};

/// (batch, rows, heads, head_dim) of q, and 2 heads of k and v with 4096 rows.
ForwardArgs call(std::int64_t rows, std::int64_t heads, std::int64_t head_dim, DType dtype = DType::bf16,
                 std::int64_t batch = 4) {
  ForwardArgs args;
  args.q = ConstTensor(nullptr, dtype, {batch, rows, heads, head_dim}, cuda);
  args.k = args.v = ConstTensor(nullptr, dtype, {batch, 4096, 2, head_dim}, cuda);
  args.out = Tensor(nullptr, dtype, {batch, rows, heads, head_dim}, cuda);
  return args;
}

BackwardArgs backward_call(std::int64_t head_dim, DType dtype) {
  const ForwardArgs forward = call(4096, 8, head_dim, dtype);
  BackwardArgs args;
  static_cast<AttentionInputs&>(args) = forward;
  args.out = args.dout = forward.out;
  args.lse = ConstTensor(nullptr, DType::f32, {4, 8, 4096}, cuda);
  args.dq = Tensor(nullptr, dtype, {4, 4096, 8, head_dim}, cuda);
  return args;
}

/// The Config of a call, its heads folded into rows as in every plan.
Sm80ForwardConfig config_of(const ForwardArgs& args) {
  Problem p = make_problem(args, Memory::described);
  fold_heads_into_rows(p);
  return portable_forward_config(CallFacts(p));
}

bool has(const Sm80ForwardConfig& config) {
  const std::vector<Sm80ForwardConfig> set = portable_forward_configs();
  return std::ranges::find(set, config) != set.end();
}

TEST(PortableSet, EveryConfigCanExistInTheLeastSharedMemory) {
  for (const Sm80ForwardConfig& c : portable_forward_configs())
    EXPECT_EQ(forward_objection(c, portable_shared_bytes_per_sm), "") << gpu::expression_of(c);
  for (const Sm80BackwardConfig& c : portable_backward_configs())
    EXPECT_EQ(backward_objection(c, portable_shared_bytes_per_sm), "") << gpu::expression_of(c);
}

TEST(PortableSet, IsSmallAndHasNoKernelTwice) {
  const std::vector<gpu::KernelName> kernels = portable_kernels();
  EXPECT_LE(kernels.size(), 70U);
  for (auto at = kernels.begin(); at != kernels.end(); ++at) {
    EXPECT_EQ(at->architecture, "compute_80");
    EXPECT_EQ(std::find(at + 1, kernels.end(), *at), kernels.end()) << at->expression;
  }
}

/// Prefill, training and steps of generation, of every head dimension, whatever the mask.
TEST(PortableSet, ServesTheUsualForwardCalls) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (std::int64_t head_dim = 8; head_dim <= 256; head_dim += 8) {
      for (const std::int64_t rows : {1, 5, 64, 300, 4096}) {
        for (const std::int64_t heads : {2, 8, 14}) {
          ForwardArgs args = call(rows, heads, head_dim, dtype, head_dim % 16 == 0 ? 4 : 600);
          EXPECT_TRUE(has(config_of(args))) << gpu::expression_of(config_of(args));
          args.options.causal = true;
          args.options.window_left = 1000;
          EXPECT_TRUE(has(config_of(args))) << gpu::expression_of(config_of(args));
        }
      }
    }
  }
}

TEST(PortableSet, ServesSequencesOfOneTensorAndPages) {
  const std::array<std::int32_t, 5> offsets = {0, 100, 1000, 2000, 4096};
  ForwardArgs packed;
  packed.q = ConstTensor(nullptr, DType::bf16, {4096, 8, 128}, cuda);
  packed.k = packed.v = ConstTensor(nullptr, DType::bf16, {4096, 2, 128}, cuda);
  packed.out = Tensor(nullptr, DType::bf16, {4096, 8, 128}, cuda);
  packed.cu_seqlens_q = packed.cu_seqlens_k = ConstTensor(offsets.data(), DType::i32, {5}, cuda);
  packed.options.causal = true;
  EXPECT_TRUE(has(config_of(packed)));
  for (const std::int64_t rows : {1, 4, 512}) {
    for (const std::int64_t heads : {2, 8}) {
      ForwardArgs paged = call(rows, heads, 128);
      const std::array<std::int32_t, 4> table{};
      paged.k = paged.v = ConstTensor(nullptr, DType::bf16, {64, 64, 2, 128}, cuda);
      paged.page_table = ConstTensor(table.data(), DType::i32, {4, 32}, cuda);
      paged.seqused_k = ConstTensor(table.data(), DType::i32, {4}, cuda);
      const Sm80ForwardConfig c = config_of(paged);
      EXPECT_EQ(c.keys, KeySource::pages);
      EXPECT_TRUE(has(c)) << gpu::expression_of(c);
    }
  }
}

TEST(PortableSet, ServesTheUsualBackwardCalls) {
  const std::vector<Sm80BackwardConfig> set = portable_backward_configs();
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (std::int64_t head_dim = 8; head_dim <= max_sm80_backward_head_dim; head_dim += 8) {
      BackwardArgs args = backward_call(head_dim, dtype);
      for (const bool causal : {false, true}) {
        args.options.causal = causal;
        const Sm80BackwardConfig c =
            portable_backward_config(CallFacts(make_problem(args, Memory::described)));
        EXPECT_NE(std::ranges::find(set, c), set.end()) << gpu::expression_of(c);
      }
    }
  }
}

/// What is not in the set keeps its feature: no call takes a kernel that computes something else.
TEST(PortableSet, LacksWhatIsNotUsual) {
  ForwardArgs args = call(300, 8, 128);
  args.options.softcap = 30;
  EXPECT_EQ(config_of(args).transform, ScoreTransform::softcap);
  EXPECT_FALSE(has(config_of(args)));
  args = call(300, 8, 128);
  args.options.scale = -1;
  EXPECT_FALSE(has(config_of(args)));
  args = call(4, 8, 128);
  args.options.split_size = 256;
  EXPECT_TRUE(config_of(args).schedule.invariant);
  EXPECT_FALSE(has(config_of(args)));
  BackwardArgs backward = backward_call(128, DType::bf16);
  backward.options.deterministic = true;
  EXPECT_TRUE(
      portable_backward_config(CallFacts(make_problem(backward, Memory::described))).schedule.deterministic);
}

}  // namespace
}  // namespace tandem
