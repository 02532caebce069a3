// Copies of rows in the two layouts that the register tile reads: rows of words (broadcast operands) and
// panels.
#pragma once

#include "cpu/backward/block.hpp"
#include "cpu/backward/gemm.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// Panels that `columns` take.
constexpr std::int64_t panels_of(std::int64_t columns) {
  return (columns + panel_lanes - 1) / panel_lanes;
}

/// One row of a user's tensor.
template <typename T>
TANDEM_INLINE T* row_of(const HeadRows& rows, std::int64_t row) {
  return static_cast<T*>(rows.data) + row * rows.row_stride;
}

/// The element type of staged rows: bf16 stays as it is where the processor multiplies it, the rest becomes
/// f32.
template <bool paired>
struct StagedOf {
  using Type = float;
};
template <>
struct StagedOf<true> {
  using Type = bf16;
};

/// Copies `columns` elements of a row, widening them, and fills up to `padded` with zeros.
template <typename T>
TANDEM_INLINE void stage_row(const T* src, std::int64_t columns, std::int64_t padded, float* dst) {
  std::int64_t c = 0;
  for (; c + vec_lanes <= columns; c += vec_lanes) store(load(src + c), dst + c);
  if (c < columns) {
    store(load_first(src + c, static_cast<int>(columns - c)), dst + c);
    c += vec_lanes;
  }
  for (; c < padded; c += vec_lanes) store(zero(), dst + c);
}

TANDEM_INLINE void stage_row(const bf16* src, std::int64_t columns, std::int64_t padded, bf16* dst) {
  __builtin_memcpy(dst, src, static_cast<std::size_t>(columns) * sizeof(bf16));
  __builtin_memset(dst + columns, 0, static_cast<std::size_t>(padded - columns) * sizeof(bf16));
}

/// Rows staged one after the other, `padded` elements each -> panels of `columns`: panel n, row i (or rows 2i
/// and 2i + 1 as pairs) at dst + n * panel_step + i * panel_lanes. With pairs, `rows` is even.
TANDEM_INLINE void to_panels(const float* rows_in, std::int64_t rows, std::int64_t padded, float* dst,
                             std::int64_t panel_step) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* src = rows_in + r * padded;
    float* out = dst + r * panel_lanes;
    for (std::int64_t c = 0; c < padded; c += panel_lanes, out += panel_step) {
      store(load(src + c), out);
      store(load(src + c + vec_lanes), out + vec_lanes);
    }
  }
}

TANDEM_INLINE void to_panels(const bf16* rows_in, std::int64_t rows, std::int64_t padded, float* dst,
                             std::int64_t panel_step) {
  for (std::int64_t r = 0; r < rows; r += 2) {
    const bf16* src = rows_in + r * padded;
    float* out = dst + r / 2 * panel_lanes;
    for (std::int64_t c = 0; c < padded; c += panel_lanes, out += panel_step) {
      for (int n = 0; n < 2; ++n) {
        const bf16* even = src + c + n * vec_lanes;
        const auto low = hn::ShiftRight<16>(f32_as_bits(load(even)));
        store(bits_as_f32(hn::Or(low, f32_as_bits(load(even + padded)))), out + n * vec_lanes);
      }
    }
  }
}

/// Adds x * 0 for every element: stays 0 unless one of them is infinite or NaN.
template <typename T>
TANDEM_INLINE bool all_finite(const T* src, std::int64_t columns) {
  Vec sum = zero();
  std::int64_t c = 0;
  for (; c + vec_lanes <= columns; c += vec_lanes) sum = hn::MulAdd(load(src + c), zero(), sum);
  if (c < columns) sum = hn::MulAdd(load_first(src + c, static_cast<int>(columns - c)), zero(), sum);
  return hn::AllTrue(f32_lanes, hn::Eq(sum, zero()));
}

template <typename T>
TANDEM_INLINE float dot_rows(const T* a, const T* b, std::int64_t columns) {
  Vec sum = zero();
  std::int64_t c = 0;
  for (; c + vec_lanes <= columns; c += vec_lanes) sum = hn::MulAdd(load(a + c), load(b + c), sum);
  if (c < columns) {
    const int rest = static_cast<int>(columns - c);
    sum = hn::MulAdd(load_first(a + c, rest), load_first(b + c, rest), sum);
  }
  return hn::GetLane(hn::SumOfLanes(f32_lanes, sum));
}

/// dst = or += src.
TANDEM_INLINE void add_words(const float* src, std::int64_t count, bool first, float* dst) {
  for (std::int64_t i = 0; i < count; ++i) dst[i] = first ? src[i] : dst[i] + src[i];
}

/// Rounds panels (row i of panel n at src + n * panel_step + i * panel_lanes) to rows of a user's tensor.
template <typename T>
TANDEM_INLINE void from_panels_as(const float* src, std::int64_t panel_step, std::int64_t rows,
                                  std::int64_t columns, const HeadRows& dst, std::int64_t first_row) {
  for (std::int64_t r = 0; r < rows; ++r) {
    T* out = row_of<T>(dst, first_row + r);
    const float* in = src + r * panel_lanes;
    for (std::int64_t c = 0; c < columns; c += vec_lanes) {
      const Vec v = load(in + c / panel_lanes * panel_step + c % panel_lanes);
      if (c + vec_lanes <= columns) {
        store(v, out + c);
      } else {
        store_first(v, out + c, static_cast<int>(columns - c));
      }
    }
  }
}

/// Writes in f32 where `gradient` says so, else as T.
template <typename T>
TANDEM_INLINE void from_panels(DType gradient, const float* src, std::int64_t panel_step, std::int64_t rows,
                               std::int64_t columns, const HeadRows& dst, std::int64_t first_row) {
  if (gradient == DType::f32) {
    from_panels_as<float>(src, panel_step, rows, columns, dst, first_row);
  } else {
    from_panels_as<T>(src, panel_step, rows, columns, dst, first_row);
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
