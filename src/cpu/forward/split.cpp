// A call with a split size and few tiles, as in decoding: threads share the runs of keys of each tile. A run
// has the same bits alone as in a whole tile, and runs are added up in the same order, so that no bit depends
// on it.
#include <algorithm>

#include "cpu/forward/work.hpp"

namespace tandem::cpu {
namespace {

std::int64_t runs_of(const Problem& p, const Config& config, std::int64_t seqlen_k) {
  return seqlen_k > 0 ? key_runs(p.split_size, config.block_k).at(seqlen_k - 1) + 1 : 0;
}

/// Rows of the sums of a tile: whole stripes, of block_q or of all that a sequence can have.
std::int64_t rows_of_sums(const Problem& p, const Config& config) {
  const std::int64_t stripe = forward_kernel(config.target).stripe;
  const std::int64_t rows = std::min<std::int64_t>(config.block_q, p.rows_q * p.group());
  return (rows + stripe - 1) / stripe * stripe;
}

/// Where the tiles of a sequence begin whose first row is `row` of all, if those of the sequences before have
/// begun in the same way; there are no more in all, and those of two sequences are apart.
std::int64_t first_tile(const Problem& p, const Config& config, std::int64_t row, std::int64_t b) {
  return row * p.group() / config.block_q + b;
}
std::int64_t most_tiles(const Problem& p, const Config& config) {
  return first_tile(p, config, p.packed_q ? p.rows_q : p.batch * p.rows_q, p.batch);
}

/// Of the sums of a tile and run.
std::size_t numbers_of(const ForwardRun& run) {
  return split_sum_numbers(rows_of_sums(run.problem, run.config), run.problem.head_dim_v);
}

float* sums_of(const ForwardRun& run, std::int64_t b, std::int64_t kv_head, std::int64_t tile,
               std::int64_t key_run) {
  const Problem& p = run.problem;
  const std::int64_t row = p.packed_q ? query_rows(p, b).begin : b * p.rows_q;
  const std::int64_t index = (first_tile(p, run.config, row, b) + tile) * p.heads_kv + kv_head;
  return run.split_sums + static_cast<std::size_t>(index * run.split_runs + key_run) * numbers_of(run);
}

/// Sums that a call has at most, of all tiles and runs: 64 MiB. With more each thread computes whole tiles.
constexpr std::size_t most_sums = (std::size_t{64} << 20) / sizeof(float);

/// Floats for the sums of `runs` runs a tile.
std::size_t sums_of_runs(const Problem& p, const Config& config, std::int64_t runs) {
  return static_cast<std::size_t>(most_tiles(p, config) * p.heads_kv * runs) *
         split_sum_numbers(rows_of_sums(p, config), p.head_dim_v);
}

}  // namespace

std::size_t shared_sum_numbers(const Problem& p, const Config& config) {
  if (p.split_size == 0 || p.batch * p.rows_q * p.heads_kv == 0) return 0;
  const std::int64_t tiles = most_tiles(p, config) * p.heads_kv;
  const std::int64_t runs = runs_of(p, config, p.rows_k);
  if (runs < 2 || tiles >= 4 * static_cast<std::int64_t>(config.threads)) return 0;
  return std::min(sums_of_runs(p, config, runs), most_sums);
}

std::int64_t shared_runs(const Problem& p, const Config& config) {
  const std::size_t room = shared_sum_numbers(p, config);
  if (room == 0) return 0;
  std::int64_t runs = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) runs = std::max(runs, runs_of(p, config, key_rows(p, b).used));
  return runs >= 2 && sums_of_runs(p, config, runs) <= room ? runs : 0;
}

std::int64_t split_units(const Problem& p, const Config& config, std::int64_t b) {
  return tiles_of(p, config, b) * p.heads_kv *
         std::max<std::int64_t>(1, runs_of(p, config, key_rows(p, b).used));
}

void run_split(const ForwardRun& run, std::int64_t b, std::int64_t unit) {
  const Problem& p = run.problem;
  const std::int64_t runs = runs_of(p, run.config, key_rows(p, b).used);
  if (runs == 0) return;
  const std::int64_t tiles = tiles_of(p, run.config, b);
  const std::int64_t key_run = unit % runs;
  const std::int64_t tile = unit / runs % tiles;
  const std::int64_t kv_head = unit / runs / tiles;
  forward_kernel(run.config.target)
      .attend(tile_of(run, b, kv_head, tile), key_run, sums_of(run, b, kv_head, tile, key_run));
}

void finish_splits(const ForwardRun& run, std::int64_t b, std::int64_t kv_head) {
  if (run.stops()) return;
  const std::int64_t runs = runs_of(run.problem, run.config, key_rows(run.problem, b).used);
  for (std::int64_t tile = 0; tile < tiles_of(run.problem, run.config, b); ++tile) {
    forward_kernel(run.config.target)
        .finish(tile_of(run, b, kv_head, tile), runs, sums_of(run, b, kv_head, tile, 0), numbers_of(run));
  }
}

}  // namespace tandem::cpu
