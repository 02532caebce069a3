#include "cpu/quantize/dequantize.hpp"

#include <array>

#include "cpu/common/convert.hpp"
#include "cpu/common/operand.hpp"

namespace tandem::cpu {
namespace {

/// The values of all 256 bit patterns.
using Values = std::array<float, 256>;
Values values_of(DType dtype) {
  Values values{};
  for (std::size_t code = 0; code < values.size(); ++code) {
    const auto bits = static_cast<std::uint8_t>(code);
    values[code] =
        dtype == DType::s8 ? static_cast<float>(static_cast<std::int8_t>(bits)) : to_f32(e4m3{.bits = bits});
  }
  return values;
}

/// The scale of row `row` of a sequence that begins at `begin` in the tensor.
float scale_of(const Scales& s, std::int64_t b, std::int64_t head, std::int64_t begin, std::int64_t row) {
  if (s.data == nullptr) return 1.0F;
  const std::int64_t group = s.group == ScaleGroup::block ? row / quant_block : begin + row;
  return s.data[b * s.batch_stride + head * s.head_stride + group * s.group_stride];
}

template <typename T>
void convert_row(const std::uint8_t* quantized, const Values& values, float scale, std::byte* to,
                 std::int64_t count) {
  auto* const out = reinterpret_cast<T*>(to);
  for (std::int64_t c = 0; c < count; ++c) out[c] = from_f32<T>(values[quantized[c]] * scale);
}

void convert_row(DType dtype, const std::uint8_t* quantized, const Values& values, float scale, std::byte* to,
                 std::int64_t count) {
  switch (dtype) {
    case DType::f16: return convert_row<f16>(quantized, values, scale, to, count);
    case DType::bf16: return convert_row<bf16>(quantized, values, scale, to, count);
    default: return convert_row<float>(quantized, values, scale, to, count);
  }
}

}  // namespace

void dequantize(const Problem& p, const Problem& d, int threads) {
  const Values values = values_of(p.k.dtype);
#pragma omp parallel num_threads(threads)
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const Rows rows = key_rows(p, b);
#pragma omp for schedule(static) nowait
    for (std::int64_t at = 0; at < rows.used * p.heads_kv; ++at) {
      const std::int64_t head = at / rows.used;
      const std::int64_t row = at % rows.used;
      const std::int64_t in_tensor = rows.begin + row;
      convert_row(d.k.dtype, element<std::uint8_t>(p.k, b, in_tensor, head), values,
                  scale_of(p.k_scale, b, head, rows.begin, row), element(d.k, b, in_tensor, head),
                  p.head_dim_qk);
      convert_row(d.v.dtype, element<std::uint8_t>(p.v, b, in_tensor, head), values,
                  scale_of(p.v_scale, b, head, rows.begin, row), element(d.v, b, in_tensor, head),
                  p.head_dim_v);
    }
  }
}

}  // namespace tandem::cpu
