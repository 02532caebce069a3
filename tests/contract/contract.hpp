// What the tests of the contract share. Each file holds some lines of the contract, a test suite a line,
// named after it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "harness/changes.hpp"
#include "harness/expect.hpp"
#include "harness/runner.hpp"

namespace tandem::harness {

inline const std::vector<DType> float_dtypes{DType::f32, DType::f16, DType::bf16};

/// Two heads over one kv head pair, lengths that end inside tiles.
inline Case plain_case(DType dtype) {
  return with({}, {.dtype = dtype, .batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 75, .seqlen_k = 139});
}

/// What suites cross their features with, as changes of plain_case.
inline void pack_four_sequences(Case& c) {
  change(c, {.batch = 4, .packed = true, .lengths_q = {70, 0, 1, 33}, .lengths_k = {141, 5, 40, 33}});
  change(c, {.slack_q = 3, .slack_k = 3});
}
inline void use_fewer_rows(Case& c) {
  change(c, {.used_q = {40, 0}, .used_k = {139, 77}});
}
inline void see_a_window(Case& c) {
  change(c, {.window_left = 20, .window_right = 7});
}
inline void cap_a_window(Case& c) {
  see_a_window(c);
  c.options.softcap = 1.5F;
}
inline void read_pages(Case& c) {
  change(c, {.used_k = {139, 60}, .page_size = 16});
}

/// A varlen case of these lengths, the same for queries and keys.
inline Case varlen_case(DType dtype, const std::vector<std::int64_t>& lengths) {
  Case c = with(plain_case(dtype), {.batch = static_cast<std::int64_t>(lengths.size()), .packed = true});
  change(c, {.lengths_q = lengths, .lengths_k = lengths});
  return c;
}

/// Three sequences of a cache; the lengths end inside pages and at their edges.
inline Case cache_case(DType dtype, std::int64_t page_size) {
  Case c = with(plain_case(dtype), {.batch = 3, .seqlen_q = 5});
  change(c, {.seqlen_k = 150 / page_size * page_size + page_size, .used_k = {141, page_size, 97}});
  c.page_size = page_size;
  return c;
}

/// Features of a call on a cache, at random; without layouts that TMA cannot read where it is to read them.
inline void take_random_features(Case& c, Random& random, bool for_tma = false) {
  c.head_dim_qk = 8 * random.between(1, 32);
  c.head_dim_v = 8 * random.between(1, 32);
  c.heads_q = c.heads_kv * random.pick<std::int64_t>({1, 3, 8});
  c.options.window_left = random.between(-1, 40);
  c.options.causal = random.chance(0.5);
  c.options.softcap = random.chance(0.5) ? 15.0F : 0.0F;
  c.sink = random.chance(0.5);
  c.packed_q = random.chance(0.5);
  c.lengths_q = {1, 40, 9};
  c.metadata = random.pick({DType::i32, DType::i64});
  c.k = random_layout(random, 4, false);
  c.v = random_layout(random, 4, false);
  if (random.chance(0.5)) c.leftpad = {7, 0, 97};
  if (!for_tma) return;
  c.head_dim_qk = (c.head_dim_qk + 31) / 32 * 16;
  c.head_dim_v = (c.head_dim_v + 31) / 32 * 16;
  for (Layout* layout : {&c.k, &c.v}) {
    layout->pad = layout->pad / 16 * 16;
    layout->base_offset = 0;
    layout->ends_at_guard = false;
  }
}

/// Success if both hold the same bytes; else where they first differ.
inline testing::AssertionResult same_bits(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  if (a.size() != b.size()) return testing::AssertionFailure() << a.size() << " bytes and " << b.size();
  const auto [at, other] = std::mismatch(a.begin(), a.end(), b.begin());
  if (at == a.end()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "the bits differ from byte " << at - a.begin() << " of " << a.size()
                                     << " on";
}

/// All results of one runner as bytes, in the order out, lse, dq, dk, dv, dsink, dgate, gradients of captured
/// tensors: for bitwise comparison.
using Results = std::vector<std::vector<std::byte>>;

inline testing::AssertionResult same_bits(const Results& a, const Results& b) {
  constexpr const char* names[] = {"out", "lse", "dq", "dk", "dv", "dsink", "dgate"};
  for (std::size_t n = 0; n < a.size(); ++n) {
    if (testing::AssertionResult result = same_bits(a[n], b[n]); !result) {
      const char* const name = n < std::size(names) ? names[n] : "a captured tensor's gradient";
      return testing::AssertionFailure() << name << ": " << result.message();
    }
  }
  return testing::AssertionSuccess();
}

inline Results run(Runner& runner, Call& call, bool backward = true) {
  Results results;
  const auto keep = [&](Pass pass) {
    for (const Box* box : call.outputs(pass)) {
      if (box == &call.max_logits) continue;
      results.push_back(box->given() ? box->raw() : std::vector<std::byte>{});
    }
  };
  call.prepare(Pass::forward);
  runner.forward(call);
  keep(Pass::forward);
  if (!backward || !call.spec.has_gradients()) return results;
  call.prepare(Pass::backward);
  runner.backward(call);
  keep(Pass::backward);
  return results;
}

/// Copies the elements of one box to another of the same shape.
inline void copy(const Box& from, Box& to, std::int64_t from_first, std::int64_t to_first,
                 std::int64_t count) {
  for (std::int64_t n = 0; n < count; ++n) to.set(to_first + n, from.get(from_first + n));
}
inline void copy(const Box& from, Box& to) {
  copy(from, to, 0, 0, from.numel());
}

/// The rows of a contiguous cache of one sequence, with their scales, put into the pages of another.
inline void copy_rows(const Call& dense, Call& cache) {
  const Case& c = cache.spec;
  copy(dense.q, cache.q);
  if (dense.q_scale.given()) copy(dense.q_scale, cache.q_scale);
  for (const auto& [from, to] :
       {std::pair{&dense.k_scale, &cache.k_scale}, {&dense.v_scale, &cache.v_scale}}) {
    if (from->given() && c.scales != 3) copy(*from, *to);
    for (std::int64_t n = 0; c.scales == 3 && n < c.heads_kv * c.used_k[0]; ++n) {
      const std::int64_t head = n / c.used_k[0];
      const auto [page, at] = cache.cache_place(0, n % c.used_k[0]);
      copy(*from, *to, head * dense.spec.seqlen_k + n % c.used_k[0],
           (page * c.heads_kv + head) * c.page_size + at, 1);
    }
  }
  const std::int64_t inner = c.heads_kv * c.head_dim_qk;
  for (std::int64_t row = 0; row < c.used_k[0]; ++row) {
    const auto [page, at] = cache.cache_place(0, row);
    copy(dense.k, cache.k, row * inner, (page * c.page_size + at) * inner, inner);
    copy(dense.v, cache.v, row * inner, (page * c.page_size + at) * inner, inner);
  }
}

/// One sequence of `keys` keys through a contiguous cache and through pages of any of these sizes: the same
/// bits, for one query, a few and many.
inline void expect_bits_of_pages(Case dense, std::int64_t keys,
                                 std::initializer_list<std::int64_t> page_sizes) {
  change(dense, {.batch = 1, .seqlen_k = keys + 5, .used_k = {keys}, .causal = true});
  for (const std::int64_t seqlen_q : {1, 3, 70}) {
    dense.seqlen_q = seqlen_q;
    Call call(dense);
    for (const std::int64_t page_size : page_sizes) {
      Case paged = with(dense, {.page_size = page_size});
      Call cache(paged);
      copy_rows(call, cache);
      on_every_runner(paged, [&](Runner& runner) {
        EXPECT_TRUE(same_bits(run(runner, call, false), run(runner, cache, false))) << page_size;
      });
    }
  }
}

/// A decoding step on `keys` keys in pages alone, and beside the prefill of another request of 129 tokens:
/// the same bits where a runner keeps them.
inline void expect_bits_beside_a_prefill(Case both, std::int64_t keys) {
  change(both, {.batch = 2, .packed_q = true, .lengths_q = {1, 129}});
  both.seqlen_k = (keys / both.page_size + 3) * both.page_size;
  change(both, {.used_k = {keys, 129}, .causal = true});
  Case alone = with(both, {.batch = 1, .lengths_q = {1}, .used_k = {keys}});
  Call pair(both), single(alone);
  copy(pair.q, single.q, 0, 0, single.q.numel());
  for (std::int64_t i = 0; i * both.page_size < keys; ++i) {
    single.page_table.set(i, static_cast<double>(i));
    const auto page = static_cast<std::int64_t>(pair.page_table.get(i));
    const auto copy_page = [&](const Box& from, Box& to, std::int64_t columns) {
      const std::int64_t inner = both.page_size * both.heads_kv * columns;
      copy(from, to, page * inner, i * inner, inner);
    };
    copy_page(pair.k, single.k, both.head_dim_qk);
    copy_page(pair.v, single.v, both.head_dim_v);
    if (both.scales != 3) continue;
    copy_page(pair.k_scale, single.k_scale, 1);
    copy_page(pair.v_scale, single.v_scale, 1);
  }
  on_every_runner(both, [&](Runner& runner) {
    for (const int threads : {1, 2, 3}) {
      pair.spec.threads = threads;
      const Results together = run(runner, pair, false);
      const Results apart = run(runner, single, false);
      const auto row = static_cast<std::ptrdiff_t>(apart[0].size());
      const std::vector<std::byte> first(together[0].begin(), together[0].begin() + row);
      EXPECT_TRUE(!runner.keeps_bits_beside_others(both) || same_bits(first, apart[0])) << threads;
    }
  });
}

/// Elements [first, first + count) of a tensor's raw bytes.
inline std::vector<std::byte> part(const Box& box, std::int64_t first, std::int64_t count) {
  const std::vector<std::byte> all = box.raw();
  const auto item = static_cast<std::int64_t>(size_of(box.dtype()));
  return {all.begin() + first * item, all.begin() + (first + count) * item};
}

}  // namespace tandem::harness
