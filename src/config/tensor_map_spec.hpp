// What a tensor map says, before anything encodes it. The driver encodes it for TMA, the emulator
// for itself; both are passed in as an EncodeTensorMap. Host only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "config/types.hpp"

namespace tandem {

/// A tiled tensor of up to five dimensions, innermost first; the innermost is contiguous.
struct TensorMapSpec {
  static constexpr int max_rank = 5;

  const void* base = nullptr;
  int rank = 0;
  int element_bytes = 2;                             ///< 1, 2 or 4; 2 is f16 and bf16 alike, 4 is f32
  Element element = Element::bf16;                   ///< which of the two, where element_bytes is 2
  std::array<std::int64_t, max_rank> dims{};         ///< elements
  std::array<std::int64_t, max_rank - 1> strides{};  ///< bytes; strides[i] belongs to dims[i + 1]
  std::array<int, max_rank> box{};                   ///< elements that one copy moves
  Swizzle swizzle = Swizzle::b128;
  bool wide_fetch = true;  ///< the L2 fetches 256 bytes where one of them is missed, else 128

  bool operator==(const TensorMapSpec&) const = default;
};

using EncodeTensorMap = TensorMap (*)(const TensorMapSpec&);

/// Bytes of the rows within which a swizzle exchanges 16-byte units.
constexpr int bytes_of(Swizzle swizzle) {
  return swizzle == Swizzle::b128 ? 128 : swizzle == Swizzle::b64 ? 64 : 32;
}

/// Why TMA cannot move `spec`, or null if it can. The rules are those of the PTX ISA for tensor
/// maps without interleave: base and strides are multiples of 16 bytes, strides below 2^40, dims 1 to 2^32,
/// box 1 to 256, and the box's inner extent a multiple of 16 bytes that fits the swizzle. Strides need not
/// ascend; 0 repeats a dimension.
inline const char* tma_objection(const TensorMapSpec& spec) {
  constexpr std::int64_t dim_limit = std::int64_t{1} << 32;
  constexpr std::int64_t stride_limit = std::int64_t{1} << 40;
  if (spec.rank < 1 || spec.rank > TensorMapSpec::max_rank) return "rank is not 1 to 5";
  if (spec.element_bytes != 1 && spec.element_bytes != 2 && spec.element_bytes != 4)
    return "elements are not 1, 2 or 4 bytes";
  if (spec.base == nullptr) return "base address is null";
  if (reinterpret_cast<std::uintptr_t>(spec.base) % 16 != 0)
    return "base address is not a multiple of 16 bytes";
  for (int i = 0; i < spec.rank; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (spec.dims[at] < 1 || spec.dims[at] > dim_limit) return "a dimension is not 1 to 2^32";
    if (spec.box[at] < 1 || spec.box[at] > 256) return "a box extent is not 1 to 256";
    if (i == 0) continue;
    const std::int64_t stride = spec.strides[at - 1];
    if (stride < 0 || stride >= stride_limit) return "a stride is not 0 to 2^40 bytes";
    if (stride % 16 != 0) return "a stride is not a multiple of 16 bytes";
  }
  const int inner = spec.box[0] * spec.element_bytes;
  if (inner % 16 != 0) return "the box's inner extent is not a multiple of 16 bytes";
  if (inner > bytes_of(spec.swizzle)) return "the box's inner extent is wider than the swizzle";
  return nullptr;
}

inline bool tma_can_read(const TensorMapSpec& spec) {
  return tma_objection(spec) == nullptr;
}

}  // namespace tandem
