// Elements of captured tensors, by lanes.
#pragma once

#include "cpu/common/convert.hpp"
#include "cpu/functions/kernel.hpp"
#include "cpu/simd/transpose.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// As the bits of an f32 or i32, or the lower ones of an i64.
TANDEM_INLINE std::uint32_t bits_of(float x) {
  return __builtin_bit_cast(std::uint32_t, x);
}
TANDEM_INLINE std::uint32_t bits_of(f16 x) {
  return bits_of(to_f32(x));
}
TANDEM_INLINE std::uint32_t bits_of(bf16 x) {
  return bits_of(to_f32(x));
}
TANDEM_INLINE std::uint32_t bits_of(std::int32_t x) {
  return static_cast<std::uint32_t>(x);
}
TANDEM_INLINE std::uint32_t bits_of(std::int8_t x) {
  return static_cast<std::uint32_t>(static_cast<std::int32_t>(x));
}
TANDEM_INLINE std::uint32_t bits_of(std::int64_t x) {
  return static_cast<std::uint32_t>(x);
}

/// vec_lanes neighbours in memory, likewise.
template <typename T>
TANDEM_INLINE Vec load_bits(const T* p) {
  if constexpr (__is_same(T, std::int32_t)) {
    return hn::BitCast(f32_lanes, hn::LoadU(i32_lanes, p));
  } else if constexpr (__is_same(T, std::int8_t)) {
    const hn::Rebind<std::int8_t, Lanes> quarter;
    return hn::BitCast(f32_lanes, hn::PromoteTo(i32_lanes, hn::LoadU(quarter, p)));
  } else {
    return load(p);
  }
}

/// Adds what one dimension's indices contribute to the offsets of a register of elements.
TANDEM_INLINE void add_offsets(Vec index, std::int64_t size, std::int64_t stride, std::int64_t* offsets) {
  std::int32_t indices[vec_lanes];
  hn::StoreU(hn::BitCast(i32_lanes, index), i32_lanes, indices);
  for (int i = 0; i < vec_lanes; ++i) {
    std::int64_t at = indices[i];
    at = at < 0 ? at + size : at;
    at = at < 0 ? 0 : (at < size ? at : size - 1);
    offsets[i] += at * stride;
  }
}

/// The offset of an index that all lanes share.
TANDEM_INLINE std::int64_t offset_of(float index, std::int64_t size, std::int64_t stride) {
  std::int64_t at = __builtin_bit_cast(std::int32_t, index);
  at = at < 0 ? at + size : at;
  at = at < 0 ? 0 : (at < size ? at : size - 1);
  return at * stride;
}

/// Keys [0, count) whose indices of dimension `dim` follow one another inside the tensor, where they do so in
/// memory, too: a register of keys for each row, turned into one of rows for each key. Returns how many keys
/// that were.
template <typename T>
int read_neighbours(const ProgramTensor& t, const FunctionSource& index, int dim, const std::int64_t* base,
                    int count, float* result) {
  std::int32_t first;
  std::int32_t last;
  __builtin_memcpy(&first, index.p, sizeof first);
  __builtin_memcpy(&last, index.p + count - 1, sizeof last);
  if (t.stride[dim] != 1 || first < 0 || last >= t.shape[dim] || last - first != count - 1) return 0;
  for (int j = 1; j < count; ++j) {
    if (__builtin_bit_cast(std::int32_t, index.p[j]) != first + j) return 0;
  }
  const T* const data = static_cast<const T*>(t.data) + first;
  const int whole = count / vec_lanes * vec_lanes;
  for (int j = 0; j < whole; j += vec_lanes) {
    float rows[vec_lanes * vec_lanes];
    for (int i = 0; i < vec_lanes; ++i) store(load_bits(data + base[i] + j), rows + i * vec_lanes);
    transpose(rows, vec_lanes, vec_lanes, vec_lanes, result + j * vec_lanes, vec_lanes);
  }
  return whole;
}

/// `high`: of 64-bit integers, where their upper halves go.
template <typename T>
void read_elements(const ProgramTensor& t, const FunctionSource* indices, int count, float* result,
                   float* high) {
  const T* const data = static_cast<const T*>(t.data);
  std::int64_t base[vec_lanes] = {};
  for (int d = 0; d < t.rank; ++d) {  // the same for every register
    if (indices[d].step == 0) add_offsets(load(indices[d].p), t.shape[d], t.stride[d], base);
  }
  int start = 0;
  int varying = 0;
  int by_key = 0;
  for (int d = 0; d < t.rank; ++d) {
    if (indices[d].step == 0) continue;
    ++varying;
    if (indices[d].broadcast) by_key = d;
  }
  if constexpr (sizeof(T) < 8) {
    if (varying == 1 && indices[by_key].broadcast) {
      start = read_neighbours<T>(t, indices[by_key], by_key, base, count, result);
    }
  }
  for (int j = start; j < count; ++j) {
    std::int64_t offsets[vec_lanes];
    std::int64_t shared = 0;
    __builtin_memcpy(offsets, base, sizeof base);
    for (int d = 0; d < t.rank; ++d) {
      if (indices[d].step == 0) continue;
      if (indices[d].broadcast) {
        shared += offset_of(indices[d].p[j], t.shape[d], t.stride[d]);
      } else {
        add_offsets(load(indices[d].p + j * indices[d].step), t.shape[d], t.stride[d], offsets);
      }
    }
    std::uint32_t bits[vec_lanes];
    for (int i = 0; i < vec_lanes; ++i) bits[i] = bits_of(data[offsets[i] + shared]);
    __builtin_memcpy(result + j * vec_lanes, bits, sizeof bits);
    if constexpr (sizeof(T) == 8) {
      for (int i = 0; i < vec_lanes; ++i)
        bits[i] = static_cast<std::uint32_t>(static_cast<std::uint64_t>(data[offsets[i] + shared]) >> 32);
      __builtin_memcpy(high + j * vec_lanes, bits, sizeof bits);
    }
  }
}

/// `indices` has one source for each dimension.
inline void read_tensor(const ProgramTensor& t, const FunctionSource* indices, int count, float* result,
                        float* high) {
  switch (t.dtype) {
    case DType::f32: return read_elements<float>(t, indices, count, result, high);
    case DType::f16: return read_elements<f16>(t, indices, count, result, high);
    case DType::bf16: return read_elements<bf16>(t, indices, count, result, high);
    case DType::i32: return read_elements<std::int32_t>(t, indices, count, result, high);
    case DType::i64: return read_elements<std::int64_t>(t, indices, count, result, high);
    case DType::s8: return read_elements<std::int8_t>(t, indices, count, result, high);
    case DType::e4m3: break;
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
