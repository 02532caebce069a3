// Contract line 19: functions of the caller's own, on scores and as masks, of the kinds that are published.
#include <limits>

#include "contract/contract.hpp"
#include "contract/published_functions.hpp"

namespace tandem::harness {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// Of plain_case.
constexpr std::int64_t nq = 75;
constexpr std::int64_t nk = 139;

Case with(Case c, const Named& f) {
  change(c, {.score_function = f.score, .mask_function = f.mask});
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

void cross(const std::function<void(Case&)>& change) {
  for (const Named& f : crossed_functions()) {
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
  cross(see_a_window);
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
  cross(pack_four_sequences);
  cross(use_fewer_rows);
}

TEST(Contract19_Functions, WithHeadsOfEveryRatio) {
  for (const std::int64_t heads_kv : {1, 4}) {
    cross([&](Case& c) { c.heads_kv = heads_kv; });
  }
}

TEST(Contract19_Functions, FewQueries) {
  for (const std::int64_t seqlen_q : {1, 3}) {
    cross([&](Case& c) { change(c, {.seqlen_q = seqlen_q, .seqlen_k = 700}); });
  }
}

TEST(Contract19_Functions, LongerThanARunOfKeys) {
  Case c = with(plain_case(DType::f32), {"", "add(s, mul(0.001, real(k)))", "ne(mod(k, 7), mod(q, 7))"});
  change(c, {.batch = 1, .seqlen_q = 9, .seqlen_k = 9000});
  run_everywhere(c);
}

TEST(Contract19_Functions, OfCaches) {
  cross(read_pages);
  cross([](Case& c) { c.leftpad = {3, 50}; });
}

TEST(Contract19_Functions, SplitSize) {
  cross([](Case& c) { change(c, {.seqlen_k = 500, .split_size = 128, .threads = 3}); });
}

/// Line 16 holds with functions: a sequence's bits do not depend on the rest of the batch.
TEST(Contract19_Functions, BitsOfASequenceWithSplitSize) {
  for (const Named& f : crossed_functions()) {
    SCOPED_TRACE(f.name);
    Case pair = with(varlen_case(DType::f32, {130, 70}), f);
    pair.options.split_size = 128;
    pair.captured.clear();
    for (const Captured& captured : f.captured) {
      pair.captured.push_back(
          {.dtype = captured.dtype, .shape = captured.shape, .values = {0.1, 0.2, -0.3, 0.5}});
    }
    Case alone = with(pair, {.batch = 1, .lengths_q = {70}, .lengths_k = {70}});
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
  for (const Named& f : crossed_functions()) {
    SCOPED_TRACE(f.name);
    Case c = with(plain_case(DType::f32), f);
    change(c, {.seqlen_q = 300, .seqlen_k = 400, .deterministic = true});
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
    const Case c = with(plain_case(dtype), one_nan());
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
      run_everywhere(with(plain_case(dtype), value_of_masked(value)));
      Case c = with(plain_case(dtype), value_of_causal(value));
      c.options.window_right = 9 - (nk - nq);
      if (c.options.window_right < 0) c.options.window_right = 0;
      run_everywhere(c);
    }
  }
}

/// Masked pairs behave as those of the window do: NaN in a K that nobody sees reaches nothing.
TEST(Contract19_Functions, NaNInInvisibleKeys) {
  for (const DType dtype : float_dtypes) {
    const Case c = with(plain_case(dtype), hidden_keys());
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
        Case c = with(plain_case(dtype), by_score ? blind_by_score() : blind_by_mask());
        change(c, {.sink = sink, .dlse = dtype == DType::f32});
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
    Call call(with(plain_case(DType::f32), {.score_function = score}));
    run_everywhere(call, false);
  }
}

}  // namespace
}  // namespace tandem::harness
