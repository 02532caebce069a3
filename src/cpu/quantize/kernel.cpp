// Rows of one head to 8-bit values and scales: mean removed, rotated, scaled, rounded. Compiled once for each
// instruction set (targets/targets.cmake); the loops are plain, and the compiler's to vectorise.
#include "cpu/eight_bit/tile.hpp"
#include "cpu/simd/eight_bit.hpp"
#include "cpu/simd/rotate.hpp"
#include "cpu/simd/stage.hpp"

namespace tandem::cpu::TANDEM_TARGET {
namespace {

/// The rows as f32, as the user has them.
void load_rows(const QuantizeRows& r) {
  widen_rows(r.data, r.dtype, r.stride, r.rows, r.dim, r.scratch, r.dim);
}

/// The rows as f32, without the mean, rotated.
void prepare(const QuantizeRows& r) {
  load_rows(r);
  for (int i = 0; i < r.rows; ++i) {
    float* row = r.scratch + static_cast<std::int64_t>(i) * r.dim;
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
  return largest_of(r.scratch, static_cast<std::int64_t>(r.rows) * r.dim);
}

template <OperandType type>
void quantize_row_group(const QuantizeRows& r, const QuantizeTo& to, int first, int count, float largest) {
  const float* x = r.scratch + static_cast<std::int64_t>(first) * r.dim;
  const Scale s = scale_for(largest, limit_of(type));
  const float stored = stored_scale<type>(s.scale, all_finite(x, static_cast<std::int64_t>(count) * r.dim));
  for (int i = 0; i < count; ++i) {
    std::uint8_t* out = to.out + (first + i) * to.out_stride;
    for (int c = 0; c < r.dim; ++c)
      out[c] = eight_bit_of<type>(x[static_cast<std::int64_t>(i) * r.dim + c], s.inverse);
    to.scales[first + i] = stored;
  }
}

/// As above for s8 and rows that share a scale: those that hold what is no number are marked.
void mark_row_group(const QuantizeRows& r, const QuantizeTo& to, float largest) {
  const Scale s = scale_for(largest, largest_s8);
  for (int i = 0; i < r.rows; ++i) {
    const float* x = r.scratch + static_cast<std::int64_t>(i) * r.dim;
    std::uint8_t* out = to.out + i * to.out_stride;
    for (int c = 0; c < r.dim; ++c) out[c] = eight_bit_of<OperandType::s8>(x[c], s.inverse);
    const bool marked = !all_finite(x, r.dim);
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
  switch (to.group) {
    case ScaleGroup::tensor:
    case ScaleGroup::head: quantize_row_group<type>(r, to, 0, r.rows, to.largest); break;
    case ScaleGroup::block:
      quantize_row_group<type>(r, to, 0, r.rows,
                               largest_of(r.scratch, static_cast<std::int64_t>(r.rows) * r.dim));
      break;
    case ScaleGroup::row:
      for (int i = 0; i < r.rows; ++i) {
        quantize_row_group<type>(r, to, i, 1,
                                 largest_of(r.scratch + static_cast<std::int64_t>(i) * r.dim, r.dim));
      }
      break;
    case ScaleGroup::channel: quantize_channels<type>(r, to); break;
  }
}

void quantize(const QuantizeRows& r, const QuantizeTo& to) {
  prepare(r);
  const bool shared = to.group != ScaleGroup::row && to.group != ScaleGroup::channel;
  if (to.type == OperandType::s8 && to.nan_markers && shared) {
    const bool by_block = to.group == ScaleGroup::block;
    mark_row_group(r, to,
                   by_block ? largest_of(r.scratch, static_cast<std::int64_t>(r.rows) * r.dim) : to.largest);
  } else if (to.type == OperandType::s8) {
    quantize_as<OperandType::s8>(r, to);
  } else {
    quantize_as<OperandType::e4m3>(r, to);
  }
}

}  // namespace

extern const QuantizeKernel quantize_kernel;
const QuantizeKernel quantize_kernel{.sum_channels = sum_channels, .largest = largest, .quantize = quantize};

}  // namespace tandem::cpu::TANDEM_TARGET
