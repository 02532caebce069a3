// Quantized values of the caller's that the 8-bit kernel reads where they are, V's transposed on the way,
// against the same quantized values that are all arranged first: the same bits.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "api/make_problem.hpp"
#include "eight_bit/families.hpp"
#include "emulated_call.hpp"
#include "emulated_quantize.hpp"
#include "harness/changes.hpp"
#include "harness/quantized.hpp"
#include "harness/recipe_reference.hpp"
#include "ops/eight_bit/launch.hpp"
#include "ops/quantize/plan.hpp"
#include "problem/recipe_of.hpp"

// After the other headers, as they say.
#include "ops/quantize/common/arrange_quantized.cuh"

namespace tandem::kernel_tests {
namespace {

using harness::Box;
using harness::Call;
using harness::Case;

constexpr EightBitConfig in_place(EightBitConfig c) {
  c.in_place = true;
  return c;
}

void attend(void (*kernel)(EightBitParams), const EightBitConfig& config, const EightBitParams& params,
            const emulator::Options& options, unsigned blocks = 2) {
  emulator::launch(kernel, params,
                   {.blocks = blocks,
                    .threads = static_cast<unsigned>(config.threads()),
                    .shared_bytes = static_cast<std::size_t>(eight_bit_shared_bytes(config))},
                   options);
}

void expect_same(const std::vector<double>& got, const std::vector<double>& want) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(got[i]) && std::isnan(want[i])) continue;
    ASSERT_EQ(got[i], want[i]) << i;
  }
}

/// `config` is one of the families'; `change`: of quantized values and scales.
template <EightBitConfig config, QuantizeConfig arrange>
void check(std::span<const EmulatedEightBit> family, const Case& c, Granularity granularity,
           void (*change)(Call&)) {
  SCOPED_TRACE(describe(config) + ": " + c.describe());
  const EmulatedEightBit* kernel = nullptr;
  for (const EmulatedEightBit& k : family) {
    if (k.config == config) kernel = &k;
  }
  ASSERT_NE(kernel, nullptr);
  Call call(c);
  harness::quantize_inputs(call, DType::e4m3, granularity);
  change(call);
  call.prepare(Pass::forward);
  const Problem p = make_problem(call.forward_args());
  const Recipe recipe = tandem::recipe_of(p);
  ASSERT_EQ(choose_quantize_config(CallFacts(p), recipe), arrange);
  ASSERT_TRUE(gpu::can_read_quantized(p, in_place(config)));
  emulator::Options options{.seed = 3};
  add_buffers(options, call.inputs(), false);
  add_buffers(options, call.outputs(Pass::forward), true);
  const gpu::Workspace space = gpu::quantized_workspace(p, recipe);
  gpu::Workspace space_of_v;
  gpu::reserve_transposed(space_of_v, p, in_place(config));
  const QuantizedScratch scratch(space), scratch_of_v(space_of_v);
  options.buffers.push_back({scratch.data, space.bytes(), true});
  options.buffers.push_back({scratch_of_v.data, space_of_v.bytes(), true});
  std::vector<unsigned int> counter(1, 0);
  options.buffers.push_back(emulator::writable(counter));
  const auto launch_arrange = [&](const QuantizeParams& q) {
    emulator::launch(arrange_quantized<arrange>, gpu::make_arrange_params(p, q),
                     {.blocks = static_cast<unsigned>(q.items_q + q.items_k + q.items_v),
                      .threads = quantize_threads,
                      .shared_bytes = static_cast<std::size_t>(arrange_shared_bytes(arrange))},
                     options);
  };
  launch_arrange(gpu::make_quantize_params(p, recipe, space, scratch.data));
  gpu::LoadedMaps maps = gpu::eight_bit_maps(p, config);
  gpu::place(maps, space, scratch.data);
  attend(kernel->kernel, config,
         gpu::make_eight_bit_params(p, config, gpu::quantized_scales(recipe, space, scratch.data), maps,
                                    &emulator::encode, 64 * 1024, counter.data()),
         options);
  const std::vector<double> out = call.out.values();
  const std::vector<double> lse = call.lse.values();
  constexpr EightBitConfig how = in_place(config);
  // As many CTAs at once as there are threads of the host, and one after the other: then the first transposes
  // all blocks, and finds the others' tiles done.
  for (const unsigned at_once : {1U, 3U}) {
    call.prepare(Pass::forward);
    std::memset(scratch_of_v.data, 0xff, space_of_v.bytes());
    std::memset(space_of_v.at(gpu::Region::counters, scratch_of_v.data), 0, space_of_v.counter_bytes());
    options.host_threads = at_once;
    attend(&eight_bit_forward<how>, how,
           gpu::make_caller_params(p, how, gpu::eight_bit_maps(p, how),
                                   gpu::transposed_values(p, space_of_v, scratch_of_v.data),
                                   &emulator::encode, 64 * 1024,
                                   space_of_v.at<unsigned int>(gpu::Region::counters, scratch_of_v.data)),
           options, 3);
    expect_same(call.out.values(), out);
    expect_same(call.lse.values(), lse);
  }
  EXPECT_TRUE(harness::follows_recipe(call, harness::expect_recipe(call)));
  for (const Box* box : call.outputs(Pass::forward))
    EXPECT_TRUE(!box->given() || box->changed_outside().empty());
}

constexpr QuantizeConfig arranged(int head_dim_qk, int head_dim_v, bool varlen) {
  return {.head_dim_qk = head_dim_qk,
          .head_dim_v = head_dim_v,
          .rotate_qk = false,
          .smooth_k = false,
          .varlen = varlen};
}

Case case_of(const EightBitConfig& config, std::int64_t head_dim_qk, std::int64_t head_dim_v) {
  Case c = harness::with({}, {.dtype = config.tiling.element == Element::f16 ? DType::f16 : DType::bf16});
  change(c, {.batch = 2, .heads_q = 2, .heads_kv = 1, .head_dim_qk = head_dim_qk, .head_dim_v = head_dim_v});
  change(c, {.seqlen_q = 140, .seqlen_k = 270, .causal = config.mask.causal});
  return c;
}

void negate(Box& scales, std::int64_t at) {
  scales.set(at, -scales.get(at));
}

void negate_one_of_each(Call& call) {
  negate(call.q_scale, 0);
  negate(call.k_scale, 1);
  negate(call.v_scale, 2);
}

TEST(TransposedValues, ScalesOfBlocksSomeNegative) {
  constexpr EightBitConfig config{
      .mask = {.causal = true}, .linear_exp2 = true, .schedule = {.dynamic = true}};
  Case c = with(case_of(config, 128, 128), {.scale = -0.1F});
  check<config, arranged(128, 128, false)>(wide_eight_bit(), c, Granularity::block, [](Call& call) {
    negate(call.q_scale, 1);
    negate(call.k_scale, 0);
    negate(call.k_scale, 4);
    negate(call.v_scale, 1);
  });
}

/// Head dimensions that are padded, a scale for both query heads, none for V; past the keys in use quantized
/// values are NaN.
TEST(TransposedValues, PackedSequencesOfAnyLength) {
  constexpr EightBitConfig config{.tiling = {.element = Element::f16, .head_dim_qk = 64, .head_dim_v = 64},
                                  .q_stages = 2,
                                  .mask = {.causal = true, .local = true, .varlen = true},
                                  .slices = 1,
                                  .linear_exp2 = true,
                                  .schedule = {.dynamic = true}};
  Case c = with(case_of(config, 48, 48), {.batch = 3, .packed = true, .lengths_q = {90, 1, 140}});
  change(c, {.lengths_k = {131, 0, 250}, .used_k = {110, 0, 217}, .window_left = 120});
  c.v.pad = 16;
  check<config, arranged(48, 48, true)>(narrow_eight_bit(), c, Granularity::tensor, [](Call& call) {
    call.q_scale = Box(DType::f32, {3, 1}, {}, false);
    call.k_scale = Box(DType::f32, {3, 1}, {}, false);
    for (std::int64_t i = 0; i < 3; ++i) {
      call.q_scale.set(i, 0.01 * static_cast<double>(i + 1));
      call.k_scale.set(i, 0.02 - 0.01 * static_cast<double>(i));
    }
    call.v_scale = {};
    const auto spoil = [&call](std::int64_t row) {
      for (std::int64_t i = 0; i < 48; ++i) call.v.set(row * 48 + i, NAN);
    };
    for (std::int64_t row = 110; row < 131; ++row) spoil(row);
    for (std::int64_t row = 131 + 217; row < 131 + 250; ++row) spoil(row);
  });
}

/// A cap is not linear: the signs of scales belong into what is capped, not into the exponent's factor.
TEST(TransposedValues, ScoresThatAreCapped) {
  constexpr EightBitConfig config{.tiling = {.head_dim_qk = 64, .head_dim_v = 64},
                                  .mask = {.causal = true, .varlen = true},
                                  .linear_exp2 = true,
                                  .transform = ScoreTransform::softcap,
                                  .schedule = {.dynamic = true}};
  Case c = with(case_of(config, 64, 64), {.used_k = {270, 201}, .scale = -0.2F, .softcap = 4.0F});
  check<config, arranged(64, 64, true)>(narrow_eight_bit(), c, Granularity::block, negate_one_of_each);
}

/// Every block by the code of the first, whose references find maxima.
TEST(TransposedValues, ShortCausalSequences) {
  constexpr EightBitConfig config{.tiling = {.head_dim_qk = 64, .head_dim_v = 64, .block_m = 192},
                                  .mask = {.causal = true},
                                  .slices = 1,
                                  .linear_exp2 = true,
                                  .schedule = {.dynamic = true, .overlap = false, .pingpong = false}};
  Case c = with(case_of(config, 64, 64), {.scale = -0.1F});
  check<config, arranged(64, 64, false)>(narrow_eight_bit(), c, Granularity::block, negate_one_of_each);
}

TEST(TransposedValues, StripsOfSixtyFourColumns) {
  constexpr EightBitConfig config{.tiling = {.head_dim_qk = 192, .head_dim_v = 192},
                                  .slices = 3,
                                  .linear_exp2 = true,
                                  .schedule = {.overlap = false}};
  check<config, arranged(192, 176, false)>(widest_eight_bit(), case_of(config, 192, 176), Granularity::head,
                                           [](Call&) {});
}

/// The last strip has half of the columns, and of many keys few are seen: the others' blocks are not
/// transposed.
TEST(TransposedValues, BlocksThatNoQuerySees) {
  constexpr EightBitConfig config{.tiling = {.head_dim_qk = 160, .head_dim_v = 160},
                                  .mask = {.local = true, .varlen = true},
                                  .slices = 1,
                                  .linear_exp2 = true,
                                  .schedule = {.dynamic = true, .overlap = false, .pingpong = false}};
  Case c = with(case_of(config, 160, 160), {.batch = 4, .seqlen_q = 30, .seqlen_k = 520});
  change(c, {.used_k = {520, 0, 29, 400}, .window_left = 60});
  check<config, arranged(160, 160, true)>(widest_eight_bit(), c, Granularity::block, negate_one_of_each);
}

}  // namespace
}  // namespace tandem::kernel_tests
