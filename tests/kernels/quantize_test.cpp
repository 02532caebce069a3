// The quantiser's kernels in the emulator, against the CPU's quantiser.
#include <gtest/gtest.h>

#include "api/make_problem.hpp"
#include "cpu/quantize/dequantize.hpp"
#include "cpu/quantize/quantize.hpp"
#include "emulated_call.hpp"
#include "emulated_quantize.hpp"
#include "harness/changes.hpp"
#include "harness/element.hpp"
#include "harness/quantized.hpp"
#include "ops/quantize/plan.hpp"
#include "ops/quantize/tensor_launch.hpp"
#include "problem/mixed.hpp"
#include "problem/recipe_of.hpp"
#include "quantize_check.hpp"

// After them: the device language has names at file scope that others declare inside theirs.
#include "ops/quantize/common/dequantize.cuh"

namespace tandem::kernel_tests {
namespace {

using harness::Call;
using harness::Case;

constexpr QuantizeConfig config_of(Element element, int head_dim_qk, int head_dim_v, const Recipe& r,
                                   bool varlen, bool vectors) {
  return with_recipe(QuantizeConfig{.element = element,
                                    .head_dim_qk = head_dim_qk,
                                    .head_dim_v = head_dim_v,
                                    .varlen = varlen,
                                    .vectors = vectors},
                     r);
}

/// What a call leaves behind.
struct Result {
  QuantizedScratch scratch;
  QuantizeParams params;
};

template <QuantizeConfig C>
Result run(Call& call, const Recipe& recipe, std::uint64_t seed) {
  const Problem p = call.problem();
  EXPECT_EQ(choose_quantize_config(CallFacts(p), recipe), C);
  const gpu::Workspace space = gpu::quantized_workspace(p, recipe);
  Result r{.scratch = QuantizedScratch(space), .params = {}};
  r.params = gpu::make_quantize_params(p, recipe, space, r.scratch.data);
  emulator::Options options{.seed = seed};
  add_buffers(options, call.inputs(), false);
  options.buffers.push_back({r.scratch.data, space.bytes(), true});
  run_quantizer<C>(r.params, options);
  return r;
}

template <Element element, int head_dim_qk, int head_dim_v>
struct Shape {};

template <const Recipe& recipe, bool varlen, bool vectors, Element element, int head_dim_qk, int head_dim_v>
void check_shape(Shape<element, head_dim_qk, head_dim_v> /*shape*/) {
  Case c = quantize_case(element == Element::f16 ? DType::f16 : DType::bf16, head_dim_qk, head_dim_v);
  if (varlen) make_varlen(c);
  if (!vectors) make_unaligned(c);
  Call call(c);
  constexpr QuantizeConfig config = config_of(element, head_dim_qk, head_dim_v, recipe, varlen, vectors);
  SCOPED_TRACE(describe(config));
  check_quantized(call, recipe, run<config>(call, recipe, varlen ? 3 : 0).params);
}

/// Sequences long enough for a mean of a sample, one of them past the end of one sum.
TEST(Quantize, LongSequencesHaveTheMeanOfASample) {
  constexpr QuantizeConfig dense = config_of(Element::bf16, 64, 32, fp8_recipe, false, true);
  constexpr QuantizeConfig varlen = config_of(Element::bf16, 64, 32, fp8_recipe, true, true);
  Case c = with(quantize_case(DType::bf16, 64, 32), {.heads = 1, .seqlen_q = 3, .seqlen_k = 1029});
  Call call(c);
  check_quantized(call, fp8_recipe, run<dense>(call, fp8_recipe, 2).params);
  change(c, {.packed = true, .lengths_q = {3, 4}, .lengths_k = {512, 1150}});
  Call packed(c);
  check_quantized(packed, fp8_recipe, run<varlen>(packed, fp8_recipe, 2).params);
}

constexpr Recipe strict_fp8 = strict(fp8_recipe);
constexpr Recipe strict_int8 = strict(int8_recipe);

template <const Recipe& recipe, int head_dim>
void check_short() {
  Case c = quantize_case(DType::bf16, head_dim, head_dim);
  make_short(c);
  Call call(c);
  constexpr QuantizeConfig config = config_of(Element::bf16, head_dim, head_dim, recipe, true, true);
  SCOPED_TRACE(describe(config));
  const Result r = run<config>(call, recipe, 1);
  EXPECT_GE(r.params.heads_per_item_q, 4);
  EXPECT_EQ(r.params.heads_per_item_k, 4);
  check_quantized(call, recipe, r.params);
}

/// Several heads share a unit.
TEST(Quantize, ManyShortSequences) {
  check_short<fp8_recipe, 64>();
  check_short<int8_recipe, 32>();
  check_short<strict_int8, 64>();
}

TEST(Quantize, Fp8) {
  check_shape<fp8_recipe, false, true>(Shape<Element::bf16, 128, 128>{});
  check_shape<fp8_recipe, true, true>(Shape<Element::f16, 64, 64>{});
}

TEST(Quantize, Int8) {
  check_shape<int8_recipe, false, true>(Shape<Element::bf16, 192, 128>{});
  check_shape<int8_recipe, true, false>(Shape<Element::f16, 96, 64>{});
}

TEST(Quantize, WideHeads) {
  check_shape<int8_recipe, true, true>(Shape<Element::bf16, 256, 256>{});
}

TEST(Quantize, StrictHasNoMean) {
  check_shape<strict_fp8, false, true>(Shape<Element::bf16, 72, 40>{});
}

/// Blocks of the rotation below 8 channels, and rows that no vector fits.
TEST(Quantize, OddHeadDimensions) {
  check_shape<fp8_recipe, false, false>(Shape<Element::bf16, 77, 33>{});
  check_shape<int8_recipe, true, false>(Shape<Element::f16, 31, 23>{});
}

/// What quantized values and scales become of infinities, NaN, zeros, and values beyond the scale's
/// reciprocal.
TEST(Quantize, ValuesThatAreNoNumbers) {
  constexpr QuantizeConfig e4m3 = config_of(Element::bf16, 64, 64, fp8_recipe, false, true);
  constexpr QuantizeConfig s8 = config_of(Element::bf16, 64, 64, int8_recipe, false, true);
  Call call(quantize_case(DType::bf16, 64, 64));
  set_no_numbers(call);
  check_quantized(call, fp8_recipe, run<e4m3>(call, fp8_recipe, 1).params);
  check_quantized(call, int8_recipe, run<s8>(call, int8_recipe, 1).params);
}

/// Quantized values and scales that the caller brings end where the quantiser would have put them.
template <QuantizeConfig C>
void check_arranged(const Case& c, Granularity granularity) {
  SCOPED_TRACE(describe(C));
  const Call call(c);
  Call quantized(c);
  harness::quantize_inputs(quantized, C.qk == OperandType::s8 ? DType::s8 : DType::e4m3, granularity);
  const Problem p = make_problem(quantized.forward_args());
  const Recipe recipe = tandem::recipe_of(p);
  ASSERT_EQ(choose_quantize_config(CallFacts(p), recipe), C);
  const gpu::Workspace space = gpu::quantized_workspace(p, recipe);
  const QuantizedScratch scratch(space);
  const ArrangeParams params =
      gpu::make_arrange_params(p, gpu::make_quantize_params(p, recipe, space, scratch.data));
  emulator::Options options;
  add_buffers(options, quantized.inputs(), false);
  options.buffers.push_back({scratch.data, space.bytes(), true});
  const QuantizeParams& q = params.quantize;
  emulator::launch(arrange_quantized<C>, params,
                   {.blocks = static_cast<unsigned>(q.items_q + q.items_k + q.items_v),
                    .threads = quantize_threads,
                    .shared_bytes = static_cast<std::size_t>(arrange_shared_bytes(C))},
                   options);
  check_quantized(call, recipe, q);
}

constexpr QuantizeConfig arranged(OperandType type, ScaleGroup group, int head_dim_qk, int head_dim_v,
                                  bool varlen, bool vectors) {
  return {.head_dim_qk = head_dim_qk,
          .head_dim_v = head_dim_v,
          .qk = type,
          .pv = type,
          .qk_scales = group,
          .v_scales = group,
          .rotate_qk = false,
          .smooth_k = false,
          .varlen = varlen,
          .vectors = vectors};
}

TEST(ArrangeQuantized, PutsThemWhereTheQuantiserDoes) {
  Case c = quantize_case(DType::bf16, 128, 64);
  check_arranged<arranged(OperandType::e4m3, ScaleGroup::block, 128, 64, false, true)>(c, Granularity::block);
  c = quantize_case(DType::f16, 96, 40);
  make_varlen(c);
  make_unaligned(c);
  check_arranged<arranged(OperandType::s8, ScaleGroup::row, 96, 40, true, false)>(c, Granularity::row);
}

/// 16-bit K and V from quantized values and scales, in the rows in use: the CPU's, bit for bit.
template <QuantizeConfig C>
void check_dequantized(const Case& c, DType dtype, Granularity granularity) {
  SCOPED_TRACE(describe(C));
  Call call(c);
  harness::quantize_keys_and_values(call, dtype, granularity);
  const Problem p = make_problem(call.forward_args());
  ASSERT_EQ(choose_dequantize_config(p, has_lengths(p)), C);
  constexpr auto poison = std::byte{0xEE};
  std::vector<std::byte> got(mixed_space(p).bytes + 256, poison);
  std::vector<std::byte> want = got;
  const auto aligned = [](std::vector<std::byte>& memory) {
    return memory.data() + (256 - reinterpret_cast<std::uintptr_t>(memory.data()) % 256) % 256;
  };
  const auto in = [&](std::vector<std::byte>& memory) {
    Problem placed = dequantized(p);
    place_dequantized(placed, aligned(memory));
    return placed;
  };
  const Problem d = in(got);
  cpu::dequantize(p, in(want), 1);
  const ArrangeParams params = gpu::make_dequantize_params(p, d);
  emulator::Options options;
  add_buffers(options, call.inputs(), false);
  options.buffers.push_back({aligned(got), mixed_space(p).bytes, true});
  emulator::launch(dequantize<C>, params,
                   {.blocks = static_cast<unsigned>(params.quantize.items_k + params.quantize.items_v),
                    .threads = quantize_threads},
                   options);
  const auto offset = aligned(want) - aligned(got);
  std::int64_t checked = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const Rows rows = key_rows(p, b);
    for (std::int64_t row = rows.begin; row < rows.begin + rows.used; ++row) {
      for (std::int64_t head = 0; head < p.heads_kv; ++head) {
        for (const auto& [o, dim] : {std::pair{d.k, p.head_dim_qk}, {d.v, p.head_dim_v}}) {
          const auto* const a = static_cast<const std::byte*>(o.data) + 2 * o.offset(b, row, head);
          for (std::int64_t n = 0; n < dim; ++n, ++checked) {
            const double x = harness::decode(p.q.dtype, a, n);
            const double y = harness::decode(p.q.dtype, a + offset, n);
            ASSERT_TRUE(x == y || (std::isnan(x) && std::isnan(y))) << row << ' ' << head << ' ' << n;
          }
        }
      }
    }
  }
  EXPECT_GT(checked, 0);
}

constexpr QuantizeConfig mixed(Element element, OperandType type, int head_dim_qk, int head_dim_v,
                               bool varlen, bool vectors) {
  return {.element = element,
          .head_dim_qk = head_dim_qk,
          .head_dim_v = head_dim_v,
          .qk = type,
          .pv = type,
          .varlen = varlen,
          .vectors = vectors};
}

TEST(Dequantize, GivesTheCpusValues) {
  Case c = quantize_case(DType::bf16, 128, 64);
  check_dequantized<mixed(Element::bf16, OperandType::e4m3, 128, 64, false, true)>(c, DType::e4m3,
                                                                                   Granularity::block);
  c = quantize_case(DType::f16, 96, 40);
  make_varlen(c);
  check_dequantized<mixed(Element::f16, OperandType::s8, 96, 40, true, true)>(c, DType::s8, Granularity::row);
  make_unaligned(c);
  check_dequantized<mixed(Element::f16, OperandType::e4m3, 96, 40, true, false)>(c, DType::e4m3,
                                                                                 Granularity::row);
}

/// quantize's own layout: one tensor and its quantized values, scales and mean, as the caller has them.
struct UserTensor {
  static constexpr std::int64_t batch = 2, rows = 200, heads = 3;
  std::int64_t dim;
  std::vector<std::uint16_t> x;
  std::vector<std::uint8_t> quantized;
  std::vector<float> scales, mean;
  QuantizeProblem problem;

  UserTensor(std::int64_t head_dim, std::int64_t used_rows, OperandType to, ScaleGroup group, bool rotate,
             bool smooth)
      : dim(head_dim),
        x(static_cast<std::size_t>(batch * rows * heads * dim)),
        quantized(x.size(), 0xEE),
        scales(static_cast<std::size_t>(batch * heads * rows), -1.0F),
        mean(static_cast<std::size_t>(batch * heads * dim), -1.0F) {
    harness::Random random(3);
    for (std::size_t i = 0; i < x.size(); ++i) {
      harness::encode(DType::bf16, x.data(), static_cast<std::int64_t>(i), random.normal() + 0.5);
    }
    problem.batch = batch;
    problem.rows = used_rows;
    problem.heads = heads;
    problem.head_dim = dim;
    problem.group = group;
    problem.rotate = rotate;
    problem.x = {.data = x.data(),
                 .dtype = DType::bf16,
                 .batch_stride = rows * heads * dim,
                 .row_stride = heads * dim,
                 .head_stride = dim};
    problem.codes = problem.x;
    problem.codes.data = quantized.data();
    problem.codes.dtype = to == OperandType::s8 ? DType::s8 : DType::e4m3;
    const bool one = group == ScaleGroup::tensor;
    problem.scales = {.data = scales.data(),
                      .dtype = DType::f32,
                      .batch_stride = one ? 0 : heads * rows,
                      .row_stride = one ? 0 : 1,
                      .head_stride = one ? 0 : rows};
    if (smooth)
      problem.mean = {.data = mean.data(),
                      .dtype = DType::f32,
                      .batch_stride = heads * dim,
                      .row_stride = 0,
                      .head_stride = dim};
  }
};

template <QuantizeConfig C>
void check_tensor(std::int64_t used_rows) {
  const auto tensor = [&] {
    return UserTensor(C.head_dim_qk, used_rows, C.qk, C.qk_scales, C.rotate_qk, C.smooth_k);
  };
  SCOPED_TRACE(describe(C));
  UserTensor want = tensor();
  cpu::quantize(want.problem, cpu::Target::portable, 1);
  UserTensor got = tensor();
  ASSERT_EQ(choose_tensor_config(got.problem), C);
  const gpu::Workspace workspace = gpu::tensor_workspace(got.problem);
  std::vector<ptx::Vec4> scratch(workspace.bytes() / 16 + 1);
  const QuantizeParams params =
      gpu::make_tensor_params(got.problem, workspace, reinterpret_cast<char*>(scratch.data()));
  emulator::Options options{.buffers = {emulator::readable(got.x), emulator::writable(got.quantized),
                                        emulator::writable(got.scales), emulator::writable(got.mean),
                                        emulator::writable(scratch)}};
  emulator::Grid grid{.blocks = static_cast<unsigned>(params.items_k),
                      .threads = static_cast<unsigned>(C.threads()),
                      .shared_bytes = static_cast<std::size_t>(quantize_shared_bytes(C))};
  if (C.smooth_k) launch_mean<C>(params, options);
  if (exceeds_block(C.qk_scales)) emulator::launch(largest_of_groups<C>, params, grid, options);
  emulator::launch(quantize<C>, params, grid, options);
  EXPECT_EQ(got.quantized, want.quantized);
  EXPECT_EQ(got.scales, want.scales);
  EXPECT_EQ(got.mean, want.mean);
}

constexpr QuantizeConfig tensor_config(int head_dim, OperandType type, ScaleGroup group, bool rotate,
                                       bool smooth) {
  return {.element = Element::bf16,
          .head_dim_qk = head_dim,
          .head_dim_v = head_dim,
          .qk = type,
          .pv = OperandType::input,
          .qk_scales = group,
          .rotate_qk = rotate,
          .smooth_k = smooth,
          .vectors = head_dim % 8 == 0};
}

TEST(Quantize, RowsAtMultiplesOf8BytesAreNotWrittenIn16) {
  for (const std::int64_t head_dim : {64, 72}) {
    UserTensor tensor(head_dim, 200, OperandType::e4m3, ScaleGroup::block, true, true);
    EXPECT_TRUE(choose_tensor_config(tensor.problem).vectors);
    tensor.problem.codes.data = tensor.quantized.data() + 8;
    EXPECT_EQ(choose_tensor_config(tensor.problem).vectors, head_dim == 72);
    tensor.problem.codes.data = tensor.quantized.data() + 4;
    EXPECT_FALSE(choose_tensor_config(tensor.problem).vectors);
  }
}

TEST(Quantize, TensorsInTheCallersLayout) {
  for (const std::int64_t rows : {200, 1, 0}) {
    SCOPED_TRACE(rows);
    check_tensor<tensor_config(64, OperandType::e4m3, ScaleGroup::tensor, true, true)>(rows);
    check_tensor<tensor_config(36, OperandType::s8, ScaleGroup::head, false, true)>(rows);
    check_tensor<tensor_config(24, OperandType::s8, ScaleGroup::block, true, false)>(rows);
    check_tensor<tensor_config(96, OperandType::e4m3, ScaleGroup::row, false, false)>(rows);
  }
}

}  // namespace
}  // namespace tandem::kernel_tests
