// The operands and accumulators of WGMMA: where their elements lie in shared memory and in registers.
#pragma once

#include "block.hpp"
#include "swizzle.hpp"

namespace tandem::emulator {

constexpr int matrix_depth = 16;                     ///< K of one instruction
constexpr int matrix_byte_depth = 2 * matrix_depth;  ///< in 8 bits: as many bytes
constexpr std::uint32_t matrix_threads = 128;        ///< of a warpgroup

/// A descriptor's fields, in bytes; `start` is an offset in dynamic shared memory.
struct Operand {
  std::uint32_t start;
  std::uint32_t leading;
  std::uint32_t stride;
  Swizzle swizzle;

  /// Offset of the 16 bytes that hold elements 8 `unit` to 8 `unit` + 7 of row `row` (K-major).
  [[nodiscard]] std::uint32_t k_major(std::uint32_t row, std::uint32_t unit) const {
    return swizzled(start + row / 8 * stride + row % 8 * swizzle_span(swizzle) + unit * 16, swizzle);
  }
  /// Offset of the 16 bytes that hold columns 8 `unit` to 8 `unit` + 7 of row `k` (MN-major).
  [[nodiscard]] std::uint32_t mn_major(std::uint32_t k, std::uint32_t unit) const {
    const std::uint32_t strip = swizzle_span(swizzle) / 16;
    return swizzled(
        start + unit / strip * leading + unit % strip * 16 + k / 8 * stride + k % 8 * swizzle_span(swizzle),
        swizzle);
  }
};

/// The operand of a descriptor; throws a Fault if it is misaligned.
Operand decode(Block& block, std::uint64_t bits, bool mn_major, const char* what);

/// Calls visit(offset, row or k, unit) for each 16 bytes of an operand of `extent` rows or columns.
template <typename Visit>
void for_each_unit(const Operand& o, bool mn_major, std::uint32_t extent, const Visit& visit) {
  if (mn_major) {
    for (std::uint32_t k = 0; k < matrix_depth; ++k) {
      for (std::uint32_t u = 0; u < extent / 8; ++u) visit(o.mn_major(k, u), k, u);
    }
  } else {
    for (std::uint32_t row = 0; row < extent; ++row) {
      for (std::uint32_t u = 0; u < 2; ++u) visit(o.k_major(row, u), row, u);
    }
  }
}

/// Row and column of a thread's accumulator register `r` (wgmma.cuh).
inline std::uint32_t register_row(std::uint32_t thread, std::uint32_t r) {
  return 16 * (thread / 32) + thread % 32 / 4 + 8 * (r / 2 % 2);
}
inline std::uint32_t register_column(std::uint32_t thread, std::uint32_t r) {
  return 8 * (r / 4) + 2 * (thread % 4) + r % 2;
}

/// Computes the product of an instruction whose threads have all issued it.
void execute(Block& block, const MatrixInstruction& m);

/// The product of a warp's mma, whose lanes have all handed in A, B and where their accumulators are.
void multiply_fragments(Element element, const std::array<Warp::Deposit, 32>& lanes);

}  // namespace tandem::emulator
