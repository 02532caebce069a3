// Every Config family of the 8-bit forward kernel in the emulator, on random problems, against the CPU, which
// has the same codes and scales.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cpu/cpu.hpp"
#include "emulated_call.hpp"
#include "launch.hpp"
#include "quantized/emulated_quantized.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr std::uint64_t cases_a_family = 4;

std::vector<EmulatedQuantized> all_quantized() {
  std::vector<EmulatedQuantized> all;
  for (const auto& family : {narrow_quantized(), wide_quantized(), widest_quantized()}) {
    all.insert(all.end(), family.begin(), family.end());
  }
  return all;
}

/// Out and LSE as the CPU computes them by the same recipe.
struct Expected {
  std::vector<double> out, lse;
};
Expected expect(harness::Call& call, const Recipe& recipe) {
  call.spec.options.precision = Precision::fp8;  // any that is not exact: the recipe says the rest
  call.prepare(Pass::forward);
  const Problem problem = make_problem(call.forward_args());
  cpu::Config config = cpu::choose(problem, 1);
  config.recipe = recipe;
  std::vector<std::byte> workspace(cpu::workspace_bytes(problem, config));
  cpu::forward(problem, config, workspace);
  return {.out = call.out.values(), .lse = call.lse.values()};
}

double largest_difference(const std::vector<double>& got, const std::vector<double>& expected) {
  double largest = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) continue;
    const double difference = std::abs(got[i] - expected[i]);
    largest = difference <= largest ? largest : difference;  // NaN counts as larger
  }
  return largest;
}

/// The CPU takes tiles from left to right, the kernel from right to left. Where P is rounded in units of the
/// maximum so far, the two round it differently: by up to 1/16 of P in e4m3, of values up to 4. Where the
/// unit is the tile's own, out differs in the last place of bf16.
double tolerance(const QuantizedConfig& config) {
  return config.v_row_scales || config.pv == Codes::input ? 0.02 : 0.07;
}

class EmulatedQuantizedTest : public ::testing::TestWithParam<EmulatedQuantized> {};

TEST_P(EmulatedQuantizedTest, RandomProblemsMatchTheCpu) {
  const QuantizedConfig& config = GetParam().config;
  for (std::uint64_t seed = 0; seed < cases_a_family; ++seed) {
    const harness::Case spec = random_quantized_case(seed, config);
    SCOPED_TRACE(describe(config) + ": " + spec.describe());
    harness::Call call(spec);
    const Expected expected = expect(call, recipe_of(config));
    call.prepare(Pass::forward);
    try {
      run_quantized(GetParam(), call, seed);
    } catch (const emulator::Fault& fault) {
      ADD_FAILURE() << fault.what();
      continue;
    }
    EXPECT_LE(largest_difference(call.lse.values(), expected.lse), 1e-4);
    EXPECT_LE(largest_difference(call.out.values(), expected.out), tolerance(config));
    for (const harness::Box* box : call.outputs(Pass::forward)) {
      EXPECT_TRUE(!box->given() || box->changed_outside().empty());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, EmulatedQuantizedTest, ::testing::ValuesIn(all_quantized()),
                         [](const auto& parameter) {
                           std::string name = describe(parameter.param.config);
                           std::replace_if(
                               name.begin(), name.end(), [](char c) { return c == ' ' || c == '='; }, '_');
                           return name;
                         });

}  // namespace
}  // namespace tandem::kernel_tests
