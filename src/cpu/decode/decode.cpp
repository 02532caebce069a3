// Few query rows against many keys, as in decoding: which heads and splits of keys a thread attends to.
#include <algorithm>
#include <array>
#include <cstdlib>

#include "cpu/decode/scratch.hpp"
#include "cpu/forward/work.hpp"

namespace tandem::cpu {
namespace {

/// How the keys of a sequence are split, by the sequence alone: at most max_splits splits of at least 1024
/// keys, a megabyte of fp32 K and V, beside which folding a partial result costs nothing.
constexpr std::int64_t max_splits = 64;
constexpr std::int64_t least_split = 1024;
std::int64_t split_keys(std::int64_t seqlen_k) {
  const std::int64_t even = (seqlen_k + max_splits - 1) / max_splits;
  return std::max(least_split, (even + 127) / 128 * 128);
}

/// KV heads that a thread attends to side by side: short_heads where the heads of a key follow one another in
/// memory, fewer where threads would have too little to do. No bit depends on it.
std::int64_t heads_together(const Problem& p, const Config& config, std::int64_t most_splits) {
  if (std::abs(p.k.head_stride) * p.heads_kv > std::abs(p.k.row_stride)) return 1;
  std::int64_t heads = std::min<std::int64_t>(short_heads, p.heads_kv);
  const auto work = [&] { return p.batch * ((p.heads_kv + heads - 1) / heads) * most_splits; };
  while (heads > 1 && work() < 2 * static_cast<std::int64_t>(config.threads)) heads = (heads + 1) / 2;
  return std::max<std::int64_t>(1, heads);
}

/// Some KV heads of a sequence, side by side.
struct Group {
  std::array<ForwardTile, short_heads> tiles;
  std::int64_t first = 0;
  int count = 0;
  std::int64_t split = 0;  ///< keys of a split
};

Group group_of(const ForwardRun& run, const Sequence& s, std::int64_t first, std::int64_t heads) {
  const Problem& p = run.problem;
  Group group{.tiles = {},
              .first = first,
              .count = static_cast<int>(std::min(heads, p.heads_kv - first)),
              .split = split_keys(s.most_keys)};
  const std::size_t bytes =
      decode_scratch(static_cast<int>(p.head_dim_qk), static_cast<int>(p.head_dim_v)).bytes;
  for (int h = 0; h < group.count; ++h) {
    ForwardTile& t = group.tiles[static_cast<std::size_t>(h)];
    t = run.head(s, first + h);
    t.count = static_cast<int>(t.seqlen_q * t.group);
    t.scratch += static_cast<std::size_t>(h) * bytes;
  }
  return group;
}

/// The partial results of one split of a group, `stride` numbers from head to head. Where this thread has
/// `all` splits of the group, each fetches the first keys of the next.
void attend_split(const ForwardRun& run, const Group& group, std::int64_t split, bool all, double* partials,
                  std::size_t stride) {
  // Only keys that some row sees: the first row's first to the last row's last.
  const ForwardTile& t = group.tiles[0];
  const std::int64_t size = group.split;
  const Window window{.left = t.window_left, .right = t.window_right};
  const std::int64_t first = visible_keys(window, 0, t.seqlen_q, t.seqlen_k).first;
  const std::int64_t last = visible_keys(window, t.seqlen_q - 1, t.seqlen_q, t.seqlen_k).last;
  const auto end_of = [&](std::int64_t n) { return std::min(last, (n + 1) * size); };
  const SplitKeys keys{.begin = std::max(first, split * size),
                       .end = end_of(split),
                       .next_end = all ? end_of(split + 1) : 0,
                       .fetched = all && split * size > first};
  run.kernels.few_rows.attend(group.tiles.data(), group.count, keys, partials,
                              static_cast<std::int64_t>(stride));
}

double* shared_partial(const ForwardRun& run, const Sequence& s, std::int64_t kv_head, std::int64_t split) {
  const Problem& p = run.problem;
  const std::int64_t index = (s.b * p.heads_kv + kv_head) * run.plan.decode.most_splits + split;
  return run.partials + static_cast<std::size_t>(index) * short_partial_numbers(p.head_dim_v);
}

/// All splits of a group on this thread.
void run_group(const ForwardRun& run, const Sequence& s, const Group& group) {
  const ShortKernel& kernel = run.kernels.few_rows;
  const ForwardTile& t = group.tiles[0];
  const DecodeScratch layout = decode_scratch(t.head_dim_qk, t.head_dim_v);
  auto* const total = reinterpret_cast<double*>(t.scratch + layout.partial);
  double* const next = total + short_partial_numbers(t.head_dim_v);
  const std::size_t stride = layout.bytes / sizeof(double);
  attend_split(run, group, 0, true, total, stride);
  for (std::int64_t split = 1; split < s.splits && !run.stops(); ++split) {
    attend_split(run, group, split, true, next, stride);
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

/// With a split size one kernel serves all: the two add up in different orders. Functions attach to the
/// kernel of long tiles alone. Queries that choose their keys are sequences of their own, which no threads
/// share.
DecodePlan plan_decode(const Problem& p, const Config& config) {
  if (p.split_size != 0 || p.has_function() || p.group() > short_rows) return {};
  const bool alone = p.indices.given();
  if (!alone && !p.packed_q && !p.seqused_q.given() && p.rows_q * p.group() > short_rows) return {};
  DecodePlan plan{.possible = true};
  plan.most_splits = std::min(max_splits, (p.rows_k + least_split - 1) / least_split);
  if (p.indices.numbers.head_stride == 0) plan.heads = heads_together(p, config, plan.most_splits);
  plan.head_groups = (p.heads_kv + plan.heads - 1) / plan.heads;
  plan.scratch_bytes = static_cast<std::size_t>(plan.heads) *
                       decode_scratch(static_cast<int>(p.head_dim_qk), static_cast<int>(p.head_dim_v)).bytes;
  // Threads share splits only where there are too few sequences and heads to go round, which bounds the
  // memory of the partial results.
  const bool few_groups = p.batch * plan.head_groups < 4 * static_cast<std::int64_t>(config.threads);
  if (!alone && few_groups && config.threads > 1 && plan.most_splits > 1) {
    plan.partial_numbers = static_cast<std::size_t>(p.batch * p.heads_kv * plan.most_splits) *
                           short_partial_numbers(p.head_dim_v);
  }
  return plan;
}

std::int64_t decode_splits(std::int64_t seqlen_k) {
  return std::max<std::int64_t>(1, (seqlen_k + split_keys(seqlen_k) - 1) / split_keys(seqlen_k));
}

void run_decode(const ForwardRun& run, const Sequence& s, std::int64_t item) {
  const DecodePlan& plan = run.plan.decode;
  const Group group = group_of(run, s, item % plan.head_groups * plan.heads, plan.heads);
  if (run.partials == nullptr) return run_group(run, s, group);
  const std::int64_t split = item / plan.head_groups;
  attend_split(run, group, split, false, shared_partial(run, s, group.first, split),
               static_cast<std::size_t>(plan.most_splits) * short_partial_numbers(run.problem.head_dim_v));
}

void finish_decode(const ForwardRun& run, const Sequence& s, std::int64_t kv_head) {
  const ForwardTile t = group_of(run, s, kv_head, 1).tiles[0];
  double* const total = shared_partial(run, s, kv_head, 0);
  for (std::int64_t split = 1; split < s.splits; ++split) {
    run.kernels.few_rows.fold(t, total, shared_partial(run, s, kv_head, split));
  }
  run.kernels.few_rows.finish(t, total);
}

}  // namespace tandem::cpu
