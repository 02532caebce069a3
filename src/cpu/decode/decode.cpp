// Short queries, as in decoding: which heads and splits of keys a thread attends to.
#include <array>
#include <cstdlib>

#include "cpu/forward/work.hpp"

namespace tandem::cpu {
namespace {

/// How the keys of a short query are split, by the sequence alone: at most max_splits splits of at least 1024
/// keys, a megabyte of fp32 K and V, beside which folding a partial result costs nothing.
constexpr std::int64_t max_splits = 64;
constexpr std::int64_t least_split = 1024;
std::int64_t split_keys(std::int64_t seqlen_k) {
  const std::int64_t even = (seqlen_k + max_splits - 1) / max_splits;
  return std::max(least_split, (even + 127) / 128 * 128);
}
std::int64_t split_count(std::int64_t seqlen_k) {
  return std::max<std::int64_t>(1, (seqlen_k + split_keys(seqlen_k) - 1) / split_keys(seqlen_k));
}
/// The most splits that a sequence of the problem has.
std::int64_t most_splits(const Problem& p) {
  return std::min(max_splits, (p.rows_k + least_split - 1) / least_split);
}

/// KV heads that a thread attends to side by side: short_heads where the heads of a key follow one another in
/// memory, fewer where threads would have too little to do. No bit depends on it.
std::int64_t heads_together(const Problem& p, const Config& config) {
  if (std::abs(p.k.head_stride) * p.heads_kv > std::abs(p.k.row_stride)) return 1;
  std::int64_t heads = std::min<std::int64_t>(short_heads, p.heads_kv);
  const auto work = [&] { return p.batch * ((p.heads_kv + heads - 1) / heads) * most_splits(p); };
  while (heads > 1 && work() < 2 * static_cast<std::int64_t>(config.threads)) heads = (heads + 1) / 2;
  return std::max<std::int64_t>(1, heads);
}
std::int64_t head_groups(const Problem& p, const Config& config) {
  const std::int64_t heads = heads_together(p, config);
  return (p.heads_kv + heads - 1) / heads;
}

/// With a split size one kernel serves all: the two add up in different orders. Functions attach to the
/// kernel of long tiles alone.
bool may_be_short(const Problem& p) {
  return p.split_size == 0 && !p.has_function() && p.group() <= short_rows &&
         (p.packed_q || p.seqused_q.given() || p.rows_q * p.group() <= short_rows);
}

/// Whether threads share the splits of a sequence, each partial result in a place of its own. Only needed
/// where there are too few sequences and heads to go round, which bounds the memory it takes.
bool shares_splits(const Problem& p, const Config& config) {
  return may_be_short(p) &&
         p.batch * head_groups(p, config) < 4 * static_cast<std::int64_t>(config.threads) &&
         most_splits(p) > 1;
}

/// Some KV heads of a sequence, side by side.
struct Group {
  std::array<ForwardTile, short_heads> tiles;
  std::int64_t first = 0;
  int count = 0;
};

Group describe_group(const ForwardRun& run, std::int64_t b, std::int64_t first, std::int64_t heads) {
  const Problem& p = run.problem;
  Group group{.tiles = {}, .first = first, .count = static_cast<int>(std::min(heads, p.heads_kv - first))};
  const std::size_t bytes =
      short_scratch(static_cast<int>(p.head_dim_qk), static_cast<int>(p.head_dim_v)).bytes;
  for (int h = 0; h < group.count; ++h) {
    ForwardTile& t = group.tiles[static_cast<std::size_t>(h)];
    t = run.head(b, first + h);
    t.count = static_cast<int>(t.seqlen_q * t.group);
    t.scratch += static_cast<std::size_t>(h) * bytes;
  }
  return group;
}

/// The partial results of one split of a group, `stride` numbers from head to head.
void attend_split(const ForwardRun& run, const Group& group, std::int64_t split, double* partials,
                  std::size_t stride) {
  // Only keys that some row sees: the first row's first to the last row's last.
  const ForwardTile& t = group.tiles[0];
  const std::int64_t size = split_keys(t.seqlen_k);
  const Window window{.left = t.window_left, .right = t.window_right};
  const std::int64_t first = visible_keys(window, 0, t.seqlen_q, t.seqlen_k).first;
  const std::int64_t last = visible_keys(window, t.seqlen_q - 1, t.seqlen_q, t.seqlen_k).last;
  short_kernel(run.config.target)
      .attend(group.tiles.data(), group.count, std::max(first, split * size),
              std::min(last, (split + 1) * size), partials, static_cast<std::int64_t>(stride));
}

double* shared_partial(const ForwardRun& run, std::int64_t b, std::int64_t kv_head, std::int64_t split) {
  const Problem& p = run.problem;
  const std::int64_t index = (b * p.heads_kv + kv_head) * most_splits(p) + split;
  return run.partials + static_cast<std::size_t>(index) * short_partial_numbers(p.head_dim_v);
}

/// All splits of a group on this thread.
void run_group(const ForwardRun& run, const Group& group) {
  const ShortKernel& kernel = short_kernel(run.config.target);
  const ForwardTile& t = group.tiles[0];
  const ShortScratch layout = short_scratch(t.head_dim_qk, t.head_dim_v);
  auto* const total = reinterpret_cast<double*>(t.scratch + layout.partial);
  double* const next = total + short_partial_numbers(t.head_dim_v);
  const std::size_t stride = layout.bytes / sizeof(double);
  attend_split(run, group, 0, total, stride);
  for (std::int64_t split = 1; split < split_count(t.seqlen_k) && !run.stops(); ++split) {
    attend_split(run, group, split, next, stride);
    for (int h = 0; h < group.count; ++h) {
      const std::size_t at = static_cast<std::size_t>(h) * stride;
      kernel.fold(group.tiles[static_cast<std::size_t>(h)], total + at, next + at);
    }
  }
  for (int h = 0; h < group.count; ++h) {
    kernel.finish(group.tiles[static_cast<std::size_t>(h)], total + static_cast<std::size_t>(h) * stride);
  }
}

}  // namespace

bool is_short(const Problem& p, std::int64_t b) {
  const std::int64_t rows = query_rows(p, b).used * p.group();
  return p.split_size == 0 && !p.has_function() && rows > 0 && rows <= short_rows;
}

std::size_t short_scratch_bytes(const Problem& p, const Config& config) {
  if (!may_be_short(p)) return 0;
  return static_cast<std::size_t>(heads_together(p, config)) *
         short_scratch(static_cast<int>(p.head_dim_qk), static_cast<int>(p.head_dim_v)).bytes;
}

std::size_t shared_partial_numbers(const Problem& p, const Config& config) {
  if (!shares_splits(p, config)) return 0;
  return static_cast<std::size_t>(p.batch * p.heads_kv * most_splits(p)) *
         short_partial_numbers(p.head_dim_v);
}

std::int64_t short_units(const Problem& p, const Config& config, std::int64_t b) {
  return head_groups(p, config) * (shares_splits(p, config) ? split_count(key_rows(p, b).used) : 1);
}

void run_short(const ForwardRun& run, std::int64_t b, std::int64_t unit) {
  const std::int64_t heads = heads_together(run.problem, run.config);
  const std::int64_t groups = head_groups(run.problem, run.config);
  const Group group = describe_group(run, b, unit % groups * heads, heads);
  if (run.partials == nullptr) return run_group(run, group);
  const std::size_t stride =
      static_cast<std::size_t>(most_splits(run.problem)) * short_partial_numbers(run.problem.head_dim_v);
  attend_split(run, group, unit / groups, shared_partial(run, b, group.first, unit / groups), stride);
}

void fold_shared(const ForwardRun& run, std::int64_t b, std::int64_t kv_head) {
  if (!is_short(run.problem, b) || run.stops()) return;
  const Group group = describe_group(run, b, kv_head, 1);
  const ForwardTile& t = group.tiles[0];
  const ShortKernel& kernel = short_kernel(run.config.target);
  double* total = shared_partial(run, b, kv_head, 0);
  for (std::int64_t split = 1; split < split_count(t.seqlen_k); ++split) {
    kernel.fold(t, total, shared_partial(run, b, kv_head, split));
  }
  kernel.finish(t, total);
}

}  // namespace tandem::cpu
