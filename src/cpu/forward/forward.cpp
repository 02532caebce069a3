// The forward pass: cuts a Problem into tiles and runs them on threads, the longest of each head first.
#include <omp.h>

#include <algorithm>
#include <variant>

#include "cpu/common/chosen_keys.hpp"
#include "cpu/common/operand.hpp"
#include "cpu/common/workspace.hpp"
#include "cpu/forward/work.hpp"
#include "problem/mixed.hpp"

namespace tandem::cpu {
namespace {

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

/// The scales of `kv_head`, from the row at `place` on, the first that takes part; in pages, of all rows.
TileScales scales_of(const Scales& s, const KeyPlace& place, std::int64_t kv_head) {
  if (!is_by_row(s)) return {};
  return {
      .data = s.data + place.batch * s.batch_stride + place.row * s.group_stride + kv_head * s.head_stride,
      .row_stride = s.group_stride,
      .page_stride = s.batch_stride};
}

void run_item(const ForwardRun& run, const Sequence& s, std::int64_t item) {
  if (run.stops()) return;
  if (run.problem.indices.given() && s.query < 0) {
    const std::int64_t of_query = s.items / s.q.used;
    Sequence one = s;
    one.query = item / of_query;
    return run_item(run, one, item % of_query);
  }
  if (s.kind == Sequence::Kind::few_rows) return run_decode(run, s, item);
  if (s.kind == Sequence::Kind::runs_of_tiles) return run_split(run, s, item);
  // The last tile of a causal sequence sees the most keys: it goes first.
  run.kernels.forward.run(run.tile(s, item / s.tiles, s.tiles - 1 - item % s.tiles));
}

/// Joins what threads have shared.
void finish_shared(const ForwardRun& run) {
  const Problem& p = run.problem;
  if (run.partials == nullptr && run.split_sums == nullptr) return;
#pragma omp for schedule(dynamic, 1)
  for (std::int64_t head = 0; head < p.batch * p.heads_kv; ++head) {
    const Sequence s = run.sequence(head / p.heads_kv);
    if (run.stops()) continue;
    if (s.kind == Sequence::Kind::few_rows) finish_decode(run, s, head % p.heads_kv);
    if (s.kind == Sequence::Kind::runs_of_tiles) finish_split(run, s, head % p.heads_kv);
  }
}

}  // namespace

GroupRows row_numbers(const Operand& x, std::int64_t batch, std::int64_t row, std::int64_t head) {
  if (!x.given()) return {};
  return {element(x, batch, row, head), x.row_stride, x.head_stride};
}

Sequence ForwardRun::sequence(std::int64_t b) const {
  const Problem& p = problem;
  Sequence s{.b = b, .q = query_rows(p, b), .k = key_rows(p, b)};
  const bool alone = p.indices.given();  // each query
  s.most_keys = alone ? p.indices.count : s.k.used;
  const std::int64_t rows = (alone ? std::min<std::int64_t>(s.q.used, 1) : s.q.used) * p.group();
  if (plan.decode.possible && rows > 0 && rows <= short_rows) {
    s.kind = Sequence::Kind::few_rows;
    s.splits = decode_splits(s.most_keys);
    s.items = plan.decode.head_groups * (partials != nullptr ? s.splits : 1) * (alone ? s.q.used : 1);
    return s;
  }
  s.tiles = (rows + config.block_q - 1) / config.block_q;
  s.items = s.tiles * p.heads_kv * (alone ? s.q.used : 1);
  if (split_sums == nullptr) return s;
  s.kind = Sequence::Kind::runs_of_tiles;
  s.splits = cpu::split_runs(plan.split, s.k.used);
  s.items *= std::max<std::int64_t>(1, s.splits);
  return s;
}

ForwardTile ForwardRun::tile(const Sequence& s, std::int64_t kv_head, std::int64_t tile) const {
  ForwardTile t = head(s, kv_head);
  t.first = tile * config.block_q;
  t.count = static_cast<int>(std::min<std::int64_t>(config.block_q, t.seqlen_q * t.group - t.first));
  return t;
}

ForwardTile ForwardRun::head(const Sequence& s, std::int64_t kv_head) const {
  const Problem& p = problem;
  const std::int64_t b = s.b;
  const std::int64_t head = kv_head * p.group();
  ForwardTile t;
  t.dtype = p.q.dtype;
  t.key_dtype = p.k.dtype;
  t.out_dtype = p.out.dtype;
  t.head_dim_qk = static_cast<int>(p.head_dim_qk);
  t.head_dim_v = static_cast<int>(p.head_dim_v);
  t.block_q = config.block_q;
  t.block_k = config.block_k;
  const std::int64_t first_query = s.q.begin + std::max<std::int64_t>(s.query, 0);
  t.q = {element(p.q, b, first_query, head), p.q.row_stride, p.q.head_stride};
  t.out = {element(p.out, b, first_query, head), p.out.row_stride, p.out.head_stride};
  t.lse = row_numbers(p.lse, b, first_query, head);
  t.max_logits = row_numbers(p.max_logits, b, first_query, head);
  t.gate = row_numbers(p.gate, b, first_query, head);
  static_assert(sizeof zero_row >= sizeof(float) * max_head_dim);
  if (p.pages.given()) {
    t.k = element(p.k, 0, 0, kv_head);
    t.v = element(p.v, 0, 0, kv_head);
    t.pages = pages_of(p, b, s.k.begin);
    t.k_scales = scales_of(p.k_scale, {}, kv_head);
    t.v_scales = scales_of(p.v_scale, {}, kv_head);
  } else if (s.k.used > 0) {
    const KeyPlace place = key_place(p, b, s.k.begin);
    t.k = element(p.k, place.batch, place.row, kv_head);
    t.v = element(p.v, place.batch, place.row, kv_head);
    t.k_scales = scales_of(p.k_scale, place, kv_head);
    t.v_scales = scales_of(p.v_scale, place, kv_head);
  }
  t.k_stride = p.k.row_stride;
  t.v_stride = p.v.row_stride;
  t.group = p.group();
  t.seqlen_q = s.q.used;
  t.seqlen_k = s.k.used;
  const Window window = window_of(p, b);
  t.window_left = window.left;
  t.window_right = window.right;
  t.split_size = p.split_size;
  static_cast<ScoreOptions&>(t) = p;
  t.scale = p.scale * p.q_scale.at(b, kv_head) * common_scale(p.k_scale, b, kv_head);
  t.v_scale = common_scale(p.v_scale, b, kv_head) * p.dropout.scale;
  if (p.sink != nullptr) t.sink = p.sink + head * p.sink_stride;
  t.sink_stride = p.sink_stride;
  t.functions = functions;
  t.batch = b;
  t.head = head;
  t.scratch = scratch + static_cast<std::size_t>(omp_get_thread_num()) * plan.scratch_bytes;
  if (stop != nullptr) t.stop = {.wanted = Stop::wanted, .context = stop};
  if (p.indices.given()) {  // a sequence of its own, whose keys are all that it sees
    auto* const keys = reinterpret_cast<std::int64_t*>(t.scratch + plan.chosen_at);
    t.seqlen_q = 1;
    t.seqlen_k = list_chosen_keys(p, b, s.q, s.k, s.query, kv_head, keys);
    t.pages.chosen = keys;
    t.window_left = t.window_right = -1;
  }
  return t;
}

ForwardPlan plan_forward(const Problem& p, const Config& config, const CallFunctions* functions) {
  ForwardPlan plan{.decode = plan_decode(p, config), .split = plan_split(p, config)};
  plan.scratch_bytes = forward_scratch(config.block_q, config.block_k, static_cast<int>(p.head_dim_qk),
                                       static_cast<int>(p.head_dim_v))
                           .bytes;
  if (functions != nullptr) {
    plan.scratch_bytes += function_scratch(functions->words(), config.block_q, config.block_k).bytes;
  }
  plan.scratch_bytes = std::max(plan.scratch_bytes, plan.decode.scratch_bytes);
  plan.chosen_at = plan.scratch_bytes;
  plan.scratch_bytes += whole_lines(static_cast<std::size_t>(p.indices.count) * sizeof(std::int64_t));
  plan.workspace_bytes = static_cast<std::size_t>(config.threads) * plan.scratch_bytes +
                         plan.decode.partial_numbers * sizeof(double) +
                         plan.split.sum_numbers * sizeof(float) + scratch_alignment;
  return plan;
}

void forward(const Plan& call, const Problem& p, std::byte* workspace, Stop* stop) {
  const Config& config = call.config;
  const auto& plan = std::get<ForwardPlan>(call.pass);
  const TileFunctions functions = call.functions ? call.functions->of_tiles(p) : TileFunctions{};
  std::byte* const scratch = align_scratch(workspace);
  std::byte* const shared = scratch + static_cast<std::size_t>(config.threads) * plan.scratch_bytes;
  ForwardRun run{.problem = p,
                 .config = config,
                 .plan = plan,
                 .kernels = kernels(config.target),
                 .functions = call.functions ? &functions : nullptr,
                 .scratch = scratch,
                 .partials = nullptr,
                 .split_sums = nullptr,
                 .split_runs = shared_runs(plan.split, p),
                 .stop = stop};
  if (plan.decode.partial_numbers > 0) run.partials = reinterpret_cast<double*>(shared);
  if (run.split_runs > 0) run.split_sums = reinterpret_cast<float*>(shared);
  std::int64_t all_items = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) all_items += run.sequence(b).items;

#pragma omp parallel num_threads(config.threads)
  {
    // Before the tiles: should cu_seqlens hold nonsense, unused rows may overlap used ones.
#pragma omp for schedule(static)
    for (std::int64_t b = 0; b <= p.batch; ++b) clear_unused(p, b);

    // Work items count sequences, then the items of each. A thread's items ascend, so that it finds the
    // sequence of its next item by walking on from the one before.
    std::int64_t first_item = 0;
    Sequence s = p.batch > 0 ? run.sequence(0) : Sequence{};
#pragma omp for schedule(monotonic : dynamic, 1)
    for (std::int64_t item = 0; item < all_items; ++item) {
      while (item >= first_item + s.items) {
        first_item += s.items;
        s = run.sequence(s.b + 1);
      }
      run_item(run, s, item - first_item);
    }

    finish_shared(run);
  }
}

}  // namespace tandem::cpu
