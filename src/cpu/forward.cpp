// The forward pass: cuts a Problem into tiles and runs them on threads, the longest of each head first.
#include <omp.h>

#include "cpu/cpu.hpp"
#include "cpu/dequantize.hpp"
#include "cpu/eight_bit_forward.hpp"
#include "cpu/forward_kernels.hpp"
#include "cpu/operand.hpp"
#include "cpu/workspace.hpp"

namespace tandem::cpu {
namespace {

/// How the keys of a short query are split, by the sequence alone: at most max_splits splits of at least 1024
/// keys, a megabyte of fp32 K and V, beside which folding a partial result costs nothing.
constexpr std::int64_t max_splits = 64;
std::int64_t split_keys(std::int64_t seqlen_k) {
  const std::int64_t even = (seqlen_k + max_splits - 1) / max_splits;
  return std::max<std::int64_t>(1024, (even + short_block_k - 1) / short_block_k * short_block_k);
}
std::int64_t split_count(std::int64_t seqlen_k) {
  return std::max<std::int64_t>(1, (seqlen_k + split_keys(seqlen_k) - 1) / split_keys(seqlen_k));
}

/// Whether threads share the splits of one KV head, each partial result in a place of its own. Only needed
/// where there are too few heads to go round, which bounds the memory it takes.
bool shares_splits(const Problem& p, const Config& config) {
  const bool may_be_short =
      p.group() <= short_rows && (p.packed_q || p.seqused_q.given() || p.rows_q * p.group() <= short_rows);
  return may_be_short && p.batch * p.heads_kv < 4 * config.threads && split_count(p.rows_k) > 1;
}
std::size_t shared_partial_numbers(const Problem& p, const Config& config) {
  if (!shares_splits(p, config)) return 0;
  const std::int64_t splits = std::min(max_splits, (p.rows_k + 1023) / 1024);
  return static_cast<std::size_t>(p.batch * p.heads_kv * splits) * short_partial_numbers(p.head_dim_v);
}

bool is_short(const Problem& p, std::int64_t b) {
  const std::int64_t rows = query_rows(p, b).used * p.group();
  return rows > 0 && rows <= short_rows;
}

/// Pieces of work in one KV head of sequence b.
std::int64_t units_of(const Problem& p, const Config& config, std::int64_t b) {
  if (is_short(p, b)) return shares_splits(p, config) ? split_count(key_rows(p, b).used) : 1;
  return (query_rows(p, b).used * p.group() + config.block_q - 1) / config.block_q;
}

/// What all tiles of one KV head of one sequence share.
ForwardTile describe_head(const Problem& p, const Config& config, std::int64_t b, std::int64_t kv_head) {
  const Rows q_rows = query_rows(p, b);
  const Rows k_rows = key_rows(p, b);
  const std::int64_t head = kv_head * p.group();
  ForwardTile t;
  t.dtype = p.q.dtype;
  t.out_dtype = p.out.dtype;
  t.head_dim_qk = static_cast<int>(p.head_dim_qk);
  t.head_dim_v = static_cast<int>(p.head_dim_v);
  t.block_q = config.block_q;
  t.block_k = config.block_k;
  t.q = {element(p.q, b, q_rows.begin, head), p.q.row_stride, p.q.head_stride};
  t.out = {element(p.out, b, q_rows.begin, head), p.out.row_stride, p.out.head_stride};
  if (p.lse.given()) t.lse = {element(p.lse, b, q_rows.begin, head), p.lse.row_stride, p.lse.head_stride};
  t.k = element(p.k, b, k_rows.begin, kv_head);
  t.v = element(p.v, b, k_rows.begin, kv_head);
  t.k_stride = p.k.row_stride;
  t.v_stride = p.v.row_stride;
  t.group = p.group();
  t.seqlen_q = q_rows.used;
  t.seqlen_k = k_rows.used;
  t.window_left = p.window_left;
  t.window_right = p.window_right;
  t.scale = p.scale * p.q_scale.at(b, kv_head) * p.k_scale.at(b, kv_head);
  t.softcap = p.softcap;
  t.v_scale = p.v_scale.at(b, kv_head);
  if (p.sink != nullptr) t.sink = p.sink + head * p.sink_stride;
  t.sink_stride = p.sink_stride;
  return t;
}

std::size_t scratch_bytes(const Problem& p, const Config& config) {
  return forward_scratch(config.block_q, config.block_k, static_cast<int>(p.head_dim_qk),
                         static_cast<int>(p.head_dim_v))
      .bytes;
}

/// One call: what its threads share.
struct Run {
  const Problem& problem;
  const Config& config;
  std::byte* scratch;  ///< one for each thread
  std::size_t scratch_bytes;
  double* partials;  ///< of splits that threads share: [batch][heads_kv][splits]
  std::int64_t splits;
  Stop* stop;  ///< may be null

  [[nodiscard]] bool stops() const { return stop != nullptr && stop->wanted(); }
  [[nodiscard]] double* partial(std::int64_t b, std::int64_t kv_head, std::int64_t split) const {
    const std::int64_t index = (b * problem.heads_kv + kv_head) * splits + split;
    return partials + static_cast<std::size_t>(index) * short_partial_numbers(problem.head_dim_v);
  }
  [[nodiscard]] ForwardTile head(std::int64_t b, std::int64_t kv_head) const {
    ForwardTile t = describe_head(problem, config, b, kv_head);
    t.scratch = scratch + static_cast<std::size_t>(omp_get_thread_num()) * scratch_bytes;
    if (stop != nullptr) t.stop = {.wanted = Stop::wanted, .context = stop};
    return t;
  }
};

void run_tile(const Run& run, std::int64_t b, std::int64_t kv_head, std::int64_t tile) {
  ForwardTile t = run.head(b, kv_head);
  t.first = tile * run.config.block_q;
  t.count = static_cast<int>(std::min<std::int64_t>(run.config.block_q, t.seqlen_q * t.group - t.first));
  forward_kernel(run.config.target).run(t);
}

ForwardTile short_tile(const Run& run, std::int64_t b, std::int64_t kv_head) {
  ForwardTile t = run.head(b, kv_head);
  t.count = static_cast<int>(t.seqlen_q * t.group);
  return t;
}

void attend_split(const Run& run, const ForwardTile& t, std::int64_t split, double* partial) {
  // Only keys that some row sees: the first row's first to the last row's last.
  const Problem& p = run.problem;
  const std::int64_t size = split_keys(t.seqlen_k);
  const std::int64_t first = visible_keys(p, 0, t.seqlen_q, t.seqlen_k).first;
  const std::int64_t last = visible_keys(p, t.seqlen_q - 1, t.seqlen_q, t.seqlen_k).last;
  short_kernel(run.config.target)
      .attend(t, std::max(first, split * size), std::min(last, (split + 1) * size), partial);
}

/// All splits of one KV head on this thread.
void run_short(const Run& run, std::int64_t b, std::int64_t kv_head) {
  const ForwardTile t = short_tile(run, b, kv_head);
  const ShortKernel& kernel = short_kernel(run.config.target);
  const ForwardScratch layout = forward_scratch(t.block_q, t.block_k, t.head_dim_qk, t.head_dim_v);
  auto* total = reinterpret_cast<double*>(t.scratch + layout.out);
  double* next = total + short_partial_numbers(t.head_dim_v);
  attend_split(run, t, 0, total);
  for (std::int64_t split = 1; split < split_count(t.seqlen_k); ++split) {
    attend_split(run, t, split, next);
    kernel.fold(t, total, next);
  }
  kernel.finish(t, total);
}

/// The splits of one KV head that other threads have attended to.
void fold_shared(const Run& run, std::int64_t b, std::int64_t kv_head) {
  if (!is_short(run.problem, b) || run.stops()) return;
  const ForwardTile t = short_tile(run, b, kv_head);
  const ShortKernel& kernel = short_kernel(run.config.target);
  double* total = run.partial(b, kv_head, 0);
  for (std::int64_t split = 1; split < split_count(t.seqlen_k); ++split) {
    kernel.fold(t, total, run.partial(b, kv_head, split));
  }
  kernel.finish(t, total);
}

void run_unit(const Run& run, std::int64_t b, std::int64_t kv_head, std::int64_t unit, std::int64_t units) {
  if (run.stops()) return;
  if (!is_short(run.problem, b)) {
    // The last tile of a causal sequence sees the most keys: it goes first.
    run_tile(run, b, kv_head, units - 1 - unit);
  } else if (run.partials != nullptr) {
    attend_split(run, short_tile(run, b, kv_head), unit, run.partial(b, kv_head, unit));
  } else {
    run_short(run, b, kv_head);
  }
}

}  // namespace

std::size_t forward_workspace_bytes(const Problem& p, const Config& config) {
  if (p.mixed()) {
    return mixed_space(p).bytes + forward_workspace_bytes(dequantized(p, nullptr), config) +
           scratch_alignment;
  }
  if (p.precision != Precision::exact) return eight_bit_workspace_bytes(p, config);
  return static_cast<std::size_t>(config.threads) * scratch_bytes(p, config) +
         shared_partial_numbers(p, config) * sizeof(double) + scratch_alignment;
}

void forward(const Problem& p, const Config& config, std::span<std::byte> workspace, Stop* stop) {
  if (p.mixed()) {
    std::byte* const memory = align_scratch(workspace.data());
    const Problem d = dequantized(p, memory);
    dequantize(p, d, config.threads);
    return forward(d, config, {memory + mixed_space(p).bytes, workspace.data() + workspace.size()}, stop);
  }
  if (p.precision != Precision::exact) return eight_bit_forward(p, config, workspace, stop);
  std::byte* const scratch = align_scratch(workspace.data());
  Run run{.problem = p,
          .config = config,
          .scratch = scratch,
          .scratch_bytes = scratch_bytes(p, config),
          .partials = nullptr,
          .splits = std::min(max_splits, (p.rows_k + 1023) / 1024),
          .stop = stop};
  if (shares_splits(p, config)) {
    run.partials =
        reinterpret_cast<double*>(scratch + static_cast<std::size_t>(config.threads) * run.scratch_bytes);
  }
  std::int64_t tickets = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) tickets += units_of(p, config, b) * p.heads_kv;

#pragma omp parallel num_threads(config.threads)
  {
    // Before the tiles: should cu_seqlens hold nonsense, unused rows may overlap used ones.
#pragma omp for schedule(static)
    for (std::int64_t b = 0; b <= p.batch; ++b) clear_unused(p, b);

    // Tickets count sequences, then KV heads, then units. A thread's tickets ascend, so that each thread
    // finds the sequence of its next ticket by walking on from the one before.
    std::int64_t b = 0;
    std::int64_t first_ticket = 0;
    std::int64_t units = p.batch > 0 ? units_of(p, config, 0) : 0;
#pragma omp for schedule(monotonic : dynamic, 1)
    for (std::int64_t ticket = 0; ticket < tickets; ++ticket) {
      while (ticket >= first_ticket + units * p.heads_kv) {
        first_ticket += units * p.heads_kv;
        units = units_of(p, config, ++b);
      }
      run_unit(run, b, (ticket - first_ticket) / units, (ticket - first_ticket) % units, units);
    }

    if (run.partials != nullptr) {
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t head = 0; head < p.batch * p.heads_kv; ++head) {
        fold_shared(run, head / p.heads_kv, head % p.heads_kv);
      }
    }
  }
}

}  // namespace tandem::cpu
