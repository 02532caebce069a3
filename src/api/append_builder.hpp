// Turns the arguments of append_kv into an AppendProblem: the sizes first, then every tensor against them.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "api/check.hpp"
#include "problem/append_problem.hpp"
#include "tandem/cache.hpp"

namespace tandem {

/// The methods throw Error (invalid_argument) for what they name; called in this order.
class AppendBuilder {
 public:
  using Argument = check::Argument;

  explicit AppendBuilder(const AppendArgs& args) : args_(args) {}

  /// Which arguments go together, and all sizes.
  void sizes();
  void dtypes_and_device();
  /// New rows, caches and where the rows go.
  void operands();
  void scales();
  void rotary();
  /// q and q_out.
  void queries();
  /// Outputs do not overlap themselves, one another or an input; with `check`, what the integers hold.
  void outputs_and_contents() const;

  AppendProblem& problem() { return problem_; }

 private:
  void arguments_together() const;
  void new_rows();
  void cache_rows();
  void values();
  [[nodiscard]] bool slots() const { return slot_mapping_.given(); }
  /// The shape of a tensor of new rows as the documentation calls it.
  [[nodiscard]] const char* symbols_of_rows(const char* packed, const char* batched) const {
    return problem_.packed ? packed : batched;
  }
  /// What holds for every tensor once its shape and dtype are known.
  void common(const Argument& a) const;
  [[nodiscard]] Operand rows(const Argument& a) const;
  [[nodiscard]] Operand cache(const Argument& a) const;
  [[nodiscard]] Lengths lengths(const Argument& a, std::int64_t count, const char* symbols) const;
  [[nodiscard]] Scales scales_of(const Argument& a, const Argument& cache, const Argument& rows) const;
  [[nodiscard]] Operand scale_cache(const Argument& a, const Argument& given, const Argument& cache,
                                    const Argument& rows) const;
  [[nodiscard]] Operand table(const Argument& a) const;

  const AppendArgs& args_;
  AppendProblem problem_;
  const Argument k_new_{"k_new", args_.k_new};
  const Argument v_new_{"v_new", args_.v_new};
  const Argument k_cache_{"k_cache", args_.k_cache};
  const Argument v_cache_{"v_cache", args_.v_cache};
  const Argument q_out_{"q_out", args_.q_out};
  const Argument cu_seqlens_new_{"cu_seqlens_new", args_.cu_seqlens_new};
  const Argument seqused_new_{"seqused_new", args_.seqused_new};
  const Argument page_table_{"page_table", args_.page_table};
  const Argument cache_batch_idx_{"cache_batch_idx", args_.cache_batch_idx};
  const Argument leftpad_k_{"leftpad_k", args_.leftpad_k};
  const Argument cache_seqlens_{"cache_seqlens", args_.cache_seqlens};
  const Argument slot_mapping_{"slot_mapping", args_.slot_mapping};
  const Argument k_scale_{"k_scale", args_.k_scale};
  const Argument v_scale_{"v_scale", args_.v_scale};
  const Argument k_scale_cache_{"k_scale_cache", args_.k_scale_cache};
  const Argument v_scale_cache_{"v_scale_cache", args_.v_scale_cache};
  const Argument rotary_cos_{"rotary_cos", args_.rotary_cos};
  const Argument rotary_sin_{"rotary_sin", args_.rotary_sin};
  const Argument rotary_offsets_{"rotary_offsets", args_.rotary_offsets};
  const Argument q_{"q", args_.q};
};

/// All of it.
AppendProblem make_append_problem(const AppendArgs& args);

namespace check {

/// What the integers of an append hold: lengths fit, entries, pages and positions exist, and no two tokens
/// go to one row. Reads them; where they are on a GPU this waits for it.
void append_contents(const AppendProblem& problem);

}  // namespace check

}  // namespace tandem
