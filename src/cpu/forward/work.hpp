// What the pieces of one forward call share: the long tiles (forward.cpp), the short queries
// (decode/decode.cpp), and tiles whose splits threads share (split.cpp).
#pragma once

#include <omp.h>

#include "cpu/cpu.hpp"
#include "cpu/targets/kernels.hpp"

namespace tandem::cpu {

/// What all tiles of one KV head of one sequence share.
ForwardTile describe_head(const Problem& problem, const Config& config, std::int64_t b, std::int64_t kv_head);

/// One call: what its threads share.
struct ForwardRun {
  const Problem& problem;
  const Config& config;
  std::byte* scratch;  ///< one for each thread
  std::size_t scratch_bytes;
  double* partials;   ///< of splits that threads share: [batch][heads_kv][splits]; null if they share none
  float* split_sums;  ///< the same with a split size: split_sum_numbers of each [tile][heads_kv][run]
  std::int64_t split_runs;         ///< of each tile
  Stop* stop;                      ///< may be null
  const TileFunctions* functions;  ///< null: none

  [[nodiscard]] bool stops() const { return stop != nullptr && stop->wanted(); }
  [[nodiscard]] ForwardTile head(std::int64_t b, std::int64_t kv_head) const {
    ForwardTile t = describe_head(problem, config, b, kv_head);
    t.scratch = scratch + static_cast<std::size_t>(omp_get_thread_num()) * scratch_bytes;
    t.functions = functions;
    if (stop != nullptr) t.stop = {.wanted = Stop::wanted, .context = stop};
    return t;
  }
};

/// Tiles of query rows that sequence `b` has for each KV head, and one of them.
std::int64_t tiles_of(const Problem& problem, const Config& config, std::int64_t b);
ForwardTile tile_of(const ForwardRun& run, std::int64_t b, std::int64_t kv_head, std::int64_t tile);

/// Whether sequence `b` has so few query rows that the short kernel attends to them.
bool is_short(const Problem& problem, std::int64_t b);
/// Scratch of a thread for short queries.
std::size_t short_scratch_bytes(const Problem& problem, const Config& config);
/// Numbers in ForwardRun::partials; 0: threads share no splits.
std::size_t shared_partial_numbers(const Problem& problem, const Config& config);

/// Pieces of work in the short sequence `b`, and one of them.
std::int64_t short_units(const Problem& problem, const Config& config, std::int64_t b);
void run_short(const ForwardRun& run, std::int64_t b, std::int64_t unit);
/// Finishes a KV head of the short sequence `b`, whose splits threads have shared.
void fold_shared(const ForwardRun& run, std::int64_t b, std::int64_t kv_head);

/// Room for ForwardRun::split_sums, in floats, whatever the lengths; 0: a thread computes whole tiles.
std::size_t shared_sum_numbers(const Problem& problem, const Config& config);
/// ForwardRun::split_runs, of the lengths that the call has; 0: a thread computes whole tiles.
std::int64_t shared_runs(const Problem& problem, const Config& config);
/// Pieces of work in sequence `b` where threads share its splits, and one of them.
std::int64_t split_units(const Problem& problem, const Config& config, std::int64_t b);
void run_split(const ForwardRun& run, std::int64_t b, std::int64_t unit);
/// Finishes all tiles of a KV head of sequence `b`.
void finish_splits(const ForwardRun& run, std::int64_t b, std::int64_t kv_head);

}  // namespace tandem::cpu
