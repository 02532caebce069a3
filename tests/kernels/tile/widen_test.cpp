// 8-bit values on their way to 16-bit tiles: each exactly, at the place where products look for it; and the
// hand-over from TMA through the converting warps to the tensor cores, with the mistakes that one can make.
#include "tile/widen.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "launch.hpp"
#include "ptx/barrier.cuh"
#include "ptx/warp.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"

namespace tandem::tile {
namespace {

/// What an 8-bit value stands for: the definition, written down once more.
float value_of(OperandType type, u32 byte) {
  if (type == OperandType::s8) return static_cast<float>(static_cast<signed char>(byte));
  const float sign = (byte & 0x80U) != 0 ? -1.0F : 1.0F;
  const int exponent = static_cast<int>(byte >> 3 & 15U);
  const auto mantissa = static_cast<float>(byte & 7U);
  if ((byte & 0x7FU) == 0x7FU) return std::nanf("");
  if (exponent == 0) return sign * std::ldexp(mantissa, -9);
  return sign * std::ldexp(8.0F + mantissa, exponent - 10);
}

template <OperandType type, Element element>
void expect_exact() {
  for (u32 byte = 0; byte < 256; ++byte) {
    const u32 bytes[4] = {byte, byte ^ 0x55U, 255U - byte, byte ^ 0x80U};
    u32 words[2];
    widen_four<type, element>(words[0], words[1], bytes[0] | bytes[1] << 8 | bytes[2] << 16 | bytes[3] << 24);
    for (int i = 0; i < 4; ++i) {
      const float got = ptx::unpack<element>(static_cast<u16>(words[i / 2] >> (16 * (i % 2))));
      const float want = value_of(type, bytes[i]);
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(got)) << bytes[i];
      } else {
        EXPECT_EQ(got, want) << bytes[i];
      }
    }
  }
}

TEST(TileWiden, EveryValueIsExact) {
  expect_exact<OperandType::e4m3, Element::f16>();
  expect_exact<OperandType::e4m3, Element::bf16>();
  expect_exact<OperandType::s8, Element::f16>();
  expect_exact<OperandType::s8, Element::bf16>();
}

u8 some_byte(int row, int col) {
  return static_cast<u8>((row * 37 + col * 11 + row * col) % 251 - 120);
}

/// Rows' scales that round nothing, each unlike those of the rows beside it.
float some_scale(int row) {
  return std::ldexp(row % 2 == 0 ? 1.0F : -1.0F, row % 5 - 2);
}

template <int rows, int cols, int warps, bool scaled = false>
void expect_every_place() {
  using From = ByteTile<rows, cols>;
  using To = SharedTile<rows, cols>;
  struct Both {
    From from;
    To to;
  };
  const auto kernel = [] {
    auto& s = *reinterpret_cast<Both*>(ptx::dynamic_shared());
    const int thread = static_cast<int>(ptx::thread_index());
    for (int i = thread; i < rows * cols; i += warps * warp_size) {
      ptx::store_shared(reinterpret_cast<u8*>(s.from.data + From::place(i / cols, i % cols)),
                        some_byte(i / cols, i % cols));
    }
    ptx::sync_block();
    const int warp = thread / warp_size;
    const int lane = thread % warp_size;
    if constexpr (scaled) {
      convert_tile<OperandType::s8, Element::bf16, warps>(s.to, s.from, warp, lane,
                                                          some_scale(scaled_row<From, warps>(warp, lane)));
    } else {
      convert_tile<OperandType::s8, Element::bf16, warps>(s.to, s.from, warp, lane);
    }
    ptx::sync_block();
    for (int i = thread; i < rows * cols; i += warps * warp_size) {
      const u16 got =
          ptx::load_shared(reinterpret_cast<const u16*>(s.to.address(i / cols, i % cols / 8 * 8)) + i % 8);
      const float want =
          value_of(OperandType::s8, some_byte(i / cols, i % cols)) * (scaled ? some_scale(i / cols) : 1.0F);
      if (ptx::unpack<Element::bf16>(got) != want) {
        throw emulator::Fault("at " + std::to_string(i / cols) + ", " + std::to_string(i % cols));
      }
    }
  };
  EXPECT_NO_THROW(emulator::launch(kernel, {.threads = warps * warp_size, .shared_bytes = sizeof(Both)}, {}))
      << rows << " " << cols;
}

TEST(TileWiden, EveryElementComesToItsPlace) {
  expect_every_place<128, 64, 4>();
  expect_every_place<128, 128, 4>();
  expect_every_place<64, 192, 4>();
  expect_every_place<64, 256, 4>();
  expect_every_place<32, 128, 2>();
}

TEST(TileWiden, EveryRowHasItsScale) {
  expect_every_place<128, 64, 4, true>();
  expect_every_place<128, 128, 4, true>();
  expect_every_place<64, 192, 4, true>();
  expect_every_place<32, 256, 4, true>();
}

// ---- TMA, converting warps, tensor cores ----

enum class Mistake {
  none,
  no_wait_for_bytes,  // what TMA is to bring is not waited for
  no_wait_for_free,   // the tile may still be read
  no_fence,           // the tensor cores do not see what the warps have stored
  early_hand_over,    // a warp says that the tile is there, and then writes it
  early_release,      // a warp gives the bytes back, and then reads them
  one_warp_short,     // a warp that has converted does not say so
};

constexpr int blocks = 9;
constexpr int warps = 4;
constexpr int stages = 2;

struct Shared {
  SharedTile<64, 64> q;
  ByteTile<64, 64> bytes[stages];
  SharedTile<64, 64> k[stages];
  Ring<1> q_ring;
  Ring<stages> byte_ring;
  Ring<stages> k_ring;
};

template <Mistake mistake>
void convert_blocks(Shared& s) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  const int warp = static_cast<int>(ptx::thread_index()) / warp_size - 4;
  Ring<stages>::Position from, to;
  for (int i = 0; i < blocks; ++i, from.advance(), to.advance()) {
    const auto hand_over = [&] {
      if (lane == 0 && !(mistake == Mistake::one_warp_short && warp == 1 && i == 4)) s.k_ring.hand_over(to);
    };
    const auto release = [&] {
      if (lane == 0) s.byte_ring.release(from);
    };
    if (mistake != Mistake::no_wait_for_bytes) s.byte_ring.wait(from);
    if (mistake != Mistake::no_wait_for_free) s.k_ring.wait_free(to);
    if (mistake == Mistake::early_hand_over) hand_over();
    if (mistake == Mistake::early_release) release();
    convert_tile<OperandType::e4m3, Element::bf16, warps>(s.k[to.stage], s.bytes[from.stage], warp, lane);
    if (mistake != Mistake::no_fence) ptx::fence_async_shared();
    ptx::sync_warp();
    if (mistake != Mistake::early_hand_over) hand_over();
    if (mistake != Mistake::early_release) release();
  }
}

struct Problem {
  TensorMap q, k;
  float* out;  ///< (64, 64): the sum over blocks of Q K^T
};

template <Mistake mistake>
TANDEM_KERNEL converted_product(const __grid_constant__ Problem p) {
  auto& s = *reinterpret_cast<Shared*>(ptx::dynamic_shared());
  const int thread = static_cast<int>(ptx::thread_index());
  if (thread == 0) {
    s.q_ring.init(4);
    s.byte_ring.init(warps);
    s.k_ring.init(4, warps);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_block();
  if (thread < warp_size) {
    if (!ptx::elect_one()) return;
    s.q.load(p.q, s.q_ring.acquire({}, s.q.bytes), 0, 0, 0, ptx::CacheHint::normal);
    Ring<stages>::Position at;
    for (int i = 0; i < blocks; ++i, at.advance()) {
      ptx::Mbarrier& full = s.byte_ring.acquire(at, s.bytes[0].bytes);
      s.bytes[at.stage].load(p.k, full, 64 * i, 0, 0, ptx::CacheHint::normal);
    }
    return;
  }
  if (thread < warpgroup_size) return;
  if (thread < 2 * warpgroup_size) return convert_blocks<mistake>(s);
  float d[32];
  s.q_ring.wait({});
  Ring<stages>::Position at;
  for (int i = 0; i < blocks; ++i, at.advance()) {
    s.k_ring.wait(at);
    ptx::wgmma_fence();
    for (int step = 0; step < 4; ++step) {
      ptx::wgmma_shared<64, Element::bf16, false>(d, s.q.k_major() + s.q.k_major_offset(step),
                                                  s.k[at.stage].k_major() + s.q.k_major_offset(step),
                                                  i > 0 || step > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    if (thread % warp_size == 0) s.k_ring.release(at);
  }
  const FragmentPosition position(thread - 2 * warpgroup_size);
  for (int i = 0; i < 32; ++i) {
    ptx::store_global(p.out + position.row(i / 2 % 2) * 64 + position.first_col + i / 4 * 8 + i % 2, d[i]);
  }
}

/// Runs it, and says what the emulator found wrong, or where a result is.
template <Mistake mistake>
std::string fault_of_product(std::uint64_t seed) {
  std::vector<u16> q(64 * 64);
  std::vector<u8> k(64 * 64 * blocks);
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i] = static_cast<u16>(ptx::pack_bf16(static_cast<float>(i % 7) - 3.0F, 0.0F));
  }
  constexpr u8 quarters[4] = {0x00, 0x28, 0xB8, 0x40};  // 0, 0.25, -1, 2
  for (std::size_t i = 0; i < k.size(); ++i) k[i] = quarters[(i * 7 + i / 64) % 4];
  std::vector<float> out(64 * 64);
  const auto map = [](const void* data, int rows, int bytes) {
    TensorMapSpec spec;
    spec.base = data;
    spec.rank = 4;
    spec.element_bytes = bytes;
    spec.dims = {64, rows, 1, 1};
    spec.strides = {64 * bytes, 64 * bytes * rows, 64 * bytes * rows};
    spec.box = {64, 64, 1, 1};
    spec.swizzle = bytes == 2 ? Swizzle::b128 : Swizzle::b64;
    return emulator::encode(spec);
  };
  emulator::Options options{
      .seed = seed, .buffers = {emulator::readable(q), emulator::readable(k), emulator::writable(out)}};
  try {
    emulator::launch(&converted_product<mistake>,
                     {map(q.data(), 64, 2), map(k.data(), 64 * blocks, 1), out.data()},
                     {.threads = 3 * warpgroup_size, .shared_bytes = sizeof(Shared)}, options);
  } catch (const emulator::Fault& fault) {
    return fault.what();
  }
  for (int row = 0; row < 64; ++row) {
    for (int key = 0; key < 64; ++key) {
      float want = 0.0F;
      for (int i = 0; i < 64 * blocks; ++i) {
        const int at = (i / 64 * 64 + key) * 64 + i % 64;
        want += ptx::unpack<Element::bf16>(q[static_cast<std::size_t>(row * 64 + i % 64)]) *
                value_of(OperandType::e4m3, k[static_cast<std::size_t>(at)]);
      }
      if (out[static_cast<std::size_t>(row * 64 + key)] != want) return "a wrong sum";
    }
  }
  return "";
}

TEST(TileWiden, ConvertedTilesAreMultipliedInEveryInterleaving) {
  for (std::uint64_t seed = 0; seed < 16; ++seed)
    EXPECT_EQ(fault_of_product<Mistake::none>(seed), "") << seed;
}

/// That the emulator names the mistake, whatever the interleaving.
template <Mistake mistake>
void expect_fault(const std::vector<std::string>& any_of) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const std::string fault = fault_of_product<mistake>(seed);
    bool named = false;
    for (const std::string& text : any_of) named = named || fault.find(text) != std::string::npos;
    EXPECT_TRUE(named) << seed << ": " << fault;
  }
}

TEST(TileWiden, MistakesInTheHandOverAreNoticed) {
  expect_fault<Mistake::no_wait_for_bytes>({"that it has not waited for", "that nobody wrote"});
  expect_fault<Mistake::no_wait_for_free>({"that a WGMMA of warpgroup"});
  expect_fault<Mistake::no_fence>({"without a fence_async_shared between them"});
  expect_fault<Mistake::early_hand_over>(
      {"with no barrier between them", "that nobody wrote", "without a fence_async_shared"});
  expect_fault<Mistake::early_release>({"with no barrier between them", "that it has not waited for"});
  expect_fault<Mistake::one_warp_short>({"deadlock"});
}

}  // namespace
}  // namespace tandem::tile
