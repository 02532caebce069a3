// Which family of kernels a GPU takes, and the Configs of the family sm80.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <string>

#include "api/make_problem.hpp"
#include "gpu/kernel_spec.hpp"
#include "harness/error_of.hpp"
#include "harness/runbook.hpp"
#include "ops/backward/launch.hpp"
#include "ops/backward/sm80_plan.hpp"
#include "ops/forward/launch.hpp"
#include "ops/forward/sm80_plan.hpp"
#include "ops/plan.hpp"
#include "ops/plan_gpu.hpp"
#include "plan/facts.hpp"
#include "tandem/attention.hpp"
#include "tandem/function.hpp"

namespace tandem {
namespace {

/// TANDEM_KERNELS for a scope.
class Kernels {
 public:
  explicit Kernels(const char* wish) { setenv("TANDEM_KERNELS", wish, 1); }
  ~Kernels() { unsetenv("TANDEM_KERNELS"); }
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;
};

Device described(const std::string& name) {
  int index = gpu::first_described;
  for (const gpu::DeviceProperties& device : gpu::described_devices()) {
    if (device.name == name) break;
    ++index;
  }
  return {.kind = Device::Kind::cuda, .index = index};
}

ForwardArgs call_on(const std::string& gpu, std::int64_t head_dim = 128, std::int64_t seqlen_q = 4096) {
  const Device device = described(gpu);
  ForwardArgs args;
  args.q = ConstTensor(nullptr, DType::bf16, {2, seqlen_q, 8, head_dim}, device);
  args.k = args.v = ConstTensor(nullptr, DType::bf16, {2, 4096, 2, head_dim}, device);
  args.out = Tensor(nullptr, DType::bf16, {2, seqlen_q, 8, head_dim}, device);
  return args;
}

template <typename Args>
Plan plan_of(const Args& args) {
  return make_plan(make_problem(args, Memory::described), {});
}

Family family_of(const ForwardArgs& args) {
  return plan_of(args).facts->family;
}

Sm80ForwardConfig config_of(const ForwardArgs& args) {
  return std::get<Sm80ForwardConfig>(plan_of(args).gpu->config);
}

BackwardArgs backward_on(const std::string& gpu, std::int64_t head_dim) {
  const ForwardArgs forward = call_on(gpu, head_dim);
  BackwardArgs backward;
  static_cast<AttentionInputs&>(backward) = forward;
  backward.out = backward.dout = forward.out;
  backward.lse = ConstTensor(nullptr, DType::f32, {2, 8, 4096}, forward.q.device);
  backward.dq = Tensor(nullptr, DType::bf16, {2, 4096, 8, head_dim}, forward.q.device);
  return backward;
}

TEST(Family, IsThatOfTheComputeCapability) {
  for (const gpu::DeviceProperties& device : gpu::described_devices()) {
    const Family family = device.major == 9 ? Family::sm90 : Family::sm80;
    EXPECT_EQ(facts_of(device).family, family) << device.name;
    EXPECT_EQ(family_of(call_on(device.name)), family) << device.name;
  }
  const gpu::DeviceProperties turing{.name = "T4", .major = 7, .minor = 5};
  EXPECT_TRUE(in_runbook("no-kernel.md", error_of(Status::unsupported, [&] { facts_of(turing); })));
}

TEST(Family, IsWhatTheEnvironmentAsksFor) {
  {
    const Kernels wish("sm80");
    EXPECT_EQ(family_of(call_on("H100")), Family::sm80);
    EXPECT_NE(explain(call_on("H100")).find("kernels sm80: TANDEM_KERNELS asks for them; sm_90a"),
              std::string::npos);
  }
  {
    const Kernels wish("sm90");
    EXPECT_EQ(family_of(call_on("H100")), Family::sm90);
    EXPECT_NE(error_of(Status::unsupported, [] { plan_of(call_on("A100")); })
                  .find("compute capability 9.0 alone runs, A100 has 8.0"),
              std::string::npos);
  }
  const Kernels wish("volta");
  EXPECT_EQ(error_of(Status::unsupported, [] { plan_of(call_on("H100")); }),
            "TANDEM_KERNELS is volta; it may be sm80, sm90, or unset for the GPU's own");
}

TEST(Family, IsPartOfTheKernelsName) {
  const std::string name = gpu::kernels::sm80_forward.name(config_of(call_on("A100"))).expression;
  EXPECT_EQ(name.rfind("tandem::sm80_forward<tandem::Sm80ForwardConfig{", 0), 0U);
  EXPECT_EQ(gpu::architecture_of({.name = "", .major = 8, .minor = 6}), "sm_86");
  EXPECT_EQ(gpu::architecture_of({.name = "", .major = 9, .minor = 0}), "sm_90a");
  EXPECT_EQ(gpu::architecture_of({.name = "", .major = 12, .minor = 0}), "sm_120");
}

TEST(Family, WhatItLacksIsAnError) {
  const std::string where =
      "A100 takes the kernels sm80 (compute capability 8.0 has no WGMMA), of which there is ";
  const ForwardArgs forward = call_on("A100");
  ForwardArgs eight_bit = forward;
  eight_bit.options.precision = Precision::fp8;
  EXPECT_EQ(error_of(Status::unsupported, [&] { explain(eight_bit); }),
            where + "no 8-bit kernel yet; copy the tensors to the CPU");
  ForwardArgs with_maxima = forward;
  with_maxima.max_logits = Tensor(nullptr, DType::f32, {2, 8, forward.q.shape[1]}, forward.q.device);
  EXPECT_EQ(error_of(Status::unsupported, [&] { explain(with_maxima); }),
            where + "no kernel that finds max_logits yet; copy the tensors to the CPU");
  alignas(16) static std::byte odd[32];
  ForwardArgs cache = forward;  // what TMA can read is Hopper's concern
  cache.k.dtype = cache.v.dtype = DType::e4m3;
  cache.k.data = odd + 1;
  cache.seqused_k = ConstTensor(nullptr, DType::i32, {2}, forward.q.device);
  cache.cache_batch_idx = cache.seqused_k;
  EXPECT_EQ(error_of(Status::unsupported, [&] { explain(cache); }),
            where + "no kernel for k and v of 8 bits yet; copy the tensors to the CPU");
  cache.q.dtype = DType::e4m3;
  EXPECT_EQ(error_of(Status::unsupported, [&] { explain(cache); }),
            where + "no kernel for k and v of 8 bits yet; copy the tensors to the CPU");
  cache.cache_batch_idx = {};  // more queries than read e4m3 keys as they are
  EXPECT_EQ(error_of(Status::unsupported, [&] { explain(cache); }),
            where + "no kernel for k and v of 8 bits yet; copy the tensors to the CPU");
  const Kernels wish("sm80");
  ForwardArgs forced = call_on("H100");
  forced.options.precision = Precision::fp8;
  EXPECT_NE(error_of(Status::unsupported, [&] { explain(forced); }).find("unset TANDEM_KERNELS, or copy"),
            std::string::npos);
}

TEST(Sm80Plan, EveryLineFitsTheSharedMemoryItAsksFor) {
  for (const Sm80ForwardTileLine& tile : sm80_forward_tiles()) {
    Sm80ForwardConfig c;
    c.tiling.head_dim_qk = tile.head_dim_qk;
    c.tiling.head_dim_v = tile.head_dim_v;
    c.tiling.block_m = tile.block_m;
    c.tiling.block_n = tile.block_n;
    EXPECT_EQ(forward_objection(c, tile.shared_kilobytes * 1024), "") << gpu::expression_of(c);
  }
}

/// All head dimensions have a tile on every GPU, and an SM holds two CTAs of those up to 128.
TEST(Sm80Plan, EveryGpuHasATileOfEveryHeadDimension) {
  for (const gpu::DeviceProperties& device : gpu::described_devices()) {
    if (device.major == 9) continue;
    const int shared = facts_of(device).shared_bytes_per_sm;
    for (std::int64_t head_dim = 8; head_dim <= 256; head_dim += 8) {
      for (const std::int64_t queries : {1, 64, 4096}) {
        const Sm80ForwardConfig c = config_of(call_on(device.name, head_dim, queries));
        EXPECT_EQ(forward_objection(c, shared), "") << device.name << ' ' << gpu::expression_of(c);
        EXPECT_TRUE(head_dim > 128 || 2 * (forward_shared_bytes(c) + 1024) <= shared)
            << device.name << ' ' << gpu::expression_of(c);
      }
    }
  }
}

/// The widest blocks with which an SM holds two CTAs; beside functions 64 keys.
TEST(Sm80Plan, HeadsOf64HaveTheKeysThatFit) {
  const auto tile = [](const Sm80ForwardConfig& c) { return std::array{c.tiling.block_n, c.stages}; };
  EXPECT_EQ(tile(config_of(call_on("A100", 64))), (std::array{112, 2}));
  EXPECT_EQ(tile(config_of(call_on("RTX 4090", 64))), (std::array{128, 1}));
  const Function twice = Function::parse("mul(s, 2.0)", Function::Kind::score);
  for (const char* gpu : {"A100", "RTX 4090"}) {
    ForwardArgs args = call_on(gpu, 64);
    args.score_function = &twice;
    EXPECT_EQ(tile(config_of(args)), (std::array{64, 2})) << gpu;
  }
  const Kernels wish("sm80");
  EXPECT_EQ(tile(config_of(call_on("H100", 64))), (std::array{128, 2}));
  EXPECT_EQ(2 * (forward_shared_bytes(config_of(call_on("H100", 64))) + 1024), 164 * 1024);
}

/// Backward: where head dimensions are multiples of 64, and nothing is compiled in.
TEST(Sm80Plan, WarpsHaveTwoUnitsOfKeysWhereTheyFit) {
  const auto halved = [](const BackwardArgs& args) {
    return std::get<Sm80BackwardConfig>(plan_of(args).gpu->config).halved;
  };
  for (const int head_dim : {64, 128}) {
    EXPECT_TRUE(halved(backward_on("A100", head_dim)));
    EXPECT_FALSE(halved(backward_on("RTX 4090", head_dim)));
  }
  EXPECT_FALSE(halved(backward_on("A100", 32)));
  EXPECT_FALSE(halved(backward_on("A100", 96)));
  EXPECT_FALSE(halved(backward_on("A100", 192)));
  const Function twice = Function::parse("mul(s, 2.0)", Function::Kind::score);
  BackwardArgs args = backward_on("A100", 64);
  args.score_function = &twice;
  EXPECT_FALSE(halved(args));
}

TEST(Sm80Plan, ACtaHasATileAndFewQueriesShareKeys) {
  const Plan whole = plan_of(call_on("RTX 4090"));
  const Sm80ForwardConfig c = std::get<Sm80ForwardConfig>(whole.gpu->config);
  EXPECT_EQ(whole.gpu->list.all().front().grid, 2U * 8U * 4096U / static_cast<unsigned>(c.tiling.block_m));
  const Plan few = plan_of(call_on("RTX 4090", 128, 4));
  const auto steps = few.gpu->list.all();
  ASSERT_EQ(steps.size(), 2U);
  EXPECT_EQ(steps[0].kernel, &gpu::kernels::sm80_forward);
  EXPECT_EQ(steps[1].kernel, &gpu::kernels::combine);
  EXPECT_TRUE(std::get<Sm80ForwardConfig>(few.gpu->config).tiling.heads_as_rows);
}

/// As on Hopper: a mask function of equal lengths has lists of blocks in both passes.
/// The mean length of a batch decides whether it has tiles of few queries, and sequences of length 0 are in
/// that mean: the bits of the others follow from the keys of a block.
TEST(Sm80Plan, FewQueriesHaveTheKeysOfManyInABlock) {
  for (const int kilobytes : {100, 164, 228}) {
    for (const std::int64_t head_dim : {32, 64}) {
      Problem p;
      p.batch = 2;
      p.heads_q = 4;
      p.heads_kv = 2;
      p.rows_k = 100;
      p.head_dim_qk = p.head_dim_v = head_dim;
      p.scale = 1.0F;
      p.rows_q = 16;
      const Sm80ForwardConfig few = choose_sm80_forward_config(
          CallFacts(p, {.family = Family::sm80, .shared_bytes_per_sm = kilobytes * 1024}));
      p.rows_q = 200;
      const Sm80ForwardConfig many = choose_sm80_forward_config(
          CallFacts(p, {.family = Family::sm80, .shared_bytes_per_sm = kilobytes * 1024}));
      EXPECT_TRUE(few.tiling.heads_as_rows && !many.tiling.heads_as_rows);
      EXPECT_EQ(few.tiling.block_n, many.tiling.block_n) << head_dim << " in " << kilobytes << " KB";
      EXPECT_EQ(forward_objection(few, kilobytes * 1024), "");
    }
  }
}

TEST(Sm80Plan, FunctionsAreCompiledIn) {
  const Function chunked = Function::parse("eq(floordiv(k, 64), floordiv(q, 64))", Function::Kind::mask);
  const Function causal = Function::parse("le(k, q)", Function::Kind::mask);
  const Function twice = Function::parse("mul(s, 2.0)", Function::Kind::score);
  ForwardArgs forward = call_on("A100");
  forward.mask_function = &chunked;
  const auto kernels = [](const Plan& plan) {
    std::vector<std::string_view> all;
    for (const gpu::Step& step : plan.gpu->list.all()) all.push_back(step.kernel->entry);
    return all;
  };
  EXPECT_EQ(kernels(plan_of(forward)), (std::vector<std::string_view>{"list_blocks", "sm80_forward"}));
  EXPECT_EQ(config_of(forward).transform, ScoreTransform::raw);
  EXPECT_NE(explain(forward).find("by lists that a kernel makes first"), std::string::npos);
  forward.mask_function = &causal;  // is the window
  EXPECT_EQ(kernels(plan_of(forward)), std::vector<std::string_view>{"sm80_forward"});
  EXPECT_TRUE(config_of(forward).mask.causal);
  EXPECT_FALSE(config_of(forward).functions.given());
  forward.mask_function = nullptr;
  forward.score_function = &twice;
  EXPECT_EQ(kernels(plan_of(forward)), std::vector<std::string_view>{"sm80_forward"});
  EXPECT_EQ(config_of(forward).transform, ScoreTransform::scaled);
  BackwardArgs backward = backward_on("RTX 4090", 64);
  backward.mask_function = &chunked;
  EXPECT_EQ(kernels(plan_of(backward)),
            (std::vector<std::string_view>{"list_query_blocks", "backward_preprocess", "sm80_backward",
                                           "backward_convert"}));
  backward.options.deterministic = true;
  EXPECT_EQ(kernels(plan_of(backward)),
            (std::vector<std::string_view>{"backward_preprocess", "sm80_backward", "backward_convert"}));
}

TEST(Sm80Plan, IsExplained) {
  const std::string text = explain(call_on("A10"));
  for (const char* line :
       {"kernels sm80: compute capability 8.6 has no WGMMA; sm_86 is what they are compiled for",
        "kernel sm80_forward: bf16, head_dim 128 padded to 128", "4 warps of 2 x 16 rows",
        "of 102400 an SM: 2 CTAs at once"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
  }
}

TEST(Sm80Plan, AnImpossibleConfigIsNamed) {
  Sm80ForwardConfig c = config_of(call_on("A100"));
  const auto objection = [](Sm80ForwardConfig other) { return forward_objection(other, 100 * 1024); };
  EXPECT_EQ(objection(c), "");
  c.tiling.block_m = 192;
  EXPECT_EQ(objection(c), "block_m 192 is not 64 or 128");
  c.tiling.block_m = 128;
  c.tiling.block_n = 40;
  EXPECT_EQ(objection(c), "block_n 40 is not a multiple of 16 from 16 to 128");
  c.tiling.block_n = 128;
  c.functions = {.digest = 1, .dropout = true};
  EXPECT_EQ(objection(c), "");
  c.functions = {.digest = 1, .score_function = true, .block_lists = true};
  EXPECT_EQ(objection(c),
            "block_lists are of a mask function, for equal lengths; mask_function is false, varlen false");
  c.functions = {};
  c.stages = 4;
  EXPECT_NE(objection(c).find("bytes of shared memory, a CTA has 101376"), std::string::npos);
}

TEST(Sm80Plan, EveryGpuHasABackwardTileOfEveryHeadDimension) {
  for (const gpu::DeviceProperties& device : gpu::described_devices()) {
    if (device.major == 9) continue;
    const int shared = facts_of(device).shared_bytes_per_sm;
    for (std::int64_t head_dim = 8; head_dim <= 256; head_dim += 8) {
      const Plan plan = plan_of(backward_on(device.name, head_dim));
      const auto& c = std::get<Sm80BackwardConfig>(plan.gpu->config);
      EXPECT_EQ(backward_objection(c, shared), "") << device.name << ' ' << gpu::expression_of(c);
      const auto steps = plan.gpu->list.all();
      ASSERT_EQ(steps.size(), 3U);
      EXPECT_EQ(steps[1].kernel, &gpu::kernels::sm80_backward);
    }
  }
  const Plan wide = plan_of(backward_on("A100", 192));
  EXPECT_EQ(std::get<Sm80BackwardConfig>(wide.gpu->config).tiling.block_n, 64);
  EXPECT_EQ(std::get<Sm80BackwardConfig>(wide.gpu->config).threads(), 256);
  const std::string text = explain(backward_on("RTX 4090", 128)) + explain(backward_on("L4", 256));
  for (const char* line :
       {"tile 64 keys, 32 queries at a time, 1 blocks of q and 1 of dout in flight: dS in dO's place and P "
        "in",
        "kernels backward_preprocess, sm80_backward, backward_convert: bf16, head_dim 128",
        "tile 128 keys, 64 queries at a time, 1 blocks of q and 1 of dout in flight: dS in dO's place",
        "of 102400 an SM"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
  }
}

TEST(Sm80Plan, AnImpossibleBackwardConfigIsNamed) {
  const auto objection = [](const Sm80BackwardConfig& c, int kilobytes = 164) {
    return backward_objection(c, kilobytes * 1024);
  };
  Sm80BackwardConfig good = std::get<Sm80BackwardConfig>(plan_of(backward_on("A100", 128)).gpu->config);
  EXPECT_EQ(objection(good), "");
  ASSERT_TRUE(good.halved);
  good.functions = {.digest = 1, .dropout = true};
  EXPECT_EQ(objection(good), "two units of keys a warp take no functions, and dS a place of its own");
  good.functions = {};
  good.tiling.head_dim_v = 96;
  EXPECT_EQ(objection(good), "head_dim_v 96 is not a multiple of 64 up to 128");
  good.tiling.head_dim_v = 128;
  good.halved = false;
  EXPECT_EQ(objection(good), "");
  EXPECT_NE(objection(good, 100).find("bytes of shared memory, a CTA has 101376"), std::string::npos);
  Sm80BackwardConfig c = good;
  c.tiling.head_dim_qk = 96;
  EXPECT_EQ(objection(c), "head_dim 96 is not a multiple of 64 up to 128");
  c = good;
  c.tiling.head_dim_v = 160;
  EXPECT_EQ(objection(c), "head_dim_v 160 is not a multiple of 32 up to 128");
  c.tiling.block_n = 64;
  EXPECT_EQ(objection(c), "head_dim_v 160 is not a multiple of 64 up to 256");
  c.tiling.head_dim_v = 192;
  EXPECT_EQ(objection(c), "");
  c.tiling.block_m = 128;
  EXPECT_EQ(objection(c), "block_m 128 is not 32 or 64");
  c.tiling.block_n = 96;
  EXPECT_EQ(objection(c), "block_n 96 is not 128 or 64");
  c = good;
  c.functions = {.digest = 1, .dropout = true};
  EXPECT_EQ(objection(c), "");
  c.functions = {.digest = 1, .mask_function = true, .block_lists = true};
  c.schedule.deterministic = true;
  EXPECT_NE(objection(c).find("in any order; mask_function is true, varlen false, deterministic true"),
            std::string::npos);
  c = good;
  c.ds_in_dout = true;
  EXPECT_EQ(objection(c), "ds_in_dout takes one dout_stages");
  c.q_stages = 3;
  EXPECT_EQ(objection(c), "3 stages are not 1 or 2");
}

}  // namespace
}  // namespace tandem
