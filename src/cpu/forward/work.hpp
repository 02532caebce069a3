// What the pieces of one forward call share: the long tiles (forward.cpp), sequences of few query rows
// (decode/decode.cpp), and tiles whose splits threads share (split.cpp).
#pragma once

#include "cpu/common/stop.hpp"
#include "cpu/cpu.hpp"
#include "cpu/targets/kernels.hpp"

namespace tandem::cpu {

/// One sequence: its rows, which pieces of work it is cut into, and how many.
struct Sequence {
  enum class Kind { tiles, runs_of_tiles, few_rows };

  std::int64_t b = 0;
  Rows q, k;
  std::int64_t query = -1;     ///< the only one of these, where queries choose their keys
  std::int64_t most_keys = 0;  ///< keys of the sequence, or those that a query may choose
  Kind kind = Kind::tiles;
  std::int64_t tiles = 0;   ///< tiles of query rows, for each KV head
  std::int64_t splits = 0;  ///< runs of a tile's keys, or splits of few rows'
  std::int64_t items = 0;   ///< work items
};

/// One call: what its threads share.
struct ForwardRun {
  const Problem& problem;
  const Config& config;
  const ForwardPlan& plan;
  const Kernels& kernels;
  const TileFunctions* functions;  ///< null: none
  std::byte* scratch;              ///< plan.scratch_bytes for each thread
  double* partials;                ///< [batch][heads_kv][splits]; null if threads share no splits of few rows
  float* split_sums;  ///< plan.split.run_numbers of each [tile][heads_kv][run]; null if threads share none
  std::int64_t split_runs;  ///< runs that each tile has
  Stop* stop;               ///< may be null

  [[nodiscard]] bool stops() const { return stop != nullptr && stop->wanted(); }
  [[nodiscard]] Sequence sequence(std::int64_t b) const;
  /// What all tiles of one KV head of one sequence share.
  [[nodiscard]] ForwardTile head(const Sequence& sequence, std::int64_t kv_head) const;
  [[nodiscard]] ForwardTile tile(const Sequence& sequence, std::int64_t kv_head, std::int64_t tile) const;
};

DecodePlan plan_decode(const Problem& problem, const Config& config);
/// Splits of the keys of few query rows.
std::int64_t decode_splits(std::int64_t seqlen_k);
void run_decode(const ForwardRun& run, const Sequence& sequence, std::int64_t item);
/// Finishes a KV head whose splits threads have shared.
void finish_decode(const ForwardRun& run, const Sequence& sequence, std::int64_t kv_head);

SplitPlan plan_split(const Problem& problem, const Config& config);
/// The runs that keys have; 0 if there are no keys.
std::int64_t split_runs(const SplitPlan& plan, std::int64_t seqlen_k);
/// ForwardRun::split_runs, of the lengths that the call has; 0: a thread computes whole tiles.
std::int64_t shared_runs(const SplitPlan& plan, const Problem& problem);
void run_split(const ForwardRun& run, const Sequence& sequence, std::int64_t item);
/// Finishes a KV head whose runs threads have shared.
void finish_split(const ForwardRun& run, const Sequence& sequence, std::int64_t kv_head);

}  // namespace tandem::cpu
