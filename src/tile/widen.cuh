// 8-bit values as 16-bit elements, exactly: e4m3 has 4 significant bits and s8 has 8, which f16 and bf16
// have, too. Where K or V have 8 bits in memory, products read tiles that convert_tile has made.
#pragma once

#include "problem/recipe.hpp"
#include "ptx/eight_bit.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/byte_tile.cuh"
#include "tile/fragment.cuh"
#include "tile/shared_tile.cuh"

namespace tandem::tile {

/// Two neighbouring values of `four`, from number `first` (0 or 2) on, as f32.
template <OperandType type>
TANDEM_DEVICE void widen_two(float& low, float& high, u32 four, int first) {
  if constexpr (type == OperandType::e4m3) {
    ptx::unpack_e4m3(low, high, four >> (8 * first));
  } else {
    // The byte + 128 becomes the last bits of 2^23, where the last bit is worth 1.
    const u32 raised = four ^ 0x80808080U;
    const u32 selector = 0x7440U + static_cast<u32>(first);
    low = ptx::float_of(ptx::permute_bytes(raised, 0x4B000000U, selector)) - (0x1p23F + 128.0F);
    high = ptx::float_of(ptx::permute_bytes(raised, 0x4B000000U, selector + 1)) - (0x1p23F + 128.0F);
  }
}

/// Four values as two words of 16-bit elements.
template <OperandType type, Element element>
TANDEM_DEVICE void widen_four(u32& low, u32& high, u32 four) {
  if constexpr (type == OperandType::e4m3) {
    ptx::e4m3_to_f16(low, high, four);
    if constexpr (element == Element::bf16) {
      low = ptx::pack_bf16(unpack_low<Element::f16>(low), unpack_high<Element::f16>(low));
      high = ptx::pack_bf16(unpack_low<Element::f16>(high), unpack_high<Element::f16>(high));
    }
  } else {
    u32* const words[2] = {&low, &high};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (element == Element::bf16) {
        float first;
        float second;
        widen_two<type>(first, second, four, 2 * i);
        *words[i] = ptx::pack_bf16(first, second);
      } else {
        // The byte + 128 becomes the last bits of 1024, where the last bit is worth 1.
        const u32 raised = ptx::permute_bytes(four ^ 0x80808080U, 0x64646464U, i == 0 ? 0x4140U : 0x4342U);
        *words[i] = ptx::subtract_f16(raised, 0x64806480U);
      }
    }
  }
}

/// Widens them times their scales, which alternate, rounded to 16 bits: `scales[0]` is that of the first.
template <OperandType type, Element element>
TANDEM_DEVICE void widen_four(u32& low, u32& high, u32 four, const float (&scales)[2]) {
  u32* const words[2] = {&low, &high};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float first;
    float second;
    widen_two<type>(first, second, four, 2 * i);
    first *= scales[0];
    second *= scales[1];
    *words[i] = element == Element::bf16 ? ptx::pack_bf16(first, second) : ptx::pack_f16(first, second);
  }
}
/// All of one scale.
template <OperandType type, Element element>
TANDEM_DEVICE void widen_four(u32& low, u32& high, u32 four, float scale) {
  const float scales[2] = {scale, scale};
  widen_four<type, element>(low, high, four, scales);
}

/// Sixteen values to two places of 16 bytes, times their scale if there is one.
template <OperandType type, Element element, typename... Scale>
TANDEM_DEVICE void widen_sixteen(char* left, char* right, const ptx::Vec4& bytes, Scale... scale) {
  ptx::Vec4 out;
  widen_four<type, element>(out.x, out.y, bytes.x, scale...);
  widen_four<type, element>(out.z, out.w, bytes.y, scale...);
  ptx::store_shared(reinterpret_cast<ptx::Vec4*>(left), out);
  widen_four<type, element>(out.x, out.y, bytes.z, scale...);
  widen_four<type, element>(out.z, out.w, bytes.w, scale...);
  ptx::store_shared(reinterpret_cast<ptx::Vec4*>(right), out);
}

/// Rows of a tile that convert_tile gives a warp follow one another in runs of so many.
template <typename From>
constexpr int converted_run = warp_size / (From::strip_cols / 16);
/// The row of the tile whose scale lane `lane` of warp `warp` passes to convert_tile: of its warp's rows each
/// lane has one. Lanes without one have rows past the tile's end.
template <typename From, int warps>
TANDEM_DEVICE int scaled_row(int warp, int lane) {
  constexpr int run = converted_run<From>;
  return lane / run * (warps * run) + warp * run + lane % run;
}

/// Converts a tile of 8-bit values: the share of warp `warp` of `warps`, whose lanes all call. Each lane
/// takes 16 bytes at a time to two places of 16 bytes in a row of the target's swizzled strips. Eight lanes,
/// whose accesses are one, meet all banks: they have eight vectors of a row of 128 bytes, the right half of
/// them of the neighbouring row, or four vectors of two rows. The vectors that they store first are then even
/// ones in one row and odd ones in the other, since the swizzle exchanges neighbours with the row. From a
/// lane's vector to its next one are a multiple of eight rows, so that the swizzle, and with it the address,
/// is the same but for a constant. `scales`: none, or the lane's scale, of row scaled_row().
template <OperandType type, Element element, int warps, int rows, int cols, typename... Scales>
TANDEM_DEVICE void convert_tile(SharedTile<rows, cols>& to, const ByteTile<rows, cols>& from, int warp,
                                int lane, Scales... scales) {
  using From = ByteTile<rows, cols>;
  using To = SharedTile<rows, cols>;
  constexpr int vectors = From::strip_cols / 16;
  constexpr int rows_of_warp = converted_run<From>;
  constexpr int step_rows = warps * rows_of_warp;
  constexpr int steps = rows / step_rows;
  constexpr int batch = steps % 4 == 0 ? 4 : 1;  // vectors that are loaded before any is stored
  static_assert(rows % step_rows == 0 && step_rows % 8 == 0 && cols % 64 == 0);
  static_assert(sizeof...(scales) == 0 || steps * rows_of_warp <= warp_size);
  const int vector = lane % vectors;
  const int row = warp * rows_of_warp + ((lane / vectors) ^ (vectors == 8 ? vector / 4 : 0));
#pragma unroll
  for (int strip = 0; strip < From::strips; ++strip) {
    const int col = strip * From::strip_cols + vector * 16;
    const char* source = from.data + From::place(row, col);
    char* left = to.address(row, col);
    char* right = to.address(row, col + 8);
#pragma unroll 1
    for (int step = 0; step < steps; step += batch) {
      ptx::Vec4 raw[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        raw[i] =
            ptx::load_shared(reinterpret_cast<const ptx::Vec4*>(source + i * step_rows * From::strip_cols));
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        char* const at_left = left + i * step_rows * To::row_bytes;
        char* const at_right = right + i * step_rows * To::row_bytes;
        if constexpr (sizeof...(scales) == 0) {
          widen_sixteen<type, element>(at_left, at_right, raw[i]);
        } else {
          // From the lane that has the scale of this step's row.
          const int of_row = (step + i) * rows_of_warp + row % rows_of_warp;
          widen_sixteen<type, element>(at_left, at_right, raw[i], ptx::shuffle(scales, of_row)...);
        }
      }
      source += batch * step_rows * From::strip_cols;
      left += batch * step_rows * To::row_bytes;
      right += batch * step_rows * To::row_bytes;
    }
  }
}

}  // namespace tandem::tile
