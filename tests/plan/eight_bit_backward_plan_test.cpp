// The plan of gradients by 8-bit products on a GPU.
#include "ops/eight_bit_backward/plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "gpu/device.hpp"
#include "harness/error_of.hpp"
#include "ops/eight_bit_backward/launch.hpp"
#include "ops/plan_gpu.hpp"
#include "tandem/attention.hpp"

namespace tandem {
namespace {

Problem problem(std::int64_t rows, bool causal) {
  Problem p;
  p.batch = 2;
  p.heads_q = p.heads_kv = 8;
  p.head_dim_qk = p.head_dim_v = 128;
  p.rows_q = p.rows_k = rows;
  p.q.dtype = p.out.dtype = DType::bf16;
  if (causal) p.window_right = 0;
  return p;
}

TEST(EightBitBackwardPlan, ShipsWhatItChoosesForTheUsualModels) {
  const std::vector<EightBitBackwardConfig> configs = shipped_eight_bit_backward_configs();
  for (const EightBitBackwardConfig& c : configs) EXPECT_EQ(eight_bit_backward_objection(c), "");
  for (const std::int64_t rows : {1, 512, 2048, 65536}) {
    for (const bool causal : {false, true}) {
      const auto c = choose_eight_bit_backward_config(CallFacts(problem(rows, causal)));
      EXPECT_EQ(std::count(configs.begin(), configs.end(), c), 1) << rows << (causal ? " causal" : "");
    }
  }
}

TEST(EightBitBackwardPlan, RefusesWhatCannotExist) {
  EightBitBackwardConfig c;
  c.q_stages = 1;
  EXPECT_EQ(eight_bit_backward_objection(c), "q_stages 1 is less than 2: dK and dV are a block behind S");
  c.q_stages = 5;
  EXPECT_EQ(eight_bit_backward_objection(c), "needs 265216 bytes of shared memory, a block has 232448");
  c.q_stages = 3;
  c.schedule.staggered = c.mask.causal = true;
  EXPECT_EQ(eight_bit_backward_objection(c),
            "staggered is for full attention of equal lengths; causal is true, local false, varlen false");
  c = {};
  c.tiling.head_dim_qk = 64;
  EXPECT_EQ(
      eight_bit_backward_objection(c),
      "the tile is 128 keys and 64 queries of 128 and 128 dimensions, or 128 and 128 of 64 and 64; it has "
      "128 and 64 of 64 and 128");
  c.tiling.head_dim_v = 64;
  EXPECT_NE(eight_bit_backward_objection(c), "");
  c.tiling.block_m = 128;
  EXPECT_EQ(eight_bit_backward_objection(c), "");
}

TEST(EightBitBackwardPlan, HasTwiceTheQueriesOfNarrowHeads) {
  Problem narrow = problem(4096, false);
  narrow.head_dim_qk = narrow.head_dim_v = 64;
  const auto c = choose_eight_bit_backward_config(CallFacts(narrow));
  EXPECT_EQ(c.tiling.block_m, 128);
  EXPECT_EQ(eight_bit_backward_objection(c), "");
  EXPECT_EQ(c.registers().consumer, 232);
}

BackwardArgs call(std::int64_t head_dim) {
  const Device device{.kind = Device::Kind::cuda, .index = gpu::first_described};
  const ConstTensor rows(nullptr, DType::bf16, {2, 3000, 8, head_dim}, device);
  const ConstTensor of_row(nullptr, DType::f32, {2, 8, 3000}, device);
  const Tensor gradient(nullptr, DType::bf16, {2, 3000, 8, head_dim}, device);
  BackwardArgs args;
  args.q = args.k = args.v = args.out = args.dout = rows;
  args.lse = args.max_logits = of_row;
  args.dq = args.dk = args.dv = gradient;
  args.options.precision = args.options.backward_precision = Precision::int8;
  return args;
}

TEST(EightBitBackwardPlan, ExplainsWhatItChose) {
  const std::string text = explain(call(128));
  for (const char* part :
       {"kernels mean_of_keys, quantize_keys, quantize_queries, eight_bit_backward",
        "tile 128 keys, 64 queries at a time, 3 blocks of q and dout in flight",
        "each tile begins with a block of queries of its own", "dq is added up in any order"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  EXPECT_NE(explain(call(64)).find("tile 128 keys, 128 queries at a time"), std::string::npos);
}

TEST(EightBitBackwardPlan, SaysWhatHasNoKernel) {
  EXPECT_EQ(
      error_of(Status::unsupported, [] { return explain(call(96)); }),
      "backward_precision int8 has GPU kernels for head dimensions 64 and 128 alone, and the head dimensions "
      "are 96 and 96; leave it out, for gradients in 16 bits, or copy the tensors to the CPU");
  BackwardArgs strict = call(128);
  strict.options.strict = true;
  EXPECT_EQ(
      error_of(Status::unsupported, [&] { return explain(strict); }),
      "backward_precision int8 with strict has no GPU kernel; leave one of both out, or copy the tensors "
      "to the CPU");
}

}  // namespace
}  // namespace tandem
