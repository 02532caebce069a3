// What the integers of an append hold, looked at for AppendArgs::check alone.
#include <algorithm>
#include <string>
#include <vector>

#include "api/append_builder.hpp"
#include "api/lengths.hpp"

namespace tandem::check {
namespace {

/// Tokens of sequence `b` that are appended.
std::int64_t appended(const AppendProblem& problem, std::int64_t b) {
  return sequence_rows(problem.cu_seqlens_new, problem.seqused_new, problem.rows_new, b).used;
}

void sequence(const AppendProblem& problem, std::int64_t b) {
  const std::int64_t before = problem.cache_seqlens[b];
  const std::int64_t tokens = appended(problem, b);
  if (before < 0 || before > problem.rows_of_sequence() - tokens) {
    invalid("cache_seqlens[{}] is {} and {} tokens are appended; a sequence has rows 0 to {} of the cache", b,
            before, tokens, problem.rows_of_sequence() - 1);
  }
  if (problem.leftpad_k.given() && (problem.leftpad_k[b] < 0 || problem.leftpad_k[b] > before)) {
    invalid("leftpad_k[{}] is {}; it must be from 0 to cache_seqlens[{}], {}", b, problem.leftpad_k[b], b,
            before);
  }
  if (problem.cache_batch_idx.given() &&
      (problem.cache_batch_idx[b] < 0 || problem.cache_batch_idx[b] >= problem.entries)) {
    invalid("cache_batch_idx[{}] is {}; it must be from 0 to {}, the last entry of k_cache", b,
            problem.cache_batch_idx[b], problem.entries - 1);
  }
  if (!problem.pages.given() || tokens == 0) return;
  for (std::int64_t i = before / problem.entry_rows; i <= (before + tokens - 1) / problem.entry_rows; ++i) {
    const std::int64_t page = problem.pages.entry(b, i);
    if (page >= 0 && page < problem.entries) continue;
    invalid("page_table[{}, {}] is {}; rows {} to {} of sequence {} need a page from 0 to {} there", b, i,
            page, before, before + tokens - 1, b, problem.entries - 1);
  }
}

std::string name_of(const AppendProblem& problem, std::int64_t n) {
  return problem.packed ? fmt::format("k_new[{}]", n)
                        : fmt::format("k_new[{}, {}]", n / problem.rows_new, n % problem.rows_new);
}

void positions(const AppendProblem& problem) {
  if (!problem.cos.given()) return;
  for (std::int64_t n = 0; n < problem.tokens(); ++n) {
    const NewToken token = new_token(problem, n);
    if (!token.used) continue;
    const std::int64_t position = wanted_position(problem, token);
    if (position >= 0 && position < problem.positions) continue;
    invalid("the position of {} is {}; rotary_cos and rotary_sin have positions 0 to {}", name_of(problem, n),
            position, problem.positions - 1);
  }
}

/// No two tokens go to one row.
void rows_of_their_own(const AppendProblem& problem) {
  struct Placed {
    std::int64_t slot;
    std::int64_t token;
    bool operator<(const Placed& other) const {
      return slot != other.slot ? slot < other.slot : token < other.token;
    }
  };
  std::vector<Placed> placed;
  for (std::int64_t n = 0; n < problem.tokens(); ++n) {
    const std::int64_t slot = slot_of(problem, new_token(problem, n));
    if (slot >= 0) placed.push_back({.slot = slot, .token = n});
  }
  std::sort(placed.begin(), placed.end());
  for (std::size_t i = 1; i < placed.size(); ++i) {
    if (placed[i].slot != placed[i - 1].slot) continue;
    invalid("{} and {} both go to row {} of {} {} of the cache; each token needs a row of its own",
            name_of(problem, placed[i - 1].token), name_of(problem, placed[i].token),
            placed[i].slot % problem.entry_rows, problem.pages.given() ? "page" : "entry",
            placed[i].slot / problem.entry_rows);
  }
}

void host_contents(const AppendProblem& problem) {
  offsets("cu_seqlens_new", problem.cu_seqlens_new, problem.batch, problem.rows_new, "total_new");
  used("seqused_new", problem.seqused_new, problem.cu_seqlens_new, problem.batch, problem.rows_new);
  for (std::int64_t n = 0; problem.slot_mapping.given() && n < problem.rows_new; ++n) {
    if (problem.slot_mapping[n] < problem.entries * problem.entry_rows) continue;
    invalid("slot_mapping[{}] is {}; the cache has rows 0 to {}, and below 0 nothing is appended", n,
            problem.slot_mapping[n], problem.entries * problem.entry_rows - 1);
  }
  for (std::int64_t b = 0; !problem.slot_mapping.given() && b < problem.batch; ++b) sequence(problem, b);
  positions(problem);
  rows_of_their_own(problem);
}

}  // namespace

void append_contents(const AppendProblem& problem) {
  if (problem.heads_kv == 0) return;
  if (problem.device.kind == Device::Kind::cpu) {
    host_contents(problem);
    return;
  }
  AppendProblem copied = problem;
  HostCopies copies(problem.device.index);
  copies.take(copied.cu_seqlens_new, problem.batch + 1);
  for (Lengths* lengths :
       {&copied.seqused_new, &copied.cache_seqlens, &copied.cache_batch_idx, &copied.leftpad_k}) {
    copies.take(*lengths, problem.batch);
  }
  copies.take(copied.slot_mapping, problem.rows_new);
  copies.take(copied.rotary_offsets, problem.slot_mapping.given() ? problem.rows_new : problem.batch);
  copies.take(copied.pages, problem.batch);
  host_contents(copied);
}

}  // namespace tandem::check
