// A call with a split size and few tiles, as in decoding: threads share the runs of keys of each tile. A run
// has the same bits alone as in a whole tile, and runs are added up in the same order, so that no bit depends
// on it.
#include <algorithm>

#include "cpu/forward/work.hpp"

namespace tandem::cpu {
namespace {

/// Where the tiles of a sequence begin whose first row is `row` of all, if those of the sequences before have
/// begun in the same way; there are no more in all, and those of two sequences are apart.
std::int64_t first_tile(const Problem& p, const Config& config, std::int64_t row, std::int64_t b) {
  return row * p.group() / config.block_q + b;
}

float* sums_of(const ForwardRun& run, const Sequence& s, std::int64_t kv_head, std::int64_t tile,
               std::int64_t key_run) {
  const Problem& p = run.problem;
  const std::int64_t row = p.packed_q ? s.q.begin : s.b * p.rows_q;
  const std::int64_t index = (first_tile(p, run.config, row, s.b) + tile) * p.heads_kv + kv_head;
  return run.split_sums +
         static_cast<std::size_t>(index * run.split_runs + key_run) * run.plan.split.run_numbers;
}

/// Sums that a call has at most, of all tiles and runs: 64 MiB. With more each thread computes whole tiles.
constexpr std::size_t most_sums = (std::size_t{64} << 20) / sizeof(float);

/// Floats for the sums of `runs` runs a tile.
std::size_t sums_of_runs(const SplitPlan& plan, std::int64_t runs) {
  return static_cast<std::size_t>(plan.most_tiles * runs) * plan.run_numbers;
}

}  // namespace

SplitPlan plan_split(const Problem& p, const Config& config) {
  if (p.split_size == 0 || p.batch * p.rows_q * p.heads_kv == 0) return {};
  SplitPlan plan{.runs = key_runs(p.split_size, config.block_k)};
  // Whole stripes, of block_q or of all rows that a sequence can have.
  const std::int64_t stripe = kernels(config.target).forward.stripe;
  const std::int64_t rows = std::min<std::int64_t>(config.block_q, p.rows_q * p.group());
  plan.run_numbers = split_sum_numbers((rows + stripe - 1) / stripe * stripe, p.head_dim_v);
  plan.most_tiles = first_tile(p, config, p.packed_q ? p.rows_q : p.batch * p.rows_q, p.batch) * p.heads_kv;
  const std::int64_t runs = split_runs(plan, p.rows_k);
  if (runs >= 2 && plan.most_tiles < 4 * static_cast<std::int64_t>(config.threads)) {
    plan.sum_numbers = std::min(sums_of_runs(plan, runs), most_sums);
  }
  return plan;
}

std::int64_t split_runs(const SplitPlan& plan, std::int64_t seqlen_k) {
  return seqlen_k > 0 ? plan.runs.at(seqlen_k - 1) + 1 : 0;
}

std::int64_t shared_runs(const SplitPlan& plan, const Problem& p) {
  if (plan.sum_numbers == 0) return 0;
  std::int64_t runs = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) runs = std::max(runs, split_runs(plan, key_rows(p, b).used));
  return runs >= 2 && sums_of_runs(plan, runs) <= plan.sum_numbers ? runs : 0;
}

void run_split(const ForwardRun& run, const Sequence& s, std::int64_t item) {
  if (s.splits == 0) return;
  const std::int64_t key_run = item % s.splits;
  const std::int64_t tile = item / s.splits % s.tiles;
  const std::int64_t kv_head = item / s.splits / s.tiles;
  run.kernels.forward.attend(run.tile(s, kv_head, tile), key_run, sums_of(run, s, kv_head, tile, key_run));
}

void finish_split(const ForwardRun& run, const Sequence& s, std::int64_t kv_head) {
  for (std::int64_t tile = 0; tile < s.tiles; ++tile) {
    run.kernels.forward.finish(run.tile(s, kv_head, tile), s.splits, sums_of(run, s, kv_head, tile, 0),
                               run.plan.split.run_numbers);
  }
}

}  // namespace tandem::cpu
