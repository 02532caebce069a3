// Rows on their way between the user's tensors and what the products read: widened to f32, packed into lanes,
// paired.
#pragma once

#include "cpu/simd/dot.hpp"
#include "cpu/simd/transpose.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// dst[c] = factor * src[c], widened to f32 or rounded from it.
template <typename From, typename To>
TANDEM_INLINE void scale_row(const From* src, int columns, float factor, To* dst) {
  const Vec f = broadcast(factor);
  int c = 0;
  for (; c + vec_lanes <= columns; c += vec_lanes) store(hn::Mul(load(src + c), f), dst + c);
  if (c < columns) store_first(hn::Mul(load_first(src + c, columns - c), f), dst + c, columns - c);
}

/// Widens `rows` rows to f32.
template <typename T>
void widen_rows(const T* src, std::int64_t src_stride, int rows, int columns, float* dst,
                std::int64_t dst_stride) {
  for (int r = 0; r < rows; ++r) {
    const T* s = src + r * src_stride;
    float* d = dst + r * dst_stride;
    int c = 0;
    for (; c + vec_lanes <= columns; c += vec_lanes) store(load(s + c), d + c);
    if (c < columns) store_first(load_first(s + c, columns - c), d + c, columns - c);
  }
}

#if defined(__AVX512BF16__)
/// dst[c] = src[c] in bf16, for 8-bit values, which bf16 has.
template <typename K>
TANDEM_INLINE void convert_row(const K* src, int columns, bf16* dst) {
  int c = 0;
  for (; c + 2 * vec_lanes <= columns; c += 2 * vec_lanes) {
    hn::StoreU(bf16_of(src + c), u32_lanes, reinterpret_cast<std::uint32_t*>(dst + c));
  }
  for (; c < columns; ++c) dst[c] = from_f32<bf16>(to_f32(src[c]));
}

/// dst[c] holds even[c] in the lower half and odd[c] in the upper half; a missing row counts as 0.
template <typename K>
TANDEM_INLINE void pair_converted(const K* even, const K* odd, int columns, std::uint32_t* dst) {
  int c = 0;
  for (; c + vec_lanes <= columns; c += vec_lanes) {
    hn::StoreU(pair_bf16(load(even + c), odd != nullptr ? load(odd + c) : zero()), u32_lanes, dst + c);
  }
  for (; c < columns; ++c) {
    const std::uint32_t high = odd != nullptr ? from_f32<bf16>(to_f32(odd[c])).bits : 0U;
    dst[c] = from_f32<bf16>(to_f32(even[c])).bits | (high << 16);
  }
}

/// Lanes -> rows of bf16: row i of dst holds lane i of all columns, times its scale. Column c is at
/// src + c * src_stride; dst has room for as many f32.
TANDEM_INLINE void narrow_rows(const float* src, std::int64_t src_stride, int columns, Vec scale,
                               float* dst) {
  float* const words = dst + columns / 2 * vec_lanes;
  for (int c = 0; c < columns; c += 2) {
    const Vec first = hn::Mul(load(src + c * src_stride), scale);
    const Vec second = hn::Mul(load(src + (c + 1) * src_stride), scale);
    hn::StoreU(pair_bf16(first, second), u32_lanes,
               reinterpret_cast<std::uint32_t*>(words) + c / 2 * vec_lanes);
  }
  transpose(words, vec_lanes, columns / 2, vec_lanes, dst, columns / 2);
}

/// dst[i][c] holds row 2i in the lower half and row 2i + 1 in the upper half; a missing last row counts as 0.
static inline void pair_rows(const bf16* src, std::int64_t src_stride, int rows, int columns,
                             std::uint32_t* dst, std::int64_t dst_stride) {
  for (int r = 0; r < rows; r += 2) {
    const auto* even = reinterpret_cast<const std::uint16_t*>(src + r * src_stride);
    const auto* odd = r + 1 < rows ? even + src_stride : nullptr;
    std::uint32_t* d = dst + r / 2 * dst_stride;
    int c = 0;
    for (; c + 16 <= columns; c += 16) {
      const __m512i low =
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + c)));
      __m512i high = _mm512_setzero_si512();
      if (odd != nullptr) {
        high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + c)));
      }
      _mm512_storeu_si512(d + c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
    for (; c < columns; ++c) {
      const std::uint32_t high = odd != nullptr ? odd[c] : 0U;
      d[c] = even[c] | (high << 16);
    }
  }
}
#endif

/// widen_rows of any dtype.
inline void widen_rows(const void* from, DType dtype, std::int64_t from_stride, int rows, int columns,
                       float* to, std::int64_t to_stride) {
  const auto widen = [&]<typename T>() {
    widen_rows(static_cast<const T*>(from), from_stride, rows, columns, to, to_stride);
  };
  switch (dtype) {
    case DType::f16: return widen.template operator()<f16>();
    case DType::bf16: return widen.template operator()<bf16>();
    case DType::e4m3: return widen.template operator()<e4m3>();
    case DType::s8: return widen.template operator()<s8>();
    default: return widen.template operator()<float>();
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
