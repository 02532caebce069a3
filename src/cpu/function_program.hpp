// A function of the user's own as a flat program: what a kernel evaluates for a register of rows against up
// to function_keys keys. Plain numbers and pointers, for sources that are compiled for one instruction set.
//
// Each value has the shape of what it depends on: rows (head and query differ by lane), keys, both (pairs),
// or neither. What does not depend on both is computed once for all pairs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tandem/function.hpp"

namespace tandem::cpu {

/// Keys that a program is evaluated for at a time: so many that starting an instruction costs little beside
/// them, so few that values stay in the first-level cache.
constexpr int function_keys = 64;
/// f32 or i32 numbers that a value takes at most by lane: those of the widest register.
constexpr int function_lanes = 16;

/// Rows and keys are bits. A value of neither lies as one of rows does, all lanes alike.
enum class ValueShape : std::int16_t { uniform = 0, rows = 1, keys = 2, pairs = 3 };

/// Where a value is. A value of pairs lies as the scores do: a register of rows for each key.
struct ProgramValue {
  ValueShape shape = ValueShape::uniform;
  std::int32_t offset = 0;  ///< in f32 words of the program's memory
  std::int16_t step = 0;    ///< that makes it
  bool is_score = false;    ///< where the caller has the scores
};

struct ProgramTensor {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int rank = 0;
  std::int64_t shape[ConstTensor::max_rank] = {};
  std::int64_t stride[ConstTensor::max_rank] = {};
};

struct ProgramStep {
  FunctionOp op = FunctionOp::constant;
  FunctionType type = FunctionType::real;  ///< of the result
  FunctionType from = FunctionType::real;  ///< of the first argument
  std::int16_t arguments = 0;
  ProgramValue args[4];
  ProgramValue result;
  float real = 0.0F;         ///< constant
  std::int32_t integer = 0;  ///< constant; or of floor_divide and remainder a divisor that is a power of two
  const ProgramTensor* tensor = nullptr;
};

/// The steps that make the value, and of a score function where it is wanted the slope.
struct FunctionProgram {
  int count = 0;
  std::int32_t words = 0;  ///< of memory
  ProgramValue value, slope;
  ProgramTensor tensors[Function::max_captured];
  ProgramStep steps[Function::max_nodes];
};

/// Leaves out what only the slope needs unless `with_slope`. Allocates nothing.
void compile(const Function& function, bool with_slope, FunctionProgram& program);

/// The programs of a call, as a tile sees them; null where there is no such function.
struct TileFunctions {
  const FunctionProgram* score = nullptr;
  const FunctionProgram* mask = nullptr;

  /// Words of memory that either program needs, a multiple of a cache line.
  [[nodiscard, gnu::always_inline]] std::int64_t words() const {
    const std::int64_t of_score = score != nullptr ? score->words : 0;
    const std::int64_t of_mask = mask != nullptr ? mask->words : 0;
    return of_score > of_mask ? of_score : of_mask;
  }
};

}  // namespace tandem::cpu
