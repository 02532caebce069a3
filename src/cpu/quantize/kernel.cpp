// Rows of one head to 8-bit values and scales: mean removed, rotated, scaled, rounded. Compiled once for each
// instruction set (targets/targets.cmake); the loops are plain, and the compiler's to vectorise.
#include "cpu/eight_bit/tile.hpp"
#include "cpu/simd/eight_bit.hpp"
#include "cpu/simd/rotate.hpp"
#include "cpu/simd/stage.hpp"

namespace tandem::cpu::TANDEM_TARGET {
namespace {

/// Rows as f32, as the user has them.
void load_rows(const QuantizeRows& r) {
  widen_rows(r.data, r.dtype, r.stride, r.rows, r.dim, r.scratch, r.dim);
}

/// The rows as f32, without the mean, rotated. Row by row, which stays in the first-level cache.
void prepare(const QuantizeRows& r) {
  const auto* const data = static_cast<const std::byte*>(r.data);
  const std::int64_t size = r.dtype == DType::f32                             ? 4
                            : r.dtype == DType::f16 || r.dtype == DType::bf16 ? 2
                                                                              : 1;
  constexpr int ahead = 4;
  for (int i = 0; i < r.rows; ++i) {
    float* const row = r.scratch + static_cast<std::int64_t>(i) * r.dim;
    for (std::int64_t at = 0; i + ahead < r.rows && at < r.dim * size; at += 64)
      __builtin_prefetch(data + (i + ahead) * r.stride * size + at);
    widen_rows(data + i * r.stride * size, r.dtype, r.stride, 1, r.dim, row, r.dim);
    if (r.mean != nullptr) {
      for (int c = 0; c < r.dim; ++c) row[c] -= r.mean[c];
    }
    if (r.rotate) rotate(row, r.dim);
  }
}

void sum_channels(const QuantizeRows& r, float* sums) {
  load_rows(r);
  for (int i = 0; i < r.rows; ++i) {
    const float* row = r.scratch + static_cast<std::int64_t>(i) * r.dim;
    for (int c = 0; c < r.dim; ++c) sums[c] += is_finite(row[c]) ? row[c] : 0.0F;
  }
}

float largest(const QuantizeRows& r) {
  prepare(r);
  return magnitudes_of(r.scratch, static_cast<std::int64_t>(r.rows) * r.dim).largest;
}

/// Codes of one row. `finite`: all of it is.
template <OperandType type>
void write_codes(const float* x, int dim, float inverse, bool finite, std::uint8_t* out) {
  if constexpr (type == OperandType::s8) {
    if (finite) return s8_codes_of(x, dim, inverse, out);
  }
  for (int c = 0; c < dim; ++c) out[c] = eight_bit_of<type>(x[c], inverse);
}

/// Rows that share a scale. `largest` is the magnitude that it is for, which may be that of more rows.
template <OperandType type>
void quantize_row_group(const QuantizeRows& r, const QuantizeTo& to, int first, int count, float largest,
                        bool finite) {
  const float* x = r.scratch + static_cast<std::int64_t>(first) * r.dim;
  const Scale s = scale_for(largest, limit_of(type));
  const float stored = stored_scale<type>(s.scale, finite);
  for (int i = 0; i < count; ++i) {
    write_codes<type>(x + static_cast<std::int64_t>(i) * r.dim, r.dim, s.inverse, finite,
                      to.out + (first + i) * to.out_stride);
    to.scales[first + i] = stored;
  }
}

/// As above for s8 and rows that share a scale: those that hold what is no number are marked.
void mark_row_group(const QuantizeRows& r, const QuantizeTo& to, float largest, bool finite) {
  const Scale s = scale_for(largest, largest_s8);
  for (int i = 0; i < r.rows; ++i) {
    const float* x = r.scratch + static_cast<std::int64_t>(i) * r.dim;
    std::uint8_t* out = to.out + i * to.out_stride;
    const bool marked = !finite && !magnitudes_of(x, r.dim).finite;
    write_codes<OperandType::s8>(x, r.dim, s.inverse, !marked, out);
    if (marked) out[0] = nan_marker;
    to.scales[i] = marked ? -s.scale : s.scale;
  }
}

template <OperandType type>
void quantize_channels(const QuantizeRows& r, const QuantizeTo& to) {
  for (int c = 0; c < r.dim; ++c) {
    float largest = 0.0F;
    bool finite = true;
    for (int i = 0; i < r.rows; ++i) {
      const float x = r.scratch[static_cast<std::int64_t>(i) * r.dim + c];
      const float magnitude = finite_magnitude(x);
      largest = magnitude > largest ? magnitude : largest;
      finite = finite && is_finite(x);
    }
    const Scale s = scale_for(largest, limit_of(type));
    for (int i = 0; i < r.rows; ++i) {
      to.out[i * to.out_stride + c] =
          eight_bit_of<type>(r.scratch[static_cast<std::int64_t>(i) * r.dim + c], s.inverse);
    }
    to.scales[c] = stored_scale<type>(s.scale, finite);
  }
}

template <OperandType type>
void quantize_as(const QuantizeRows& r, const QuantizeTo& to) {
  if (to.group == ScaleGroup::channel) return quantize_channels<type>(r, to);
  if (to.group == ScaleGroup::row) {
    for (int i = 0; i < r.rows; ++i) {
      const Magnitudes of_row = magnitudes_of(r.scratch + static_cast<std::int64_t>(i) * r.dim, r.dim);
      quantize_row_group<type>(r, to, i, 1, of_row.largest, of_row.finite);
    }
    return;
  }
  const Magnitudes of_block = magnitudes_of(r.scratch, static_cast<std::int64_t>(r.rows) * r.dim);
  const float largest = to.group == ScaleGroup::block ? of_block.largest : to.largest;
  if (type == OperandType::s8 && to.nan_markers) return mark_row_group(r, to, largest, of_block.finite);
  quantize_row_group<type>(r, to, 0, r.rows, largest, of_block.finite);
}

void quantize(const QuantizeRows& r, const QuantizeTo& to) {
  prepare(r);
  if (to.type == OperandType::s8) {
    quantize_as<OperandType::s8>(r, to);
  } else {
    quantize_as<OperandType::e4m3>(r, to);
  }
}

}  // namespace

extern const QuantizeKernel quantize_kernel;
const QuantizeKernel quantize_kernel{.sum_channels = sum_channels, .largest = largest, .quantize = quantize};

}  // namespace tandem::cpu::TANDEM_TARGET
