// The scratch of calls with a fixed split size.
#include <gtest/gtest.h>

#include "api/make_problem.hpp"
#include "gpu/device.hpp"
#include "ops/forward/launch.hpp"
#include "ops/forward/plan.hpp"
#include "ops/plan.hpp"
#include "tandem/attention.hpp"

namespace tandem {
namespace {

/// However many splits there is room for in the cache: the device's CTAs bound those that have places.
TEST(SplitsPlan, PartsOfSplitsFollowTheDeviceNotTheCapacity) {
  const auto work_of = [](std::int64_t batch, std::int64_t queries, std::int64_t keys) {
    Problem p;
    p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::bf16;
    p.batch = batch;
    p.heads_q = 64;
    p.heads_kv = 8;
    p.rows_q = queries;
    p.rows_k = keys;
    p.head_dim_qk = p.head_dim_v = 128;
    p.scale = 1.0F;
    p.split_size = 128;
    const CallFacts facts(p);
    const ForwardConfig c = choose_forward_config(facts);
    EXPECT_EQ(c.schedule.split, queries == 1);
    return gpu::divide_work(facts.problem, c, 132);
  };
  constexpr std::int64_t megabyte = 1'000'000;
  for (const std::int64_t keys : {131'072LL, 10'000'000LL, 0x7fffff80LL}) {
    for (const std::int64_t batch : {1, 8, 60}) {
      const gpu::WorkDivision work = work_of(batch, 1, keys);
      EXPECT_LE(work.items, splits_per_cta * 132);
      EXPECT_LE(work.ctas, 132);
      EXPECT_GT(work.levels, 0);
      EXPECT_LT(4 * work.part_outputs + 8 * work.part_sums, 13 * megabyte) << keys << " x " << batch;
    }
    EXPECT_LT(4 * work_of(8, 200, keys).part_outputs, 70 * megabyte) << keys;
  }
  EXPECT_EQ(work_of(8, 1, 4'096).items, 8 * 8 * 32) << "all of them have places";
  EXPECT_EQ(work_of(8, 1, 4'096).levels, 0);
}

/// A call on page tables with room for very many keys, whose lengths a GPU alone knows.
TEST(SplitsPlan, ScratchDoesNotFollowThePageTable) {
  for (const Device device : {Device{}, Device{.kind = Device::Kind::cuda, .index = gpu::first_described}}) {
    const bool on_gpu = device.kind == Device::Kind::cuda;
    for (const std::int64_t rows : {131'072, 10'000'000}) {
      ForwardArgs a;
      a.q = ConstTensor(nullptr, DType::bf16, {8, 1, 64, 128}, device);
      a.k = a.v = ConstTensor(nullptr, DType::bf16, {100, 16, 8, 128}, device);
      a.out = Tensor(nullptr, DType::bf16, {8, 1, 64, 128}, device);
      a.page_table = ConstTensor(nullptr, DType::i32, {8, rows / 16}, device);
      a.seqused_k = ConstTensor(nullptr, DType::i32, {8}, device);
      a.options.split_size = 128;
      const Plan plan = make_plan(make_problem(a, Memory::described), {.threads = 100});
      EXPECT_LT(plan.workspace_bytes, std::size_t{on_gpu ? 12U : 100U} * 1'000'000) << rows;
      if (on_gpu) {
        EXPECT_NE(explain(a).find("the workspace has places for 2112 splits; where"), std::string::npos)
            << explain(a);
      }
    }
  }
}

TEST(SplitsPlan, WideHeadsSayTheirPlacesToo) {
  const Device device{.kind = Device::Kind::cuda, .index = gpu::first_described};
  ForwardArgs a;
  a.q = ConstTensor(nullptr, DType::bf16, {8, 1, 64, 576}, device);
  a.k = ConstTensor(nullptr, DType::bf16, {8, 4096, 1, 576}, device);
  a.v = ConstTensor(nullptr, DType::bf16, {8, 4096, 1, 512}, device);
  a.out = Tensor(nullptr, DType::bf16, {8, 1, 64, 512}, device);
  a.options.split_size = 128;
  EXPECT_NE(explain(a).find("the workspace has places for all 256 splits"), std::string::npos) << explain(a);
}

}  // namespace
}  // namespace tandem
