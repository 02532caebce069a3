// The matrix unit of Intel's processors (AMX): eight tiles of 16 rows of 64 bytes, and products of them.
//
//   C (16 x 16 f32) += A (16 x 32 bf16) B (32 x 16 bf16)     B holds rows 2i and 2i + 1 as pairs, in its row
//   i
//   C (16 x 16 s32) += A (16 x 64 s8) B (64 x 16 8 bits)     B holds rows 4i to 4i + 3 side by side
//
// A product takes 16 cycles beside whatever the vector unit does. The target amx_emulated has plain code in
// place of the instructions, with the same sums in the same order, so that tests of the kernels run on every
// machine. Source: Intel's Software Developer's Manual, TDPBF16PS, TDPBSSD and TDPBSUD.
#pragma once

#include "cpu/simd/vec.hpp"

#if defined(TANDEM_MATRIX_UNIT)

namespace tandem::cpu::TANDEM_TARGET {

constexpr bool has_matrix_unit = true;
constexpr int tile_bytes = 1024;
constexpr int tile_row_bytes = 64;

#if defined(TANDEM_EMULATED)

/// What the instructions keep in the processor.
struct TileFile {
  alignas(64) unsigned char bytes[8][tile_bytes];
};
static thread_local TileFile tile_file;

/// The tiles are usable in a scope of this.
struct MatrixUnit {
  MatrixUnit() { __builtin_memset(&tile_file, 0, sizeof tile_file); }
  ~MatrixUnit() {}
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
};

template <int tile>
TANDEM_INLINE void load_tile(const void* p, std::int64_t stride) {
  for (int r = 0; r < 16; ++r) {
    __builtin_memcpy(tile_file.bytes[tile] + r * tile_row_bytes,
                     static_cast<const unsigned char*>(p) + r * stride, tile_row_bytes);
  }
}

template <int tile>
TANDEM_INLINE void stream_tile(const void* p, std::int64_t stride) {
  load_tile<tile>(p, stride);
}

template <int tile>
TANDEM_INLINE void store_tile(void* p, std::int64_t stride) {
  for (int r = 0; r < 16; ++r) {
    __builtin_memcpy(static_cast<unsigned char*>(p) + r * stride, tile_file.bytes[tile] + r * tile_row_bytes,
                     tile_row_bytes);
  }
}

template <int tile>
TANDEM_INLINE void clear_tile() {
  __builtin_memset(tile_file.bytes[tile], 0, tile_bytes);
}

/// The products of even columns have one sum and those of odd ones another; C gets the sum of both.
[[gnu::noinline]] static void multiply_emulated(float* c, const std::uint32_t* a, const std::uint32_t* b) {
  const auto low = [](UVec word) { return bits_as_f32(hn::ShiftLeft<16>(word)); };
  const auto high = [](UVec word) { return bits_as_f32(hn::And(word, hn::Set(u32_lanes, 0xFFFF0000U))); };
  for (int m = 0; m < 16; m += 4) {
    Vec even[4];
    Vec odd[4];
    for (int r = 0; r < 4; ++r) even[r] = odd[r] = zero();
    for (int k = 0; k < 16; ++k) {
      const UVec pair = hn::LoadU(u32_lanes, b + k * 16);
      const Vec first = low(pair);
      const Vec second = high(pair);
      for (int r = 0; r < 4; ++r) {
        const UVec word = hn::Set(u32_lanes, a[(m + r) * 16 + k]);
        even[r] = hn::MulAdd(low(word), first, even[r]);
        odd[r] = hn::MulAdd(high(word), second, odd[r]);
      }
    }
    for (int r = 0; r < 4; ++r) {
      float* const sum = c + (m + r) * 16;
      store(hn::Add(load(sum), hn::Add(even[r], odd[r])), sum);
    }
  }
}

/// The unit takes subnormal numbers for 0, whatever the thread does.
template <int c, int a, int b>
TANDEM_INLINE void multiply_tiles_bf16() {
  const unsigned kept = _mm_getcsr();
  _mm_setcsr(kept | 0x8040U);  // DAZ and FTZ
  multiply_emulated(reinterpret_cast<float*>(tile_file.bytes[c]),
                    reinterpret_cast<const std::uint32_t*>(tile_file.bytes[a]),
                    reinterpret_cast<const std::uint32_t*>(tile_file.bytes[b]));
  _mm_setcsr(kept);
}

/// Whole numbers, whose sums are exact. `B`: std::int8_t or std::uint8_t.
template <typename B>
[[gnu::noinline]] void multiply_bytes_emulated(std::int32_t* c, const std::int8_t* a, const B* b) {
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 16; ++n) {
        std::int32_t sum = 0;
        for (int i = 0; i < 4; ++i) sum += a[(m * 16 + k) * 4 + i] * b[(k * 16 + n) * 4 + i];
        c[m * 16 + n] += sum;
      }
    }
  }
}

template <int c, int a, int b>
TANDEM_INLINE void multiply_tiles_s8() {
  multiply_bytes_emulated(reinterpret_cast<std::int32_t*>(tile_file.bytes[c]),
                          reinterpret_cast<const std::int8_t*>(tile_file.bytes[a]),
                          reinterpret_cast<const std::int8_t*>(tile_file.bytes[b]));
}

template <int c, int a, int b>
TANDEM_INLINE void multiply_tiles_s8_u8() {
  multiply_bytes_emulated(reinterpret_cast<std::int32_t*>(tile_file.bytes[c]),
                          reinterpret_cast<const std::int8_t*>(tile_file.bytes[a]), tile_file.bytes[b]);
}

#else

/// What LDTILECFG reads.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// The tiles are usable in a scope of this. They are released at its end: a thread that keeps them pays 8 KB
/// at each switch between threads.
struct MatrixUnit {
  MatrixUnit() {
    static constexpr TileShapes shapes;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~MatrixUnit() { asm volatile("tilerelease"); }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
};

/// `stride` bytes lie between rows.
template <int tile>
TANDEM_INLINE void load_tile(const void* p, std::int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}

/// load_tile() of what is not wanted in the first-level cache.
template <int tile>
TANDEM_INLINE void stream_tile(const void* p, std::int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
TANDEM_INLINE void store_tile(void* p, std::int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
TANDEM_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

template <int c, int a, int b>
TANDEM_INLINE void multiply_tiles_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

template <int c, int a, int b>
TANDEM_INLINE void multiply_tiles_s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

/// A is signed, B is not.
template <int c, int a, int b>
TANDEM_INLINE void multiply_tiles_s8_u8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

#endif

/// What the words of A and B are.
enum class TileOperands { bf16, s8, s8_u8 };

template <TileOperands operands, int c, int a, int b>
TANDEM_INLINE void multiply_tiles() {
  if constexpr (operands == TileOperands::bf16) multiply_tiles_bf16<c, a, b>();
  if constexpr (operands == TileOperands::s8) multiply_tiles_s8<c, a, b>();
  if constexpr (operands == TileOperands::s8_u8) multiply_tiles_s8_u8<c, a, b>();
}

/// C is tiles 0 to 3: 32 rows, and 16 or 32 columns. Strides are in words, from row to row.
template <int columns>
TANDEM_INLINE void load_sums(const float* c, std::int64_t stride) {
  load_tile<0>(c, stride * 4);
  load_tile<1>(c + 16 * stride, stride * 4);
  if constexpr (columns == 32) {
    load_tile<2>(c + 16, stride * 4);
    load_tile<3>(c + 16 * stride + 16, stride * 4);
  }
}

template <int columns>
TANDEM_INLINE void clear_sums() {
  clear_tile<0>();
  clear_tile<1>();
  if constexpr (columns == 32) {
    clear_tile<2>();
    clear_tile<3>();
  }
}

template <int columns>
TANDEM_INLINE void store_sums(float* c, std::int64_t stride) {
  store_tile<0>(c, stride * 4);
  store_tile<1>(c + 16 * stride, stride * 4);
  if constexpr (columns == 32) {
    store_tile<2>(c + 16, stride * 4);
    store_tile<3>(c + 16 * stride + 16, stride * 4);
  }
}

/// 32 rows of A as two tiles, `below` words apart; the next 16 words of their depth are `step` further.
struct TileRows {
  const void* tiles;
  std::int64_t stride;
  std::int64_t below;
  std::int64_t step;
};

/// C += A B over `steps` tiles of depth. A of bytes is streamed: 2 % faster, with bf16 3 % slower.
template <int columns, TileOperands operands = TileOperands::bf16>
TANDEM_INLINE void add_products_of_tiles(const TileRows& a, const void* b, std::int64_t b_stride,
                                         std::int64_t steps) {
  const auto* of_a = static_cast<const std::uint32_t*>(a.tiles);
  const auto* of_b = static_cast<const std::uint32_t*>(b);
  const auto load_a = [&]<int tile>(const std::uint32_t* from) __attribute__((always_inline)) {
    if constexpr (operands == TileOperands::bf16) {
      load_tile<tile>(from, a.stride * 4);
    } else {
      stream_tile<tile>(from, a.stride * 4);
    }
  };
  for (std::int64_t i = 0; i < steps; ++i, of_a += a.step, of_b += 16 * b_stride) {
    load_a.template operator()<4>(of_a);
    load_tile<6>(of_b, b_stride * 4);
    multiply_tiles<operands, 0, 4, 6>();
    load_a.template operator()<5>(of_a + a.below);
    multiply_tiles<operands, 1, 5, 6>();
    if constexpr (columns == 32) {
      load_tile<7>(of_b + 16, b_stride * 4);
      multiply_tiles<operands, 2, 4, 7>();
      multiply_tiles<operands, 3, 5, 7>();
    }
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET

#else

namespace tandem::cpu::TANDEM_TARGET {

constexpr bool has_matrix_unit = false;
struct MatrixUnit {
  MatrixUnit() {}
};

}  // namespace tandem::cpu::TANDEM_TARGET

#endif
