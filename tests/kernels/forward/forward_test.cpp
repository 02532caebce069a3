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
  for (const auto& family : {narrow_forwards(), wide_forwards(), widest_forwards()}) {
    all.insert(all.end(), family.begin(), family.end());
  }
  return all;
}

class EmulatedForwardTest : public ::testing::TestWithParam<EmulatedForward> {};

TEST_P(EmulatedForwardTest, RandomProblemsMatchTheOracle) {
  EmulatorRunner runner(GetParam());
  for (std::uint64_t seed = 0; seed < cases_a_family; ++seed) {
    const harness::Case spec = random_forward_case(seed, GetParam().config);
    SCOPED_TRACE(runner.name() + ": " + spec.describe());
    ASSERT_EQ(runner.refuses(spec), "");
    harness::Call call(spec);
    const harness::Expected expected = harness::expect(call, Pass::forward);
    call.prepare(Pass::forward);
    runner.seed = seed;
    try {
      runner.forward(call);
    } catch (const emulator::Fault& fault) {
      ADD_FAILURE() << fault.what();
      continue;
    }
    EXPECT_TRUE(harness::correct(call, Pass::forward, expected));
  }
}

/// Random problems rarely have the widest heads that a Config can take, and so leave its last registers
/// empty.
TEST_P(EmulatedForwardTest, TheWidestHeadsMatchTheOracle) {
  EmulatorRunner runner(GetParam());
  harness::Case spec = random_forward_case(1, GetParam().config);
  spec.head_dim_qk = GetParam().config.tiling.head_dim_qk;
  spec.head_dim_v = GetParam().config.tiling.head_dim_v;
  SCOPED_TRACE(runner.name() + ": " + spec.describe());
  ASSERT_EQ(runner.refuses(spec), "");
  harness::Call call(spec);
  const harness::Expected expected = harness::expect(call, Pass::forward);
  call.prepare(Pass::forward);
  runner.forward(call);
  EXPECT_TRUE(harness::correct(call, Pass::forward, expected));
}

TEST_P(EmulatedForwardTest, OneQueryIsATileOfHeads) {
  EmulatorRunner runner(GetParam());
  if (GetParam().config.mask.local) GTEST_SKIP() << "such a call is not folded";
  harness::Case spec = random_forward_case(1, GetParam().config);
  spec.packed_q = spec.packed_k = false;
  spec.used_q.clear();
  spec.used_k =
      GetParam().config.mask.varlen ? std::vector<std::int64_t>{130, 0} : std::vector<std::int64_t>{};
  spec.batch = 2;
  spec.heads_kv = 2;
  spec.heads_q = 6;
  spec.seqlen_q = 1;
  spec.seqlen_k = 200;
  spec.sink = false;
  spec.q = spec.k = spec.v = spec.out = {};
  SCOPED_TRACE(runner.name() + ": " + spec.describe());
  harness::Call call(spec);
  Problem folded = make_problem(call.forward_args());
  fold_heads_into_rows(folded);
  ASSERT_EQ(folded.rows_q, 3);
  ASSERT_EQ(folded.heads_q, 2);
  const harness::Expected expected = harness::expect(call, Pass::forward);
  call.prepare(Pass::forward);
  runner.forward(call);
  EXPECT_TRUE(harness::correct(call, Pass::forward, expected));
}

INSTANTIATE_TEST_SUITE_P(Families, EmulatedForwardTest, ::testing::ValuesIn(all_forwards()),
                         [](const auto& parameter) {
                           std::string name = describe(parameter.param.config);
                           std::replace_if(
                               name.begin(), name.end(), [](char c) { return c == ' ' || c == '='; }, '_');
                           return name;
                         });

}  // namespace
}  // namespace tandem::kernel_tests
