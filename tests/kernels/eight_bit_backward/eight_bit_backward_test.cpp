// The kernels of the 8-bit backward pass in the emulator, on random problems, against fp64 by the recipe.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "cpu/cpu.hpp"
#include "eight_bit_backward/emulated_eight_bit_backward.hpp"
#include "harness/changes.hpp"
#include "harness/gradient_recipe.hpp"
#include "tandem/attention.hpp"

namespace tandem::kernel_tests {
namespace {

using harness::Call;
using harness::Case;

/// What is left are numbers next to the middle of two of e4m3's (1/16 of a term, of a few in a thousand),
/// what tensor cores cut off their sums (2^-13 a step), and the gradient's own rounding (2^-9): in the root
/// of the mean square less than 1 %. A wrong scale of a block, order of rows or mask is far more. NaN and 0
/// are where the recipe has them.
void expect_near(const char* name, const harness::Box& box, const std::vector<double>& expected) {
  double squares = 0.0;
  double errors = 0.0;
  for (std::size_t n = 0; n < expected.size(); ++n) {
    const double got = box.get(static_cast<std::int64_t>(n));
    const double want = expected[n];
    ASSERT_EQ(std::isnan(got), std::isnan(want)) << name << '[' << n << "]: " << got << ", " << want;
    if (std::isnan(want)) continue;
    ASSERT_TRUE(want != 0.0 || got == 0.0) << name << '[' << n << "]: " << got;
    squares += want * want;
    errors += (got - want) * (got - want);
  }
  EXPECT_LE(std::sqrt(errors), 0.01 * std::sqrt(squares)) << name;
}

void expect_gradients_by_recipe(const EmulatedEightBitBackward& kernels, Call& call,
                                const EightBitBackwardRun& run) {
  call.ask_for_max_logits();
  call.prepare(Pass::forward);
  forward(call.forward_args(), {.threads = 2});
  const harness::GradientsExpected expected =
      harness::expect_gradients_in_8_bits(call, harness::Accumulators::tensor_cores);
  call.prepare(Pass::backward);
  try {
    run_eight_bit_backward(kernels, call, run);
  } catch (const emulator::Fault& fault) {
    ADD_FAILURE() << fault.what();
    return;
  }
  EXPECT_TRUE(follows_recipe(call, expected));
  expect_near("dq", call.dq, expected.dq.values);
  expect_near("dk", call.dk, expected.dk.values);
  expect_near("dv", call.dv, expected.dv.values);
  for (const harness::Box* box : call.outputs(Pass::backward)) {
    EXPECT_TRUE(!box->given() || box->changed_outside().empty());
  }
}

/// The kernels of the first Config that `is` true of.
template <typename F>
const EmulatedEightBitBackward& kernels_with(F&& is) {
  for (const EmulatedEightBitBackward& kernels : eight_bit_backwards()) {
    if (is(kernels.config)) return kernels;
  }
  throw std::logic_error("no such kernels");
}

/// A case for the kernels.
Case in_8_bits(const EmulatedEightBitBackward& kernels, const harness::Changes& changes) {
  Case c;
  c.dtype = c.out_dtype = DType::bf16;
  change(c, {.head_dim = 128, .precision = Precision::int8, .lse = true});
  change(c, changes);
  c.options.backward_precision = Precision::int8;
  c.f32_gradients = f32_gradients_of(kernels.config);
  return c;
}

TEST(EmulatedEightBitBackward, RandomProblemsFollowTheRecipe) {
  for (const EmulatedEightBitBackward& kernels : eight_bit_backwards()) {
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      const Case spec = random_eight_bit_backward_case(seed, kernels);
      SCOPED_TRACE(describe(kernels.config) + ": " + spec.describe());
      Call call(spec);
      expect_gradients_by_recipe(kernels, call, {.seed = seed, .convert_beside = seed == 2});
    }
  }
}

/// Rows that fill no block, heads that share keys, a gradient of the LSE, and queries that see no key.
TEST(EmulatedEightBitBackward, QueriesWithoutKeysHaveNoGradients) {
  const auto& kernels =
      kernels_with([](const auto& c) { return c.mask.causal && !c.mask.varlen && c.f32_dq; });
  Call call(in_8_bits(kernels, {.batch = 1,
                                .heads_q = 4,
                                .heads_kv = 2,
                                .seqlen_q = 150,
                                .seqlen_k = 70,
                                .causal = true,
                                .dlse = true}));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (std::int64_t c = 0; c < call.dout.numel() / 150; ++c)
    call.dout.set(7 * (call.dout.numel() / 150) + c, nan);
  expect_gradients_by_recipe(kernels, call, {});
}

TEST(EmulatedEightBitBackward, NaNReachesWhatSeesIt) {
  const auto& kernels = kernels_with([](const auto& c) { return c.mask.causal && c.schedule.deterministic; });
  for (const bool of_key : {true, false}) {
    Call call(
        in_8_bits(kernels, {.batch = 1, .heads = 1, .seqlen = 200, .causal = true, .deterministic = true}));
    harness::Box& box = of_key ? call.k : call.dout;
    box.set(93 * 128 + 3, std::numeric_limits<double>::quiet_NaN());
    expect_gradients_by_recipe(kernels, call, {});
  }
}

/// In a fixed order of additions, whatever the interleaving.
TEST(EmulatedEightBitBackward, AFixedOrderHasTheSameBits) {
  const auto& kernels = kernels_with([](const auto& c) { return c.mask.causal && c.schedule.deterministic; });
  Call call(
      in_8_bits(kernels, {.batch = 1, .heads = 1, .seqlen = 300, .causal = true, .deterministic = true}));
  expect_gradients_by_recipe(kernels, call, {});
  std::vector<double> first;
  for (std::int64_t n = 0; n < call.dq.numel(); ++n) first.push_back(call.dq.get(n));
  call.prepare(Pass::backward);
  run_eight_bit_backward(kernels, call, {.seed = 5});
  for (std::int64_t n = 0; n < call.dq.numel(); ++n)
    ASSERT_EQ(call.dq.get(n), first[static_cast<std::size_t>(n)]) << n;
}

}  // namespace
}  // namespace tandem::kernel_tests
