// Every Config family of the forward kernel in the emulator, on random problems, against the oracle.
#include <gtest/gtest.h>

#include <algorithm>

#include "api/make_problem.hpp"
#include "forward/emulated_forward.hpp"
#include "harness/expect.hpp"
#include "plan/forward_plan.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr std::uint64_t cases_a_family = 6;

std::vector<EmulatedForward> all_forwards() {
  std::vector<EmulatedForward> all;
  for (const auto& family : {narrow_forwards(), wide_forwards(), widest_forwards(), split_forwards()}) {
    all.insert(all.end(), family.begin(), family.end());
  }
  return all;
}

/// The kernel's results of a case, against the oracle's.
void expect_the_oracles_results(EmulatorRunner& runner, const harness::Case& spec) {
  SCOPED_TRACE(runner.name() + ": " + spec.describe());
  ASSERT_EQ(runner.refuses(spec), "");
  harness::Call call(spec);
  const harness::Expected expected = harness::expect(call, Pass::forward);
  call.prepare(Pass::forward);
  try {
    runner.forward(call);
  } catch (const emulator::Fault& fault) {
    ADD_FAILURE() << fault.what();
    return;
  }
  EXPECT_TRUE(harness::correct(call, Pass::forward, expected));
}

class EmulatedForwardTest : public ::testing::TestWithParam<EmulatedForward> {};

TEST_P(EmulatedForwardTest, RandomProblemsMatchTheOracle) {
  EmulatorRunner runner(GetParam());
  for (std::uint64_t seed = 0; seed < cases_a_family; ++seed) {
    runner.seed = seed;
    runner.split_blocks = seed % 2 == 0 ? 5 : 40;
    expect_the_oracles_results(runner, random_forward_case(seed, GetParam().config));
  }
}

/// Random problems rarely have the widest heads that a Config can take, and so leave its last registers
/// empty.
TEST_P(EmulatedForwardTest, TheWidestHeadsMatchTheOracle) {
  EmulatorRunner runner(GetParam());
  harness::Case spec = random_forward_case(1, GetParam().config);
  spec.head_dim_qk = GetParam().config.tiling.head_dim_qk;
  spec.head_dim_v = GetParam().config.tiling.head_dim_v;
  expect_the_oracles_results(runner, spec);
}

/// A case of one sequence and head, of these lengths.
harness::Case one_head(const ForwardConfig& config, std::int64_t queries, std::int64_t keys) {
  harness::Case spec = random_forward_case(1, config);
  spec.packed_q = spec.packed_k = spec.sink = false;
  spec.used_q.clear();
  spec.used_k.clear();
  spec.batch = spec.heads_q = spec.heads_kv = 1;
  spec.seqlen_q = queries;
  spec.seqlen_k = keys;
  spec.q = spec.k = spec.v = spec.out = {};
  spec.leftpad.clear();
  if (config.keys == KeySource::entries) {
    spec.cache_batch = 1;
    spec.cache_index = {0};
  }
  if (config.keys == KeySource::pages) {
    spec.page_size = keys % 2 == 0 ? 2 : 1;
    spec.used_k = {keys};
  }
  return spec;
}

class EmulatedCausalForwardTest : public EmulatedForwardTest {};

/// Blocks that the diagonal cuts are computed by halves, masked or skipped by where it cuts them.
TEST_P(EmulatedCausalForwardTest, DiagonalsBesideTheCornersOfBlocksMatchTheOracle) {
  const ForwardConfig& config = GetParam().config;
  EmulatorRunner runner(GetParam());
  for (const auto& [queries, keys] : diagonals(config.tiling.block_m, config.tiling.block_n)) {
    harness::Case spec = one_head(config, queries, keys);
    spec.options.causal = true;
    spec.options.window_left = -1;
    expect_the_oracles_results(runner, spec);
    if (!config.mask.local) continue;
    spec.options.window_left = config.tiling.block_n / 2 + 1;
    expect_the_oracles_results(runner, spec);
  }
}

TEST_P(EmulatedForwardTest, OneQueryIsATileOfHeads) {
  EmulatorRunner runner(GetParam());
  if (GetParam().config.mask.local) GTEST_SKIP() << "such a call is not folded";
  harness::Case spec = one_head(GetParam().config, 1, 200);
  spec.used_k =
      GetParam().config.mask.varlen ? std::vector<std::int64_t>{130, 0} : std::vector<std::int64_t>{};
  if (GetParam().config.keys == KeySource::entries) spec.cache_index = {0, 0};
  spec.batch = 2;
  spec.heads_kv = 2;
  spec.heads_q = 6;
  harness::Call call(spec);
  Problem folded = make_problem(call.forward_args());
  fold_heads_into_rows(folded);
  ASSERT_EQ(folded.rows_q, 3);
  ASSERT_EQ(folded.heads_q, 2);
  expect_the_oracles_results(runner, spec);
}

std::string name_of(const ::testing::TestParamInfo<EmulatedForward>& parameter) {
  std::string name = describe(parameter.param.config);
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == ' ' || c == '='; }, '_');
  return name;
}

std::vector<EmulatedForward> causal_forwards() {
  std::vector<EmulatedForward> some = all_forwards();
  std::erase_if(some, [](const EmulatedForward& kernel) { return !kernel.config.mask.causal; });
  return some;
}

INSTANTIATE_TEST_SUITE_P(Families, EmulatedForwardTest, ::testing::ValuesIn(all_forwards()), name_of);
INSTANTIATE_TEST_SUITE_P(Families, EmulatedCausalForwardTest, ::testing::ValuesIn(causal_forwards()),
                         name_of);

}  // namespace
}  // namespace tandem::kernel_tests
