// Evaluates programs (program.hpp) by lanes: a register of rows against some keys.
#pragma once

#include "cpu/functions/program.hpp"
#include "cpu/simd/vec.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// What a program is evaluated for. Lanes that are no rows have any head and query that the call has.
struct FunctionPlace {
  std::int32_t batch = 0;
  std::int32_t seqlen_q = 0;
  std::int32_t seqlen_k = 0;
  std::int32_t head[vec_lanes] = {};
  std::int32_t query[vec_lanes] = {};
  std::int32_t first_key = 0;
  int keys = 0;  ///< at most function_keys
  float* scores = nullptr;
  std::int64_t score_step = 0;  ///< from key to key
};

/// Where the values of keys 0, 1, ... are: value `key` is a register at p + key * step, or p[key * step] for
/// all lanes.
struct FunctionSource {
  const float* p;
  std::int64_t step;
  bool broadcast;
};

TANDEM_INLINE Vec fetch(const FunctionSource& s, std::int64_t key) {
  return s.broadcast ? broadcast(s.p[key * s.step]) : load(s.p + key * s.step);
}

/// The values that are the same for all rows and keys of a tile: once for each tile, before `evaluate`, whose
/// memory keeps them.
void evaluate_uniform(const FunctionProgram& program, const FunctionPlace& place, float* memory);

/// The others. `memory` has program.words f32 words, which hold the values afterwards, but for those that
/// take the place of the scores.
void evaluate(const FunctionProgram& program, const FunctionPlace& place, float* memory);

TANDEM_INLINE FunctionSource source_of(const ProgramValue& v, const FunctionPlace& place,
                                       const float* memory) {
  if (v.is_score) return {place.scores, place.score_step, false};
  switch (v.shape) {
    case ValueShape::keys: return {memory + v.offset, 1, true};
    case ValueShape::pairs: return {memory + v.offset, vec_lanes, false};
    case ValueShape::distances: return {memory + v.offset + function_keys - 1, -1, false};
    default: return {memory + v.offset, 0, false};
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
