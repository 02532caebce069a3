// A function of the user's own as a flat program: what a kernel evaluates for a register of rows against up
// to function_keys keys. Plain numbers and pointers, for sources that are compiled for one instruction set.
//
// Each value has the shape of what it depends on: rows (head and query differ by lane), keys, both (pairs),
// or neither. What does not depend on both is computed once for all pairs. Where lanes are consecutive
// queries of one head, there are also values of the distance between query and key alone, as in q - k <= 256:
// fewer than two for each key and lane instead of their product.
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

/// A value of neither rows nor keys lies as one of rows does, all lanes alike. One of distances: element j is
/// that of the first lane's query and key function_keys - 1 - j, so that the register of key 0 starts at
/// function_keys - 1, and that of the next key one before.
enum class ValueShape : std::int16_t { uniform, rows, keys, pairs, distances };

/// Where a value is. A value of pairs lies as the scores do: a register of rows for each key.
struct ProgramValue {
  ValueShape shape = ValueShape::uniform;
  std::int32_t offset = 0;  ///< in f32 words of the program's memory
  std::int32_t high = 0;    ///< likewise of the upper halves of wide integers, which lie as the lower ones do
  std::int16_t step = 0;    ///< that makes it
  bool is_score = false;    ///< lies where the caller has the scores
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
  FunctionType type = FunctionType::real;  ///< the result's
  FunctionType from = FunctionType::real;  ///< the first argument's
  std::int16_t arguments = 0;
  ProgramValue args[4];
  ProgramValue result;
  float real = 0.0F;  ///< constant
  std::int64_t integer =
      0;  ///< constant; or of floor_divide and remainder of 32 bits a divisor that is a power of two
  std::int32_t by_key[2] = {};  ///< result of distances: what the first two arguments grow by from key to key
  std::int16_t captured = 0;    ///< read: which of the program's tensors
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
  std::int32_t words = 0;  ///< words of memory, with those of programs before it
  ProgramValue value, slope;
  /// Whether few rows and keys may be known all to be visible or hidden (bounds.hpp): not where a
  /// mask reads reals, or elements that both row and key choose.
  bool by_range = true;
  int gradient_count = 0;
  ProgramGradient gradients[Function::max_gradients];
  ProgramTensor tensors[Function::max_captured];
  ProgramStep steps[Function::max_nodes];
};

/// The lanes that programs are evaluated for.
enum class LanesOf { any_rows, consecutive_queries };

/// Queries and keys that programs for consecutive queries count to at most: sums of a few of them, and of
/// small constants, stay inside of 32 bits whatever the distance.
constexpr std::int64_t most_consecutive = std::int64_t{1} << 27;

/// Leaves out what nothing of `wanted` needs. Allocates nothing. With ProgramOf::value, a value of pairs that
/// is computed last takes the place of the scores.
/// The program's memory begins at word `first_word`, behind that of other programs.
void compile(const Function& function, ProgramOf wanted, LanesOf lanes, FunctionProgram& program,
             std::int32_t first_word = 0);

/// The programs of a call, as a tile sees them; null where there is no such function.
struct TileFunctions {
  const FunctionProgram* score = nullptr;
  const FunctionProgram* mask = nullptr;
  const Dropout* dropout = nullptr;           ///< null: off
  const FunctionProgram* captured = nullptr;  ///< the score function's, with gradients; null: not wanted

  /// Words of memory that the programs need together, a multiple of a cache line.
  std::int64_t words = 0;
};

}  // namespace tandem::cpu
