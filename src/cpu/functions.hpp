// The functions of a call, compiled once for it.
#pragma once

#include "cpu/function_program.hpp"
#include "problem/problem.hpp"

namespace tandem::cpu {

struct CallFunctions {
  /// Backward wants slopes.
  CallFunctions(const Problem& p, bool with_slope) {
    if (p.score_function != nullptr) {
      compile(*p.score_function, with_slope, score);
      tile.score = &score;
    }
    if (p.mask_function != nullptr) {
      compile(*p.mask_function, false, mask);
      tile.mask = &mask;
    }
  }
  CallFunctions(const CallFunctions&) = delete;
  CallFunctions& operator=(const CallFunctions&) = delete;

  FunctionProgram score, mask;
  TileFunctions tile;
};

}  // namespace tandem::cpu
