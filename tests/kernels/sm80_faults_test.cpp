// Seeded faults of kernels that load by cp.async and multiply by mma.sync: each mistake is a fault in the
// emulator, or a wrong result, and the kernel without one is right in every interleaving.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <random>

#include "fault_of.hpp"
#include "launch.hpp"
#include "ptx/barrier.cuh"
#include "tile/copied_rows.cuh"
#include "tile/warp_operands.cuh"

namespace tandem::kernel_tests {
namespace {

using ::testing::HasSubstr;

enum class Mistake {
  none,
  no_wait,              ///< for the copies of a block
  one_group_too_few,    ///< the wait lets the block's own group be under way
  no_commit,            ///< two blocks are one group
  no_barrier,           ///< behind the wait: others' copies are not known to have come
  copies_over_readers,  ///< the next block comes into a buffer that warps still read
  wrong_row,            ///< ldmatrix reads rows beside those of the operand
  wrong_unit,           ///< ldmatrix reads columns beside those of the operand
  no_swizzle,           ///< ldmatrix reads as if rows were not swizzled
  outside               ///< ldmatrix reads behind shared memory
};

constexpr int rows = 32;   // of A; keys of a block
constexpr int depth = 64;  // columns
constexpr int blocks = 4;
constexpr int stages = 2;
constexpr int threads = 64;

struct Params {
  const u16* a;
  const u16* b;  ///< blocks x rows
  float* out;    ///< rows x (blocks x rows)
};

using Tile = tile::SharedTile<rows, depth>;
struct Shared {
  Tile a;
  Tile b[stages];
};

template <Mistake mistake>
TANDEM_DEVICE char* address(Tile& tile, int row, int col) {
  if (mistake == Mistake::wrong_row) row ^= 8;
  if (mistake == Mistake::wrong_unit) col ^= 8;
  if (mistake == Mistake::no_swizzle) return tile.data + row * Tile::row_bytes + col * 2;
  if (mistake == Mistake::outside) return tile.data + sizeof(Shared) + row * Tile::row_bytes;
  return tile.address(row, col);
}

/// A B^T, a block of B after the other. Each warp has 16 rows of A.
template <Mistake mistake>
TANDEM_KERNEL copied_gemm(const Params p) {
  auto& shared = *reinterpret_cast<Shared*>(ptx::dynamic_shared());
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  const int first = static_cast<int>(ptx::thread_index()) / warp_size * 16;
  const auto load = [&](Tile& to, const u16* from) {
    tile::RowCopier<threads>::copy(to, depth, [&](int row, int column) {
      return [=](int offset) { return tile::SourceRow{from + (row + offset) * depth + column, true}; };
    });
  };
  const auto load_block = [&](int block) {
    if (block < blocks) load(shared.b[block % stages], p.b + block * rows * depth);
    if (mistake != Mistake::no_commit || block % 2 == 0) ptx::commit_copies();
  };
  load(shared.a, p.a);
  for (int block = 0; block < stages - 1; ++block) load_block(block);
  for (int block = 0; block < blocks; ++block) {
    constexpr int ahead = stages - 2 + (mistake == Mistake::one_group_too_few ? 1 : 0);
    if (mistake == Mistake::copies_over_readers) load_block(block + stages - 1);
    if (mistake == Mistake::copies_over_readers) {
      ptx::wait_for_copy_groups<1>();
    } else if (mistake != Mistake::no_wait) {
      ptx::wait_for_copy_groups<ahead>();
    }
    if (mistake != Mistake::no_barrier) ptx::sync_block();
    if (mistake != Mistake::copies_over_readers) load_block(block + stages - 1);
    float s[rows / 2];
    for (float& x : s) x = 0.0F;
    for (int step = 0; step < depth / 16; ++step) {
      u32 a[4];
      tile::load_rows_operand(shared.a, first, step, lane, a);
      for (int n = 0; n < rows; n += 16) {
        u32 b[4];
        ptx::ldmatrix_x4(address<mistake>(shared.b[block % stages], n + lane % 8 + lane / 16 * 8,
                                          16 * step + lane / 8 % 2 * 8),
                         b);
        ptx::mma<Element::bf16>(s + n / 2, a, b[0], b[1]);
        ptx::mma<Element::bf16>(s + n / 2 + 4, a, b[2], b[3]);
      }
    }
    for (int i = 0; i < rows / 2; ++i) {
      const int row = first + lane / 4 + 8 * (i / 2 % 2);
      const int col = block * rows + i / 4 * 8 + lane % 4 * 2 + i % 2;
      ptx::store_global(p.out + row * blocks * rows + col, s[i]);
    }
  }
}

/// A matrix of small integers, exact in bf16 and in f32 sums.
std::vector<u16> matrix(int count, unsigned seed) {
  std::vector<u16> m(static_cast<std::size_t>(count) * depth);
  std::minstd_rand random(seed);
  for (u16& x : m) {
    const auto value = static_cast<float>(static_cast<int>(random() >> 8) % 5 - 2);
    x = static_cast<u16>(std::bit_cast<u32>(value) >> 16);
  }
  return m;
}

/// What is wrong with a run: a fault's text, "a wrong result", or nothing.
template <Mistake mistake>
std::string wrong_with(std::uint64_t seed) {
  const std::vector<u16> a = matrix(rows, 1);
  const std::vector<u16> b = matrix(blocks * rows, 2);
  std::vector<float> out(static_cast<std::size_t>(rows) * blocks * rows, -1e9F);
  emulator::Options options{
      .seed = seed, .buffers = {emulator::readable(a), emulator::readable(b), emulator::writable(out)}};
  const std::string fault = fault_of([&] {
    emulator::launch(&copied_gemm<mistake>, Params{a.data(), b.data(), out.data()},
                     {.threads = threads, .shared_bytes = sizeof(Shared)}, options);
  });
  if (!fault.empty()) return fault;
  const auto at = [](const std::vector<u16>& m, int row, int k) {
    return std::bit_cast<float>(u32{m[static_cast<std::size_t>(row * depth + k)]} << 16);
  };
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < blocks * rows; ++j) {
      float sum = 0.0F;
      for (int k = 0; k < depth; ++k) sum += at(a, i, k) * at(b, j, k);
      if (out[static_cast<std::size_t>(i * blocks * rows + j)] != sum) return "a wrong result";
    }
  }
  return "";
}

TEST(Sm80Kernel, WithoutMistakeIsRightInEveryInterleaving) {
  for (std::uint64_t seed = 0; seed < 32; ++seed) EXPECT_EQ(wrong_with<Mistake::none>(seed), "");
}

struct Seeded {
  const char* name;
  std::string (*wrong)(std::uint64_t seed);
  ::testing::Matcher<const std::string&> text;

  friend void PrintTo(const Seeded& s, std::ostream* out) { *out << s.name; }
};
class Sm80Faults : public ::testing::TestWithParam<Seeded> {};

TEST_P(Sm80Faults, AreFoundInEveryInterleaving) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    EXPECT_THAT(GetParam().wrong(seed), GetParam().text) << "seed " << seed;
  }
}

const Seeded faults[] = {
    {"NoWait", &wrong_with<Mistake::no_wait>,
     HasSubstr("reads bytes of a copy that its thread has not waited for")},
    {"OneGroupTooFew", &wrong_with<Mistake::one_group_too_few>,
     HasSubstr("reads bytes of a copy that its thread has not waited for")},
    {"NoCommit", &wrong_with<Mistake::no_commit>,
     HasSubstr("reads bytes of a copy that its thread has not waited for")},
    {"NoBarrier", &wrong_with<Mistake::no_barrier>,
     ::testing::AnyOf(HasSubstr("with no barrier between them"), HasSubstr("that nobody wrote"),
                      HasSubstr("that its thread has not waited for"))},
    {"CopiesOverReaders", &wrong_with<Mistake::copies_over_readers>,
     HasSubstr("with no barrier between them")},
    {"WrongRow", &wrong_with<Mistake::wrong_row>, HasSubstr("a wrong result")},
    {"WrongUnit", &wrong_with<Mistake::wrong_unit>, HasSubstr("a wrong result")},
    {"NoSwizzle", &wrong_with<Mistake::no_swizzle>, HasSubstr("a wrong result")},
    {"OutsideSharedMemory", &wrong_with<Mistake::outside>, HasSubstr("outside shared memory")},
};
INSTANTIATE_TEST_SUITE_P(Seeded, Sm80Faults, ::testing::ValuesIn(faults),
                         [](const auto& at) { return std::string(at.param.name); });

}  // namespace
}  // namespace tandem::kernel_tests
