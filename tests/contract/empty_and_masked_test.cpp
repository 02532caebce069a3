// Contract lines 1 to 5: what is empty, masked or past the end.
#include <limits>

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

void expect_all(const Box& box, std::int64_t first, std::int64_t count, double value) {
  for (std::int64_t n = first; n < first + count; ++n) ASSERT_EQ(box.get(n), value) << "element " << n;
}

// 1. Every element of every output is written, always. The harness poisons all of them with NaN first.

TEST(Contract01_EveryElementWritten, DenseWithEveryFeature) {
  for (const DType dtype : float_dtypes) {
    Case c = plain_case(dtype);
    run_everywhere(c);
    change(c, {.softcap = 5.0F, .causal = true, .sink = true, .dlse = true});
    run_everywhere(c);
    change(c, {.window_left = 20, .deterministic = true});
    run_everywhere(c);
  }
}

TEST(Contract01_EveryElementWritten, WithoutLse) {
  run_everywhere(with(plain_case(DType::bf16), {.lse = false}));
}

TEST(Contract01_EveryElementWritten, WhereNothingIsVisibleAtAll) {
  for (const DType dtype : float_dtypes) {
    run_everywhere(with(plain_case(dtype), {.seqlen_q = 200, .seqlen_k = 3, .window = 0}));
  }
}

TEST(Contract01_EveryElementWritten, EightBitInputs) {
  for (const DType out : float_dtypes) {
    for (const int scales : {0, 1, 2}) {
      run_everywhere(with(plain_case(DType::e4m3), {.out_dtype = out, .scales = scales}));
    }
  }
}

// 2. A query that sees no key: out 0, its gradients 0, whatever dout holds there. Its lse is what is left of
// the formula: -inf, or with a sink the sink's logit.

void expect_empty_rows_defined(Case c, std::int64_t empty_rows) {
  Call call(c);
  const std::int64_t width = c.heads_q * c.head_dim_v;
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t n = 0; n < empty_rows * width; ++n) {
      call.dout.set(b * c.seqlen_q * width + n, n % 2 == 0 ? std::nan("") : infinity);
    }
  }
  run_everywhere(call);
  on_every_runner(c, [&](Runner& runner) {
    run(runner, call);
    for (std::int64_t b = 0; b < c.batch; ++b) {
      expect_all(call.out, b * c.seqlen_q * width, empty_rows * width, 0.0);
      expect_all(call.dq, b * c.seqlen_q * c.heads_q * c.head_dim_qk, empty_rows * c.heads_q * c.head_dim_qk,
                 0.0);
      for (std::int64_t h = 0; h < c.heads_q; ++h) {
        if (!c.sink) expect_all(call.lse, (b * c.heads_q + h) * c.seqlen_q, empty_rows, -infinity);
        for (std::int64_t i = 0; c.sink && i < empty_rows; ++i) {
          const double sink = call.sink.get(h);
          const double lse = call.lse.get((b * c.heads_q + h) * c.seqlen_q + i);
          ASSERT_NEAR(lse, sink, 1e-6 * std::max(1.0, std::abs(sink))) << "head " << h << ", row " << i;
        }
      }
    }
  });
}

TEST(Contract02_QueryThatSeesNoKey, CausalWithMoreQueriesThanKeys) {
  for (const DType dtype : float_dtypes) {
    Case c = with(plain_case(dtype), {.seqlen_q = 139, .seqlen_k = 75, .causal = true});
    c.dlse = dtype == DType::f32;
    expect_empty_rows_defined(c, 139 - 75);
  }
}

TEST(Contract02_QueryThatSeesNoKey, SinkDoesNotCountAsAKey) {
  for (const DType dtype : float_dtypes) {
    Case c = with(plain_case(dtype), {.seqlen_q = 90, .seqlen_k = 20, .causal = true, .sink = true});
    expect_empty_rows_defined(c, 70);
  }
}

TEST(Contract02_QueryThatSeesNoKey, NoKeysAtAll) {
  for (const DType dtype : float_dtypes) {
    Case c = with(plain_case(dtype), {.seqlen_k = 0, .sink = true});
    expect_empty_rows_defined(c, c.seqlen_q);
  }
}

TEST(Contract02_QueryThatSeesNoKey, DlseThereIsIgnoredToo) {
  for (const DType dtype : float_dtypes) {
    Case c = with(plain_case(dtype), {.seqlen_q = 100, .seqlen_k = 30, .causal = true, .dlse = true});
    Call call(c);
    for (std::int64_t n = 0; n < call.dlse.numel(); ++n) {
      if (n % c.seqlen_q < 70) call.dlse.set(n, std::nan(""));
    }
    run_everywhere(call);
  }
}

/// Heads of another size for each dtype, for which GPUs have kernels of their own.
void set_head_dim(Case& c) {
  c.head_dim_qk = c.head_dim_v = c.dtype == DType::bf16 ? 256 : c.dtype == DType::f16 ? 128 : 64;
}

/// dsink is the sum of dlse over the rows without keys where those are the only ones with a gradient.
void expect_dlse_is_the_sinks(Case c, std::int64_t empty_rows) {
  c.sink = c.dlse = true;
  Call call(c);
  for (std::int64_t n = 0; n < call.dout.numel(); ++n) {
    const std::int64_t row = n / (c.heads_q * c.head_dim_v) % c.seqlen_q;
    call.dout.set(n, row < empty_rows ? std::nan("") : 0.0);
  }
  std::vector<double> expected(static_cast<std::size_t>(c.heads_q), 0.0);
  for (std::int64_t n = 0; n < call.dlse.numel(); ++n) {
    if (n % c.seqlen_q >= empty_rows) call.dlse.set(n, 0.0);
    expected[static_cast<std::size_t>(n / c.seqlen_q % c.heads_q)] += call.dlse.get(n);
  }
  run_everywhere(call);
  on_every_runner(c, [&](Runner& runner) {
    run(runner, call);
    for (std::int64_t h = 0; h < c.heads_q; ++h) {
      EXPECT_NEAR(call.dsink.get(h), expected[static_cast<std::size_t>(h)], 1e-4) << "head " << h;
    }
  });
}

TEST(Contract02_QueryThatSeesNoKey, WithASinkDlseThereIsTheSinks) {
  for (const DType dtype : float_dtypes) {
    Case c = plain_case(dtype);
    set_head_dim(c);
    change(c, {.seqlen_q = 100, .seqlen_k = 30, .causal = true});
    expect_dlse_is_the_sinks(c, 70);
    change(c, {.causal = false, .window = 4});
    expect_dlse_is_the_sinks(c, 66);
    change(c, {.seqlen_k = 0, .window = -1});
    expect_dlse_is_the_sinks(c, 100);
  }
}

TEST(Contract02_QueryThatSeesNoKey, SinkOfVarlenRowsWithoutKeys) {
  for (const DType dtype : float_dtypes) {
    Case c = varlen_case(dtype, {40, 17, 70, 9});
    set_head_dim(c);
    change(c, {.lengths_k = {0, 40, 20, 9}, .slack_q = 5, .causal = true, .sink = true, .dlse = true});
    run_everywhere(c);
    change(c, {.used_q = {11, 17, 64, 0}, .used_k = {0, 3, 20, 9}});
    run_everywhere(c);
  }
}

// 3. Batch 0, seqlen 0, zero-length sequences anywhere: defined results, neighbours bitwise unaffected.

TEST(Contract03_NothingToDo, BatchZero) {
  for (const DType dtype : float_dtypes) {
    Case c = with(plain_case(dtype), {.batch = 0, .sink = true});
    run_everywhere(c);
    c = varlen_case(dtype, {});
    c.slack_q = c.slack_k = 5;
    run_everywhere(c);
  }
}

TEST(Contract03_NothingToDo, SeqlenZero) {
  for (const DType dtype : float_dtypes) {
    for (const auto& [seqlen_q, seqlen_k] : {std::pair{0, 0}, {0, 40}, {40, 0}}) {
      Case c = with(plain_case(dtype), {.seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .sink = true});
      run_everywhere(c);
      c.options.causal = true;
      run_everywhere(c);
    }
  }
}

/// The bytes of all results of the sequences whose length is not 0.
std::vector<std::vector<std::byte>> results_of(Runner& runner, Call& call) {
  run(runner, call);
  return {call.out.raw(), call.lse.raw(), call.dq.raw(), call.dk.raw(), call.dv.raw()};
}

TEST(Contract03_NothingToDo, ZeroLengthSequencesLeaveNeighboursAlone) {
  for (const DType dtype : float_dtypes) {
    Case with = varlen_case(dtype, {0, 70, 0, 0, 33, 5, 0});
    Case without = varlen_case(dtype, {70, 33, 5});
    with.options.causal = without.options.causal = true;
    with.options.deterministic = without.options.deterministic = true;
    run_everywhere(with);
    Call a(with);
    Call b(without);
    on_every_runner(
        with, [&](Runner& runner) { EXPECT_TRUE(same_bits(results_of(runner, a), results_of(runner, b))); });
  }
}

TEST(Contract03_NothingToDo, OneSideOfASequenceEmpty) {
  for (const DType dtype : float_dtypes) {
    Case c = with(varlen_case(dtype, {40, 0, 17, 9}), {.lengths_k = {0, 40, 80, 9}});
    run_everywhere(c);
    c.options.causal = c.sink = true;
    run_everywhere(c);
  }
}

// 4. Masks are aligned to the bottom right corner; windows are inclusive; -1 is unbounded; causal clips right
// to 0.

TEST(Contract04_Masks, EveryWindowOnSmallShapes) {
  for (const auto& [seqlen_q, seqlen_k] : {std::pair{5, 5}, {3, 7}, {7, 3}, {1, 6}, {6, 1}}) {
    for (std::int64_t left = -1; left <= 4; ++left) {
      for (std::int64_t right = -1; right <= 4; ++right) {
        Case c = with(plain_case((left + right) % 2 == 0 ? DType::f32 : DType::bf16), {.batch = 1});
        change(c, {.head_dim = 16, .seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .window_left = left});
        c.options.window_right = right;
        run_everywhere(c);
      }
    }
  }
}

TEST(Contract04_Masks, WindowsAroundTileEdges) {
  for (const std::int64_t left : {0, 1, 31, 63, 64, 65, 127, 128, 200}) {
    for (const std::int64_t right : {-1, 0, 1, 15, 63, 64, 129}) {
      Case c = with(plain_case(left % 2 == 0 ? DType::f32 : DType::bf16), {.batch = 1, .heads = 1});
      change(c, {.head_dim = 32, .seqlen_q = 150, .seqlen_k = right % 2 == 0 ? 150 : 190});
      change(c, {.window_left = left, .window_right = right});
      run_everywhere(c);
    }
  }
}

TEST(Contract04_Masks, CausalClipsTheRightOfAWindow) {
  for (const DType dtype : float_dtypes) {
    Case wide = with(plain_case(dtype), {.causal = true, .window_left = 30, .window_right = 9});
    Case exact = with(wide, {.causal = false, .window_right = 0});
    Call a(wide);
    Call b(exact);
    run_everywhere(a);
    on_every_runner(wide, [&](Runner& runner) { EXPECT_TRUE(same_bits(run(runner, a), run(runner, b))); });
  }
}

TEST(Contract04_Masks, WindowsBeyondTheSequenceHideNothing) {
  constexpr std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  Case c = plain_case(DType::bf16);
  for (const auto& [left, right] :
       {std::pair{huge, huge}, {huge, std::int64_t{-1}}, {std::int64_t{3}, huge}}) {
    change(c, {.window_left = left, .window_right = right});
    Call call(c);
    // The oracle's sums would overflow too: give it the same mask in small numbers.
    change(call.spec, {.window_left = left == huge ? -1 : left, .window_right = -1});
    const Expected expected = expect(call, Pass::forward);
    call.spec.options = c.options;
    on_every_runner(c, [&](Runner& runner) {
      call.prepare(Pass::forward);
      runner.forward(call);
      EXPECT_TRUE(correct(call, Pass::forward, expected));
    });
  }
}

TEST(Contract04_Masks, BelowMinusOneIsAnError) {
  Case c = with(plain_case(DType::f32), {.window_left = -2});
  Call left(c);
  change(c, {.window_left = -1, .window_right = -7});
  Call right(c);
  on_every_runner(c, [&](Runner& runner) {
    EXPECT_THROW(runner.forward(left), Error);
    EXPECT_THROW(runner.forward(right), Error);
  });
}

// 5. Rows past cu_seqlens[-1] or past seqused: out 0, lse -inf, gradients 0.

void expect_rows_past_the_end_defined(const Case& c) {
  Call call(c);
  run_everywhere(call);
  on_every_runner(c, [&](Runner& runner) {
    run(runner, call);
    const std::int64_t rows_q = c.rows_q();
    const std::int64_t rows_k = c.rows_k();
    for_each_query_row(c, [&](std::int64_t b, std::int64_t row, bool used) {
      if (used) return;
      const std::int64_t first = (c.packed_q ? 0 : b) * rows_q + row;
      expect_all(call.out, first * c.heads_q * c.head_dim_v, c.heads_q * c.head_dim_v, 0.0);
      expect_all(call.dq, first * c.heads_q * c.head_dim_qk, c.heads_q * c.head_dim_qk, 0.0);
      for (std::int64_t h = 0; h < c.heads_q; ++h) {
        expect_all(call.lse, ((c.packed_q ? 0 : b) * c.heads_q + h) * rows_q + row, 1, -infinity);
      }
    });
    for_each_key_row(c, [&](std::int64_t b, std::int64_t row, bool used) {
      if (used) return;
      const std::int64_t first = (c.packed_k ? 0 : b) * rows_k + row;
      expect_all(call.dk, first * c.heads_kv * c.head_dim_qk, c.heads_kv * c.head_dim_qk, 0.0);
      expect_all(call.dv, first * c.heads_kv * c.head_dim_v, c.heads_kv * c.head_dim_v, 0.0);
    });
  });
}

TEST(Contract05_RowsPastTheEnd, AfterTheLastSequence) {
  for (const DType dtype : float_dtypes) {
    Case c = with(varlen_case(dtype, {40, 66}), {.slack_q = 100, .slack_k = 3});
    expect_rows_past_the_end_defined(c);
    c.options.causal = c.sink = c.dlse = true;
    expect_rows_past_the_end_defined(c);
  }
}

TEST(Contract05_RowsPastTheEnd, PastSequsedDense) {
  for (const DType dtype : float_dtypes) {
    Case c = with(plain_case(dtype), {.used_q = {75, 11}, .used_k = {64, 139}});
    expect_rows_past_the_end_defined(c);
    c.options.causal = true;  // aligned to the lengths in use
    expect_rows_past_the_end_defined(c);
    c.used_k = {0, 10};
    expect_rows_past_the_end_defined(c);
  }
}

TEST(Contract05_RowsPastTheEnd, PastSequsedVarlen) {
  for (const DType dtype : float_dtypes) {
    Case c = with(varlen_case(dtype, {40, 0, 66, 1}), {.slack_k = 2, .used_q = {40, 0, 13, 0}});
    change(c, {.used_k = {17, 0, 66, 1}, .causal = true});
    expect_rows_past_the_end_defined(c);
  }
}

}  // namespace
}  // namespace tandem::harness
