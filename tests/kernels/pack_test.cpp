// The kernel that packs tensors for TMA, in the emulator: every element, zeros behind them, no
// access outside.
#include "ops/pack/common/pack.cuh"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "launch.hpp"

namespace tandem {
namespace {

struct Layout {
  int batch, rows, heads, head_dim;
  Strides stride;
  int offset;  ///< elements before the first
  bool paired;
};

void check(const Layout& l) {
  SCOPED_TRACE(std::to_string(l.rows) + " rows of " + std::to_string(l.head_dim));
  const long long last =
      (l.batch - 1) * l.stride.batch + (l.rows - 1) * l.stride.row + (l.heads - 1) * l.stride.head;
  std::vector<u16> source(static_cast<std::size_t>(l.offset + last + l.head_dim));
  std::iota(source.begin(), source.end(), u16{1});
  const int pitch = (l.head_dim + 7) / 8 * 8;
  std::vector<u16> target(static_cast<std::size_t>(l.batch * l.rows * l.heads * pitch), u16{0xdead});
  const PackParams params{.source = source.data() + l.offset,
                          .stride = l.stride,
                          .target = target.data(),
                          .batch = l.batch,
                          .rows = l.rows,
                          .heads = l.heads,
                          .head_dim = l.head_dim,
                          .pitch = pitch};
  const emulator::Grid grid{.blocks = 2, .threads = pack_threads};
  emulator::Options options{.buffers = {emulator::readable(source), emulator::writable(target)}};
  if (l.paired) {
    emulator::launch(&pack<PackConfig{.paired = true}>, params, grid, options);
  } else {
    emulator::launch(&pack<PackConfig{.paired = false}>, params, grid, options);
  }
  std::size_t i = 0;
  for (int b = 0; b < l.batch; ++b) {
    for (int r = 0; r < l.rows; ++r) {
      for (int h = 0; h < l.heads; ++h) {
        for (int c = 0; c < pitch; ++c) {
          const long long at = l.offset + b * l.stride.batch + r * l.stride.row + h * l.stride.head + c;
          const u16 expected = c < l.head_dim ? source[static_cast<std::size_t>(at)] : u16{0};
          ASSERT_EQ(target[i++], expected)
              << "batch " << b << " row " << r << " head " << h << " column " << c;
        }
      }
    }
  }
}

/// Any strides, odd head dimensions, pairs where they are aligned, stride 0 that repeats, and more rows than
/// one round of the grid takes.
TEST(Pack, TakesEveryElementOfAnyLayout) {
  for (const Layout& layout : {Layout{2, 5, 3, 20, {.batch = 400, .row = 67, .head = 21}, 1, false},
                               Layout{1, 40, 2, 65, {.batch = 0, .row = 130, .head = 65}, 0, false},
                               Layout{2, 7, 2, 36, {.batch = 1000, .row = 82, .head = 38}, 2, true},
                               Layout{3, 4, 2, 8, {.batch = 0, .row = 8, .head = 0}, 3, false},
                               Layout{1, 600, 1, 16, {.batch = 0, .row = 17, .head = 0}, 0, false}}) {
    check(layout);
  }
}

/// Queries of e4m3 as 16-bit ones: every value, zeros behind rows, and the products of the scales.
template <bool paired, Element element>
void check_widened(int head_dim, long long row_stride) {
  constexpr int rows = 9;
  constexpr int sequences = 3;
  constexpr int heads_kv = 2;
  std::vector<u8> source(static_cast<std::size_t>(rows * row_stride));
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<u8>(i * 7);
  const int pitch = (head_dim + 7) / 8 * 8;
  std::vector<u16> target(static_cast<std::size_t>(rows * pitch), u16{0xdead});
  std::vector<float> q_scale(sequences * heads_kv), k_scale(heads_kv * sequences);
  std::iota(q_scale.begin(), q_scale.end(), 1.0F);
  std::iota(k_scale.begin(), k_scale.end(), 100.0F);
  std::vector<float> product(sequences * heads_kv, -1.0F);
  WidenParams params{};
  params.source = source.data();
  params.stride = {.batch = 0, .row = row_stride, .head = 0};
  params.target = target.data();
  params.batch = 1;
  params.rows = rows;
  params.heads = 1;
  params.head_dim = head_dim;
  params.pitch = pitch;
  params.q_scale = {.data = q_scale.data(), .batch_stride = heads_kv, .head_stride = 1};
  params.k_scale = {.data = k_scale.data(), .batch_stride = 1, .head_stride = sequences};
  params.product = product.data();
  params.sequences = sequences;
  params.heads_kv = heads_kv;
  emulator::Options options{.buffers = {emulator::readable(source), emulator::writable(target),
                                        emulator::readable(q_scale), emulator::readable(k_scale),
                                        emulator::writable(product)}};
  emulator::launch(&pack<PackConfig{.paired = paired, .widens = true, .element = element}>, params,
                   {.blocks = 2, .threads = pack_threads}, options);
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < pitch; ++c) {
      const u8 byte = c < head_dim ? source[static_cast<std::size_t>(r * row_stride + c)] : u8{0};
      float want;
      float unused;
      ptx::unpack_e4m3(want, unused, byte);
      const float got = ptx::unpack<element>(target[static_cast<std::size_t>(r * pitch + c)]);
      if (want == want) {
        ASSERT_EQ(got, want) << "row " << r << " column " << c;
      } else {
        ASSERT_NE(got, got) << "row " << r << " column " << c;
      }
    }
  }
  for (int i = 0; i < sequences * heads_kv; ++i) {
    const auto at = static_cast<std::size_t>(i % heads_kv * sequences + i / heads_kv);
    EXPECT_EQ(product[static_cast<std::size_t>(i)], q_scale[static_cast<std::size_t>(i)] * k_scale[at]) << i;
  }
}

TEST(Pack, WidensQueriesAndMultipliesScales) {
  check_widened<true, Element::bf16>(64, 72);
  check_widened<true, Element::f16>(40, 40);
  check_widened<false, Element::bf16>(37, 41);
  check_widened<false, Element::f16>(64, 65);
}

}  // namespace
}  // namespace tandem
