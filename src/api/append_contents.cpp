// What the integers of an append hold, looked at for AppendArgs::check alone.
#include <algorithm>
#include <string>
#include <vector>

#include "api/append_builder.hpp"
#include "api/lengths.hpp"

namespace tandem::check {
namespace {

/// Tokens of sequence `b` that are appended.
std::int64_t appended(const AppendJob& job, std::int64_t b) {
  return sequence_rows(job.cu_seqlens_new, job.seqused_new, job.rows_new, b).used;
}

void sequence(const AppendJob& job, std::int64_t b) {
  const std::int64_t before = job.cache_seqlens[b];
  const std::int64_t tokens = appended(job, b);
  if (before < 0 || before > job.rows_of_sequence() - tokens) {
    invalid("cache_seqlens[{}] is {} and {} tokens are appended; a sequence has rows 0 to {} of the cache", b,
            before, tokens, job.rows_of_sequence() - 1);
  }
  if (job.leftpad_k.given() && (job.leftpad_k[b] < 0 || job.leftpad_k[b] > before)) {
    invalid("leftpad_k[{}] is {}; it must be from 0 to cache_seqlens[{}], {}", b, job.leftpad_k[b], b,
            before);
  }
  if (job.cache_batch_idx.given() && (job.cache_batch_idx[b] < 0 || job.cache_batch_idx[b] >= job.entries)) {
    invalid("cache_batch_idx[{}] is {}; it must be from 0 to {}, the last entry of k_cache", b,
            job.cache_batch_idx[b], job.entries - 1);
  }
  if (!job.pages.given() || tokens == 0) return;
  for (std::int64_t i = before / job.entry_rows; i <= (before + tokens - 1) / job.entry_rows; ++i) {
    const std::int64_t page = job.pages.entry(b, i);
    if (page >= 0 && page < job.entries) continue;
    invalid("page_table[{}, {}] is {}; rows {} to {} of sequence {} need a page from 0 to {} there", b, i,
            page, before, before + tokens - 1, b, job.entries - 1);
  }
}

std::string name_of(const AppendJob& job, std::int64_t n) {
  return job.packed ? fmt::format("k_new[{}]", n)
                    : fmt::format("k_new[{}, {}]", n / job.rows_new, n % job.rows_new);
}

void positions(const AppendJob& job) {
  if (!job.cos.given()) return;
  for (std::int64_t n = 0; n < job.tokens(); ++n) {
    const NewToken token = new_token(job, n);
    if (!token.used) continue;
    const std::int64_t position = wanted_position(job, token);
    if (position >= 0 && position < job.positions) continue;
    invalid("the position of {} is {}; rotary_cos and rotary_sin have positions 0 to {}", name_of(job, n),
            position, job.positions - 1);
  }
}

/// No two tokens go to one row.
void rows_of_their_own(const AppendJob& job) {
  struct Placed {
    std::int64_t slot;
    std::int64_t token;
    bool operator<(const Placed& other) const {
      return slot != other.slot ? slot < other.slot : token < other.token;
    }
  };
  std::vector<Placed> placed;
  for (std::int64_t n = 0; n < job.tokens(); ++n) {
    const std::int64_t slot = slot_of(job, new_token(job, n));
    if (slot >= 0) placed.push_back({.slot = slot, .token = n});
  }
  std::sort(placed.begin(), placed.end());
  for (std::size_t i = 1; i < placed.size(); ++i) {
    if (placed[i].slot != placed[i - 1].slot) continue;
    invalid("{} and {} both go to row {} of {} {} of the cache; each token needs a row of its own",
            name_of(job, placed[i - 1].token), name_of(job, placed[i].token), placed[i].slot % job.entry_rows,
            job.pages.given() ? "page" : "entry", placed[i].slot / job.entry_rows);
  }
}

void host_contents(const AppendJob& job) {
  offsets("cu_seqlens_new", job.cu_seqlens_new, job.batch, job.rows_new, "total_new");
  used("seqused_new", job.seqused_new, job.cu_seqlens_new, job.batch, job.rows_new);
  for (std::int64_t n = 0; job.slot_mapping.given() && n < job.rows_new; ++n) {
    if (job.slot_mapping[n] < job.entries * job.entry_rows) continue;
    invalid("slot_mapping[{}] is {}; the cache has rows 0 to {}, and below 0 nothing is appended", n,
            job.slot_mapping[n], job.entries * job.entry_rows - 1);
  }
  for (std::int64_t b = 0; !job.slot_mapping.given() && b < job.batch; ++b) sequence(job, b);
  positions(job);
  rows_of_their_own(job);
}

}  // namespace

void append_contents(const AppendJob& job) {
  if (job.heads_kv == 0) return;
  if (job.device.kind == Device::Kind::cpu) {
    host_contents(job);
    return;
  }
  AppendJob copied = job;
  HostCopies copies(job.device.index);
  copies.take(copied.cu_seqlens_new, job.batch + 1);
  for (Lengths* lengths :
       {&copied.seqused_new, &copied.cache_seqlens, &copied.cache_batch_idx, &copied.leftpad_k}) {
    copies.take(*lengths, job.batch);
  }
  copies.take(copied.slot_mapping, job.rows_new);
  copies.take(copied.rotary_offsets, job.slot_mapping.given() ? job.rows_new : job.batch);
  copies.take(copied.pages, job.batch);
  host_contents(copied);
}

}  // namespace tandem::check
