// A function of the user's own as a flat program: what a kernel evaluates for a register of rows against up
// to function_keys keys. Plain numbers and pointers, for sources that are compiled for one instruction set.
//
// Each value has the shape of what it depends on: rows (head and query differ by lane), keys, both (pairs),
// or neither. What does not depend on both is computed once for all pairs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/dropout.hpp"
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

/// The gradient of an element that a score function reads: d(logit) / d(element), and where it is.
struct ProgramGradient {
  ProgramValue slope;
  ProgramValue index[ConstTensor::max_rank];
  std::int16_t captured = 0;
};

/// What a program makes.
enum class ProgramOf { value, value_and_slope, value_and_gradients };

/// The steps that make it.
struct FunctionProgram {
  int count = 0;
  std::int32_t words = 0;  ///< of memory
  ProgramValue value, slope;
  int gradient_count = 0;
  ProgramGradient gradients[Function::max_gradients];
  ProgramTensor tensors[Function::max_captured];
  ProgramStep steps[Function::max_nodes];
};

/// Leaves out what nothing of `wanted` needs. Allocates nothing.
void compile(const Function& function, ProgramOf wanted, FunctionProgram& program);

/// The programs of a call, as a tile sees them; null where there is no such function.
struct TileFunctions {
  const FunctionProgram* score = nullptr;
  const FunctionProgram* mask = nullptr;
  const Dropout* dropout = nullptr;           ///< null: off
  const FunctionProgram* captured = nullptr;  ///< of the score function, with gradients; null: not wanted

  /// Words of memory that any of the programs needs, a multiple of a cache line.
  [[nodiscard, gnu::always_inline]] std::int64_t words() const {
    const std::int64_t of_score = score != nullptr ? score->words : 0;
    const std::int64_t of_mask = mask != nullptr ? mask->words : 0;
    const std::int64_t of_captured = captured != nullptr ? captured->words : 0;
    const std::int64_t most = of_score > of_mask ? of_score : of_mask;
    return most > of_captured ? most : of_captured;
  }
};

}  // namespace tandem::cpu
