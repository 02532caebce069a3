// The forward pass of codes and scales that the caller brings: what quantize and the recipe without its
// rotation and mean give from 16 bits, bit for bit.
#include <gtest/gtest.h>

#include <cmath>

#include "api/make_problem.hpp"
#include "cpu/cpu.hpp"
#include "harness/codes.hpp"
#include "harness/runner.hpp"

namespace tandem::harness {
namespace {

Case grouped_case() {
  Case c;
  c.dtype = DType::bf16;
  c.batch = 2;
  c.heads_q = 4;
  c.heads_kv = 2;
  c.head_dim_qk = 72;
  c.head_dim_v = 40;
  c.seqlen_q = 150;
  c.seqlen_k = 300;
  c.options.causal = true;
  return c;
}

std::vector<std::byte> bits_of_codes(Call call, DType codes, Granularity granularity) {
  bring_codes(call, codes, granularity);
  call.prepare(Pass::forward);
  forward(call.forward_args(), Execution{.threads = 1});
  return call.out.raw();
}

std::vector<std::byte> bits_of_recipe(Call call, Codes codes, ScaleGroup group) {
  call.spec.options.precision = Precision::fp8;  // the recipe says the rest
  call.prepare(Pass::forward);
  const Problem problem = make_problem(call.forward_args());
  cpu::Config config = cpu::choose(problem, 1);
  config.recipe = {.qk = codes,
                   .pv = codes,
                   .qk_scales = group,
                   .v_scales = group,
                   .rotate_qk = false,
                   .rotate_v = false,
                   .smooth_k = false,
                   .linear_exp2 = codes == Codes::e4m3 && group != ScaleGroup::row};
  std::vector<std::byte> workspace(cpu::workspace_bytes(problem, config));
  cpu::forward(problem, config, workspace);
  return call.out.raw();
}

TEST(Codes, AreAttendedToAsTheRecipeDoes) {
  const Call call(grouped_case());
  for (const auto& [granularity, group] : {std::pair{Granularity::tensor, ScaleGroup::tensor},
                                           {Granularity::head, ScaleGroup::head},
                                           {Granularity::block, ScaleGroup::block},
                                           {Granularity::row, ScaleGroup::row}}) {
    SCOPED_TRACE(static_cast<int>(granularity));
    EXPECT_EQ(bits_of_codes(call, DType::e4m3, granularity), bits_of_recipe(call, Codes::e4m3, group));
  }
  EXPECT_EQ(bits_of_codes(call, DType::s8, Granularity::row),
            bits_of_recipe(call, Codes::s8, ScaleGroup::row));
}

TEST(Codes, OfPackedSequencesHaveScalesByRow) {
  Case c = grouped_case();
  c.batch = 3;
  c.packed_q = c.packed_k = true;
  c.lengths_q = {40, 0, 131};
  c.lengths_k = {130, 7, 140};
  c.slack_k = 3;
  const Call call(c);
  EXPECT_EQ(bits_of_codes(call, DType::e4m3, Granularity::row),
            bits_of_recipe(call, Codes::e4m3, ScaleGroup::row));
  EXPECT_EQ(bits_of_codes(call, DType::s8, Granularity::row),
            bits_of_recipe(call, Codes::s8, ScaleGroup::row));
}

/// A scale's sign is its codes': results are those of the other signs.
TEST(Codes, TakeTheSignOfTheirScales) {
  Call call(grouped_case());
  bring_codes(call, DType::e4m3, Granularity::block);
  const auto run = [&call] {
    call.prepare(Pass::forward);
    forward(call.forward_args(), Execution{.threads = 1});
    return call.out.raw();
  };
  const std::vector<std::byte> plain = run();
  for (Box* box : {&call.k, &call.k_scale, &call.v, &call.v_scale}) {
    for (std::int64_t i = 0; i < box->numel(); ++i) box->set(i, -box->get(i));
  }
  EXPECT_EQ(run(), plain);
}

/// A group of zeros may have a scale of either zero.
TEST(Codes, TakeAScaleOfMinusZero) {
  for (const DType codes : {DType::e4m3, DType::s8}) {
    for (const Granularity granularity : {Granularity::block, Granularity::row}) {
      Call call(grouped_case());
      bring_codes(call, codes, granularity);
      const auto run = [&call](double zero) {
        for (Box* scales : {&call.q_scale, &call.k_scale, &call.v_scale}) scales->set(1, zero);
        call.prepare(Pass::forward);
        forward(call.forward_args(), Execution{.threads = 1});
        return call.out.raw();
      };
      const std::vector<std::byte> plain = run(0.0);
      for (std::int64_t i = 0; i < call.out.numel(); ++i) ASSERT_FALSE(std::isnan(call.out.get(i)));
      EXPECT_EQ(run(-0.0), plain);
    }
  }
}

/// 16-bit queries on 8-bit keys and values: the result on what the codes stand for, bit for bit.
void check_mixed(const Case& c, DType codes, Granularity granularity) {
  SCOPED_TRACE(c.describe());
  Call mixed(c);
  bring_mixed_codes(mixed, codes, granularity);
  Call want = dequantized(mixed);
  for (Call* call : {&mixed, &want}) {
    call->prepare(Pass::forward);
    runners().front()->forward(*call);
  }
  EXPECT_EQ(mixed.out.raw(), want.out.raw());
  EXPECT_EQ(mixed.lse.raw(), want.lse.raw());
  EXPECT_TRUE(mixed.out.changed_outside().empty());
}

TEST(MixedCodes, AreAttendedToAsTheirValues) {
  Case c = grouped_case();
  for (const DType codes : {DType::e4m3, DType::s8}) {
    for (const Granularity g : {Granularity::tensor, Granularity::head, Granularity::block, Granularity::row})
      check_mixed(c, codes, g);
  }
  c.dtype = DType::f16;
  c.options.softcap = 5.0F;
  c.threads = 2;
  check_mixed(c, DType::e4m3, Granularity::block);
  c.dtype = DType::f32;
  c.used_k = {211, 0};
  check_mixed(c, DType::e4m3, Granularity::row);
  c.seqlen_q = 1;  // a step of decoding
  c.head_dim_v = 35;
  c.options.pad = true;
  check_mixed(c, DType::s8, Granularity::row);
}

TEST(MixedCodes, OfPackedSequencesAndAnyLayout) {
  Case c = grouped_case();
  c.batch = 3;
  c.packed_q = c.packed_k = true;
  c.lengths_q = {40, 0, 131};
  c.lengths_k = {130, 7, 140};
  c.used_k = {130, 3, 77};
  c.slack_k = 3;
  c.k.pad = 3;
  c.k.base_offset = 1;
  c.v.order = {1, 0, 2};
  c.v.base_offset = 5;
  check_mixed(c, DType::e4m3, Granularity::row);
  check_mixed(c, DType::s8, Granularity::row);
}

}  // namespace
}  // namespace tandem::harness
