#include "api/lengths.hpp"

#include <algorithm>

#include "api/check.hpp"
#include "gpu/lengths.hpp"

namespace tandem::check {

void offsets(const char* name, const Lengths& cu_seqlens, std::int64_t batch, std::int64_t rows,
             const char* rows_name) {
  if (!cu_seqlens.given()) return;
  if (cu_seqlens[0] != 0) invalid("{}[0] is {}; the first sequence starts at row 0", name, cu_seqlens[0]);
  for (std::int64_t b = 1; b <= batch; ++b) {
    if (cu_seqlens[b] < cu_seqlens[b - 1]) {
      invalid("{}[{}] is {}, below {}[{}] = {}; offsets must ascend", name, b, cu_seqlens[b], name, b - 1,
              cu_seqlens[b - 1]);
    }
    if (cu_seqlens[b] > rows) {
      invalid("{}[{}] is {}; offsets are at most {} = {}", name, b, cu_seqlens[b], rows_name, rows);
    }
  }
}

void used(const char* name, const Lengths& seqused, const Lengths& cu_seqlens, std::int64_t batch,
          std::int64_t rows) {
  if (!seqused.given()) return;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = cu_seqlens.given() ? cu_seqlens[b + 1] - cu_seqlens[b] : rows;
    if (seqused[b] < 0 || seqused[b] > length) {
      invalid("{}[{}] is {}; it must be from 0 to the length of sequence {}, {}", name, b, seqused[b], b,
              length);
    }
  }
}

namespace {

/// The first row of sequence `b` of a cache that one of its queries may see. An engine may have freed the
/// pages of those before.
std::int64_t first_visible(const Problem& p, std::int64_t b, std::int64_t rows) {
  const std::int64_t queries = query_rows(p, b).used;
  if (queries == 0) return rows;
  const std::int64_t padding = p.leftpad_k.given() ? p.leftpad_k[b] : 0;
  return p.window_left < 0 ? padding : std::max(padding, rows - queries - p.window_left);
}

void cache_contents(const Problem& p) {
  for (std::int64_t b = 0; b < p.batch; ++b) {
    if (p.cache_batch_idx.given() && (p.cache_batch_idx[b] < 0 || p.cache_batch_idx[b] >= p.cache_batch)) {
      invalid("cache_batch_idx[{}] is {}; it must be from 0 to {}, the last entry of k", b,
              p.cache_batch_idx[b], p.cache_batch - 1);
    }
    const std::int64_t rows = p.seqused_k.given() ? p.seqused_k[b] : p.rows_k;
    if (p.leftpad_k.given() && (p.leftpad_k[b] < 0 || p.leftpad_k[b] > rows)) {
      invalid("leftpad_k[{}] is {}; it must be from 0 to the rows of sequence {}, {}", b, p.leftpad_k[b], b,
              rows);
    }
    if (!p.pages.given()) continue;
    if (p.pages.page_size == 0) continue;
    for (std::int64_t i = first_visible(p, b, rows) / p.pages.page_size; i * p.pages.page_size < rows; ++i) {
      if (p.pages.entry(b, i) >= 0 && p.pages.entry(b, i) < p.pages.count) continue;
      invalid("page_table[{}, {}] is {}; the {} rows of sequence {} need a page from 0 to {} there", b, i,
              p.pages.entry(b, i), rows, b, p.pages.count - 1);
    }
  }
}

void host_contents(const Problem& p) {
  offsets("cu_seqlens_q", p.cu_seqlens_q, p.batch, p.rows_q, "total_q");
  offsets("cu_seqlens_k", p.cu_seqlens_k, p.batch, p.rows_k, "total_k");
  used("seqused_q", p.seqused_q, p.cu_seqlens_q, p.batch, p.rows_q);
  used("seqused_k", p.seqused_k, p.cu_seqlens_k, p.batch, p.rows_k);
  cache_contents(p);
}

}  // namespace

void HostCopies::take(Lengths& lengths, std::int64_t count) {
  if (!lengths.given()) return;
  const std::vector<std::int64_t>& values =
      values_.emplace_back(gpu::read_lengths(lengths, count, device_index_));
  lengths = {.data = values.data(), .wide = true, .stride = 1};
}

void HostCopies::take(Pages& pages, std::int64_t batch) {
  if (!pages.given()) return;
  std::vector<std::int64_t>& table = values_.emplace_back();
  const std::int64_t bytes = pages.wide ? sizeof(std::int64_t) : sizeof(std::int32_t);
  for (std::int64_t b = 0; b < batch; ++b) {
    const Lengths row{.data = static_cast<const std::byte*>(pages.table) + b * pages.batch_stride * bytes,
                      .wide = pages.wide,
                      .stride = pages.stride};
    const std::vector<std::int64_t> entries = gpu::read_lengths(row, pages.per_sequence, device_index_);
    table.insert(table.end(), entries.begin(), entries.end());
  }
  pages.table = table.data();
  pages.wide = true;
  pages.batch_stride = pages.per_sequence;
  pages.stride = 1;
}

void lengths_contents(const Problem& p) {
  if (p.device.kind == Device::Kind::cpu) {
    host_contents(p);
    return;
  }
  Problem copied = p;
  HostCopies copies(p.device.index);
  for (Lengths* offsets : {&copied.cu_seqlens_q, &copied.cu_seqlens_k}) copies.take(*offsets, p.batch + 1);
  for (Lengths* lengths :
       {&copied.seqused_q, &copied.seqused_k, &copied.leftpad_k, &copied.cache_batch_idx}) {
    copies.take(*lengths, p.batch);
  }
  copies.take(copied.pages, p.batch);
  host_contents(copied);
}

}  // namespace tandem::check
