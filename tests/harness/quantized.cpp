#include "quantized.hpp"

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

void quantize_input(Box& x, Box& scale, const Layout& layout, DType dtype, Granularity granularity) {
  const Tensor& t = x.view();
  Box quantized(dtype, {t.shape.begin(), t.shape.begin() + t.rank}, layout, false);
  scale = Box(DType::f32, scales_shape(t, granularity), {}, false);
  if (t.numel() > 0) {
    quantize(
        {.x = t, .codes = quantized.view(), .scales = scale.view(), .mean = {}, .granularity = granularity},
        Execution{.threads = 1});
  }
  x = quantized;
}

}  // namespace

void quantize_keys_and_values(Call& call, DType dtype, Granularity granularity) {
  quantize_input(call.k, call.k_scale, call.spec.k, dtype, granularity);
  quantize_input(call.v, call.v_scale, call.spec.v, dtype, granularity);
}

void quantize_inputs(Call& call, DType dtype, Granularity granularity) {
  quantize_input(call.q, call.q_scale, call.spec.q, dtype, granularity);
  quantize_keys_and_values(call, dtype, granularity);
  call.spec.options.precision = dtype == DType::s8 ? Precision::int8 : Precision::fp8;
  call.spec.options.strict = false;
  call.spec.options.split_size = 0;
}

namespace {

Box dequantized(const Box& quantized, const Box& scale, DType dtype) {
  const Tensor& t = quantized.view();
  const std::size_t first = t.rank == 4 ? 1 : 0;
  const std::int64_t rows = t.shape[first];
  const std::int64_t heads = t.shape[first + 1];
  const std::int64_t columns = t.shape[first + 2];
  const std::int64_t all_heads = t.numel() / (rows * columns);  // of all batch entries
  const std::int64_t groups = scale.numel() / all_heads;        // of a head; 0: one scale for all
  Box values(dtype, {t.shape.begin(), t.shape.begin() + t.rank}, {}, false);
  for (std::int64_t n = 0; n < quantized.numel(); ++n) {
    const std::int64_t row = n / columns / heads % rows;
    const std::int64_t head = n / columns / heads / rows * heads + n / columns % heads;
    const std::int64_t group = groups == rows ? row : groups == 1 ? 0 : row / 128;
    const double s = scale.get(groups == 0 ? 0 : head * groups + group);
    values.set(n, static_cast<double>(static_cast<float>(quantized.get(n) * s)));
  }
  return values;
}

}  // namespace

Call dequantized(const Call& mixed) {
  Call call = mixed;
  call.k = dequantized(mixed.k, mixed.k_scale, mixed.q.dtype());
  call.v = dequantized(mixed.v, mixed.v_scale, mixed.q.dtype());
  call.k_scale = call.v_scale = {};
  return call;
}

}  // namespace tandem::harness
