// State of the tensor cores: WGMMAs in flight, and the registers that belong to them.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "clock.hpp"
#include "config/types.hpp"

namespace tandem::emulator {

struct Thread;

/// What a WGMMA multiplies: Element's types, then Bytes'.
enum class MatrixType : int { f16, bf16, e4m3, s8, u8, u8_u8 };
constexpr MatrixType matrix_type(Element element) {
  return static_cast<MatrixType>(element);
}
constexpr MatrixType matrix_type(Bytes bytes) {
  return static_cast<MatrixType>(static_cast<int>(bytes) + 2);
}

/// A writer of an operand, and the first place where it wrote.
struct Source {
  Event event;
  std::uint32_t offset;
};

/// A 64 x n tile of accumulators while WGMMAs own it: opened by the first that names it, closed by the wait.
struct Accumulator {
  int n = 0;
  std::vector<float> values;  ///< 64 x n, row-major; s32 sums as their bits
};

/// One WGMMA, from its first thread's issue until the last thread has retired it.
struct MatrixInstruction {
  std::uint32_t number = 0;  ///< from 1, in the warpgroup's order
  int n = 0;
  MatrixType type = MatrixType::bf16;
  bool a_in_registers = false;
  std::uint64_t a = 0;
  std::uint64_t b = 0;
  bool a_mn_major = false;
  bool b_mn_major = false;
  bool accumulate = false;
  bool opens = false;  ///< its accumulators were not in flight before
  std::shared_ptr<Accumulator> accumulator = nullptr;
  std::vector<std::uint32_t> a_registers = {};  ///< 4 for each of 128 threads, as issued
  std::vector<Source> sources = {};             ///< who wrote its shared-memory operands
  std::uint32_t first_thread = 0;
  std::uint32_t waits = 0;    ///< that thread's before this instruction
  std::uint32_t issued = 0;   ///< by so many threads
  std::uint32_t retired = 0;  ///< by so many threads
};

struct Warpgroup {
  std::deque<MatrixInstruction> instructions;
  std::uint32_t executed = 0;  ///< the last one done
  std::vector<Thread*> waiting;

  [[nodiscard]] MatrixInstruction* find(std::uint32_t number);
};

/// A thread's side of it.
struct MatrixThread {
  struct Open {
    float* registers;
    std::shared_ptr<Accumulator> accumulator = nullptr;
    std::uint32_t last;  ///< instruction
  };
  struct Operand {
    const std::uint32_t* registers;
    std::uint32_t instruction;
  };
  std::uint32_t issued = 0;
  std::uint32_t retired = 0;
  std::vector<std::uint32_t> groups;  ///< instructions issued at each commit
  bool fenced = false;
  std::uint32_t waits = 0;  ///< as many in each warp of a warpgroup before its next WGMMA: they wait together
  std::vector<Open> open;
  std::vector<Operand> operands;
};

/// Fills registers that WGMMAs own; any arithmetic on it keeps the pattern but for sign and quiet bit.
constexpr std::uint32_t poison = 0x7f9ac5e5;
constexpr bool is_poison(std::uint32_t bits) {
  return (bits & 0x7fbfffffU) == poison;
}

}  // namespace tandem::emulator
