// The public functions: execution arguments, workspace, explain, version.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <string>

#include "arguments.hpp"
#include "harness/error_of.hpp"

namespace tandem::test {
namespace {

using testing::HasSubstr;
using testing::MatchesRegex;

template <typename Call>
void expect_error(Status status, const std::string& message, Call&& call) {
  EXPECT_EQ(error_of(status, call), message);
}

/// Every public function that takes an Execution.
template <typename Args>
void expect_error_everywhere(const std::string& message, const Args& args, const Execution& execution) {
  expect_error(Status::invalid_argument, message, [&] { workspace_bytes(args, execution); });
  expect_error(Status::invalid_argument, message, [&] { explain(args, execution); });
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    expect_error(Status::invalid_argument, message, [&] { forward(args, execution); });
  } else {
    expect_error(Status::invalid_argument, message, [&] { backward(args, execution); });
  }
}

TEST(Attention, RefusesImpossibleThreadCounts) {
  expect_error_everywhere("threads is -1; it must be from 1 to 4096, or 0 for every core", dense_forward(),
                          {.threads = -1});
  expect_error_everywhere("threads is 1000000; it must be from 1 to 4096, or 0 for every core",
                          dense_backward(), {.threads = 1000000});
}

TEST(Attention, RefusesFewerThanNoSms) {
  expect_error_everywhere("sm_limit is -1; it must be at least 1, or 0 for all SMs", dense_forward(),
                          {.sm_limit = -1});
}

TEST(Attention, RefusesWorkspaceSizeWithoutMemory) {
  expect_error_everywhere("workspace is NULL but workspace_bytes is 64; pass the memory too, or 0 bytes",
                          dense_forward(), {.workspace_bytes = 64});
}

TEST(Attention, RefusesMisalignedWorkspace) {
  expect_error(Status::invalid_argument, "workspace is at address 0x1080; it must be a multiple of 256", [] {
    forward(dense_forward(),
            {.workspace = reinterpret_cast<void*>(0x1080), .workspace_bytes = std::size_t{1} << 40});
  });
}

TEST(Attention, RefusesSmallWorkspaceBeforeWriting) {
  const ForwardArgs args = dense_forward();
  auto* out = static_cast<float*>(args.out.data);
  out[0] = std::numeric_limits<float>::quiet_NaN();
  const std::size_t needed = workspace_bytes(args, {.threads = 1});
  ASSERT_GT(needed, 0U);
  alignas(256) static std::byte memory[256];
  expect_error(Status::invalid_argument,
               "workspace has " + std::to_string(needed - 1) + " bytes but this call needs " +
                   std::to_string(needed) + "; ask workspace_bytes() with the same arguments",
               [&] { forward(args, {.threads = 1, .workspace = memory, .workspace_bytes = needed - 1}); });
  EXPECT_TRUE(std::isnan(out[0]));
}

TEST(Attention, ExplainsACall) {
  ForwardArgs args = packed_forward();
  args.options.causal = true;
  args.options.softcap = 20.0F;
  EXPECT_THAT(
      explain(args, {.threads = 2}),
      MatchesRegex(
          "forward f32: batch 2, total_q 5, total_k 7, heads_q 4, heads_kv 2, head_dim 16, head_dim_v 8\n"
          "scale 0.25, softcap 20, mask: causal, also: cu_seqlens_q, cu_seqlens_k, lse\n"
          "backend cpu: the tensors are on the CPU\n"
          "target [a-z0-9_]+: .+\n"
          "threads 2: what the caller asked for\n"
          "block_q [0-9]+, block_k [0-9]+: the tile one thread works on\n"
          "workspace [0-9]+ bytes\n"));
}

TEST(Attention, ExplainsABackwardCall) {
  BackwardArgs args = dense_backward();
  args.options.window_left = 3;
  args.options.deterministic = true;
  const std::string text = explain(args);
  EXPECT_THAT(text, HasSubstr("backward f32: batch 2, seqlen_q 5, seqlen_k 7, heads_q 4"));
  EXPECT_THAT(
      text,
      HasSubstr(
          "softcap off, mask: window, left 3, right unbounded, also: sink, lse, dlse, dsink, deterministic"));
}

TEST(Attention, ExplainsMasksAndScales) {
  ForwardArgs args = e4m3_forward();
  args.k_scale = tensor(5, DType::f32, {1});
  EXPECT_THAT(explain(args), HasSubstr("mask: none, also: lse, scales"));
  args.options.window_right = 1;
  args.seqused_q = tensor(6, DType::i32, {2});
  args.seqused_k = tensor(7, DType::i64, {2});
  EXPECT_THAT(explain(args),
              HasSubstr("mask: window, left unbounded, right 1, also: seqused_q, seqused_k, lse, scales"));
}

TEST(Attention, ExplainsWithoutMemory) {
  ForwardArgs args = packed_forward();
  for (ConstTensor* t : {&args.q, &args.k, &args.v, &args.cu_seqlens_q, &args.cu_seqlens_k})
    t->data = nullptr;
  args.out.data = nullptr;
  args.lse.data = nullptr;
  args.options.check = true;
  EXPECT_THAT(explain(args), HasSubstr("also: cu_seqlens_q, cu_seqlens_k, lse"));
  EXPECT_EQ(workspace_bytes(args, {.threads = 2}), workspace_bytes(packed_forward(), {.threads = 2}));
}

TEST(Attention, ExplainThrowsWhatForwardWouldThrow) {
  ForwardArgs args = dense_forward();
  args.options.softcap = -2.0F;
  expect_error_everywhere("softcap is -2; it must be finite and at least 0 (0: off)", args, {});
}

TEST(Attention, TellsItsVersion) {
  EXPECT_THAT(version(), MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
}

}  // namespace
}  // namespace tandem::test
