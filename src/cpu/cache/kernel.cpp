// Rows that are appended to a cache, embedded and rounded to 8 bits on the way, and rows of parts that are
// merged. Compiled once for each instruction set (targets/targets.cmake).
#include "cpu/cache/rows.hpp"
#include "cpu/simd/eight_bit.hpp"
#include "cpu/simd/rotary.hpp"
#include "cpu/simd/stage.hpp"
#include "problem/append_problem.hpp"

namespace tandem::cpu::TANDEM_TARGET {
namespace {

/// `count` elements as f32.
void widen(const void* from, DType dtype, int count, float* to) {
  widen_rows(from, dtype, 0, 1, count, to, 0);
}

template <typename T>
void narrow(const float* from, int count, void* to) {
  T* const out = static_cast<T*>(to);
  int c = 0;
  for (; c + vec_lanes <= count; c += vec_lanes) store(load(from + c), out + c);
  if (c < count) store_first(load_first(from + c, count - c), out + c, count - c);
}

template <OperandType type>
void round_to_eight_bit(const float* from, int count, float scale, void* to) {
  auto* const out = static_cast<std::uint8_t*>(to);
  for (int c = 0; c < count; ++c) {
    const float quotient = from[c] / scale;
    // 0 / 0 has another sign on every processor.
    out[c] = eight_bit_of_quotient<type>(from[c], quotient == quotient ? quotient : __builtin_nanf(""));
  }
}

/// Takes the scale that quantize gives a row, and returns it.
template <OperandType type>
float round_by_row(const float* from, int count, void* to) {
  auto* const out = static_cast<std::uint8_t*>(to);
  const Magnitudes of_row = magnitudes_of(from, count);
  const Scale scale = scale_for(of_row.largest, limit_of(type));
  for (int c = 0; c < count; ++c) out[c] = eight_bit_of<type>(from[c], scale.inverse);
  return stored_scale<type>(scale.scale, of_row.finite);
}

void narrow(const float* from, int count, float scale, DType dtype, void* to) {
  switch (dtype) {
    case DType::f16: return narrow<f16>(from, count, to);
    case DType::bf16: return narrow<bf16>(from, count, to);
    case DType::e4m3: return round_to_eight_bit<OperandType::e4m3>(from, count, scale, to);
    case DType::s8: return round_to_eight_bit<OperandType::s8>(from, count, scale, to);
    default: return narrow<float>(from, count, to);
  }
}

TANDEM_INLINE long long bytes_of(DType dtype) {
  return dtype == DType::f32 ? 4 : (dtype == DType::f16 || dtype == DType::bf16 ? 2 : 1);
}

/// Rows that stay as they are.
void copy(const AppendRow& r) {
  const long long item = bytes_of(r.from_dtype);
  const auto* from = static_cast<const char*>(r.from);
  auto* to = static_cast<char*>(r.to);
  const bool dense = r.heads == 1 || (r.from_stride == r.dim && r.to_stride == r.dim);
  const int heads = dense ? 1 : r.heads;
  const auto bytes = static_cast<unsigned long>(item * r.dim * (dense ? r.heads : 1));
  for (int h = 0; h < heads; ++h) {
    __builtin_memcpy(to + h * r.to_stride * item, from + h * r.from_stride * item, bytes);
  }
}

void append(const AppendRow& r) {
  if (r.cos == nullptr && r.from_dtype == r.to_dtype) return copy(r);
  float cos[max_row / 2];
  float sin[max_row / 2];
  float row[max_row];
  if (r.cos != nullptr) {
    widen(r.cos, r.table_dtype, r.rotary_dim / 2, cos);
    widen(r.sin, r.table_dtype, r.rotary_dim / 2, sin);
  }
  for (int h = 0; h < r.heads; ++h) {
    const auto* const from = static_cast<const char*>(r.from) + h * r.from_stride * bytes_of(r.from_dtype);
    const float scale = r.scales != nullptr ? r.scales[h * r.scale_stride] : 1.0F;
    widen(from, r.from_dtype, r.dim, row);
    if (is_eight_bit(r.from_dtype)) scale_row(row, r.dim, scale, row);
    if (r.cos != nullptr) embed_row(row, cos, sin, r.rotary_dim, r.interleaved);
    char* const to = static_cast<char*>(r.to) + h * r.to_stride * bytes_of(r.to_dtype);
    if (r.found_scales != nullptr) {
      r.found_scales[h * r.found_stride] = r.to_dtype == DType::s8
                                               ? round_by_row<OperandType::s8>(row, r.dim, to)
                                               : round_by_row<OperandType::e4m3>(row, r.dim, to);
      continue;
    }
    narrow(row, r.dim, scale, r.to_dtype, to);
  }
}

/// Sums in f64, rounded once: they are right to the last bit however many parts there are.
void merge(const MergeRow& r) {
  float row[max_row];
  double sums[max_row];
  widen(r.from[0], r.from_dtype, r.dim, row);
  for (int c = 0; c < r.dim; ++c) sums[c] = r.weights[0] * static_cast<double>(row[c]);
  for (int i = 1; i < r.parts; ++i) {
    widen(r.from[i], r.from_dtype, r.dim, row);
    for (int c = 0; c < r.dim; ++c) sums[c] += r.weights[i] * static_cast<double>(row[c]);
  }
  for (int c = 0; c < r.dim; ++c) row[c] = static_cast<float>(sums[c]);
  narrow(row, r.dim, 1.0F, r.to_dtype, r.to);
}

}  // namespace

extern const CacheKernel cache_kernel;
const CacheKernel cache_kernel{.append = append, .merge = merge};

}  // namespace tandem::cpu::TANDEM_TARGET
