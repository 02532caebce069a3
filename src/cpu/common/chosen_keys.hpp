// The keys that a query sees by its indices. Nothing behind it knows indices: it has a list of keys.
#pragma once

#include <cstdint>

#include "problem/problem.hpp"

namespace tandem::cpu {

/// Lists the keys of query `i` of sequence `b`, whose rows are these, in the order of its indices: those that
/// name a key which the window leaves. Returns how many; `keys` has room for Indices::count.
inline std::int64_t list_chosen_keys(const Problem& p, std::int64_t b, const Rows& q, const Rows& k,
                                     std::int64_t i, std::int64_t kv_head, std::int64_t* keys) {
  const KeyRange seen = visible_keys(window_of(p, b), i, q.used, k.used);
  const std::int64_t length = p.indices.length(b, q.begin + i);
  std::int64_t count = 0;
  for (std::int64_t n = 0; n < length; ++n) {
    const std::int64_t key = p.indices.number(b, q.begin + i, kv_head, n);
    if (key >= seen.first && key < seen.last) keys[count++] = key;
  }
  return count;
}

}  // namespace tandem::cpu
