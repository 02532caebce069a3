#include "codes.hpp"

namespace tandem::harness {
namespace {

/// The shape of quantize's scales for x of rank 4, or 3.
std::vector<std::int64_t> scales_shape(const Tensor& x, Granularity granularity) {
  if (granularity == Granularity::tensor) return {1};
  std::vector<std::int64_t> shape;
  const std::size_t rows = x.rank == 4 ? 1 : 0;
  if (x.rank == 4) shape.push_back(x.shape[0]);
  shape.push_back(x.shape[rows + 1]);
  if (granularity == Granularity::block) shape.push_back((x.shape[rows] + 127) / 128);
  if (granularity == Granularity::row) shape.push_back(x.shape[rows]);
  return shape;
}

void bring(Box& x, Box& scale, const Layout& layout, DType dtype, Granularity granularity) {
  const Tensor& t = x.view();
  Box codes(dtype, {t.shape.begin(), t.shape.begin() + t.rank}, layout, false);
  scale = Box(DType::f32, scales_shape(t, granularity), {}, false);
  if (t.numel() > 0) {
    quantize({.x = t, .codes = codes.view(), .scales = scale.view(), .mean = {}, .granularity = granularity},
             Execution{.threads = 1});
  }
  x = codes;
}

}  // namespace

void bring_codes(Call& call, DType codes, Granularity granularity) {
  bring(call.q, call.q_scale, call.spec.q, codes, granularity);
  bring(call.k, call.k_scale, call.spec.k, codes, granularity);
  bring(call.v, call.v_scale, call.spec.v, codes, granularity);
  call.spec.options.precision = codes == DType::s8 ? Precision::int8 : Precision::fp8;
  call.spec.options.strict = false;
}

}  // namespace tandem::harness
