// Contract line 21: max_logits is the largest logit of the keys that a query sees, and asking for it changes
// no bit of out and LSE. Every case that run_everywhere() has runs with it, too (harness/runner.cpp).
#include <limits>

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// Calls f(runner, max_logits' call) where a runner finds them.
template <typename F>
void on_every_finder(const Call& prepared, const F& f) {
  on_every_runner(prepared.spec, [&](Runner& runner) {
    if (!runner.refuses_max_logits(prepared.spec).empty()) return;
    Call call(prepared);
    call.ask_for_max_logits();
    call.prepare(Pass::forward);
    runner.forward(call);
    f(runner, call);
  });
}

void expect_oracle(const Call& prepared) {
  const Expected expected = expect(prepared, Pass::forward);
  on_every_finder(prepared,
                  [&](Runner&, Call& call) { EXPECT_TRUE(correct(call, Pass::forward, expected)); });
}

/// Long and short sequences, on one thread and on several, which merge parts of few queries and of splits.
TEST(Contract21_MaxLogits, OfPartsThatAreMerged) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t rows : {1, 3, 70}) {
      for (const std::int64_t split_size : {0, 256}) {
        for (const int threads : {1, 3}) {
          Case c = with(plain_case(dtype), {.batch = 1, .seqlen_q = rows, .seqlen_k = 9000});
          expect_oracle(Call(with(c, {.split_size = split_size, .threads = threads})));
        }
      }
    }
  }
}

/// Logits that grow by less than what kernels rescale for, block by block.
TEST(Contract21_MaxLogits, OfLogitsThatGrowSlowly) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t rows : {1, 75}) {
      Call call(with(plain_case(dtype), {.seqlen_q = rows, .seqlen_k = 900}));
      const Case& c = call.spec;
      for (std::int64_t row = 0; row < call.q.numel() / c.head_dim_qk; ++row)
        call.q.set(row * c.head_dim_qk, 8.0);
      for (std::int64_t row = 0; row < call.k.numel() / c.head_dim_qk; ++row)
        call.k.set(row * c.head_dim_qk, static_cast<double>(row / c.heads_kv % c.seqlen_k) / 256.0);
      expect_oracle(call);
    }
  }
}

TEST(Contract21_MaxLogits, LeavesTheSinkOut) {
  for (const DType dtype : float_dtypes) {
    Case c = with(plain_case(dtype), {.seqlen_q = 100, .seqlen_k = 30, .causal = true, .sink = true});
    Call call(c);
    for (std::int64_t h = 0; h < c.heads_q; ++h) call.sink.set(h, 20.0);  // above all logits
    expect_oracle(call);
    on_every_finder(call, [&](Runner&, Call& found) {
      for (std::int64_t n = 0; n < found.max_logits.numel(); ++n) {
        const double largest = found.max_logits.get(n);
        if (n % c.seqlen_q < 70) {
          ASSERT_EQ(largest, -infinity) << n;
        }
        ASSERT_LT(largest, found.lse.get(n)) << n;
      }
    });
  }
}

/// A NaN or an infinity in a key, and keys whose logits are all -inf.
TEST(Contract21_MaxLogits, IsNaNWhereTheLseIs) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t rows : {1, 75}) {
      for (const double value : {std::nan(""), infinity, -infinity}) {
        Call call(with(plain_case(dtype), {.seqlen_q = rows}));
        const std::int64_t width = call.spec.heads_kv * call.spec.head_dim_qk;
        for (std::int64_t row = 0; row < call.q.numel() / call.spec.head_dim_qk; ++row)
          call.q.set(row * call.spec.head_dim_qk, 1.0);
        for (std::int64_t key = 0; key < call.spec.seqlen_k; ++key) {
          if (key == 50 || value == -infinity) call.k.set(key * width, value);
        }
        expect_oracle(call);
      }
    }
  }
}

/// A row that sees one key, whose probability is 1 bit for bit: so is the LSE its logit.
TEST(Contract21_MaxLogits, OfOneKeyIsTheLse) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t rows : {1, 75}) {
      Case c = with(plain_case(dtype), {.seqlen_q = rows, .causal = true, .window_left = 0});
      on_every_finder(Call(c), [](Runner&, Call& call) {
        EXPECT_TRUE(same_bits(call.max_logits.raw(), call.lse.raw()));
      });
    }
  }
}

TEST(Contract21_MaxLogits, InAnyLayoutAndWithoutLse) {
  Case c = with(plain_case(DType::bf16), {.used_q = {40, 0}, .used_k = {139, 77}, .lse = false});
  expect_oracle(Call(c));
  c.lse_layout = Layout{.order = {1, 0, 2}, .pad = 9, .base_offset = 1};
  expect_oracle(Call(c));
}

TEST(Contract21_MaxLogits, ChangesNoBitOfTheOthers) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t rows : {1, 75}) {
      for (const std::int64_t split_size : {0, 128}) {
        Case c = with(plain_case(dtype), {.seqlen_q = rows, .seqlen_k = 700, .causal = true});
        Call without(with(c, {.split_size = split_size}));
        on_every_runner(without.spec, [&](Runner& runner) {
          if (!runner.refuses_max_logits(without.spec).empty()) return;
          const Results alone = run(runner, without, false);
          Call with_maxima(without);
          with_maxima.ask_for_max_logits();
          EXPECT_TRUE(same_bits(run(runner, with_maxima, false), alone));
        });
      }
    }
  }
}

}  // namespace
}  // namespace tandem::harness
