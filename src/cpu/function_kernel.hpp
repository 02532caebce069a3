// Evaluates programs (function_program.hpp) by lanes: a register of rows against some keys.
#pragma once

#include "cpu/function_program.hpp"
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
  const float* scores = nullptr;
  std::int64_t score_step = 0;  ///< from key to key
};

/// Where the values of keys 0, 1, ... are: value `key` is a register at p + key * step, or p[key] for all
/// lanes.
struct FunctionSource {
  const float* p;
  std::int64_t step;
  bool broadcast;
};

TANDEM_INLINE Vec fetch(const FunctionSource& s, std::int64_t key) {
  return s.broadcast ? broadcast(s.p[key]) : load(s.p + key * s.step);
}

/// `memory` is program.words f32 words, which hold the values afterwards.
void evaluate(const FunctionProgram& program, const FunctionPlace& place, float* memory);

TANDEM_INLINE FunctionSource source_of(const ProgramValue& v, const FunctionPlace& place,
                                       const float* memory) {
  if (v.is_score) return {place.scores, place.score_step, false};
  switch (v.shape) {
    case ValueShape::keys: return {memory + v.offset, 1, true};
    case ValueShape::pairs: return {memory + v.offset, vec_lanes, false};
    default: return {memory + v.offset, 0, false};
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
