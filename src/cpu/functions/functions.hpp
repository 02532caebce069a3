// The functions of a call, compiled once for it.
#pragma once

#include <optional>

#include "cpu/functions/program.hpp"
#include "problem/problem.hpp"

namespace tandem::cpu {

/// Holds no address of its own, so that a plan may be moved.
class CallFunctions {
 public:
  /// Backward wants slopes, and what the gradients of captured tensors need where these are wanted.
  explicit CallFunctions(const Problem& p) {
    // The backward pass has the queries of one head in lanes, forward those of all heads that share keys.
    const bool backward = p.pass == Pass::backward;
    const bool one_head = backward || p.group() == 1;
    const bool consecutive = one_head && p.rows_q <= most_consecutive && p.rows_k <= most_consecutive;
    const LanesOf lanes = consecutive ? LanesOf::consecutive_queries : LanesOf::any_rows;
    const auto add = [&](std::optional<FunctionProgram>& to, const Function& function, ProgramOf wanted) {
      compile(function, wanted, lanes, to.emplace(), words_);
      words_ = to->words;
    };
    if (p.score_function != nullptr) {
      add(score_, *p.score_function, backward ? ProgramOf::value_and_slope : ProgramOf::value);
      if (p.wants_captured_gradients()) {
        add(captured_, *p.score_function, ProgramOf::value_and_gradients);
      }
    }
    if (p.mask_function != nullptr) add(mask_, *p.mask_function, ProgramOf::value);
  }

  /// Words of memory that the programs need together, a multiple of a cache line.
  [[nodiscard]] std::int64_t words() const { return words_; }
  [[nodiscard]] TileFunctions of_tiles(const Problem& p) const {
    const auto address = [](const std::optional<FunctionProgram>& f) { return f ? &*f : nullptr; };
    return {.score = address(score_),
            .mask = address(mask_),
            .dropout = p.dropout.on ? &p.dropout : nullptr,
            .captured = address(captured_),
            .words = words_};
  }

 private:
  std::optional<FunctionProgram> score_, mask_, captured_;
  std::int32_t words_ = 0;
};

}  // namespace tandem::cpu
