// Every Config family of the backward kernels in the emulator, on random problems, against the oracle.
#include <gtest/gtest.h>

#include <algorithm>

#include "backward/emulated_backward.hpp"
#include "harness/expect.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr std::uint64_t cases_a_family = 3;

std::vector<EmulatedBackward> all_backwards() {
  std::vector<EmulatedBackward> all;
  for (const auto& family : {narrow_backwards(), wide_backwards(), widest_backwards()}) {
    all.insert(all.end(), family.begin(), family.end());
  }
  return all;
}

class EmulatedBackwardTest : public ::testing::TestWithParam<EmulatedBackward> {};

TEST_P(EmulatedBackwardTest, RandomProblemsMatchTheOracle) {
  const BackwardConfig& config = GetParam().config;
  for (std::uint64_t seed = 0; seed < cases_a_family; ++seed) {
    const harness::Case spec = random_backward_case(seed, config);
    SCOPED_TRACE(describe(config) + ": " + spec.describe());
    harness::Call call(spec);
    const harness::Expected expected = harness::expect(call, Pass::backward);
    call.prepare(Pass::forward);
    tandem::forward(call.forward_args());
    call.prepare(Pass::backward);
    try {
      // Blocks that wait for each other's turns must run at once.
      run_backward(GetParam(), call, {.seed = seed, .host_threads = config.deterministic ? 2U : 1U});
    } catch (const emulator::Fault& fault) {
      ADD_FAILURE() << fault.what();
      continue;
    }
    EXPECT_TRUE(harness::correct(call, Pass::backward, expected));
  }
}

INSTANTIATE_TEST_SUITE_P(Families, EmulatedBackwardTest, ::testing::ValuesIn(all_backwards()),
                         [](const auto& parameter) {
                           std::string name = describe(parameter.param.config);
                           std::replace_if(
                               name.begin(), name.end(), [](char c) { return c == ' ' || c == '='; }, '_');
                           return name;
                         });

}  // namespace
}  // namespace tandem::kernel_tests
