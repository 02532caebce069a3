// CUDA's own functions, under the names and in the namespace that they have on the device, where all 32 lanes
// of a warp take part. emulator.hpp includes this.
#pragma once

#include <math.h>  // NOLINT(modernize-deprecated-headers): ::sinf and others, as on the device

#include <bit>

#include "emulator.hpp"

inline void __syncthreads() {
  tandem::emulator::sync_block();
}
inline void __syncwarp() {
  tandem::emulator::sync_warp();
}
template <typename T>
T __shfl_xor_sync(unsigned /*lanes*/, T value, int mask) {
  return tandem::emulator::shuffle_xor(value, mask);
}
template <typename T>
T __shfl_sync(unsigned /*lanes*/, T value, int lane, int width = 32) {
  const int own = static_cast<int>(tandem::emulator::thread_index()) % 32;
  const int from = own / width * width + lane % width;
  return std::bit_cast<T>(tandem::emulator::shuffle(std::bit_cast<std::uint32_t>(value), from));
}
inline std::uint32_t __shfl_up_sync(unsigned /*lanes*/, std::uint32_t value, int delta) {
  return tandem::emulator::shuffle_up(value, delta);
}
inline std::uint32_t __reduce_or_sync(unsigned /*lanes*/, std::uint32_t value) {
  return tandem::emulator::reduce_or(value);
}
inline std::uint32_t __reduce_max_sync(unsigned /*lanes*/, std::uint32_t value) {
  return tandem::emulator::reduce_max(value);
}
inline std::uint32_t __ballot_sync(unsigned /*lanes*/, bool predicate) {
  return tandem::emulator::ballot(predicate);
}
inline bool __any_sync(unsigned /*lanes*/, bool predicate) {
  return tandem::emulator::ballot(predicate) != 0;
}

template <typename T>
T __ldg(const T* p) {
  return tandem::emulator::load_global(p);
}
inline std::uint32_t atomicAdd(std::uint32_t* p, std::uint32_t value) {
  return tandem::emulator::atomic_add(p, value);
}
inline void atomicMax(std::uint32_t* p, std::uint32_t value) {
  tandem::emulator::atomic_max(p, value);
}

inline float __fmul_rn(float a, float b) {
  return tandem::emulator::multiply(a, b);
}
inline float __fdiv_rn(float a, float b) {
  return tandem::emulator::divide(a, b);
}
inline std::uint32_t __float_as_uint(float x) {
  return std::bit_cast<std::uint32_t>(x);
}
inline float __uint_as_float(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}
inline float __int_as_float(int bits) {
  return std::bit_cast<float>(bits);
}
inline int __ffs(int bits) {
  return __builtin_ffs(bits);
}
inline int __clz(int bits) {
  return std::countl_zero(static_cast<unsigned>(bits));
}
inline int __popc(unsigned bits) {
  return std::popcount(bits);
}
inline std::uint32_t __byte_perm(std::uint32_t low, std::uint32_t high, std::uint32_t selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(high) << 32 | low;
  std::uint32_t result = 0;
  for (std::uint32_t i = 0; i < 4; ++i) {
    result |= static_cast<std::uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7U)) & 0xFFU) << (8 * i);
  }
  return result;
}
/// sum + the products of the four u8 of a and of b.
inline std::uint32_t __dp4a(std::uint32_t a, std::uint32_t b, std::uint32_t sum) {
  for (int i = 0; i < 32; i += 8) sum += (a >> i & 0xFFU) * (b >> i & 0xFFU);
  return sum;
}
