// The forward pass: cuts a Problem into tiles and runs them on threads, the longest of each head first.
#include "cpu/eight_bit/forward.hpp"
#include "cpu/common/operand.hpp"
#include "cpu/common/workspace.hpp"
#include "cpu/forward/work.hpp"
#include "cpu/functions/functions.hpp"
#include "cpu/quantize/dequantize.hpp"
#include "problem/mixed.hpp"

namespace tandem::cpu {
namespace {

/// Work items of sequence b.
std::int64_t items_of(const ForwardRun& run, std::int64_t b) {
  const Problem& p = run.problem;
  if (is_short(p, b)) return short_units(p, run.config, b);
  if (run.split_sums != nullptr) return split_units(p, run.config, b);
  return tiles_of(p, run.config, b) * p.heads_kv;
}

TilePages pages_of(const Problem& p, std::int64_t b, std::int64_t first_row) {
  const std::int64_t entry_bytes = p.pages.wide ? 8 : 4;
  return {.table = static_cast<const std::byte*>(p.pages.table) + b * p.pages.batch_stride * entry_bytes,
          .wide = p.pages.wide,
          .stride = p.pages.stride,
          .page_size = p.pages.page_size,
          .count = p.pages.count,
          .first_row = first_row,
          .k_stride = p.k.batch_stride,
          .v_stride = p.v.batch_stride};
}

/// Those of the head `kv_head` whose first row that takes part is at `place`; in pages, of all its rows.
TileScales scales_of(const Scales& s, const KeyPlace& place, std::int64_t kv_head) {
  if (!is_by_row(s)) return {};
  return {
      .data = s.data + place.batch * s.batch_stride + place.row * s.group_stride + kv_head * s.head_stride,
      .row_stride = s.group_stride,
      .page_stride = s.batch_stride};
}

std::size_t scratch_bytes(const Problem& p, const Config& config) {
  const std::size_t of_tiles =
      forward_scratch(config.block_q, config.block_k, static_cast<int>(p.head_dim_qk),
                      static_cast<int>(p.head_dim_v))
          .bytes;
  if (p.has_function()) {
    const CallFunctions functions(p);
    return of_tiles + function_scratch(functions.tile, config.block_q, config.block_k).bytes;
  }
  return std::max(of_tiles, short_scratch_bytes(p, config));
}

/// Item `item` of the `items` that sequence b has.
void run_item(const ForwardRun& run, std::int64_t b, std::int64_t item, std::int64_t items) {
  if (run.stops()) return;
  if (is_short(run.problem, b)) return run_short(run, b, item);
  if (run.split_sums != nullptr) return run_split(run, b, item);
  // The last tile of a causal sequence sees the most keys: it goes first.
  const std::int64_t tiles = items / run.problem.heads_kv;
  forward_kernel(run.config.target).run(tile_of(run, b, item / tiles, tiles - 1 - item % tiles));
}

/// Joins what threads have shared.
void finish_shared(const ForwardRun& run) {
  const Problem& p = run.problem;
  if (run.partials == nullptr && run.split_sums == nullptr) return;
#pragma omp for schedule(dynamic, 1)
  for (std::int64_t head = 0; head < p.batch * p.heads_kv; ++head) {
    const std::int64_t b = head / p.heads_kv;
    run.partials != nullptr ? fold_shared(run, b, head % p.heads_kv)
                            : finish_splits(run, b, head % p.heads_kv);
  }
}

}  // namespace

std::int64_t tiles_of(const Problem& p, const Config& config, std::int64_t b) {
  return (query_rows(p, b).used * p.group() + config.block_q - 1) / config.block_q;
}

ForwardTile tile_of(const ForwardRun& run, std::int64_t b, std::int64_t kv_head, std::int64_t tile) {
  ForwardTile t = run.head(b, kv_head);
  t.first = tile * run.config.block_q;
  t.count = static_cast<int>(std::min<std::int64_t>(run.config.block_q, t.seqlen_q * t.group - t.first));
  return t;
}

ForwardTile describe_head(const Problem& p, const Config& config, std::int64_t b, std::int64_t kv_head) {
  const Rows q_rows = query_rows(p, b);
  const Rows k_rows = key_rows(p, b);
  const std::int64_t head = kv_head * p.group();
  ForwardTile t;
  t.dtype = p.q.dtype;
  t.key_dtype = p.k.dtype;
  t.out_dtype = p.out.dtype;
  t.head_dim_qk = static_cast<int>(p.head_dim_qk);
  t.head_dim_v = static_cast<int>(p.head_dim_v);
  t.block_q = config.block_q;
  t.block_k = config.block_k;
  t.q = {element(p.q, b, q_rows.begin, head), p.q.row_stride, p.q.head_stride};
  t.out = {element(p.out, b, q_rows.begin, head), p.out.row_stride, p.out.head_stride};
  if (p.lse.given()) t.lse = {element(p.lse, b, q_rows.begin, head), p.lse.row_stride, p.lse.head_stride};
  static_assert(sizeof zero_row >= sizeof(float) * max_head_dim);
  if (p.pages.given()) {
    t.k = element(p.k, 0, 0, kv_head);
    t.v = element(p.v, 0, 0, kv_head);
    t.pages = pages_of(p, b, k_rows.begin);
    t.k_scales = scales_of(p.k_scale, {}, kv_head);
    t.v_scales = scales_of(p.v_scale, {}, kv_head);
  } else if (k_rows.used > 0) {
    const KeyPlace place = key_place(p, b, k_rows.begin);
    t.k = element(p.k, place.batch, place.row, kv_head);
    t.v = element(p.v, place.batch, place.row, kv_head);
    t.k_scales = scales_of(p.k_scale, place, kv_head);
    t.v_scales = scales_of(p.v_scale, place, kv_head);
  }
  t.k_stride = p.k.row_stride;
  t.v_stride = p.v.row_stride;
  t.group = p.group();
  t.seqlen_q = q_rows.used;
  t.seqlen_k = k_rows.used;
  const Window window = window_of(p, b);
  t.window_left = window.left;
  t.window_right = window.right;
  t.split_size = p.split_size;
  t.scale = p.scale * p.q_scale.at(b, kv_head) * common_scale(p.k_scale, b, kv_head);
  t.softcap = p.softcap;
  t.v_scale = common_scale(p.v_scale, b, kv_head) * p.dropout.scale;
  if (p.sink != nullptr) t.sink = p.sink + head * p.sink_stride;
  t.sink_stride = p.sink_stride;
  t.batch = b;
  t.head = head;
  return t;
}

std::size_t forward_workspace_bytes(const Problem& p, const Config& config) {
  if (p.precision != Precision::exact) return eight_bit_workspace_bytes(p, config);
  return static_cast<std::size_t>(config.threads) * scratch_bytes(p, config) +
         shared_partial_numbers(p, config) * sizeof(double) + shared_sum_numbers(p, config) * sizeof(float) +
         scratch_alignment;
}

void forward(const Problem& p, const Config& config, std::span<std::byte> workspace, Stop* stop) {
  if (p.precision != Precision::exact) return eight_bit_forward(p, config, workspace, stop);
  std::byte* const scratch = align_scratch(workspace.data());
  std::optional<CallFunctions> functions;
  if (p.has_function()) functions.emplace(p);
  ForwardRun run{.problem = p,
                 .config = config,
                 .scratch = scratch,
                 .scratch_bytes = scratch_bytes(p, config),
                 .partials = nullptr,
                 .split_sums = nullptr,
                 .split_runs = shared_runs(p, config),
                 .stop = stop,
                 .functions = functions ? &functions->tile : nullptr};
  std::byte* const shared = scratch + static_cast<std::size_t>(config.threads) * run.scratch_bytes;
  if (shared_partial_numbers(p, config) > 0) run.partials = reinterpret_cast<double*>(shared);
  if (run.split_runs > 0) run.split_sums = reinterpret_cast<float*>(shared);
  std::int64_t all_items = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) all_items += items_of(run, b);

#pragma omp parallel num_threads(config.threads)
  {
    // Before the tiles: should cu_seqlens hold nonsense, unused rows may overlap used ones.
#pragma omp for schedule(static)
    for (std::int64_t b = 0; b <= p.batch; ++b) clear_unused(p, b);

    // Work items count sequences, then the items of each. A thread's items ascend, so that it finds the
    // sequence of its next item by walking on from the one before.
    std::int64_t b = 0;
    std::int64_t first_item = 0;
    std::int64_t items = p.batch > 0 ? items_of(run, 0) : 0;
#pragma omp for schedule(monotonic : dynamic, 1)
    for (std::int64_t item = 0; item < all_items; ++item) {
      while (item >= first_item + items) {
        first_item += items;
        items = items_of(run, ++b);
      }
      run_item(run, b, item - first_item, items);
    }

    finish_shared(run);
  }
}

}  // namespace tandem::cpu
