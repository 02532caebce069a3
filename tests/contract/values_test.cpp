// Contract lines 6 and 7: which values reach which results.
#include <limits>

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

void set_row(Box& box, std::int64_t row, std::int64_t width, double value) {
  for (std::int64_t n = 0; n < width; ++n) box.set(row * width + n, value);
}

// 6. What lies past a sequence's end (NaN, Inf, stale pages) never reaches a result.

TEST(Contract06_PastTheEnd, WhateverLiesThereTheResultIsTheSame) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::e4m3}) {
    Case c = with(varlen_case(dtype, {40, 66, 3}), {.slack_q = 70, .slack_k = 70, .used_q = {31, 66, 3}});
    change(c, {.used_k = {40, 20, 0}, .deterministic = true});
    Call call(c);
    on_every_runner(c, [&](Runner& runner) {
      std::vector<Results> all;
      for (const double stale : {nan_value, infinity, -infinity, 0.0, 12345.0}) {
        for_each_query_row(c, [&](std::int64_t, std::int64_t row, bool used) {
          if (used) return;
          set_row(call.q, row, c.heads_q * c.head_dim_qk, stale);
          if (call.dout.given()) set_row(call.dout, row, c.heads_q * c.head_dim_v, stale);
        });
        for_each_key_row(c, [&](std::int64_t, std::int64_t row, bool used) {
          if (used) return;
          set_row(call.k, row, c.heads_kv * c.head_dim_qk, stale);
          set_row(call.v, row, c.heads_kv * c.head_dim_v, stale);
        });
        all.push_back(run(runner, call));
        EXPECT_TRUE(same_bits(all.back(), all.front())) << "with " << stale << " past the end";
      }
    });
    run_everywhere(call);
  }
}

// 7. A NaN in a visible key makes exactly the rows that see it NaN. One in an invisible key reaches nothing.

void expect_nan_key(Case c, std::int64_t key) {
  Call call(c);
  call.k.set((key * c.heads_kv + 1) * c.head_dim_qk + 5, nan_value);  // batch 0, kv head 1
  run_everywhere(call);
  // The oracle says the same; here the rule itself, row by row.
  on_every_runner(c, [&](Runner& runner) {
    call.prepare(Pass::forward);
    runner.forward(call);
    for (std::int64_t i = 0; i < c.seqlen_q; ++i) {
      for (std::int64_t h = 0; h < c.heads_q; ++h) {
        const KeyRange seen = visible_keys(window_of(call.problem(), 0), i, c.seqlen_q, c.seqlen_k);
        const bool nan_row = h / (c.heads_q / c.heads_kv) == 1 && key >= seen.first && key < seen.last;
        for (std::int64_t d = 0; d < c.head_dim_v; ++d) {
          ASSERT_EQ(std::isnan(call.out.get((i * c.heads_q + h) * c.head_dim_v + d)), nan_row)
              << i << " head " << h;
        }
        ASSERT_EQ(std::isnan(call.lse.get(h * c.seqlen_q + i)), nan_row) << i << " head " << h;
      }
    }
  });
}

TEST(Contract07_NaN, VisibleKeyMakesExactlyItsRowsNaN) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t key : {0, 64, 127, 128, 138}) {
      Case c = plain_case(dtype);
      expect_nan_key(c, key);
      c.options.causal = true;
      expect_nan_key(c, key);
      change(c, {.window_left = 10, .sink = true});
      expect_nan_key(c, key);
    }
  }
}

TEST(Contract07_NaN, QueryMakesExactlyItsRowNaN) {
  for (const DType dtype : float_dtypes) {
    Case c = with(plain_case(dtype), {.causal = true});
    Call call(c);
    call.q.set((40 * c.heads_q + 2) * c.head_dim_qk, nan_value);
    run_everywhere(call, false);
  }
}

TEST(Contract07_NaN, InvisibleKeysReachNothing) {
  for (const DType dtype : float_dtypes) {
    for (const double bad : {nan_value, infinity, -infinity}) {
      Case c = with(plain_case(dtype), {.seqlen_q = 20, .seqlen_k = 139});
      c.options.window_left = 3;  // keys before 139 - 20 - 3 = 116 are nobody's, in the tile of key 116 too
      c.options.window_right = 0;
      Call call(c);
      for (std::int64_t key = 0; key < 116; ++key) {
        set_row(call.k, key, c.heads_kv * c.head_dim_qk, bad);
      }
      run_everywhere(call);
    }
  }
}

TEST(Contract07_NaN, VisibleValueReachesItsColumn) {
  for (const DType dtype : float_dtypes) {
    Case c = plain_case(dtype);
    Call call(c);
    call.v.set((70 * c.heads_kv + 1) * c.head_dim_v + 7, nan_value);
    run_everywhere(call, false);
  }
}

/// Runs a case in which every key of kv head 1, and 30 of the others, have a logit of -inf.
void expect_infinitely_low_keys(const Case& c) {
  Call call(c);
  const std::int64_t width = c.head_dim_qk;
  for (std::int64_t n = 0; n < call.q.numel(); n += width) call.q.set(n, 1.0);
  for (std::int64_t n = 0; n < call.k.numel(); n += width) {
    const std::int64_t row = n / width / c.heads_kv;
    const bool low = (c.page_size > 0 ? row : row % c.seqlen_k) < 30;
    if (low || n / width % c.heads_kv == 1) call.k.set(n, -infinity);
  }
  run_everywhere(call, false);
}

/// A row that sees keys, all with a logit of -inf, is NaN: it is not one that sees no key. With a sink the
/// sum is finite.
TEST(Contract07_NaN, ARowOfInfinitelyLowLogitsIsNaN) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t rows : {1, 5, 75, 200}) {
      for (const std::int64_t split : {0, 128}) {
        Case c = with(plain_case(dtype), {.seqlen_q = rows, .split_size = split});
        expect_infinitely_low_keys(c);
        c.options.causal = true;  // of 200 queries 61 see no key
        expect_infinitely_low_keys(c);
        c.options.window_left = 12;
        expect_infinitely_low_keys(c);
        c.sink = true;
        expect_infinitely_low_keys(c);
      }
    }
  }
}

TEST(Contract07_NaN, ARowOfInfinitelyLowLogitsIsNaNThroughCachesAndLongRows) {
  for (const std::int64_t rows : {1, 3, 70}) {
    for (const std::int64_t heads : {2, 16}) {
      Case c = with(plain_case(DType::bf16), {.batch = 1, .heads_q = heads, .seqlen_q = rows});
      c.seqlen_k = 1100;
      expect_infinitely_low_keys(c);
      c.options.softcap = 5.0F;
      expect_infinitely_low_keys(c);
      c = cache_case(DType::f16, 16);
      change(c, {.heads_q = heads, .seqlen_q = rows, .causal = true});
      expect_infinitely_low_keys(c);
    }
  }
}

}  // namespace
}  // namespace tandem::harness
