// The quantiser's kernels in the emulator, against the CPU's quantiser.
#include <gtest/gtest.h>

#include "emulated_call.hpp"
#include "kernels/quantize.cuh"
#include "plan/quantize_plan.hpp"
#include "quantize_check.hpp"

namespace tandem::kernel_tests {
namespace {

using harness::Box;
using harness::Call;
using harness::Case;

constexpr QuantizeConfig config_of(Element element, int head_dim_qk, int head_dim_v, const Recipe& r,
                                   bool ragged, bool vectors) {
  return {.element = element,
          .head_dim_qk = head_dim_qk,
          .head_dim_v = head_dim_v,
          .qk = r.qk,
          .pv = r.pv,
          .qk_scales = r.qk_scales,
          .v_scales = r.v_scales,
          .rotate_qk = r.rotate_qk,
          .rotate_v = r.rotate_v,
          .smooth_k = r.smooth_k,
          .ragged = ragged,
          .vectors = vectors};
}

/// What a call leaves behind.
struct Result {
  std::vector<std::byte> memory;
  std::size_t offset = 0;  ///< of the scratch memory in it
  QuantizeParams params;
};

template <QuantizeConfig C>
Result run(Call& call, const Recipe& recipe, std::uint64_t seed) {
  const Problem p = call.problem();
  EXPECT_EQ(choose_quantize_config(p, recipe), C);
  const gpu::QuantizedSpace space = gpu::quantized_space(p, recipe);
  Result r;
  r.memory.assign(space.bytes + 256, std::byte{0xff});
  r.offset = 256 - reinterpret_cast<std::uintptr_t>(r.memory.data()) % 256;
  char* const scratch = reinterpret_cast<char*>(r.memory.data()) + r.offset;
  std::fill_n(scratch + space.arrived, space.arrived_bytes, char{0});
  r.params = gpu::make_quantize_params(p, recipe, scratch);
  emulator::Options options;
  options.seed = seed;
  for (const Box* box : call.inputs()) {
    if (box->given() && box->numel() > 0) options.buffers.push_back(buffer_of(*box, false));
  }
  options.buffers.push_back({scratch, space.bytes, true});
  if (const std::int64_t units = gpu::mean_units(p, recipe); units > 0) {
    emulator::launch(mean_of_keys<C>, r.params,
                     {.blocks = static_cast<unsigned>(units),
                      .threads = static_cast<unsigned>(mean_threads(C)),
                      .shared_bytes = mean_shared_bytes},
                     options);
  }
  if (const std::int64_t units = gpu::quantize_units(r.params); units > 0) {
    emulator::launch(quantize<C>, r.params,
                     {.blocks = static_cast<unsigned>(units),
                      .threads = quantize_threads,
                      .shared_bytes = static_cast<std::size_t>(quantize_shared_bytes(C))},
                     options);
  }
  return r;
}

template <Element element, int head_dim_qk, int head_dim_v>
struct Shape {};

template <const Recipe& recipe, bool ragged, bool vectors, Element element, int head_dim_qk, int head_dim_v>
void check_shape(Shape<element, head_dim_qk, head_dim_v> /*shape*/) {
  Case c = quantize_case(element == Element::f16 ? DType::f16 : DType::bf16, head_dim_qk, head_dim_v);
  if (ragged) make_ragged(c);
  if (!vectors) make_unaligned(c);
  Call call(c);
  constexpr QuantizeConfig config = config_of(element, head_dim_qk, head_dim_v, recipe, ragged, vectors);
  SCOPED_TRACE(describe(config));
  check_quantized(call, recipe, run<config>(call, recipe, ragged ? 3 : 0).params);
}

constexpr Recipe strict_fp8 = strict(fp8_recipe);

TEST(Quantize, Fp8) {
  check_shape<fp8_recipe, false, true>(Shape<Element::bf16, 128, 128>{});
  check_shape<fp8_recipe, true, true>(Shape<Element::f16, 64, 64>{});
}

TEST(Quantize, Int8) {
  check_shape<int8_recipe, false, true>(Shape<Element::bf16, 192, 128>{});
  check_shape<int8_recipe, true, false>(Shape<Element::f16, 96, 64>{});
}

TEST(Quantize, Int8LeavesVToTheSixteenBitProduct) {
  check_shape<int8_accurate_recipe, true, true>(Shape<Element::bf16, 256, 256>{});
}

TEST(Quantize, StrictHasNoMean) {
  check_shape<strict_fp8, false, true>(Shape<Element::bf16, 72, 40>{});
}

/// Blocks of the rotation below 8 channels, and rows that no vector fits.
TEST(Quantize, OddHeadDimensions) {
  check_shape<fp8_recipe, false, false>(Shape<Element::bf16, 77, 33>{});
  check_shape<int8_recipe, true, false>(Shape<Element::f16, 31, 23>{});
}

/// What codes and scales become of infinities, NaN, zeros, and values beyond the scale's reciprocal.
TEST(Quantize, ValuesThatAreNoNumbers) {
  constexpr QuantizeConfig e4m3 = config_of(Element::bf16, 64, 64, fp8_recipe, false, true);
  constexpr QuantizeConfig s8 = config_of(Element::bf16, 64, 64, int8_recipe, false, true);
  Call call(quantize_case(DType::bf16, 64, 64));
  set_no_numbers(call);
  check_quantized(call, fp8_recipe, run<e4m3>(call, fp8_recipe, 1).params);
  check_quantized(call, int8_recipe, run<s8>(call, int8_recipe, 1).params);
}

}  // namespace
}  // namespace tandem::kernel_tests
