// The functions of a call, compiled once for it.
#pragma once

#include "cpu/functions/program.hpp"
#include "problem/problem.hpp"

namespace tandem::cpu {

struct CallFunctions {
  /// Backward wants slopes, and what the gradients of captured tensors need where these are wanted.
  explicit CallFunctions(const Problem& p) {
    // The backward pass has the queries of one head in lanes, forward those of all heads that share keys.
    const bool one_head = p.pass == Pass::backward || p.group() == 1;
    const bool consecutive = one_head && p.rows_q <= most_consecutive && p.rows_k <= most_consecutive;
    const LanesOf lanes = consecutive ? LanesOf::consecutive_queries : LanesOf::any_rows;
    std::int32_t words = 0;
    if (p.score_function != nullptr) {
      const bool backward = p.pass == Pass::backward;
      compile(*p.score_function, backward ? ProgramOf::value_and_slope : ProgramOf::value, lanes, score);
      words = score.words;
      tile.score = &score;
      if (p.wants_captured_gradients()) {
        compile(*p.score_function, ProgramOf::value_and_gradients, lanes, captured, words);
        words = captured.words;
        tile.captured = &captured;
      }
    }
    if (p.dropout.on) tile.dropout = &p.dropout;
    if (p.mask_function != nullptr) {
      compile(*p.mask_function, ProgramOf::value, lanes, mask, words);
      words = mask.words;
      tile.mask = &mask;
    }
    tile.words = words;
  }
  CallFunctions(const CallFunctions&) = delete;
  CallFunctions& operator=(const CallFunctions&) = delete;

  FunctionProgram score, mask, captured;
  TileFunctions tile;
};

}  // namespace tandem::cpu
