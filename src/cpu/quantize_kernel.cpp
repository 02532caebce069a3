// Rows of one head to 8-bit codes and scales: mean removed, rotated, scaled, rounded. Compiled once for each
// instruction set (targets.cmake); the loops are plain, and the compiler's to vectorise.
#include "cpu/eight_bit_tile.hpp"
#include "cpu/simd/rotate.hpp"
#include "cpu/simd/stage.hpp"

namespace tandem::cpu::TANDEM_TARGET {
namespace {

/// Below, a group is taken for zeros: the inverse of its scale might overflow. Scale and codes are 0 then.
constexpr float smallest_largest = 0x1p-100F;

constexpr float limit_of(Codes codes) {
  return codes == Codes::s8 ? largest_s8 : largest_e4m3;
}

TANDEM_INLINE bool is_finite(float x) {
  return __builtin_fabsf(x) <= 3.4028235e38F;
}

TANDEM_INLINE float finite_magnitude(float x) {
  return is_finite(x) ? __builtin_fabsf(x) : 0.0F;
}

template <typename T>
void widen(const QuantizeRows& r) {
  widen_rows(static_cast<const T*>(r.data), r.stride, r.rows, r.dim, r.scratch, r.dim);
}

/// The rotary embedding of the rows. Products are rounded before they are added, as on the GPU.
void embed(const QuantizeRows& r) {
  const int half = r.rotary.dim / 2;
  for (int i = 0; i < r.rows; ++i) {
    float* const row = r.scratch + static_cast<std::int64_t>(i) * r.dim;
    const float* const cos = r.rotary.cos + i * r.rotary.cos_stride;
    const float* const sin = r.rotary.sin + i * r.rotary.sin_stride;
    for (int c = 0; c < half; ++c) {
      float& first = row[r.rotary.interleaved ? 2 * c : c];
      float& second = row[r.rotary.interleaved ? 2 * c + 1 : c + half];
      const float a = first;
      const float b = second;
      first = a * cos[c] - b * sin[c];
      second = b * cos[c] + a * sin[c];
    }
  }
}

/// The rows as f32, as the user has them but for the rotary embedding.
void load_rows(const QuantizeRows& r) {
  switch (r.dtype) {
    case DType::f16: widen<f16>(r); break;
    case DType::bf16: widen<bf16>(r); break;
    default: widen<float>(r); break;
  }
  if (r.rotary.cos != nullptr) embed(r);
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

float largest_of(const float* x, std::int64_t count) {
  float largest = 0.0F;
  for (std::int64_t i = 0; i < count; ++i) {
    const float magnitude = finite_magnitude(x[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

float largest(const QuantizeRows& r) {
  prepare(r);
  return largest_of(r.scratch, static_cast<std::int64_t>(r.rows) * r.dim);
}

struct Scale {
  float scale;
  float inverse;
};
TANDEM_INLINE Scale scale_for(float largest, float limit) {
  if (largest < smallest_largest) return {0.0F, 0.0F};
  return {largest / limit, limit / largest};
}

/// To nearest, ties to even, for |x| <= 2^22; NaN stays NaN. The compiler may not reorder it: no -ffast-math
/// here.
TANDEM_INLINE float round_even(float x) {
  return (x + 0x1.8p23F) - 0x1.8p23F;
}

TANDEM_INLINE float clamp(float x, float limit) {  // NaN stays NaN
  return x > limit ? limit : (x < -limit ? -limit : x);
}

/// The e4m3 code of |x| <= 448, or of NaN: to nearest, ties to even.
TANDEM_INLINE std::uint8_t e4m3_code(float x) {
  const float magnitude = __builtin_fabsf(x);
  std::uint32_t sign = 0;
  std::uint32_t bits = 0;
  std::uint32_t small = 0;
  const float aligned = magnitude + 0x1p14F;  // the last bit of 2^14 + m is 2^-9, the smallest code's value
  __builtin_memcpy(&sign, &x, sizeof sign);
  __builtin_memcpy(&bits, &magnitude, sizeof bits);
  __builtin_memcpy(&small, &aligned, sizeof small);
  const std::uint32_t normal = ((bits + 0x7FFFFU + ((bits >> 20) & 1U)) >> 20) - (120U << 3);
  std::uint32_t code = magnitude < 0x1p-6F ? small - (141U << 23) : normal;
  code = magnitude <= largest_e4m3 ? code : 0x7FU;
  return static_cast<std::uint8_t>(code | ((sign >> 24) & 0x80U));
}

TANDEM_INLINE std::uint8_t s8_code(float x) {
  const float whole = round_even(x);
  return static_cast<std::uint8_t>(static_cast<std::int8_t>(whole == whole ? static_cast<int>(whole) : 0));
}

template <Codes codes>
TANDEM_INLINE std::uint8_t code_of(float x, float inverse) {
  constexpr float limit = limit_of(codes);
  // Infinite elements count as NaN, so that they do not pass for the largest code.
  const float scaled = is_finite(x) ? clamp(x * inverse, limit) : __builtin_nanf("");
  return codes == Codes::s8 ? s8_code(scaled) : e4m3_code(scaled);
}

/// s8 has no NaN: the scale says it for all of its group.
template <Codes codes>
TANDEM_INLINE float stored_scale(float scale, bool finite) {
  return codes == Codes::s8 && !finite ? __builtin_nanf("") : scale;
}

bool all_finite(const float* x, std::int64_t count) {
  bool finite = true;
  for (std::int64_t i = 0; i < count; ++i) finite = finite && is_finite(x[i]);
  return finite;
}

template <Codes codes>
void quantize_row_group(const QuantizeRows& r, const QuantizeTo& to, int first, int count, float largest) {
  const float* x = r.scratch + static_cast<std::int64_t>(first) * r.dim;
  const Scale s = scale_for(largest, limit_of(codes));
  const float stored = stored_scale<codes>(s.scale, all_finite(x, static_cast<std::int64_t>(count) * r.dim));
  for (int i = 0; i < count; ++i) {
    std::uint8_t* out = to.out + (first + i) * to.out_stride;
    for (int c = 0; c < r.dim; ++c)
      out[c] = code_of<codes>(x[static_cast<std::int64_t>(i) * r.dim + c], s.inverse);
    to.scales[first + i] = stored;
  }
}

/// As above for s8 and rows that share a scale: those that hold what is no number are marked.
void mark_row_group(const QuantizeRows& r, const QuantizeTo& to, float largest) {
  const Scale s = scale_for(largest, largest_s8);
  for (int i = 0; i < r.rows; ++i) {
    const float* x = r.scratch + static_cast<std::int64_t>(i) * r.dim;
    std::uint8_t* out = to.out + i * to.out_stride;
    for (int c = 0; c < r.dim; ++c) out[c] = code_of<Codes::s8>(x[c], s.inverse);
    const bool marked = !all_finite(x, r.dim);
    if (marked) out[0] = nan_marker;
    to.scales[i] = marked ? -s.scale : s.scale;
  }
}

template <Codes codes>
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
    const Scale s = scale_for(largest, limit_of(codes));
    for (int i = 0; i < r.rows; ++i) {
      to.out[i * to.out_stride + c] =
          code_of<codes>(r.scratch[static_cast<std::int64_t>(i) * r.dim + c], s.inverse);
    }
    to.scales[c] = stored_scale<codes>(s.scale, finite);
  }
}

template <Codes codes>
void quantize_as(const QuantizeRows& r, const QuantizeTo& to) {
  switch (to.group) {
    case ScaleGroup::tensor:
    case ScaleGroup::head: quantize_row_group<codes>(r, to, 0, r.rows, to.largest); break;
    case ScaleGroup::block:
      quantize_row_group<codes>(r, to, 0, r.rows,
                                largest_of(r.scratch, static_cast<std::int64_t>(r.rows) * r.dim));
      break;
    case ScaleGroup::row:
      for (int i = 0; i < r.rows; ++i) {
        quantize_row_group<codes>(r, to, i, 1,
                                  largest_of(r.scratch + static_cast<std::int64_t>(i) * r.dim, r.dim));
      }
      break;
    case ScaleGroup::channel: quantize_channels<codes>(r, to); break;
  }
}

void quantize(const QuantizeRows& r, const QuantizeTo& to) {
  prepare(r);
  const bool shared = to.group != ScaleGroup::row && to.group != ScaleGroup::channel;
  if (to.codes == Codes::s8 && to.nan_markers && shared) {
    const bool by_block = to.group == ScaleGroup::block;
    mark_row_group(r, to,
                   by_block ? largest_of(r.scratch, static_cast<std::int64_t>(r.rows) * r.dim) : to.largest);
  } else if (to.codes == Codes::s8) {
    quantize_as<Codes::s8>(r, to);
  } else {
    quantize_as<Codes::e4m3>(r, to);
  }
}

}  // namespace

extern const QuantizeKernel quantize_kernel;
const QuantizeKernel quantize_kernel{.sum_channels = sum_channels, .largest = largest, .quantize = quantize};

}  // namespace tandem::cpu::TANDEM_TARGET
