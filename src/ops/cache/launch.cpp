#include "ops/cache/launch.hpp"

#include <algorithm>

#include "gpu/param_fields.hpp"

namespace tandem::gpu {
namespace {

/// Whether rows begin at multiples of `bytes`.
bool aligned(const Operand& o, std::int64_t bytes) {
  const auto item = static_cast<std::int64_t>(size_of(o.dtype));
  return reinterpret_cast<std::uintptr_t>(o.data) % static_cast<std::uintptr_t>(bytes) == 0 &&
         (o.batch_stride * item) % bytes == 0 && (o.row_stride * item) % bytes == 0 &&
         (o.head_stride * item) % bytes == 0;
}

AppendTensor tensor(const Operand& rows, const Operand& cache, const Scales& scales, std::int64_t columns) {
  return {.rows = rows.data,
          .row_stride = strides_of(rows),
          .cache = cache.data,
          .cache_stride = strides_of(cache),
          .scales = scales.data,
          .scale_batch = scales.batch_stride,
          .scale_head = scales.head_stride,
          .scale_row = scales.group_stride,
          .columns = as_int(columns)};
}

FoundScales found(const Operand& scales) {
  return {.data = static_cast<float*>(scales.data), .stride = strides_of(scales)};
}

/// The largest power of two, `most` at most, that divides the rows of a page, of which `fits` is true.
template <typename Fits>
int largest_shift(const AppendProblem& problem, int most, const Fits& fits) {
  int shift = 0;
  const auto in_page = [&](int s) {
    return !problem.pages.given() || problem.entry_rows % (std::int64_t{1} << s) == 0;
  };
  while (shift < most && in_page(shift + 1) && fits(std::int64_t{1} << (shift + 1))) ++shift;
  return shift;
}

}  // namespace

Stored stored(DType dtype) {
  switch (dtype) {
    case DType::f16: return Stored::f16;
    case DType::bf16: return Stored::bf16;
    case DType::e4m3: return Stored::e4m3;
    case DType::s8: return Stored::s8;
    default: return Stored::f32;
  }
}

bool allows_append_vectors(const AppendProblem& problem) {
  constexpr std::int64_t vector = 16;
  const bool same = problem.k_new.dtype == problem.k_cache.dtype;
  const auto item = static_cast<std::int64_t>(size_of(problem.k_new.dtype));
  const std::int64_t multiple = same && !problem.cos.given() ? vector / item : 8;
  // Codes are made, or read to become values, 8 at a time.
  const std::int64_t rows = !same && is_eight_bit(problem.k_new.dtype) ? 8 : vector;
  const std::int64_t cache = !same && is_eight_bit(problem.k_cache.dtype) ? 8 : vector;
  if (problem.head_dim_k % multiple != 0 || !aligned(problem.k_new, rows) || !aligned(problem.k_cache, cache))
    return false;
  if (problem.v_new.given() && (problem.head_dim_v % multiple != 0 || !aligned(problem.v_new, rows) ||
                                !aligned(problem.v_cache, cache))) {
    return false;
  }
  if (problem.q.given() && (!aligned(problem.q, vector) || !aligned(problem.q_out, vector))) return false;
  return !problem.cos.given() || (aligned(problem.cos, vector) && aligned(problem.sin, vector));
}

std::int64_t append_grid(const AppendProblem& problem, const AppendConfig& config, int multiprocessors) {
  if (problem.heads_kv == 0 && (!problem.q.given() || problem.heads_q == 0)) return 0;
  // Each block looks at all runs, so that there are no more of them than run at once.
  const int at_once = append_blocks_per_sm(config) * multiprocessors;
  return std::min<std::int64_t>(problem.tokens(), at_once);
}

AppendParams make_append_params(const AppendProblem& problem, std::int64_t grid) {
  AppendParams p{};
  p.k = tensor(problem.k_new, problem.k_cache, problem.k_scale, problem.head_dim_k);
  p.v = tensor(problem.v_new, problem.v_cache, problem.v_scale, problem.head_dim_v);
  p.q = tensor(problem.q, problem.q_out, {}, problem.head_dim_k);
  p.cu_seqlens_new = lengths_of(problem.cu_seqlens_new);
  p.seqused_new = lengths_of(problem.seqused_new);
  p.cache_seqlens = lengths_of(problem.cache_seqlens);
  p.cache_batch_idx = lengths_of(problem.cache_batch_idx);
  p.slot_mapping = lengths_of(problem.slot_mapping);
  p.rotary_offsets = lengths_of(problem.rotary_offsets);
  p.page_table = {.data = problem.pages.table, .stride = problem.pages.stride, .wide = problem.pages.wide};
  p.page_table_batch = problem.pages.batch_stride;
  p.cos = problem.cos.data;
  p.sin = problem.sin.data;
  p.cos_stride = problem.cos.row_stride;
  p.sin_stride = problem.sin.row_stride;
  p.positions = problem.positions;
  p.entries = problem.entries;
  p.entry_rows = problem.entry_rows;
  p.rows_of_sequence = problem.slot_mapping.given() ? 0 : problem.rows_of_sequence();
  p.rotary_dim = as_int(problem.rotary_dim);
  p.batch = as_int(problem.batch);
  p.tokens = as_int(problem.tokens());
  p.rows_new = as_int(problem.rows_new);
  p.heads_kv = as_int(problem.heads_kv);
  p.heads_q = as_int(problem.heads_q);
  p.packed = problem.packed;
  // As long as there are four runs for each block: then blocks have about as much to write.
  p.run_shift = largest_shift(problem, append_longest_run, [&](std::int64_t rows) {
    return !problem.slot_mapping.given() && 4 * grid * rows <= problem.tokens();
  });
  p.stretch_shift = largest_shift(problem, p.run_shift + 5, [](std::int64_t) { return true; });
  const std::int64_t run = std::int64_t{1} << p.run_shift;
  const std::int64_t stretch = std::int64_t{1} << p.stretch_shift;
  // The first of n rows may be the last of its stretch.
  const auto touched = [&](std::int64_t rows, std::int64_t sequences) {
    return sequences == 0 ? 0 : (rows + sequences * (2 * stretch - 2)) / stretch;
  };
  p.words = as_int(problem.slot_mapping.given() ? blocks_of(problem.tokens(), 32)
                   : problem.packed             ? touched(problem.rows_new, problem.batch)
                                                : problem.batch * touched(problem.rows_new, 1));
  // A block for each run of a word and more, and for each team so many words that teams are evenly busy (with
  // 33 words 15 teams took 32.6 us for 18.4). Their number is odd, as every second stretch of an entry may
  // have no rows, or the last of 2^n + 1.
  const bool apart =
      !problem.pages.given() && !problem.cache_batch_idx.given() && !problem.slot_mapping.given();
  p.teams = apart ? std::max(std::min(as_int(grid / 32 - 1), p.words / 512) | 1, 1) : 1;
  p.runs_of_entry = blocks_of(problem.entry_rows, run);
  p.k_found = found(problem.k_scale_cache);
  p.v_found = found(problem.v_scale_cache);
  return p;
}

bool allows_merge_vectors(const MergeProblem& problem) {
  constexpr std::int64_t elements = 4;
  const auto fits = [](const Operand& o) {
    return aligned(o, elements * static_cast<std::int64_t>(size_of(o.dtype)));
  };
  return problem.head_dim % elements == 0 && fits(problem.out) &&
         std::all_of(problem.parts.begin(), problem.parts.end(),
                     [&](const MergePart& p) { return fits(p.out); });
}

std::int64_t merge_grid(const MergeProblem& problem, int multiprocessors) {
  // Eight blocks of 256 threads fill a multiprocessor.
  return std::min(blocks_of(problem.count(), merge_threads / 32), std::int64_t{8} * multiprocessors);
}

bool same_strides(const Operand& a, const Operand& b) {
  return a.batch_stride == b.batch_stride && a.row_stride == b.row_stride && a.head_stride == b.head_stride;
}

bool parts_are_even(const MergeProblem& problem) {
  const auto step = [&](std::size_t i, auto member) {
    return reinterpret_cast<std::intptr_t>((problem.parts[i].*member).data) -
           reinterpret_cast<std::intptr_t>((problem.parts[i - 1].*member).data);
  };
  for (const auto member : {&MergePart::out, &MergePart::lse}) {
    const auto item = static_cast<std::intptr_t>(size_of((problem.parts[0].*member).dtype));
    for (std::size_t i = 1; i < problem.parts.size(); ++i) {
      if (step(i, member) != step(1, member) || step(i, member) % item != 0) return false;
    }
  }
  return true;
}

MergeParams make_merge_params(const MergeProblem& problem) {
  MergeParams p{};
  const MergePart& first = problem.parts.front();
  p.even = parts_are_even(problem);
  for (std::size_t i = 0; i < problem.parts.size() && i < merge_most_parts; ++i) {
    p.outs[i] = problem.parts[i].out.data;
    p.lses[i] = static_cast<const float*>(problem.parts[i].lse.data);
  }
  if (p.even && problem.parts.size() > 1) {
    const auto item = static_cast<std::int64_t>(size_of(first.out.dtype));
    p.out_step = (static_cast<const char*>(p.outs[1]) - static_cast<const char*>(p.outs[0])) / item;
    p.lse_step = p.lses[1] - p.lses[0];
  }
  p.part_stride = strides_of(first.out);
  p.part_lse_stride = strides_of(first.lse);
  p.out = problem.out.data;
  p.out_stride = strides_of(problem.out);
  p.lse = static_cast<float*>(problem.lse.data);
  p.lse_stride = strides_of(problem.lse);
  p.count = problem.count();
  p.rows = as_int(problem.rows);
  p.heads = as_int(problem.heads);
  p.columns = as_int(problem.head_dim);
  p.parts = static_cast<int>(problem.parts.size());
  return p;
}

}  // namespace tandem::gpu
