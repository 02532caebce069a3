#include "gpu/append_params.hpp"

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
          .columns = as_int(columns)};
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

bool allows_append_vectors(const AppendJob& job) {
  constexpr std::int64_t vector = 16;
  const bool copies = job.k_new.dtype == job.k_cache.dtype && !job.cos.given();
  const auto item = static_cast<std::int64_t>(size_of(job.k_new.dtype));
  const std::int64_t unit = copies ? vector / item : 8;
  // Converted rows become 8 codes at a time.
  const std::int64_t cache = job.k_new.dtype == job.k_cache.dtype ? vector : 8;
  if (job.head_dim_k % unit != 0 || !aligned(job.k_new, vector) || !aligned(job.k_cache, cache)) return false;
  if (job.v_new.given() &&
      (job.head_dim_v % unit != 0 || !aligned(job.v_new, vector) || !aligned(job.v_cache, cache))) {
    return false;
  }
  if (job.q.given() && (!aligned(job.q, vector) || !aligned(job.q_out, vector))) return false;
  return !job.cos.given() || (aligned(job.cos, vector) && aligned(job.sin, vector));
}

std::int64_t append_grid(const AppendJob& job, int multiprocessors) {
  if (job.heads_kv == 0 && (!job.q.given() || job.heads_q == 0)) return 0;
  // Each block looks at all tokens, so that no more of them than the memory is kept busy by.
  return std::min<std::int64_t>(job.tokens(), std::int64_t{4} * multiprocessors);
}

AppendParams make_append_params(const AppendJob& job) {
  AppendParams p{};
  p.k = tensor(job.k_new, job.k_cache, job.k_scale, job.head_dim_k);
  p.v = tensor(job.v_new, job.v_cache, job.v_scale, job.head_dim_v);
  p.q = tensor(job.q, job.q_out, {}, job.head_dim_k);
  p.cu_seqlens_new = lengths_of(job.cu_seqlens_new);
  p.seqused_new = lengths_of(job.seqused_new);
  p.cache_seqlens = lengths_of(job.cache_seqlens);
  p.cache_batch_idx = lengths_of(job.cache_batch_idx);
  p.slot_mapping = lengths_of(job.slot_mapping);
  p.rotary_offsets = lengths_of(job.rotary_offsets);
  p.page_table = {.data = job.pages.table, .stride = job.pages.stride, .wide = job.pages.wide};
  p.page_table_batch = job.pages.batch_stride;
  p.cos = job.cos.data;
  p.sin = job.sin.data;
  p.cos_stride = job.cos.row_stride;
  p.sin_stride = job.sin.row_stride;
  p.positions = job.positions;
  p.entries = job.entries;
  p.entry_rows = job.entry_rows;
  p.rows_of_sequence = job.slot_mapping.given() ? 0 : job.rows_of_sequence();
  p.rotary_dim = as_int(job.rotary_dim);
  p.batch = as_int(job.batch);
  p.tokens = as_int(job.tokens());
  p.rows_new = as_int(job.rows_new);
  p.heads_kv = as_int(job.heads_kv);
  p.heads_q = as_int(job.heads_q);
  p.packed = job.packed;
  return p;
}

bool allows_merge_vectors(const MergeJob& job) {
  constexpr std::int64_t elements = 4;
  const auto fits = [](const Operand& o) {
    return aligned(o, elements * static_cast<std::int64_t>(size_of(o.dtype)));
  };
  return job.head_dim % elements == 0 && fits(job.out) &&
         std::all_of(job.parts.begin(), job.parts.end(), [&](const MergePart& p) { return fits(p.out); });
}

std::int64_t merge_grid(const MergeJob& job, int multiprocessors) {
  // Eight blocks of 256 threads fill a multiprocessor.
  return std::min(blocks_of(job.count(), merge_threads / 32), std::int64_t{8} * multiprocessors);
}

bool same_strides(const Operand& a, const Operand& b) {
  return a.batch_stride == b.batch_stride && a.row_stride == b.row_stride && a.head_stride == b.head_stride;
}

bool parts_are_even(const MergeJob& job) {
  const auto step = [&](std::size_t i, auto member) {
    return reinterpret_cast<std::intptr_t>((job.parts[i].*member).data) -
           reinterpret_cast<std::intptr_t>((job.parts[i - 1].*member).data);
  };
  for (const auto member : {&MergePart::out, &MergePart::lse}) {
    const auto item = static_cast<std::intptr_t>(size_of((job.parts[0].*member).dtype));
    for (std::size_t i = 1; i < job.parts.size(); ++i) {
      if (step(i, member) != step(1, member) || step(i, member) % item != 0) return false;
    }
  }
  return true;
}

MergeParams make_merge_params(const MergeJob& job) {
  MergeParams p{};
  const MergePart& first = job.parts.front();
  p.even = parts_are_even(job);
  for (std::size_t i = 0; i < job.parts.size() && i < merge_most_parts; ++i) {
    p.outs[i] = job.parts[i].out.data;
    p.lses[i] = static_cast<const float*>(job.parts[i].lse.data);
  }
  if (p.even && job.parts.size() > 1) {
    const auto item = static_cast<std::int64_t>(size_of(first.out.dtype));
    p.out_step = (static_cast<const char*>(p.outs[1]) - static_cast<const char*>(p.outs[0])) / item;
    p.lse_step = p.lses[1] - p.lses[0];
  }
  p.part_stride = strides_of(first.out);
  p.part_lse_stride = strides_of(first.lse);
  p.out = job.out.data;
  p.out_stride = strides_of(job.out);
  p.lse = static_cast<float*>(job.lse.data);
  p.lse_stride = strides_of(job.lse);
  p.count = job.count();
  p.rows = as_int(job.rows);
  p.heads = as_int(job.heads);
  p.columns = as_int(job.head_dim);
  p.parts = static_cast<int>(job.parts.size());
  return p;
}

}  // namespace tandem::gpu
