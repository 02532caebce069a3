// The instructions of src/ptx in the emulator: against their formulas, and against the bytes that a
// GPU wrote.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>

#include "hardware_truth.hpp"
#include "launch.hpp"

namespace tandem::kernel_tests {
namespace {

/// The kernel's results in the emulator, and where its sections begin.
struct Results {
  TruthInputs in = truth_inputs();
  std::vector<unsigned char> bytes = blank_truth();

  Results() {
    emulator::Options options;
    options.buffers = {emulator::readable(in.bf16), emulator::readable(in.f16),
                       emulator::readable(in.numbers), emulator::writable(bytes)};
    TruthParams params =
        truth_params({in.bf16.data(), in.f16.data(), in.numbers.data(), bytes.data()}, &emulator::encode);
    for (int section = 0; section < truth_sections; ++section) {
      params.section = static_cast<TruthSection>(section);
      emulator::launch(&hardware_truth, params,
                       {.threads = truth_threads, .shared_bytes = sizeof(TruthShared)}, options);
    }
  }

  [[nodiscard]] std::uint32_t word(int i) const {
    std::uint32_t w = 0;
    std::memcpy(&w, bytes.data() + static_cast<std::size_t>(i) * 4, 4);
    return w;
  }
  [[nodiscard]] std::uint16_t half(int i) const {
    return static_cast<std::uint16_t>(word(i / 2) >> (16 * (i % 2)));
  }
  [[nodiscard]] float source(int row, int col) const {
    return std::bit_cast<float>(std::uint32_t{in.bf16[static_cast<std::size_t>(row * truth_cols + col)]}
                                << 16);
  }
  [[nodiscard]] std::uint16_t target(int swizzle, int row, int col) const {
    std::uint16_t x = 0;
    std::memcpy(
        &x,
        bytes.data() + truth_target_offset(swizzle) + static_cast<std::size_t>(row * truth_cols + col) * 2,
        2);
    return x;
  }
};

const Results& results() {
  static const Results r;
  return r;
}

// Where the sections of the kernel's output begin, in words.
constexpr int swizzle_begin[] = {truth_begin(TruthSection::load_b32), truth_begin(TruthSection::load_b64),
                                 truth_begin(TruthSection::load_b128)};
constexpr int products_begin = truth_begin(TruthSection::wgmma_k_major_b32);
constexpr int stmatrix_begin = truth_begin(TruthSection::stmatrix);
constexpr int warp_begin = truth_begin(TruthSection::warp);
constexpr int math_begin = truth_begin(TruthSection::math);

/// Byte offset in a tile of rows of `span` bytes whose 16-byte units are exchanged as the CUDA driver's
/// manual draws it.
int swizzled_offset(int row, int byte, int span) {
  const int rows_a_line = 128 / span;  // rows that share 128 bytes share an exchange
  return row * span + ((byte / 16) ^ (row / rows_a_line % (span / 16))) * 16 + byte % 16;
}

TEST(Instructions, CopiesSwizzleAndFillWithZerosOutsideTheTensor) {
  for (int s = 0; s < 3; ++s) {
    const int span = 32 << s;
    for (int row = 0; row < 32; ++row) {
      for (int col = 0; col < span / 2; ++col) {
        const int from_row = row + truth_load_row;
        const int from_col = truth_load_col(span / 2) + col;
        const bool inside = from_row >= 0 && from_col < truth_cols;
        const auto expected =
            inside ? results().in.bf16[static_cast<std::size_t>(from_row * truth_cols + from_col)] : 0;
        const int offset = swizzled_offset(row, col * 2, span);
        ASSERT_EQ(results().half(swizzle_begin[s] * 2 + offset / 2), expected)
            << span << ": " << row << ", " << col;
      }
    }
  }
}

/// Checks 128 x registers words of D against a formula for its elements.
template <typename Formula>
void expect_product(int begin, int registers, const Formula& element) {
  for (int r = 0; r < registers; ++r) {
    for (int thread = 0; thread < 128; ++thread) {
      const int row = 16 * (thread / 32) + thread % 32 / 4 + 8 * (r / 2 % 2);
      const int col = 8 * (r / 4) + 2 * (thread % 4) + r % 2;
      const float got = std::bit_cast<float>(results().word(begin + r * 128 + thread));
      ASSERT_EQ(got, element(row, col))
          << "D[" << row << "][" << col << "], thread " << thread << " register " << r;
    }
  }
}

TEST(Instructions, ProductsOfKMajorOperands) {
  int begin = products_begin;
  for (const int depth : {16, 32, 64}) {
    expect_product(begin, 16, [&](int m, int n) {
      float sum = 0;
      for (int k = 0; k < depth; ++k) sum += results().source(m, k) * results().source(64 + n, 32 + k);
      return sum;
    });
    begin += 128 * 16;
  }
}

TEST(Instructions, ProductsOfMnMajorOperands) {
  int begin = products_begin + 3 * 128 * 16;
  for (const int registers : {16, 32, 64}) {
    expect_product(begin, registers, [&](int m, int n) {
      float sum = 0;
      for (int k = 0; k < 32; ++k) sum += results().source(m, k) * results().source(64 + k, n);
      return sum;
    });
    begin += 128 * registers;
  }
}

TEST(Instructions, ProductsWithAInRegisters) {
  expect_product(products_begin + 128 * (3 * 16 + 112), 64, [&](int m, int n) {
    float sum = 1;
    for (int k = 0; k < 16; ++k) sum += results().source(m, k) * results().source(32 + k, n);
    return sum;
  });
}

TEST(Instructions, ProductsOfAWarp) {
  for (const TruthSection section : {TruthSection::mma_bf16, TruthSection::mma_f16}) {
    expect_product(truth_begin(section), 8, [&](int m, int n) {
      float sum = 1;
      for (int k = 0; k < 64; ++k) sum += results().source(m, k) * results().source(64 + n, 64 + k);
      return sum;
    });
    expect_product(truth_begin(section) + 128 * 8, 8, [&](int m, int n) {
      float sum = 1;
      for (int k = 0; k < 16; ++k) sum += results().source(m, k) * results().source(80 + k, 96 + n);
      return sum;
    });
  }
}

/// Byte `col` of a row of the source, and what it is as e4m3.
int source_byte(int row, int col) {
  return static_cast<int>(results().in.bf16[static_cast<std::size_t>(row * truth_cols + col / 2)] >>
                          (8 * (col % 2))) &
         0xff;
}
float source_e4m3(int row, int col) {
  const int code = source_byte(row, col);
  const float magnitude = std::ldexp(static_cast<float>(8 + (code & 7)), (code >> 3 & 15) - 10);
  return (code & 0x7f) == 0 ? 0.0F : code >= 0x80 ? -magnitude : magnitude;
}

/// Checks sums over `depth` bytes of rows of A and of B, whose first row is 64 and first byte 128.
template <typename A, typename B>
void expect_bytes(TruthSection section, int registers, int depth, bool whole, const A& a, const B& b) {
  for (int r = 0; r < registers; ++r) {
    for (int thread = 0; thread < 128; ++thread) {
      const int row = 16 * (thread / 32) + thread % 32 / 4 + 8 * (r / 2 % 2);
      const int col = 8 * (r / 4) + 2 * (thread % 4) + r % 2;
      float sum = 0;
      for (int k = 0; k < depth; ++k) sum += a(row, k) * b(64 + col, 128 + k);
      const std::uint32_t word = results().word(truth_begin(section) + r * 128 + thread);
      const float got =
          whole ? static_cast<float>(static_cast<std::int32_t>(word)) : std::bit_cast<float>(word);
      ASSERT_EQ(got, sum) << name_of(section) << ": D[" << row << "][" << col << "]";
    }
  }
}

TEST(Instructions, ProductsOfBytes) {
  const auto s8 = [](int row, int col) {
    return static_cast<float>(static_cast<std::int8_t>(source_byte(row, col)));
  };
  const auto u8 = [](int row, int col) { return static_cast<float>(source_byte(row, col)); };
  expect_bytes(TruthSection::wgmma_e4m3, 16, 64, false, source_e4m3, source_e4m3);
  expect_bytes(TruthSection::wgmma_s8, 16, 128, true, s8, s8);
  expect_bytes(TruthSection::wgmma_e4m3_registers, 32, 32, false, source_e4m3, source_e4m3);
  expect_bytes(TruthSection::wgmma_u8_registers, 32, 32, true, u8, s8);
}

TEST(Instructions, ProductsInF16) {
  expect_product(products_begin + 128 * (3 * 16 + 112 + 64), 32, [&](int m, int n) {
    float sum = 0;
    for (int k = 0; k < 16; ++k) sum += results().source(m, k) * results().source(64 + n, 64 + k);
    return sum;
  });
}

TEST(Instructions, StmatrixStoresEightRowsAMatrix) {
  for (int warp = 0; warp < 4; ++warp) {
    for (int row = 0; row < 32; ++row) {
      for (int word = 0; word < 8; ++word) {
        const int lane = row % 8 * 4 + word;
        const int expected = word < 4 ? ((warp * 32 + lane) << 8) + row / 8 : 0;
        ASSERT_EQ(results().word(stmatrix_begin + warp * 256 + row * 8 + word),
                  static_cast<std::uint32_t>(expected));
      }
    }
  }
}

TEST(Instructions, ExchangesInsideAWarp) {
  std::uint32_t ballot = 0;
  for (std::uint32_t lane = 1; lane < 32; lane += 3) ballot |= 1U << lane;
  for (int lane = 0; lane < 32; ++lane) {
    const auto got = [&](int i) { return results().word(warp_begin + i * 32 + lane); };
    EXPECT_EQ(got(0), static_cast<std::uint32_t>((lane ^ 5) * 3));
    EXPECT_EQ(got(1), 77U);
    EXPECT_EQ(got(2), static_cast<std::uint32_t>(lane >= 4 ? lane + 96 : lane + 100));
    EXPECT_EQ(got(3), ballot);
    EXPECT_EQ(got(4), 0x503U);
    EXPECT_EQ(got(5), 1U) << "elect_one elects one lane";
  }
}

/// The bf16 or f16 nearest to x, ties to even: the candidate that no other beats.
std::uint32_t nearest(double x, int mantissa_bits, int smallest_exponent, double largest,
                      std::uint32_t infinity) {
  const std::uint32_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isinf(x)) return sign | infinity;
  const double magnitude = std::fabs(x);
  const int exponent =
      magnitude == 0 ? smallest_exponent : std::max(std::ilogb(magnitude), smallest_exponent);
  const double unit = std::ldexp(1.0, exponent - mantissa_bits);
  const double rounded = std::nearbyint(magnitude / unit) * unit;
  if (rounded > largest) return sign | infinity;
  if (rounded < std::ldexp(1.0, smallest_exponent)) return sign | static_cast<std::uint32_t>(rounded / unit);
  const int e = std::ilogb(rounded);
  const auto mantissa =
      static_cast<std::uint32_t>(std::ldexp(rounded, mantissa_bits - e)) - (1U << mantissa_bits);
  return sign | static_cast<std::uint32_t>(e - smallest_exponent + 1) << mantissa_bits | mantissa;
}
std::uint32_t bf16_bits(float x) {
  return std::isnan(x) ? 0x7fff : nearest(static_cast<double>(x), 7, -126, 0x1.fep127, 0x7f80);
}
std::uint32_t f16_bits(float x) {
  return std::isnan(x) ? 0x7fff : nearest(static_cast<double>(x), 10, -14, 65504.0, 0x7c00);
}

TEST(Instructions, PackingRoundsToNearestEven) {
  for (int i = 0; i < 64; ++i) {
    const auto x = std::bit_cast<float>(results().in.numbers[static_cast<std::size_t>(i)]);
    const auto y = std::bit_cast<float>(results().in.numbers[static_cast<std::size_t>((i + 17) % 64)]);
    EXPECT_EQ(results().word(math_begin + 5 * 64 + i), bf16_bits(x) | bf16_bits(y) << 16) << x << ", " << y;
    EXPECT_EQ(results().word(math_begin + 6 * 64 + i), f16_bits(x) | f16_bits(y) << 16) << x << ", " << y;
    EXPECT_EQ(results().word(math_begin + 7 * 64 + i), f16_bits(x * 0x1p-14F) | f16_bits(y * 0x1p-10F) << 16);
  }
}

TEST(Instructions, SpecialValuesOfTheApproximations) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const auto got = [](int function, int i) {
    return std::bit_cast<float>(results().word(math_begin + function * 64 + i));
  };
  constexpr int zero = 0, minus_zero = 1, inf = 2, minus_inf = 3, nan = 4, subnormal = 5, sixteen = 13,
                minus_sixteen = 14;
  EXPECT_EQ(got(2, minus_inf), 0.0F);
  EXPECT_EQ(got(2, inf), infinity);
  EXPECT_TRUE(std::isnan(got(2, nan)));
  EXPECT_EQ(got(2, subnormal), 1.0F);
  EXPECT_EQ(got(2, sixteen), 65536.0F);
  EXPECT_EQ(got(2, minus_sixteen), 0x1p-16F);
  EXPECT_EQ(got(3, zero), -infinity);
  EXPECT_EQ(got(3, subnormal), -infinity);
  EXPECT_TRUE(std::isnan(got(3, minus_sixteen)));
  EXPECT_EQ(got(3, sixteen), 4.0F);
  EXPECT_EQ(got(4, zero), infinity);
  EXPECT_EQ(got(4, minus_zero), -infinity);
  EXPECT_EQ(got(4, inf), 0.0F);
  EXPECT_EQ(got(4, subnormal), infinity);
  EXPECT_EQ(got(4, sixteen), 0.0625F);
  for (int i = 0; i < 64; ++i) {
    const auto x = std::bit_cast<float>(results().in.numbers[static_cast<std::size_t>(i)]);
    const auto y = std::bit_cast<float>(results().in.numbers[static_cast<std::size_t>((i + 17) % 64)]);
    if (std::isnan(x) || std::isnan(y)) {
      EXPECT_EQ(got(0, i), std::isnan(x) ? y : x) << "a NaN loses";
      EXPECT_TRUE(std::isnan(got(1, i)));
    } else {
      EXPECT_EQ(got(0, i), x < y ? y : x);
    }
  }
}

TEST(Instructions, StoresTakeFromWhereCopiesPutAndClipAtTheEdges) {
  constexpr int origin_row[] = {8, 40, 100};
  constexpr int origin_col[] = {0, 16, 72};
  for (int s = 0; s < 3; ++s) {
    const int span = 32 << s;
    for (int row = 0; row < truth_rows; ++row) {
      for (int col = 0; col < truth_cols; ++col) {
        const int r = row - origin_row[s];
        const int c = col - origin_col[s];
        std::uint32_t expected = truth_blank | truth_blank << 8;
        if (r >= 0 && r < 32 && c >= 0 && c < span / 2) {
          const int offset = swizzled_offset(r, c * 2, span);
          expected = static_cast<std::uint32_t>(offset / 4 * 0x20001 + 1) >> (offset % 4 * 8) & 0xffff;
        }
        ASSERT_EQ(results().target(s, row, col), expected) << span << ": " << row << ", " << col;
      }
    }
  }
}

TEST(Instructions, ReductionsAdd) {
  for (int row = 0; row < truth_rows; ++row) {
    for (int col = 0; col < truth_cols; ++col) {
      float got = 0;
      std::memcpy(
          &got,
          results().bytes.data() + truth_sum_offset + static_cast<std::size_t>(row * truth_cols + col) * 4,
          4);
      ASSERT_EQ(got, row >= 120 && col >= 104 ? 1.0F : 0.0F) << row << ", " << col;
    }
  }
}

TEST(Instructions, CopiesBringTheirBytesOrZeros) {
  const auto* const source = reinterpret_cast<const unsigned char*>(results().in.bf16.data());
  for (int unit = 0; unit < 2 * truth_threads; ++unit) {
    const bool exists = unit >= truth_threads || unit % 3 != 0;
    for (int i = 0; i < 16; ++i) {
      const auto at = static_cast<std::size_t>(16 * unit + i);
      ASSERT_EQ(results().bytes[truth_late_offset + at], exists ? source[at] : 0) << "unit " << unit;
    }
  }
}

TEST(Instructions, AreTheHardwares) {
  std::ifstream file(TANDEM_HARDWARE_TRUTH, std::ios::binary);
  if (!file)
    GTEST_SKIP() << "no GPU has been recorded: run gpu_tests with TANDEM_RECORD_TRUTH="
                 << TANDEM_HARDWARE_TRUTH;
  const std::vector<unsigned char> packed((std::istreambuf_iterator<char>(file)),
                                          std::istreambuf_iterator<char>());
  const std::vector<unsigned char> truth = unpack_truth(packed);
  // The sections behind truth_late_offset are newer than the last recording.
  ASSERT_TRUE(truth.size() == truth_late_offset || truth.size() == truth_bytes);
  for (std::size_t i = 0; i < truth.size(); ++i) {
    ASSERT_EQ(results().bytes[i], truth[i]) << "byte " << i << " (word " << i / 4 << ")";
  }
}

}  // namespace
}  // namespace tandem::kernel_tests
