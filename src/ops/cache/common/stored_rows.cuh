// Elements of rows in memory as f32 and back, several at a time. Where a Config does not promise alignment
// they are read and written one by one.
#pragma once

#include "ops/cache/config.hpp"
#include "problem/recipe.hpp"
#include "ptx/eight_bit.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/widen.cuh"

namespace tandem::stored {

/// The address of an element.
template <Stored type>
TANDEM_DEVICE const u8* at(const void* row, i64 element) {
  return static_cast<const u8*>(row) + element * stored_bytes(type);
}
template <Stored type>
TANDEM_DEVICE u8* at(void* row, i64 element) {
  return static_cast<u8*>(row) + element * stored_bytes(type);
}

template <Stored type>
TANDEM_DEVICE float unpack(u16 bits) {
  return ptx::unpack < type == Stored::f16 ? Element::f16 : Element::bf16 > (bits);
}

constexpr bool is_code(Stored type) {
  return type == Stored::e4m3 || type == Stored::s8;
}

/// Eight codes from `first` on, of which `left` are there, as f32; the others are 0.
template <Stored type, bool vectors>
TANDEM_DEVICE void load_codes(float (&x)[8], const u8* first, int left) {
  u64 codes = 0;
  if constexpr (vectors) {
    codes = ptx::load_global(reinterpret_cast<const u64*>(first));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < left) codes |= static_cast<u64>(ptx::load_global(first + i)) << (8 * i);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    constexpr OperandType operand = type == Stored::s8 ? OperandType::s8 : OperandType::e4m3;
    tile::widen_two<operand>(x[i], x[i + 1], static_cast<u32>(codes >> (i < 4 ? 0 : 32)), i % 4);
  }
}

/// `count` elements (4 or 8; of codes 8) from `col` on, with vectors by 8 or 16 bytes; past `columns` 0. With
/// vectors they are all there.
template <Stored type, bool vectors, int count>
TANDEM_DEVICE void load(float (&x)[count], const void* row, int col, int columns) {
  const u8* const first = at<type>(row, col);
  if constexpr (is_code(type)) {
    load_codes<type, vectors>(x, first, columns - col);
  } else if constexpr (!vectors) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      x[i] = 0.0F;
      if (col + i >= columns) continue;
      if constexpr (type == Stored::f32) {
        x[i] = ptx::load_global(reinterpret_cast<const float*>(first) + i);
      } else {
        x[i] = unpack<type>(ptx::load_global(reinterpret_cast<const u16*>(first) + i));
      }
    }
  } else if constexpr (type == Stored::f32) {
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      const ptx::Vec4 v = ptx::load_global(reinterpret_cast<const ptx::Vec4*>(first) + i / 4);
      x[i] = ptx::float_of(v.x);
      x[i + 1] = ptx::float_of(v.y);
      x[i + 2] = ptx::float_of(v.z);
      x[i + 3] = ptx::float_of(v.w);
    }
  } else if constexpr (count == 8) {
    const ptx::Vec4 v = ptx::load_global(reinterpret_cast<const ptx::Vec4*>(first));
    const u32 twos[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = unpack<type>(static_cast<u16>(twos[i / 2] >> (16 * (i % 2))));
  } else {
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      const u64 four = ptx::load_global(reinterpret_cast<const u64*>(first) + i / 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i + j] = unpack<type>(static_cast<u16>(four >> (16 * j)));
    }
  }
}

template <Stored type>
TANDEM_DEVICE u32 pack_two(float low, float high) {
  return type == Stored::f16 ? ptx::pack_f16(low, high) : ptx::pack_bf16(low, high);
}

/// Rounds and stores `count` elements (4 or 8) of a 16-bit type or f32, those before `columns`.
template <Stored type, bool vectors, int count>
TANDEM_DEVICE void store(const float (&x)[count], void* row, int col, int columns) {
  u8* const first = at<type>(row, col);
  if constexpr (type == Stored::f32) {
#pragma unroll
    for (int i = 0; i < count; i += vectors ? 4 : 1) {
      if constexpr (vectors) {
        ptx::store_global(reinterpret_cast<ptx::Vec4*>(first) + i / 4,
                          ptx::Vec4{ptx::bits_of(x[i]), ptx::bits_of(x[i + 1]), ptx::bits_of(x[i + 2]),
                                    ptx::bits_of(x[i + 3])});
      } else {
        if (col + i < columns) ptx::store_global(reinterpret_cast<float*>(first) + i, x[i]);
      }
    }
  } else if constexpr (vectors && count == 8) {
    ptx::store_global(reinterpret_cast<ptx::Vec4*>(first),
                      ptx::Vec4{pack_two<type>(x[0], x[1]), pack_two<type>(x[2], x[3]),
                                pack_two<type>(x[4], x[5]), pack_two<type>(x[6], x[7])});
  } else {
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      const u32 low = pack_two<type>(x[i], x[i + 1]);
      const u32 high = pack_two<type>(x[i + 2], x[i + 3]);
      if constexpr (vectors) {
        ptx::store_global(reinterpret_cast<u64*>(first) + i / 4, static_cast<u64>(high) << 32 | low);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const u32 two = j < 2 ? low : high;
          if (col + i + j < columns) {
            ptx::store_global(reinterpret_cast<u16*>(first) + i + j, static_cast<u16>(two >> (16 * (j % 2))));
          }
        }
      }
    }
  }
}

/// x over scale as the code is made of: an infinite x counts as NaN, as every NaN is the same one.
TANDEM_DEVICE float quotient(float x, float scale) {
  constexpr float largest_float = 3.4028235e38F;
  const float q = ptx::divide(x, scale);
  const bool number = x >= -largest_float && x <= largest_float && q == q;
  return number ? q : ptx::quiet_nan();
}

/// Eight elements over their scale, for codes: the f32 quotient that IEEE 754 has, but for quotients below
/// 2^-23, whose last bits no code shows. By a reciprocal and corrections (Markstein, IA-64 and Elementary
/// Functions, 2000, chapter 8), which needs none of the cases of a division. For elements of 16-bit types one
/// correction is enough: for every significand of a scale and of an element, tried one by one. Zeros keep
/// their sign. Elements that are not below 2^20 times their scale are divided, and all by scales below zero,
/// or so small or large that a residual could be too small for f32.
template <bool of_16_bits>
TANDEM_DEVICE void divide_by(float (&x)[8], float scale) {
  constexpr float most = 0x1p20F;
  const bool usual = scale >= 0x1p-80F && scale <= 0x1p80F;
  const float limit = usual ? scale * most : 0.0F;
  bool all = true;
#pragma unroll
  for (int i = 0; i < 8; ++i) all = all && ptx::abs(x[i]) < limit;
  if (!all) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = quotient(x[i], scale);
    return;
  }
  const float inverse = ptx::divide(1.0F, scale);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float q = ptx::multiply(x[i], inverse);
#pragma unroll
    for (int step = 0; step < (of_16_bits ? 1 : 2); ++step) {
      q = ptx::fma(-ptx::fma(q, scale, -x[i]), inverse, q);
    }
    x[i] = q;
  }
}

/// The s8 code of a quotient; of NaN 0.
TANDEM_DEVICE u32 s8_code(float q) {
  const float inside = q > largest_s8 ? largest_s8 : (q < -largest_s8 ? -largest_s8 : q);
  return q == q ? ptx::round_s8(inside) & 0xFFU : 0U;
}

/// The codes of eight quotients.
template <Stored type>
TANDEM_DEVICE u64 codes_of(const float (&q)[8]) {
  if constexpr (type == Stored::e4m3) {
    const u32 low = ptx::pack_e4m3(q[0], q[1], q[2], q[3]);
    const u32 high = ptx::pack_e4m3(q[4], q[5], q[6], q[7]);
    return static_cast<u64>(high) << 32 | low;
  } else {
    u64 codes = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) codes |= static_cast<u64>(s8_code(q[i])) << (8 * i);
    return codes;
  }
}

/// Rounds eight quotients to codes and stores them.
template <Stored type, bool vectors>
TANDEM_DEVICE void store_quotients(const float (&q)[8], void* row, int col, int columns) {
  const u64 codes = codes_of<type>(q);
  u8* const first = static_cast<u8*>(row) + col;
  if constexpr (vectors) {
    ptx::store_global(reinterpret_cast<u64*>(first), codes);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (col + i < columns) ptx::store_global(first + i, static_cast<u8>(codes >> (8 * i)));
    }
  }
}

/// Stores eight elements over their scale, which are lost.
template <Stored type, bool vectors, bool of_16_bits>
TANDEM_DEVICE void store_codes(float (&x)[8], float scale, void* row, int col, int columns) {
  divide_by<of_16_bits>(x, scale);
  store_quotients<type, vectors>(x, row, col, columns);
}

/// The largest magnitude of a row, as bits, which order them: infinities and NaNs are the largest.
struct Magnitude {
  static constexpr u32 infinite = 0x7f800000U;
  u32 bits = 0;

  TANDEM_DEVICE void add(const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) bits = max(bits, ptx::bits_of(x[i]) & 0x7fffffffU);
  }
  TANDEM_DEVICE void add_finite(const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 own = ptx::bits_of(x[i]) & 0x7fffffffU;
      bits = max(bits, own < infinite ? own : 0U);
    }
  }
  TANDEM_DEVICE bool finite() const {
    return bits < infinite;
  }
  /// Shares the largest of `lanes` neighbouring lanes, a power of two; all lanes of the warp call.
  TANDEM_DEVICE void share(int lanes) {
    for (int step = 1; step < lanes; step *= 2) bits = max(bits, ptx::shuffle_xor(bits, step));
  }
};

/// The scale that the quantiser gives a row of its own, and what its elements are multiplied by
/// (cpu/simd/eight_bit.hpp has the same rule): 0 of a row of zeros. s8 has no NaN, and a NaN as scale in its
/// place.
struct RowScale {
  float stored = 0.0F;
  float inverse = 0.0F;
};
/// `m` is of the finite elements, which may not be all.
template <Stored type>
TANDEM_DEVICE RowScale scale_of(const Magnitude& m, bool all_finite) {
  constexpr float smallest_largest = 0x1p-100F;
  constexpr float limit = type == Stored::e4m3 ? largest_e4m3 : largest_s8;
  const float largest = ptx::float_of(m.bits);
  RowScale scale;
  if (largest >= smallest_largest) scale = {ptx::divide(largest, limit), ptx::divide(limit, largest)};
  if (type == Stored::s8 && !all_finite) scale.stored = ptx::quiet_nan();
  return scale;
}

/// x times the inverse of its scale, as the code is made of.
TANDEM_DEVICE float product(float x, float inverse) {
  constexpr float largest_float = 3.4028235e38F;
  return x >= -largest_float && x <= largest_float ? ptx::multiply(x, inverse) : ptx::quiet_nan();
}

}  // namespace tandem::stored
