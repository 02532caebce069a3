// Every Config family of the 8-bit forward kernel in the emulator, on random problems: against fp64 by the
// recipe (harness/recipe_reference.hpp), and against the CPU, which has the same quantized values and scales.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "api/make_problem.hpp"
#include "cpu/cpu.hpp"
#include "eight_bit/emulated_eight_bit.hpp"
#include "emulated_call.hpp"
#include "harness/changes.hpp"
#include "harness/recipe_reference.hpp"
#include "launch.hpp"

// After it: the device language has names at file scope that it declares inside others.
#include "tile/lazy_softmax.cuh"

namespace tandem::kernel_tests {
namespace {

constexpr std::uint64_t cases_a_family = 4;

std::vector<EmulatedEightBit> all_eight_bit() {
  std::vector<EmulatedEightBit> all;
  for (const auto& family : {narrow_eight_bit(), wide_eight_bit(), widest_eight_bit()}) {
    all.insert(all.end(), family.begin(), family.end());
  }
  return all;
}

/// Out, LSE and max_logits as the CPU computes them by the same recipe.
struct Expected {
  std::vector<double> out, lse, max_logits;
};
Expected expect(harness::Call& call, const Recipe& recipe) {
  call.spec.options.precision = Precision::fp8;  // any that is not exact: the recipe says the rest
  call.prepare(Pass::forward);
  const Problem problem = make_problem(call.forward_args());
  cpu::Config config = cpu::choose(problem, 1);
  config.recipe = recipe;
  const cpu::Plan plan(problem, config);
  std::vector<std::byte> workspace(plan.workspace_bytes);
  cpu::run(plan, workspace);
  Expected e{.out = call.out.values(), .lse = call.lse.values(), .max_logits = {}};
  if (call.max_logits.given()) e.max_logits = call.max_logits.values();
  return e;
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

/// The CPU takes tiles from left to right, the kernel from right to left. Where P is rescaled lazily,
/// each rounds it in units of its own: by up to 1/16 of P in e4m3, of values up to 4, which would be 0.5 if
/// all went the same way. Where V's scales join P, out differs in the last place of bf16.
double tolerance(const EightBitConfig& config) {
  if (config.v_row_scales) return 0.02;
  return config.pv == OperandType::e4m3 ? 0.125 : 0.07;
}

/// The largest is luck's, this one the method's: two roundings of P to e4m3 are each 0.027 off over a binade,
/// and half of the exponentials 0.018 besides, of V, whose values have a root mean square of 1.
double rms_tolerance(const EightBitConfig& config) {
  return std::min(config.linear_exp2 ? 0.042 : 0.038, tolerance(config));
}

double rms_difference(const std::vector<double>& got, const std::vector<double>& expected) {
  double sum = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] != expected[i]) sum += (got[i] - expected[i]) * (got[i] - expected[i]);
  }
  return std::sqrt(sum / static_cast<double>(std::max<std::size_t>(got.size(), 1)));
}

/// Of LSE. Linear exponentials err by -3.9 to +2.0 % in P's unit, so that two sums of them may be 6 % apart.
double lse_tolerance(const EightBitConfig& config) {
  return config.linear_exp2 ? 0.06 : 1e-4;
}
/// Half of them, each 1.8 % off in the root mean square on either side.
double lse_rms_tolerance(const EightBitConfig& config) {
  return config.linear_exp2 ? 0.018 : 1e-4;
}

TEST(LinearExp2, HasTheBitsOfItsFormulaAndIsInfiniteWhereItHasNone) {
  const auto of = [](float x) { return tile::linear_exp2(tile::linear_exp2_start + x); };
  constexpr int one = 1 << linear_exp2_bits;
  for (int i = -126 * one; i < 128 * one; i += 37) {  // in units of the last bit behind the point
    const int whole = static_cast<int>(std::floor(static_cast<double>(i) / one));
    const double fraction = static_cast<double>(i) / one - whole;
    const float x = static_cast<float>(i + linear_exp2_offset) / one;
    EXPECT_EQ(of(x), static_cast<float>(std::ldexp(1.0 + fraction, whole))) << x;
  }
  EXPECT_EQ(of(e4m3_lazy_p_range_log2), e4m3_lazy_p_range);
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (const float x : {-128.0F, -1536.0F, -4000.0F, -3e38F, -infinity}) EXPECT_EQ(of(x), 0.0F) << x;
  for (const float x :
       {129.0F, 3e38F, infinity, std::numeric_limits<float>::quiet_NaN(), -1600.0F, -2500.0F}) {
    EXPECT_EQ(of(x), infinity) << x;
  }
}

class EmulatedEightBitTest : public ::testing::TestWithParam<EmulatedEightBit> {};

/// The kernel's results of a case, against the CPU's by the same recipe.
void expect_the_cpus_results(const EmulatedEightBit& kernel, const harness::Case& spec, std::uint64_t seed) {
  const EightBitConfig& config = kernel.config;
  SCOPED_TRACE(describe(config) + ": " + spec.describe());
  harness::Call call(spec);
  if (config.tiling.max_logits) call.ask_for_max_logits();
  const Expected expected = expect(call, recipe_of(config));
  call.prepare(Pass::forward);
  try {
    run_eight_bit(kernel, call, seed);
  } catch (const emulator::Fault& fault) {
    ADD_FAILURE() << fault.what();
    return;
  }
  EXPECT_TRUE(harness::follows_recipe(call, harness::expect_recipe(call, recipe_of(config))));
  EXPECT_LE(largest_difference(call.lse.values(), expected.lse), lse_tolerance(config));
  EXPECT_LE(rms_difference(call.lse.values(), expected.lse), lse_rms_tolerance(config));
  EXPECT_LE(largest_difference(call.out.values(), expected.out), tolerance(config));
  EXPECT_LE(rms_difference(call.out.values(), expected.out), rms_tolerance(config));
  for (const harness::Box* box : call.outputs(Pass::forward)) {
    EXPECT_TRUE(!box->given() || box->changed_outside().empty());
  }
}

TEST_P(EmulatedEightBitTest, RandomProblemsMatchTheCpu) {
  for (std::uint64_t seed = 0; seed < cases_a_family; ++seed) {
    expect_the_cpus_results(GetParam(), random_eight_bit_case(seed, GetParam().config), seed);
  }
}

class EmulatedCausalEightBitTest : public EmulatedEightBitTest {};

/// Blocks that the diagonal cuts are masked or skipped by where it cuts them.
TEST_P(EmulatedCausalEightBitTest, DiagonalsBesideTheCornersOfBlocksMatchTheCpu) {
  const EightBitConfig& config = GetParam().config;
  for (const auto& [queries, keys] : diagonals(config.tiling.block_m, quant_block)) {
    harness::Case spec = random_eight_bit_case(1, config);
    spec.packed_q = spec.packed_k = spec.sink = false;
    spec.used_q.clear();
    spec.used_k.clear();
    change(spec, {.batch = 1, .heads = 1, .seqlen_q = queries, .seqlen_k = keys, .causal = true});
    change(spec, {.window = -1});
    spec.q = spec.k = spec.v = spec.out = {};
    expect_the_cpus_results(GetParam(), spec, 1);
  }
}

/// The same sums, whether P V comes in slices of 112 columns, of which O begins as the first block's, or of
/// 32, which are added to zeros.
TEST(EmulatedEightBitParts, ChangeNoBit) {
  std::vector<EmulatedEightBit> kernels;
  for (const EmulatedEightBit& kernel : widest_eight_bit()) {
    if (kernel.config.tiling.head_dim_v == 224) kernels.push_back(kernel);
  }
  ASSERT_EQ(kernels.size(), 2U);
  EXPECT_NE(kernels[0].config.slices, kernels[1].config.slices);
  for (std::uint64_t seed = 0; seed < cases_a_family; ++seed) {
    std::vector<double> results[2];
    for (int i = 0; i < 2; ++i) {
      harness::Call call(random_eight_bit_case(seed, kernels[0].config));
      call.prepare(Pass::forward);
      run_eight_bit(kernels[i], call, seed);
      results[i] = call.out.values();
    }
    EXPECT_EQ(results[0], results[1]) << "seed " << seed;
  }
}

/// Kernels that know every mask, on one causal f16 sequence of 200 queries.
void expect_as_on_the_cpu(const EmulatedEightBit& kernel, void (*spoil)(harness::Call&),
                          std::int64_t keys = 200, std::int64_t heads_q = 1) {
  harness::Case spec;
  change(spec, {.dtype = DType::f16, .heads_q = heads_q, .head_dim_qk = kernel.config.tiling.head_dim_qk});
  change(spec, {.head_dim_v = kernel.config.tiling.head_dim_v, .seqlen_q = 200, .seqlen_k = keys});
  spec.options.causal = true;
  SCOPED_TRACE(describe(kernel.config));
  harness::Call call(spec);
  if (kernel.config.tiling.max_logits) call.ask_for_max_logits();
  spoil(call);
  const Expected expected = expect(call, recipe_of(kernel.config));
  call.prepare(Pass::forward);
  run_eight_bit(kernel, call, 1);
  const std::vector<double> out = call.out.values();
  const std::vector<double> lse = call.lse.values();
  // f32's own, or what the tensor cores' sums of e4m3 products lose and ordinary ones do not.
  const double relative = kernel.config.qk == OperandType::e4m3 ? 0x1p-12 : 0x1p-21;
  for (std::size_t i = 0; i < lse.size(); ++i) {
    ASSERT_EQ(std::isnan(lse[i]), std::isnan(expected.lse[i])) << "lse of row " << i;
    if (!std::isnan(lse[i]) && lse[i] != expected.lse[i]) {
      const double bound = std::max(lse_tolerance(kernel.config), relative * std::abs(lse[i]));
      ASSERT_NEAR(lse[i], expected.lse[i], bound) << "lse of row " << i;
    }
  }
  for (std::size_t i = 0; i < expected.max_logits.size(); ++i) {
    const double got = call.max_logits.get(static_cast<std::int64_t>(i));
    const double want = expected.max_logits[i];
    ASSERT_EQ(std::isnan(got), std::isnan(want)) << "max_logits of row " << i;
    if (std::isnan(got) || got == want) continue;
    ASSERT_NEAR(got, want, std::max(1e-4, relative * std::abs(want))) << "max_logits of row " << i;
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    ASSERT_EQ(std::isnan(out[i]), std::isnan(expected.out[i])) << "out " << i;
    if (!std::isnan(out[i])) {
      ASSERT_NEAR(out[i], expected.out[i], tolerance(kernel.config)) << "out " << i;
    }
  }
}

/// The f16 kernels with e4m3 (promoted at once or later), with s8 by block and by row, and with V in 16 bits.
std::vector<EmulatedEightBit> causal_f16_kernels() {
  std::vector<EmulatedEightBit> kernels;
  for (const EmulatedEightBit& kernel : all_eight_bit()) {
    if (kernel.config.tiling.element == Element::f16 && kernel.config.mask.causal) kernels.push_back(kernel);
  }
  return kernels;
}

TEST(EmulatedEightBitCorners, NanInAKeyOrAQueryMakesTheRowsThatSeeItNan) {
  ASSERT_EQ(causal_f16_kernels().size(), 9U);
  for (const EmulatedEightBit& kernel : causal_f16_kernels()) {
    expect_as_on_the_cpu(kernel, [](harness::Call& call) {
      call.k.set(150 * call.spec.head_dim_qk + 3, NAN);
      call.q.set(20 * call.spec.head_dim_qk, NAN);
    });
  }
}

/// Each CTA computes several tiles, whose Q is in one stage after the other.
TEST(EmulatedEightBitCorners, NanInQueriesOfTilesThatFollowEachOther) {
  int kernels = 0;
  for (const EmulatedEightBit& kernel : causal_f16_kernels()) {
    if (kernel.config.qk != OperandType::s8 || kernel.config.q_stages < 2) continue;
    const auto spoil = [](harness::Call& call) {
      const auto set = [&](std::int64_t row, std::int64_t head) {
        call.q.set((row * call.spec.heads_q + head) * call.spec.head_dim_qk + 5, NAN);
      };
      for (std::int64_t head = 0; head < call.spec.heads_q; ++head) set(11 + 37 * head, head);
    };
    expect_as_on_the_cpu(kernel, spoil, 200, 4);
    ++kernels;
  }
  EXPECT_EQ(kernels, 1);
}

TEST(EmulatedEightBitCorners, NanInAQueryThatSeesNoKeyChangesNothing) {
  for (const EmulatedEightBit& kernel : causal_f16_kernels()) {
    const auto spoil = [](harness::Call& call) {
      for (const std::int64_t row : {10, 60, 140}) call.q.set(row * call.spec.head_dim_qk + 9, INFINITY);
    };
    expect_as_on_the_cpu(kernel, spoil, 150);
  }
}

TEST(EmulatedEightBitCorners, BlocksOfZerosAndNumbersThatSaturate) {
  for (const EmulatedEightBit& kernel : causal_f16_kernels()) {
    expect_as_on_the_cpu(kernel, [](harness::Call& call) {
      const std::int64_t d = call.spec.head_dim_qk;
      for (std::int64_t i = 0; i < 128 * d; ++i) call.q.set(i, 0.0);
      for (std::int64_t i = 0; i < 128 * call.spec.head_dim_v; ++i) call.v.set(i, 0.0);
      for (std::int64_t i = 180 * d; i < 181 * d; ++i) call.k.set(i, 60.0);
    });
  }
}

/// Tiles go from right to left: the maximum rises by some bits and by hundreds, which is more than f32 has;
/// by thousands, which is more than the linear exponential's integers have.
TEST(EmulatedEightBitCorners, MaximaThatRise) {
  for (const EmulatedEightBit& kernel : causal_f16_kernels()) {
    for (const double factor : {4.0, 100.0, 1500.0, 5000.0}) {
      static double with;
      with = factor;
      expect_as_on_the_cpu(kernel, [](harness::Call& call) {
        for (std::int64_t i = 0; i < 128 * call.spec.head_dim_qk; ++i) call.k.set(i, with * call.k.get(i));
      });
    }
  }
}

/// By so much that the linear exponential's integers wrap around: in a masked tile, and in one that is not.
TEST(EmulatedEightBitCorners, ScoresFarBelowTheReference) {
  for (const EmulatedEightBit& kernel : causal_f16_kernels()) {
    expect_as_on_the_cpu(kernel, [](harness::Call& call) {
      const std::int64_t d = call.spec.head_dim_qk;
      for (std::int64_t i = 0; i < 200 * d; ++i) {
        call.q.set(i, 1.0);
        call.k.set(i, i / d >= 128 && i / d < 150 ? 80.0 : -80.0);
      }
    });
  }
}

/// So do V's scales, by more than O's unit has room for where V is stored with a zero point.
TEST(EmulatedEightBitCorners, ScalesOfVThatRise) {
  for (const EmulatedEightBit& kernel : causal_f16_kernels()) {
    expect_as_on_the_cpu(kernel, [](harness::Call& call) {
      const std::int64_t d = call.spec.head_dim_v;
      for (std::int64_t i = 128 * d; i < 200 * d; ++i) call.v.set(i, 0x1p-13 * call.v.get(i));
    });
  }
}

std::string name_of(const ::testing::TestParamInfo<EmulatedEightBit>& parameter) {
  std::string name = describe(parameter.param.config);
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == ' ' || c == '='; }, '_');
  return name;
}

std::vector<EmulatedEightBit> causal_eight_bit() {
  std::vector<EmulatedEightBit> some = all_eight_bit();
  std::erase_if(some, [](const EmulatedEightBit& kernel) { return !kernel.config.mask.causal; });
  return some;
}

INSTANTIATE_TEST_SUITE_P(Families, EmulatedEightBitTest, ::testing::ValuesIn(all_eight_bit()), name_of);
INSTANTIATE_TEST_SUITE_P(Families, EmulatedCausalEightBitTest, ::testing::ValuesIn(causal_eight_bit()),
                         name_of);

}  // namespace
}  // namespace tandem::kernel_tests
