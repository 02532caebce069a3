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

void expect_gradients_by_recipe(const EmulatedEightBitBackward& kernels, Call& call,
                                const EightBitBackwardRun& run) {
  call.ask_for_max_logits();
  call.prepare(Pass::forward);
  forward(call.forward_args(), {.threads = 2});
  harness::expect_gradients_by_recipe(call, harness::Accumulators::tensor_cores, [&](Call& c) {
    try {
      run_eight_bit_backward(kernels, c, run);
    } catch (const emulator::Fault& fault) {
      ADD_FAILURE() << fault.what();
    }
  });
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
  for (const auto& family :
       {eight_bit_backwards(), general_eight_bit_backwards(), narrow_eight_bit_backwards()}) {
    for (const EmulatedEightBitBackward& kernels : family) {
      for (std::uint64_t seed = 0; seed < 3; ++seed) {
        const Case spec = random_eight_bit_backward_case(seed, kernels);
        SCOPED_TRACE(describe(kernels.config) + ": " + spec.describe());
        Call call(spec);
        expect_gradients_by_recipe(kernels, call, {.seed = seed, .convert_beside = seed == 2});
      }
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
