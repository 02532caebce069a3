// The quantiser's kernels and the 8-bit attention kernel one after the other in the emulator, as a call on a
// GPU launches them, against fp64 by the recipe and the CPU's forward.
#include <gtest/gtest.h>

#include <cmath>

#include "api/make_problem.hpp"
#include "cpu/cpu.hpp"
#include "eight_bit/emulated_eight_bit.hpp"
#include "emulated_call.hpp"
#include "emulated_quantize.hpp"
#include "harness/changes.hpp"
#include "harness/recipe_reference.hpp"
#include "ops/eight_bit/launch.hpp"
#include "ops/quantize/plan.hpp"

namespace tandem::kernel_tests {
namespace {

using harness::Call;
using harness::Case;

constexpr QuantizeConfig quantizer_of(const EightBitConfig& c, const Recipe& r) {
  return with_recipe(
      QuantizeConfig{
          .element = c.tiling.element, .head_dim_qk = 128, .head_dim_v = 128, .varlen = c.mask.varlen},
      r);
}

template <QuantizeConfig C>
void run_whole(const EmulatedEightBit& kernel, Call& call, const Recipe& recipe) {
  const Problem p = make_problem(call.forward_args());
  ASSERT_EQ(choose_quantize_config(CallFacts(p), recipe), C);
  const gpu::Workspace space = gpu::quantized_workspace(p, recipe);
  const QuantizedScratch scratch(space);
  emulator::Options options{.seed = 5};
  add_buffers(options, call.inputs(), false);
  add_buffers(options, call.outputs(Pass::forward), true);
  options.buffers.push_back({scratch.data, space.bytes(), true});
  std::vector<unsigned int> counter(1, 0);
  options.buffers.push_back(emulator::writable(counter));
  const QuantizeParams q = gpu::make_quantize_params(p, recipe, space, scratch.data);
  run_quantizer<C>(q, options);
  gpu::LoadedMaps maps = gpu::eight_bit_maps(p, kernel.config);
  gpu::place(maps, space, scratch.data);
  const EightBitParams params =
      gpu::make_eight_bit_params(p, kernel.config, gpu::quantized_scales(recipe, space, scratch.data), maps,
                                 &emulator::encode, 64 * 1024, counter.data());
  emulator::launch(kernel.kernel, params,
                   {.blocks = 2,
                    .threads = static_cast<unsigned>(kernel.config.threads()),
                    .shared_bytes = static_cast<std::size_t>(eight_bit_shared_bytes(kernel.config))},
                   options);
}

void expect_near(const std::vector<double>& got, const std::vector<double>& want, double bound) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) continue;  // infinities too
    ASSERT_NEAR(got[i], want[i], bound) << i;
  }
}

Case case_of(const EightBitConfig& config) {
  Case c = harness::with({}, {.dtype = config.tiling.element == Element::f16 ? DType::f16 : DType::bf16});
  change(c, {.batch = 2, .heads_q = 2, .heads_kv = 1, .head_dim = 128, .seqlen_q = 140, .seqlen_k = 270});
  if (config.mask.varlen) {
    change(c, {.batch = 3, .packed = true, .lengths_q = {90, 1, 140}, .lengths_k = {131, 0, 250}});
    change(c, {.slack_k = 4, .used_k = {130, 0, 250}});
  }
  c.options.causal = config.mask.causal;
  c.options.scale = -0.1F;  // its sign goes into Q's quantized values
  return c;
}

template <EightBitConfig config, const Recipe& recipe>
void check_whole(Precision precision, double out_bound, double lse_bound) {
  SCOPED_TRACE(describe(config));
  const EmulatedEightBit* kernel = nullptr;
  for (const EmulatedEightBit& k : wide_eight_bit()) {
    if (k.config == config) kernel = &k;
  }
  ASSERT_NE(kernel, nullptr);
  Call call(case_of(config));
  call.prepare(Pass::forward);
  run_whole<quantizer_of(config, recipe)>(*kernel, call, recipe);
  EXPECT_TRUE(harness::follows_recipe(call, harness::expect_recipe(call, recipe)));
  const std::vector<double> out = call.out.values();
  const std::vector<double> lse = call.lse.values();
  call.spec.options.precision = precision;
  call.prepare(Pass::forward);
  tandem::forward(call.forward_args(), Execution{.threads = 1});
  expect_near(out, call.out.values(), out_bound);
  expect_near(lse, call.lse.values(), lse_bound);
}

// The bounds are quantized_test.cpp's.
TEST(WholeQuantizedCall, Fp8) {
  check_whole<EightBitConfig{.mask = {.causal = true}, .linear_exp2 = true, .schedule = {.dynamic = true}},
              fp8_recipe>(Precision::fp8, 0.07, 0.06);
}

TEST(WholeQuantizedCall, Int8) {
  check_whole<EightBitConfig{.tiling = {.element = Element::f16},
                             .qk = OperandType::s8,
                             .pv = OperandType::s8,
                             .mask = {.causal = true},
                             .rotated_v = true,
                             .schedule = {.dynamic = true, .pingpong = false}},
              int8_recipe>(Precision::int8, 0.07, 1e-4);
}

}  // namespace
}  // namespace tandem::kernel_tests
