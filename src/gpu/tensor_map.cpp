#include "gpu/tensor_map.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "gpu/driver.hpp"
#include "tandem/error.hpp"

namespace tandem::gpu {
namespace {

abi::TensorMapType type_of(const TensorMapSpec& spec) {
  if (spec.element_bytes == 1) return abi::TensorMapType::u8;
  if (spec.element_bytes == 4) return abi::TensorMapType::f32;
  return spec.element == Element::f16 ? abi::TensorMapType::f16 : abi::TensorMapType::bf16;
}

abi::TensorMapSwizzle swizzle_of(Swizzle swizzle) {
  return swizzle == Swizzle::b128  ? abi::TensorMapSwizzle::b128
         : swizzle == Swizzle::b64 ? abi::TensorMapSwizzle::b64
                                   : abi::TensorMapSwizzle::b32;
}

TensorMap encode(const TensorMapSpec& spec) {
  if (const char* objection = tma_objection(spec)) {
    throw Error(Status::internal, fmt::format("tensor map: {}", objection));
  }
  std::array<std::uint64_t, TensorMapSpec::max_rank> dims{};
  std::array<std::uint64_t, TensorMapSpec::max_rank - 1> strides{};
  std::array<std::uint32_t, TensorMapSpec::max_rank> box{};
  std::array<std::uint32_t, TensorMapSpec::max_rank> steps{};
  std::copy(spec.dims.begin(), spec.dims.end(), dims.begin());
  std::copy(spec.strides.begin(), spec.strides.end(), strides.begin());
  std::copy(spec.box.begin(), spec.box.end(), box.begin());
  steps.fill(1);
  TensorMap map;
  check(driver().tensor_map_encode_tiled(
            &map, type_of(spec), static_cast<std::uint32_t>(spec.rank), const_cast<void*>(spec.base),
            dims.data(), strides.data(), box.data(), steps.data(), 0, swizzle_of(spec.swizzle),
            spec.wide_fetch ? abi::tensor_map_l2_promotion_256 : abi::tensor_map_l2_promotion_128, 0),
        "cuTensorMapEncodeTiled");
  return map;
}

struct Encoded {
  TensorMapSpec spec;
  TensorMap map;
};

std::size_t place_of(const TensorMapSpec& spec, std::size_t places) {
  auto h = reinterpret_cast<std::uintptr_t>(spec.base);
  for (const std::int64_t n : {spec.dims[0], spec.dims[1], spec.dims[2], std::int64_t{spec.box[1]}}) {
    h = (h ^ static_cast<std::uintptr_t>(n)) * 0x9e3779b97f4a7c15U;
  }
  return (h >> 32) % places;
}

}  // namespace

TensorMap encode_tensor_map(const TensorMapSpec& spec) {
  // Allocators give the same addresses in every step of a training loop. The driver takes 0.5 us for a map.
  // A thread's own, since a lock takes as long as the search.
  thread_local std::array<Encoded, 128> last;
  Encoded& known = last[place_of(spec, last.size())];
  if (known.spec != spec) known = {.spec = spec, .map = encode(spec)};
  return known.map;
}

}  // namespace tandem::gpu
