// The functions of a call, compiled once for it.
#pragma once

#include "cpu/function_program.hpp"
#include "problem/problem.hpp"

namespace tandem::cpu {

struct CallFunctions {
  /// Backward wants slopes, and what the gradients of captured tensors need where these are wanted.
  explicit CallFunctions(const Problem& p) {
    if (p.score_function != nullptr) {
      const bool backward = p.pass == Pass::backward;
      compile(*p.score_function, backward ? ProgramOf::value_and_slope : ProgramOf::value, score);
      tile.score = &score;
      if (p.wants_captured_gradients()) {
        compile(*p.score_function, ProgramOf::value_and_gradients, captured);
        tile.captured = &captured;
      }
    }
    if (p.dropout.on) tile.dropout = &p.dropout;
    if (p.mask_function != nullptr) {
      compile(*p.mask_function, ProgramOf::value, mask);
      tile.mask = &mask;
    }
  }
  CallFunctions(const CallFunctions&) = delete;
  CallFunctions& operator=(const CallFunctions&) = delete;

  FunctionProgram score, mask, captured;
  TileFunctions tile;
};

}  // namespace tandem::cpu
