// Arithmetic with an instruction of its own, and checked accesses to shared memory.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "block.hpp"

namespace tandem::emulator {
namespace {

/// Results that the hardware flushes to zero.
float flush(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0F, x) : x;
}

}  // namespace

void check_register(float x) {
  if (!is_poison(std::bit_cast<std::uint32_t>(x))) return;
  Block::current().fail("uses an accumulator register that WGMMAs own: wgmma_wait has not handed it back");
}

void check_registers(const void* d, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    float x = 0.0F;
    std::memcpy(&x, static_cast<const char*>(d) + i * sizeof(x), sizeof(x));
    check_register(x);
  }
}

float exp2(float x) {
  count(&Work::special);
  check_register(x);
  return flush(std::exp2(x));
}

float log2(float x) {
  count(&Work::special);
  check_register(x);
  return std::log2(flush(x));
}

float reciprocal(float x) {
  count(&Work::special);
  check_register(x);
  return flush(1.0F / flush(x));
}

float square_root(float x) {
  count(&Work::special);
  check_register(x);
  return flush(std::sqrt(flush(x)));
}

int add_min_relu(int a, int b, int most) {
  count(&Work::arithmetic);
  const auto sum = static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
  return std::max(std::min(sum, most), 0);
}

float fmax(float a, float b) {
  count(&Work::arithmetic);
  check_register(a);
  check_register(b);
  return std::fmax(a, b);
}

float fmax_nan(float a, float b) {
  count(&Work::arithmetic);
  check_register(a);
  check_register(b);
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<float>::quiet_NaN();
  return std::fmax(a, b);
}

float fma(float a, float b, float c) {
  count(&Work::arithmetic);
  check_register(a);
  check_register(b);
  check_register(c);
  return std::fma(a, b, c);
}

float multiply(float a, float b) {
  count(&Work::arithmetic);
  check_register(a);
  check_register(b);
  return a * b;
}

float divide(float a, float b) {
  check_register(a);
  check_register(b);
  return a / b;
}

float max_magnitude(float largest, float x) {
  count(&Work::arithmetic);
  check_register(x);
  if (std::isnan(largest) || std::isnan(x)) return std::numeric_limits<float>::quiet_NaN();
  return std::fmax(largest, std::fabs(x));
}

namespace {

std::uint32_t to_bf16(float x) {
  if (std::isnan(x)) return 0x7fff;
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

std::uint32_t to_f16(float x) {
  if (std::isnan(x)) return 0x7fff;
  const std::uint32_t sign = std::bit_cast<std::uint32_t>(x) >> 16 & 0x8000;
  const float magnitude = std::fabs(x);
  if (magnitude >= 65520.0F) return sign | 0x7c00;  // halfway between the largest finite value and the next
  if (magnitude < 0x1p-14F) {                       // subnormal: a multiple of 2^-24
    return sign | static_cast<std::uint32_t>(std::nearbyint(magnitude * 0x1p24F));
  }
  const auto bits = std::bit_cast<std::uint32_t>(magnitude);
  return sign | (((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112U << 10));
}

}  // namespace

std::uint32_t pack_bf16(float low, float high) {
  count(&Work::arithmetic);
  check_register(low);
  check_register(high);
  return to_bf16(low) | to_bf16(high) << 16;
}

std::uint32_t pack_f16(float low, float high) {
  count(&Work::arithmetic);
  check_register(low);
  check_register(high);
  return to_f16(low) | to_f16(high) << 16;
}

namespace {

/// By rounding to a multiple of the spacing of the e4m3 numbers about x; every step is exact but that one.
std::uint32_t to_e4m3(float x) {
  if (std::isnan(x)) return 0x7F;
  const std::uint32_t sign = std::signbit(x) ? 0x80U : 0U;
  const float magnitude = std::fmin(std::fabs(x), 448.0F);
  const int exponent = std::max(magnitude > 0.0F ? std::ilogb(magnitude) : -6, -6);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  // 8 steps a binade above 2^-6; a code counts them through all binades.
  return sign | static_cast<std::uint32_t>(8 * (exponent + 6) + steps);
}

}  // namespace

std::uint32_t pack_e4m3(float a, float b, float c, float d) {
  count(&Work::arithmetic);
  for (const float x : {a, b, c, d}) check_register(x);
  return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | to_e4m3(d) << 24;
}

float unpack_e4m3(std::uint32_t code) {
  count(&Work::arithmetic);
  const auto exponent = static_cast<int>(code >> 3 & 15);
  const auto mantissa = static_cast<float>(code & 7);
  if ((code & 0x7f) == 0x7f) return std::bit_cast<float>(0x7fffffffU);
  const float magnitude =
      exponent == 0 ? mantissa * 0x1p-9F : std::ldexp(1.0F + mantissa / 8.0F, exponent - 7);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

std::uint32_t pack_u8(float a, float b, float c, float d) {
  count(&Work::arithmetic);
  std::uint32_t packed = 0;
  int shift = 0;
  for (const float x : {a, b, c, d}) {
    check_register(x);
    const float rounded = std::isnan(x) ? 0.0F : std::nearbyint(std::clamp(x, 0.0F, 255.0F));
    packed |= static_cast<std::uint32_t>(rounded) << shift;
    shift += 8;
  }
  return packed;
}

std::uint32_t low_bytes(float a, float b, float c, float d) {
  count(&Work::arithmetic);
  std::uint32_t packed = 0;
  int shift = 0;
  for (const float x : {a, b, c, d}) {
    check_register(x);
    packed |= (std::bit_cast<std::uint32_t>(x) & 0xff) << shift;
    shift += 8;
  }
  return packed;
}

float to_float(int x) {
  count(&Work::arithmetic);
  check_register(std::bit_cast<float>(x));
  return static_cast<float>(x);
}

void check_shared_read(const void* p, std::size_t bytes) {
  Block& block = Block::current();
  count(&Work::shared);
  const std::uint32_t offset = block.shared_offset(p, bytes, "shared load");
  Thread& self = block.self();
  block.check(block.shadow().read(offset, static_cast<std::uint32_t>(bytes), self.index, self.clock), offset,
              "shared load");
}

void check_shared_write(const void* p, std::size_t bytes) {
  Block& block = Block::current();
  count(&Work::shared);
  const std::uint32_t offset = block.shared_offset(p, bytes, "shared store");
  Thread& self = block.self();
  block.check(block.shadow().write(offset, static_cast<std::uint32_t>(bytes), self.index, self.clock), offset,
              "shared store");
}

/// The bytes come as late as they can, with the wait. Null: zeros.
void copy_async(void* shared, const void* global, std::size_t bytes) {
  Block& block = Block::current();
  Thread& self = block.self();
  if (global != nullptr) check_global(global, bytes, false);
  if (reinterpret_cast<std::uintptr_t>(shared) % bytes != 0)
    block.fail(fmt::format("copy_async: the target is not aligned to {} bytes", bytes));
  check_shared_write(shared, bytes);
  block.shadow().begin_copy(block.shared_offset(shared, bytes, "copy_async"),
                            static_cast<std::uint32_t>(bytes));
  Thread::Copy copy{.shared = shared, .data = {}, .bytes = bytes, .group = self.copy_groups};
  if (global != nullptr) std::memcpy(copy.data.data(), global, bytes);
  std::memset(shared, 0xff, bytes);
  self.copies.push_back(copy);
}

namespace {

/// Ends this thread's copies of the groups before `end`.
void end_copies(std::uint32_t end) {
  Block& block = Block::current();
  Thread& self = block.self();
  constexpr const char* what = "copy to shared memory";
  std::size_t ended = 0;
  for (; ended < self.copies.size() && self.copies[ended].group < end; ++ended) {
    const Thread::Copy& copy = self.copies[ended];
    const std::uint32_t offset = block.shared_offset(copy.shared, copy.bytes, what);
    const auto bytes = static_cast<std::uint32_t>(copy.bytes);
    block.check(block.shadow().end_copy(offset, bytes, self.index, self.clock), offset, what);
    std::memcpy(copy.shared, copy.data.data(), copy.bytes);
  }
  self.copies.erase(self.copies.begin(), self.copies.begin() + static_cast<std::ptrdiff_t>(ended));
}

}  // namespace

void wait_for_copies() {
  end_copies(Block::current().self().copy_groups + 1);
}

void commit_copies() {
  ++Block::current().self().copy_groups;
}

void wait_for_copy_groups(int pending) {
  const std::uint32_t groups = Block::current().self().copy_groups;
  const auto kept = static_cast<std::uint32_t>(pending);
  if (groups > kept) end_copies(groups - kept);
}

}  // namespace tandem::emulator
