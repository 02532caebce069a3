// Whether two tensors share an element, decided without looking at all of them (src/api/overlap.cpp): the
// same answer as the sets of their addresses give.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <random>
#include <set>
#include <string>

#include "api/overlap.hpp"
#include "tandem/tensor.hpp"

namespace tandem::test {
namespace {

/// The addresses of a tensor's bytes, one by one.
std::set<std::uintptr_t> bytes(const ConstTensor& t) {
  std::set<std::uintptr_t> all;
  std::array<std::int64_t, 4> n{};
  for (bool more = true; more;) {
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(t.rank); ++i) offset += n[i] * t.stride[i];
    for (std::size_t b = 0; b < size_of(t.dtype); ++b) {
      all.insert(reinterpret_cast<std::uintptr_t>(t.data) +
                 static_cast<std::uintptr_t>(offset) * size_of(t.dtype) + b);
    }
    more = false;
    for (std::size_t i = static_cast<std::size_t>(t.rank); i-- > 0 && !more;) {
      more = ++n[i] < t.shape[i];
      if (!more) n[i] = 0;
    }
  }
  return all;
}

TEST(Overlap, IsThatOfTheElementSets) {
  std::mt19937 random(11);
  const auto any = [&](std::int64_t from, std::int64_t to) {
    return std::uniform_int_distribution<std::int64_t>(from, to)(random);
  };
  const auto any_tensor = [&] {
    ConstTensor t;
    constexpr std::array dtypes{DType::e4m3, DType::bf16, DType::f32, DType::i64};
    t.dtype = dtypes[static_cast<std::size_t>(any(0, 3))];
    t.data = reinterpret_cast<const void*>(1'000'000 + 8 * any(-40, 40));
    t.rank = static_cast<int>(any(1, 4));
    for (std::size_t i = 0; i < static_cast<std::size_t>(t.rank); ++i) {
      t.shape[i] = any(1, t.rank < 3 ? 20 : 4);
      t.stride[i] = any(-30, 30);
    }
    if (any(0, 1) == 1) t.stride[static_cast<std::size_t>(t.rank) - 1] = 1;
    return t;
  };
  int shared = 0;
  constexpr int cases = 20'000;
  for (int i = 0; i < cases; ++i) {
    const ConstTensor x = any_tensor();
    const ConstTensor y = any_tensor();
    const auto of_x = bytes(x);
    const auto of_y = bytes(y);
    const bool expected = std::ranges::any_of(of_x, [&](std::uintptr_t b) { return of_y.contains(b); });
    ASSERT_EQ(check::share_memory(x, y), expected) << "case " << i;
    ASSERT_EQ(check::share_memory(y, x), expected) << "case " << i << ", the other way round";
    ASSERT_EQ(check::bytes_of(x).low, *of_x.begin());
    ASSERT_EQ(check::bytes_of(x).high, *of_x.rbegin() + 1);
    shared += expected ? 1 : 0;
  }
  EXPECT_GT(shared, cases / 10);
  EXPECT_LT(shared, cases * 9 / 10);
}

/// Two tensors in a buffer of this many bf16 elements, by offset, shape and strides.
struct Pair {
  bool share;
  std::array<std::int64_t, 4> shape_x, stride_x;
  std::int64_t offset_y;
  std::array<std::int64_t, 4> shape_y, stride_y;
};

constexpr std::int64_t n = 100'000;  // tokens
constexpr std::array<Pair, 10> pairs{{
    // Heads of a row, interleaved
    {false, {2, n, 32, 128}, {n * 6144, 6144, 192, 1}, 128, {2, n, 32, 64}, {n * 6144, 6144, 192, 1}},
    // Heads of a row, one element too wide
    {true, {2, n, 32, 129}, {n * 6144, 6144, 192, 1}, 128, {2, n, 32, 64}, {n * 6144, 6144, 192, 1}},
    // Query and key heads of different widths behind one another
    {false, {2, n, 8, 192}, {n * 2560, 2560, 192, 1}, 1536, {2, n, 8, 128}, {n * 2560, 2560, 128, 1}},
    // Even and odd rows
    {false, {1, n, 8, 64}, {0, 1024, 64, 1}, 512, {1, n, 8, 64}, {0, 1024, 64, 1}},
    // Even rows, and every fourth from the second on
    {false, {1, 2 * n, 8, 64}, {0, 1024, 64, 1}, 512, {1, n, 8, 64}, {0, 2048, 64, 1}},
    // Even rows, and every third
    {true, {1, n, 8, 64}, {0, 1024, 64, 1}, 512, {1, n, 8, 64}, {0, 1536, 64, 1}},
    // Halves of the head dimension, heads before rows
    {false, {4, n, 8, 64}, {n * 1024, 128, n * 128, 1}, 64, {4, 8, n, 64}, {n * 1024, n * 128, 128, 1}},
    // Halves of the batch
    {false, {3, n, 8, 64}, {n * 512, 512, 64, 1}, 3 * n * 512, {3, n, 8, 64}, {n * 512, 512, 64, 1}},
    // Expanded heads beside one head
    {false, {1, n, 8, 64}, {0, 128, 0, 1}, 64, {1, n, 1, 64}, {0, 128, 77, 1}},
    // Rows of unrelated widths, columns apart modulo their common divisor
    {false, {1, n, 1, 256}, {0, 1536, 0, 1}, 256, {1, n, 1, 256}, {0, 1024, 0, 1}},
}};

TEST(Overlap, LayoutsOfUsersAreDecidedExactlyAndFast) {
  for (const Pair& p : pairs) {
    SCOPED_TRACE("pair " + std::to_string(&p - pairs.data()));
    const auto make = [](std::int64_t offset, const auto& shape, const auto& stride) {
      ConstTensor t;
      t.data = reinterpret_cast<const void*>((std::intptr_t{1} << 40) + 2 * offset);
      t.dtype = DType::bf16;
      t.rank = 4;
      t.shape = shape;
      t.stride = stride;
      return t;
    };
    const ConstTensor x = make(0, p.shape_x, p.stride_x);
    const ConstTensor y = make(p.offset_y, p.shape_y, p.stride_y);
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(check::share_memory(x, y), p.share);
    EXPECT_EQ(check::share_memory(y, x), p.share) << "the other way round";
    // Microseconds, and what a loaded machine adds to them; a search of all rows would take seconds.
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(50));
  }
}

TEST(Overlap, ASearchWithoutEndIsAnOverlap) {
  const auto make = [](std::intptr_t address, std::array<std::int64_t, 4> stride) {
    ConstTensor t;
    t.data = reinterpret_cast<const void*>(address);
    t.dtype = DType::f16;
    t.rank = 4;
    t.shape = {1'000'000, 1'000'000, 1'000'000, 1};
    t.stride = stride;
    return t;
  };
  // No two steps have a common divisor but 30; 2 bytes of a multiple of 60 never meet those beside them.
  constexpr std::intptr_t base = std::intptr_t{1} << 50;
  const ConstTensor x = make(base, {30 * 1'000'003, 30 * 1'009, 30 * 10'007, 1});
  const ConstTensor y = make(base + 30, {30 * 999'983, 30 * 1'013, 30 * 10'009, 1});
  EXPECT_FALSE(check::share_memory(x, y)) << "their common divisor settles it";
  const ConstTensor z = make(base + 30, {30 * 999'983, 30 * 1'013, 30 * 10'009 + 1, 1});
  static_cast<void>(check::share_memory(x, z));  // ends, whatever it says
}

}  // namespace
}  // namespace tandem::test
