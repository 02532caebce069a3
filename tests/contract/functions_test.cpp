// Contract line 19: functions of the caller's own, on scores and as masks, of the kinds that are published.
#include <limits>

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// A function by its usual name, with what it reads.
struct Named {
  const char* name;
  const char* score;
  const char* mask;
  std::vector<Captured> captured = {};
};

Captured reals(std::vector<std::int64_t> shape, Layout layout = {}) {
  return {.dtype = DType::f32, .shape = std::move(shape), .layout = std::move(layout)};
}
Captured integers(std::vector<std::int64_t> shape, std::int64_t low, std::int64_t high) {
  return {.dtype = DType::i32, .shape = std::move(shape), .low = low, .high = high};
}
/// Nothing behind the last element can be read.
Layout at_guard() {
  Layout layout;
  layout.ends_at_guard = true;
  return layout;
}
/// The slopes of the paper for four heads: logits stay small enough that their rounding to f32 is within the
/// bounds.
Captured slopes() {
  return {.shape = {4}, .values = {0.25, 0.0625, 0.015625, 0.00390625}};
}
/// Ascending numbers of documents of these lengths.
Captured documents(const std::vector<std::int64_t>& lengths) {
  Captured c{.dtype = DType::i64, .shape = {0}};
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    c.values.insert(c.values.end(), static_cast<std::size_t>(lengths[n]), static_cast<double>(n));
  }
  c.shape[0] = static_cast<std::int64_t>(c.values.size());
  return c;
}

// Of plain_case: 2 sequences of 75 queries and 139 keys, 4 query heads.
constexpr std::int64_t nq = 75;
constexpr std::int64_t nk = 139;

std::vector<Named> published_masks() {
  return {
      {"causal", "", "le(k, q)"},
      {"causal, aligned at the bottom right", "", "le(k, add(q, sub(nk, nq)))"},
      {"block causal", "", "le(floordiv(k, 16), floordiv(q, 16))"},
      {"block causal by 24", "", "le(floordiv(k, 24), floordiv(q, 24))"},
      {"sliding window", "", "$0=sub(q, k); and(le(0, $0), lt($0, 20))"},
      {"sliding window both ways", "", "le(abs(sub(q, k)), 9)"},
      {"dilated sliding window", "", "$0=abs(sub(q, k)); and(le($0, 40), eq(mod($0, 3), 0))"},
      {"document", "", "eq(t0[q], t0[k])", {documents({30, 1, 50, 58})}},
      {"document, causal", "", "and(eq(t0[q], t0[k]), le(k, q))", {documents({31, 33, 75})}},
      {"prefix-LM", "", "or(lt(k, t0[b]), le(k, q))", {integers({2}, 1, 60)}},
      {"chunked", "", "and(le(k, q), eq(floordiv(k, 32), floordiv(q, 32)))"},
      {"shared prefix", "", "or(lt(k, 17), eq(mod(k, 4), mod(q, 4)))"},
      {"two-dimensional neighbourhood (NATTEN)", "",
       "and(le(abs(sub(floordiv(q, 12), floordiv(k, 12))), 2), le(abs(sub(mod(q, 12), mod(k, 12))), 3))"},
      {"tiles of a neighbourhood (STA)", "",
       "$0=sub(floordiv(floordiv(q, 12), 4), floordiv(floordiv(k, 12), 4)); and(le(abs($0), 1), "
       "eq(floordiv(mod(q, 12), 6), floordiv(mod(k, 12), 6)))"},
      {"strided", "", "and(le(k, q), or(eq(mod(sub(q, k), 8), 0), lt(sub(q, k), 8)))"},
      {"boolean tensor",
       "",
       "ne(t0[b, h, q, k], 0)",
       {{.dtype = DType::s8, .shape = {2, 4, nq, nk}, .layout = at_guard(), .high = 1}}},
      {"keys by padding", "", "lt(k, t0[b])", {integers({2}, 0, nk)}},
      {"heads that differ", "", "le(k, add(q, mul(h, 10)))"},
      {"tree by ancestors", "", "ne(and(t0[q], t1[k]), 0)", {integers({nq}, 0, 255), integers({nk}, 0, 15)}},
      {"of the batch alone", "", "eq(b, 1)"},
      {"nothing", "", "false"},
      {"everything", "", "true"},
  };
}

std::vector<Named> published_scores() {
  return {
      {"identity", "s", ""},
      {"scaled again", "mul(s, 1.5)", ""},
      {"relative position", "add(s, real(sub(q, k)))", ""},
      {"ALiBi", "add(s, mul(t0[h], real(sub(k, q))))", "", {slopes()}},
      {"ALiBi by batch and head, aligned at the bottom right",
       "sub(s, mul(mul(0.1, abs(t0[b, h])), real(abs(sub(add(q, sub(nk, nq)), k)))))",
       "",
       {reals({2, 4})}},
      {"softcap by tanh", "mul(tanh(div(s, 3.0)), 3.0)", ""},
      {"additive bias", "add(s, t0[b, h, q, k])", "", {reals({2, 4, nq, nk}, at_guard())}},
      {"additive bias of a transposed tensor",
       "add(s, t0[k, h, q])",
       "",
       {reals({nk, 4, nq}, {.order = {2, 1, 0}})}},
      {"additive bias in 16 bits", "add(s, t0[h, q, k])", "", {{.dtype = DType::bf16, .shape = {4, nq, nk}}}},
      {"bias by key", "add(s, t0[k])", "", {{.dtype = DType::f16, .shape = {nk}}}},
      {"relative table", "add(s, t0[h, add(sub(q, k), 138)])", "", {reals({4, nq + nk})}},
      {"T5 buckets",
       "$0=max(sub(q, k), 0); $1=int(mul(log(div(real(max($0, 1)), 8.0)), 2.885)); "
       "add(s, t0[where(lt($0, 8), $0, min(add($1, 8), 15)), h])",
       "",
       {reals({16, 4})}},
      {"causal by -inf", "where(le(k, q), s, -inf)", ""},
      {"gate by a sigmoid", "mul(s, sigmoid(add(s, t0[h])))", "", {reals({4})}},
      {"quadratic", "mul(s, s)", ""},
      {"absolute value", "neg(abs(s))", ""},
      {"clamped", "min(max(s, -1.0), 1.5)", ""},
      {"logarithm of a sum", "log(add(1.0, exp(s)))", ""},
      {"root", "sqrt(add(mul(s, s), 0.25))", ""},
      {"quotient", "div(s, add(1.0, mul(0.1, mul(s, s))))", ""},
      {"two buffers", "add(add(s, t0[q]), t1[h, k])", "", {reals({nq}), reals({4, nk})}},
      {"distance in two dimensions",
       "sub(s, sqrt(add(real(mul(sub(mod(q, 12), mod(k, 12)), sub(mod(q, 12), mod(k, 12)))), 1.0)))", ""},
      {"softcap and ALiBi, causal",
       "mul(tanh(div(add(s, mul(t0[h], real(sub(k, q)))), 20.0)), 20.0)",
       "le(k, q)",
       {slopes()}},
      {"document bias",
       "add(s, where(eq(t0[q], t0[k]), 0.5, -0.5))",
       "ne(mod(add(q, k), 5), 0)",
       {documents({40, 60, 39})}},
  };
}

Case with(Case c, const Named& f) {
  c.score_function = f.score;
  c.mask_function = f.mask;
  c.captured = f.captured;
  return c;
}

TEST(Contract19_Functions, PublishedMasks) {
  for (const Named& f : published_masks()) {
    SCOPED_TRACE(f.name);
    run_everywhere(with(plain_case(DType::f32), f));
  }
}

TEST(Contract19_Functions, PublishedScores) {
  for (const Named& f : published_scores()) {
    SCOPED_TRACE(f.name);
    run_everywhere(with(plain_case(DType::f32), f));
  }
}

TEST(Contract19_Functions, PublishedInSixteenBits) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::vector<Named>& all : {published_masks(), published_scores()}) {
      for (const Named& f : all) {
        SCOPED_TRACE(f.name);
        run_everywhere(with(plain_case(dtype), f));
      }
    }
  }
}

/// Some of the published functions, none of which reads by position in a dense tensor.
const std::vector<Named> crossed{
    {"causal", "", "le(k, q)"},
    {"dilated", "", "eq(mod(sub(q, k), 3), 0)"},
    {"ALiBi", "add(s, mul(t0[h], real(sub(k, q))))", "", {slopes()}},
    {"softcap and prefix", "mul(tanh(div(s, 2.0)), 2.0)", "or(lt(k, 5), le(k, q))"},
    {"-inf", "where(eq(mod(k, 4), mod(q, 4)), add(s, t0[h]), -inf)", "", {reals({4})}},
};

void cross(const std::function<void(Case&)>& change) {
  for (const Named& f : crossed) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(f.name);
      Case c = with(plain_case(dtype), f);
      change(c);
      run_everywhere(c);
    }
  }
}

TEST(Contract19_Functions, WithCausalAndWindows) {
  cross([](Case& c) { c.options.causal = true; });
  cross([](Case& c) {
    c.options.window_left = 20;
    c.options.window_right = 7;
  });
}

TEST(Contract19_Functions, WithSoftcapWhichComesFirst) {
  cross([](Case& c) { c.options.softcap = 1.5F; });
}

TEST(Contract19_Functions, WithASinkAndDlse) {
  cross([](Case& c) { c.sink = c.dlse = true; });
}

TEST(Contract19_Functions, WithEveryKindOfScale) {
  for (const float scale : {0.0F, -0.3F, 1.0F}) {
    cross([&](Case& c) {
      c.options.scale = scale;
      c.amplitude = 0.5;  // of unscaled scores, as far as their rounding to f32 stays within the bounds
    });
  }
}

TEST(Contract19_Functions, PositionsCountInTheSequence) {
  cross([](Case& c) {
    c.packed_q = c.packed_k = true;
    c.batch = 4;
    c.lengths_q = {70, 0, 1, 33};
    c.lengths_k = {141, 5, 40, 33};
    c.slack_q = c.slack_k = 3;
  });
  cross([](Case& c) {
    c.used_q = {40, 0};
    c.used_k = {139, 77};
  });
}

TEST(Contract19_Functions, WithHeadsOfEveryRatio) {
  for (const std::int64_t heads_kv : {1, 4}) {
    cross([&](Case& c) { c.heads_kv = heads_kv; });
  }
}

TEST(Contract19_Functions, FewQueries) {
  for (const std::int64_t seqlen_q : {1, 3}) {
    cross([&](Case& c) {
      c.seqlen_q = seqlen_q;
      c.seqlen_k = 700;
    });
  }
}

TEST(Contract19_Functions, LongerThanARunOfKeys) {
  Case c = with(plain_case(DType::f32), {"", "add(s, mul(0.001, real(k)))", "ne(mod(k, 7), mod(q, 7))"});
  c.batch = 1;
  c.seqlen_q = 9;
  c.seqlen_k = 9000;
  run_everywhere(c);
}

TEST(Contract19_Functions, OfCaches) {
  cross([](Case& c) {
    c.page_size = 16;
    c.used_k = {139, 60};
  });
  cross([](Case& c) { c.leftpad = {3, 50}; });
}

TEST(Contract19_Functions, SplitSize) {
  cross([](Case& c) {
    c.options.split_size = 128;
    c.seqlen_k = 500;
    c.threads = 3;
  });
}

/// Line 16 holds with functions: a sequence's bits do not depend on the rest of the batch.
TEST(Contract19_Functions, BitsOfASequenceWithSplitSize) {
  for (const Named& f : crossed) {
    SCOPED_TRACE(f.name);
    Case pair = with(varlen_case(DType::f32, {130, 70}), f);
    pair.options.split_size = 128;
    pair.captured.clear();
    for (const Captured& captured : f.captured) {
      pair.captured.push_back(
          {.dtype = captured.dtype, .shape = captured.shape, .values = {0.1, 0.2, -0.3, 0.5}});
    }
    Case alone = pair;
    alone.batch = 1;
    alone.lengths_q = alone.lengths_k = {70};
    Call both(pair);
    Call one(alone);
    const auto tail = [&](const Box& from, Box& to) {
      copy(from, to, from.numel() - to.numel(), 0, to.numel());
    };
    tail(both.q, one.q);
    tail(both.k, one.k);
    tail(both.v, one.v);
    on_every_runner(pair, [&](Runner& runner) {
      run(runner, both, false);
      run(runner, one, false);
      EXPECT_TRUE(
          same_bits(part(both.out, both.out.numel() - one.out.numel(), one.out.numel()), one.out.raw()));
    });
  }
}

TEST(Contract19_Functions, ThreadsChangeNoBit) {
  for (const Named& f : crossed) {
    SCOPED_TRACE(f.name);
    Case c = with(plain_case(DType::f32), f);
    c.seqlen_q = 300;
    c.seqlen_k = 400;
    c.options.deterministic = true;
    Call call(c);
    on_every_runner(c, [&](Runner& runner) {
      const Results one = run(runner, call);
      call.spec.threads = 4;
      EXPECT_TRUE(same_bits(run(runner, call), one));
      call.spec.threads = 1;
    });
  }
}

/// A NaN that a function makes for a visible pair makes that row NaN and no other.
TEST(Contract19_Functions, NaNStaysInItsRow) {
  for (const DType dtype : float_dtypes) {
    Case c = plain_case(dtype);
    c.score_function = "where(and(eq(q, 20), eq(k, 7)), nan, s)";
    Call call(c);
    run_everywhere(call, false);
    on_every_runner(c, [&](Runner& runner) {
      run(runner, call, false);
      const std::int64_t width = c.heads_q * c.head_dim_v;
      for (std::int64_t n = 0; n < call.out.numel(); ++n) {
        ASSERT_EQ(std::isnan(call.out.get(n)), n / width % c.seqlen_q == 20) << "element " << n;
      }
    });
  }
}

/// Whatever it makes for pairs that a mask or the window hides reaches nothing.
TEST(Contract19_Functions, ValuesOfMaskedPairsReachNothing) {
  for (const char* const value : {"nan", "inf", "1e30", "-inf"}) {
    for (const DType dtype : float_dtypes) {
      Case c = plain_case(dtype);
      c.score_function = std::string("where(le(k, add(q, 9)), s, ") + value + ")";
      c.mask_function = "le(k, add(q, 9))";
      run_everywhere(c);
      c.mask_function = "";
      c.options.window_right = 9 - (nk - nq);
      if (c.options.window_right < 0) c.options.window_right = 0;
      c.score_function = std::string("where(le(k, add(q, sub(nk, nq))), s, ") + value + ")";
      run_everywhere(c);
    }
  }
}

/// Masked pairs behave as those of the window do: NaN in a K that nobody sees reaches nothing.
TEST(Contract19_Functions, NaNInInvisibleKeys) {
  for (const DType dtype : float_dtypes) {
    Case c = plain_case(dtype);
    c.mask_function = "ne(mod(k, 9), 4)";
    Call call(c);
    const std::int64_t width = c.heads_kv * c.head_dim_qk;
    for (std::int64_t n = 0; n < call.k.numel(); ++n) {
      if (n / width % c.seqlen_k % 9 == 4) call.k.set(n, n % 2 == 0 ? std::nan("") : infinity);
    }
    run_everywhere(call);
  }
}

/// A row that sees nothing: out 0, LSE -inf or the sink, gradients 0 whatever dout holds there.
TEST(Contract19_Functions, RowsThatSeeNothing) {
  for (const DType dtype : float_dtypes) {
    for (const bool sink : {false, true}) {
      for (const bool by_score : {false, true}) {
        Case c = plain_case(dtype);
        c.sink = sink;
        c.dlse = dtype == DType::f32;
        (by_score ? c.score_function : c.mask_function) =
            by_score ? "where(lt(q, 33), -inf, s)" : "le(33, q)";
        Call call(c);
        const std::int64_t width = c.heads_q * c.head_dim_v;
        for (std::int64_t n = 0; n < call.dout.numel(); ++n) {
          if (n / width % c.seqlen_q < 33) call.dout.set(n, n % 2 == 0 ? std::nan("") : infinity);
        }
        run_everywhere(call);
      }
    }
  }
}

/// Logits that f32 holds exactly, so that nothing but a sentinel could be wrong.
TEST(Contract19_Functions, LogitsWithoutASentinel) {
  for (const char* const score :
       {"sub(real(mod(sub(q, k), 5)), 200000.0)", "add(real(mod(k, 7)), 60000.0)"}) {
    Case c = plain_case(DType::f32);
    c.score_function = score;
    Call call(c);
    run_everywhere(call, false);
  }
}

}  // namespace
}  // namespace tandem::harness
