// The device sources, embedded in the library as text by cmake/embed_sources.cmake.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace tandem::gpu {

/// One file of device code and the name that #include finds it under, for example "ptx/base.cuh".
struct Source {
  const char* name;
  const char* text;
};

std::span<const Source> device_sources();

/// 64-bit FNV-1a; continues from `seed`.
constexpr std::uint64_t fnv_offset = 0xcbf29ce484222325;
constexpr std::uint64_t fnv1a(std::string_view bytes, std::uint64_t seed = fnv_offset) {
  for (const char c : bytes) seed = (seed ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return seed;
}

/// The digest of the source `name` and all that it includes, directly or through others: it changes with any
/// byte of these and of no other source.
std::uint64_t sources_digest(std::string_view name, std::span<const Source> sources);
/// The digest among the device sources, which is computed once for a name.
std::uint64_t sources_digest(std::string_view name);

}  // namespace tandem::gpu
