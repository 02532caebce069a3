// The products of the tensor cores, out of swizzled shared memory and registers.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "cpu/common/vector_clones.hpp"
#include "operand.hpp"
#include "problem/recipe.hpp"

namespace tandem::emulator {
namespace {

float from_f16(std::uint32_t h) {
  const std::uint32_t magnitude = (h & 0x7fff) << 13;
  const bool finite = (h & 0x7c00) != 0x7c00;
  // Moves the exponent from f16's bias to f32's, and makes subnormal numbers normal.
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112F;
  const std::uint32_t bits = finite ? std::bit_cast<std::uint32_t>(scaled) : magnitude | 0x7f800000;
  return std::bit_cast<float>(bits | (h & 0x8000) << 16);
}

float to_float(std::uint32_t bits, Element element) {
  return element == Element::bf16 ? std::bit_cast<float>(bits << 16) : from_f16(bits);
}

void load_unit(const char* p, Element element, float (&values)[8]) {
  std::uint16_t raw[8];
  std::memcpy(raw, p, sizeof(raw));
  for (int i = 0; i < 8; ++i) values[i] = to_float(raw[i], element);
}

/// c (64 x n) += a (64 x matrix_depth) b (matrix_depth x n), in blocks of 8 x 8 sums that stay in registers.
TANDEM_VECTOR_CLONES void multiply(const float (*a)[matrix_depth], const float* b, float* c, int n) {
  using Vector = float __attribute__((vector_size(32)));
  constexpr int rows = 8;
  for (int j = 0; j < n; j += 8) {
    Vector columns[matrix_depth];
    for (int k = 0; k < matrix_depth; ++k) std::memcpy(&columns[k], b + k * n + j, sizeof(Vector));
    for (int m = 0; m < 64; m += rows) {
      Vector sums[rows];
      for (int r = 0; r < rows; ++r) std::memcpy(&sums[r], c + (m + r) * n + j, sizeof(Vector));
      for (int k = 0; k < matrix_depth; ++k) {
        for (int r = 0; r < rows; ++r) sums[r] += a[m + r][k] * columns[k];
      }
      for (int r = 0; r < rows; ++r) std::memcpy(c + (m + r) * n + j, &sums[r], sizeof(Vector));
    }
  }
}

/// c (16 x 8) += a (16 x matrix_depth) b (matrix_depth x 8), by rows of eight sums.
TANDEM_VECTOR_CLONES void multiply_16_by_8(const float (*a)[matrix_depth], const float (*b)[8],
                                           float (*c)[8]) {
  using Vector = float __attribute__((vector_size(32)));
  Vector rows[matrix_depth];
  std::memcpy(rows, b, sizeof(rows));
  for (int m = 0; m < 16; m += 8) {
    Vector sums[8];
    std::memcpy(sums, c + m, sizeof(sums));
    for (int k = 0; k < matrix_depth; ++k) {
      for (int r = 0; r < 8; ++r) sums[r] += a[m + r][k] * rows[k];
    }
    std::memcpy(c + m, sums, sizeof(sums));
  }
}

/// Operands in 8 bits: all of A, and B as columns.
struct ByteOperands {
  std::uint8_t a[64][matrix_byte_depth];
  std::vector<std::uint8_t> b;  ///< [n][matrix_byte_depth]
};

/// c += a b in f32; the accumulator then keeps 13 bits behind the point (problem/recipe.hpp).
void multiply_e4m3(const ByteOperands& x, std::vector<float>& c, std::uint32_t n) {
  static const std::vector<float> values = [] {
    std::vector<float> table(256);
    for (std::uint32_t i = 0; i < table.size(); ++i) table[i] = unpack_e4m3(i);
    return table;
  }();
  std::vector<float> b(static_cast<std::size_t>(matrix_byte_depth) * n);  // [k][n]
  for (std::uint32_t j = 0; j < n; ++j) {
    for (std::uint32_t k = 0; k < matrix_byte_depth; ++k)
      b[k * n + j] = values[x.b[j * matrix_byte_depth + k]];
  }
  for (std::uint32_t m = 0; m < 64; ++m) {
    float* const sums = c.data() + static_cast<std::size_t>(m) * n;
    for (std::uint32_t k = 0; k < matrix_byte_depth; ++k) {
      const float a = values[x.a[m][k]];
      for (std::uint32_t j = 0; j < n; ++j) sums[j] += a * b[k * n + j];
    }
    for (std::uint32_t j = 0; j < n; ++j) {
      const bool nan = sums[j] != sums[j];
      if (!nan) sums[j] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(sums[j]) & e4m3_accumulator_mask);
    }
  }
}

/// c += a b in s32, whose bits lie in c.
std::int32_t integer(std::uint8_t byte, bool is_signed) {
  return is_signed ? static_cast<std::int8_t>(byte) : static_cast<std::int32_t>(byte);
}
void multiply_integers(const ByteOperands& x, MatrixType type, std::vector<float>& c, std::uint32_t n) {
  const bool a_signed = type == MatrixType::s8;
  const bool b_signed = type != MatrixType::u8_u8;
  for (std::uint32_t m = 0; m < 64; ++m) {
    std::int32_t a[matrix_byte_depth];
    for (int k = 0; k < matrix_byte_depth; ++k) a[k] = integer(x.a[m][k], a_signed);
    for (std::uint32_t j = 0; j < n; ++j) {
      std::int32_t sum = 0;
      for (int k = 0; k < matrix_byte_depth; ++k)
        sum += a[k] * integer(x.b[j * matrix_byte_depth + static_cast<std::uint32_t>(k)], b_signed);
      std::int32_t held;
      std::memcpy(&held, &c[m * n + j], sizeof(held));
      held += sum;
      std::memcpy(&c[m * n + j], &held, sizeof(held));
    }
  }
}

void execute_bytes(Block& block, const MatrixInstruction& m) {
  ByteOperands x;
  const auto n = static_cast<std::uint32_t>(m.n);
  x.b.resize(static_cast<std::size_t>(n) * matrix_byte_depth);
  if (m.a_in_registers) {
    for (std::uint32_t t = 0; t < matrix_threads; ++t) {
      for (std::uint32_t r = 0; r < 4; ++r) {
        const std::uint32_t row = 16 * (t / 32) + t % 32 / 4 + 8 * (r % 2);
        std::memcpy(&x.a[row][16 * (r / 2) + 4 * (t % 4)], &m.a_registers[t * 4 + r], 4);
      }
    }
  } else {
    for_each_unit(decode(block, m.a, false, "wgmma"), false, 64,
                  [&](std::uint32_t offset, std::uint32_t row, std::uint32_t u) {
                    std::memcpy(&x.a[row][16 * u], block.shared() + offset, 16);
                  });
  }
  for_each_unit(decode(block, m.b, false, "wgmma"), false, n,
                [&](std::uint32_t offset, std::uint32_t row, std::uint32_t u) {
                  std::memcpy(&x.b[row * matrix_byte_depth + 16 * u], block.shared() + offset, 16);
                });
  std::vector<float>& c = m.accumulator->values;
  if (!m.accumulate) std::fill(c.begin(), c.end(), 0.0F);
  if (m.type == MatrixType::e4m3) {
    multiply_e4m3(x, c, n);
  } else {
    multiply_integers(x, m.type, c, n);
  }
}

}  // namespace

Operand decode(Block& block, std::uint64_t bits, bool mn_major, const char* what) {
  constexpr std::uint32_t field = 0x3fff;
  const std::uint32_t mode = static_cast<std::uint32_t>(bits >> 62);
  if (mode == 0) block.fail(fmt::format("{}: a descriptor without swizzle", what));
  Operand o{.start = (static_cast<std::uint32_t>(bits) & field) * 16 - shared_window,
            .leading = (static_cast<std::uint32_t>(bits >> 16) & field) * 16,
            .stride = (static_cast<std::uint32_t>(bits >> 32) & field) * 16,
            .swizzle = mode == 1   ? Swizzle::b128
                       : mode == 2 ? Swizzle::b64
                                   : Swizzle::b32};
  const std::uint32_t span = swizzle_span(o.swizzle);
  const std::uint32_t in_pattern = o.start % swizzle_pattern(o.swizzle);
  if (mn_major ? in_pattern != 0 : in_pattern + 2 * matrix_depth > span) {
    block.fail(fmt::format("{}: misaligned descriptor: start +{} is {} bytes into a pattern of {}", what,
                           o.start, in_pattern, swizzle_pattern(o.swizzle)));
  }
  return o;
}

void execute(Block& block, const MatrixInstruction& m) {
  if (m.type >= MatrixType::e4m3) {
    execute_bytes(block, m);
    return;
  }
  const auto element = static_cast<Element>(m.type);
  float a[64][matrix_depth];
  std::vector<float> b(static_cast<std::size_t>(matrix_depth * m.n));
  const auto n = static_cast<std::uint32_t>(m.n);
  if (m.a_in_registers) {
    for (std::uint32_t t = 0; t < matrix_threads; ++t) {
      for (std::uint32_t r = 0; r < 4; ++r) {
        const std::uint32_t row = 16 * (t / 32) + t % 32 / 4 + 8 * (r % 2);
        const std::uint32_t column = 8 * (r / 2) + 2 * (t % 4);
        const std::uint32_t packed = m.a_registers[t * 4 + r];
        a[row][column] = to_float(packed & 0xffff, element);
        a[row][column + 1] = to_float(packed >> 16, element);
      }
    }
  } else {
    for_each_unit(decode(block, m.a, m.a_mn_major, "wgmma"), m.a_mn_major, 64,
                  [&](std::uint32_t offset, std::uint32_t line, std::uint32_t u) {
                    float values[8];
                    load_unit(block.shared() + offset, element, values);
                    for (std::uint32_t i = 0; i < 8; ++i) {
                      (m.a_mn_major ? a[8 * u + i][line] : a[line][8 * u + i]) = values[i];
                    }
                  });
  }
  for_each_unit(decode(block, m.b, m.b_mn_major, "wgmma"), m.b_mn_major, n,
                [&](std::uint32_t offset, std::uint32_t line, std::uint32_t u) {
                  float values[8];
                  load_unit(block.shared() + offset, element, values);
                  for (std::uint32_t i = 0; i < 8; ++i) {
                    if (m.b_mn_major) {
                      b[line * n + 8 * u + i] = values[i];
                    } else {
                      b[(8 * u + i) * n + line] = values[i];
                    }
                  }
                });
  std::vector<float>& c = m.accumulator->values;
  if (!m.accumulate) std::fill(c.begin(), c.end(), 0.0F);
  multiply(a, b.data(), c.data(), m.n);
}

void multiply_fragments(Element element, const std::array<Warp::Deposit, 32>& lanes) {
  float a[16][matrix_depth];
  float b[matrix_depth][8];
  float c[16][8];
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    const auto& [words, accumulators] = lanes[lane];
    float sums[4];
    std::memcpy(sums, accumulators, sizeof(sums));
    const std::uint32_t line = lane / 4;
    const std::uint32_t pair = 2 * (lane % 4);
    for (std::uint32_t e = 0; e < 2; ++e) {
      const auto value = [&](std::uint32_t word) {
        return to_float(words[word] >> (16 * e) & 0xffff, element);
      };
      for (std::uint32_t h = 0; h < 2; ++h) {
        a[line + 8 * h][pair + e] = value(h);
        a[line + 8 * h][8 + pair + e] = value(2 + h);
        b[8 * h + pair + e][line] = value(4 + h);
        c[line + 8 * h][pair + e] = sums[2 * h + e];
      }
    }
  }
  multiply_16_by_8(a, b, c);
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    for (std::uint32_t h = 0; h < 2; ++h)
      std::memcpy(lanes[lane].row + 8 * h, &c[lane / 4 + 8 * h][2 * (lane % 4)], 8);
  }
}

float unpack(std::uint32_t bits, Element element) {
  return to_float(bits, element);
}

std::uint32_t add_zero_times(std::uint32_t sum, std::uint32_t x, Element element) {
  const auto finite = [element](std::uint32_t bits) {
    return std::isfinite(to_float(bits & 0xffff, element));
  };
  const std::uint32_t low = finite(sum) && finite(x) ? 0 : 0x7fff;
  const std::uint32_t high = finite(sum >> 16) && finite(x >> 16) ? 0 : 0x7fff0000;
  return high | low;
}

}  // namespace tandem::emulator
