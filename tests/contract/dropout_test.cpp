// Contract line 19: dropout, whose bits depend on seed, offset, batch, head, query and key alone.
#include "contract/contract.hpp"
#include "contract/published_functions.hpp"

namespace tandem::harness {
namespace {

Case dropped(DType dtype, float p = 0.3F) {
  Case c = plain_case(dtype);
  c.options.dropout_p = p;
  c.options.dropout_seed = 0x1234'5678'9ABC'DEF0U;
  c.options.dropout_offset = 0x7'0000'0005U;
  return c;
}

void cross(const std::function<void(Case&)>& change) {
  for (const DType dtype : float_dtypes) {
    Case c = dropped(dtype);
    change(c);
    run_everywhere(c);
  }
}

TEST(Contract19_Dropout, OfEveryShare) {
  for (const float p : {1e-6F, 0.1F, 0.5F, 0.9F}) {
    cross([&](Case& c) { c.options.dropout_p = p; });
  }
}

TEST(Contract19_Dropout, WithCausalWindowsAndSoftcap) {
  cross([](Case& c) { c.options.causal = true; });
  cross(cap_a_window);
}

TEST(Contract19_Dropout, WithASinkAndDlse) {
  cross([](Case& c) { c.sink = c.dlse = true; });
}

TEST(Contract19_Dropout, PositionsCountInTheSequence) {
  cross(pack_four_sequences);
  cross(use_fewer_rows);
}

/// Of parts of sequences: rows from anywhere, at any distance, and any numbers at all.
void cross_places(const std::function<void(Case&)>& change) {
  const std::vector<std::vector<std::int64_t>> places = {
      {8, 128, 64, 1},    // whole fours of keys
      {3, 1001, 333, 1},  // that begin between
      {40, 7, 2, 2},      // every other row
      {5, 2, 1, 5},       // every fifth
      {-1, -60, -59, 1},  // a place below 0
      {7, 2147483647, 2147483600, 4},
  };
  for (const std::vector<std::int64_t>& place : places) {
    cross([&](Case& c) {
      change(c);
      c.dropout_places.clear();
      for (std::int64_t b = 0; b < c.batch; ++b) {
        const std::vector<std::int64_t>& own = places[static_cast<std::size_t>(b + place[3]) % places.size()];
        const std::vector<std::int64_t>& of = b == 0 ? place : own;
        c.dropout_places.insert(c.dropout_places.end(), of.begin(), of.end());
      }
    });
  }
}

TEST(Contract19_Dropout, OfPartsOfSequences) {
  cross_places([](Case&) {});
  cross_places(pack_four_sequences);
  cross_places(use_fewer_rows);
}

TEST(Contract19_Dropout, OfPartsWithMasksAndHeads) {
  cross_places([](Case& c) { change(c, {.heads_kv = 1, .causal = true}); });
  cross_places([](Case& c) { change(c, {.seqlen_q = 3, .seqlen_k = 300}); });
}

/// Forward over parts of the queries is forward over all of them.
TEST(Contract19_Dropout, QueriesInPartsKeepWhatAllKeep) {
  for (const DType dtype : float_dtypes) {
    Case c = with(dropped(dtype), {.batch = 1, .seqlen_q = 160, .seqlen_k = 200});
    Call whole(c);
    on_every_runner(c, [&](Runner& runner) {
      run(runner, whole, false);
      for (const std::int64_t first : {0, 64}) {
        Case part = with(c, {.seqlen_q = first == 0 ? 64 : 96});
        part.dropout_places = {0, first, 0, 1};
        Call call(part);
        const std::int64_t row = c.heads_q * c.head_dim_qk;
        for (std::int64_t n = 0; n < call.q.numel(); ++n) call.q.set(n, whole.q.get(first * row + n));
        for (std::int64_t n = 0; n < call.k.numel(); ++n) call.k.set(n, whole.k.get(n));
        for (std::int64_t n = 0; n < call.v.numel(); ++n) call.v.set(n, whole.v.get(n));
        if (!runner.refuses(part).empty()) continue;
        run(runner, call, false);
        const std::int64_t of_out = first * c.heads_q * c.head_dim_v;
        for (std::int64_t n = 0; n < call.out.numel(); ++n) {
          ASSERT_NEAR(call.out.get(n), whole.out.get(of_out + n), dtype == DType::f32 ? 1e-5 : 2e-2);
        }
      }
    });
  }
}

TEST(Contract19_Dropout, WithHeadsOfEveryRatio) {
  for (const std::int64_t heads_kv : {1, 4}) {
    cross([&](Case& c) { c.heads_kv = heads_kv; });
  }
}

TEST(Contract19_Dropout, FewQueriesAndManyKeys) {
  for (const std::int64_t seqlen_q : {1, 3}) {
    cross([&](Case& c) { change(c, {.seqlen_q = seqlen_q, .seqlen_k = 700}); });
  }
}

TEST(Contract19_Dropout, LongerThanARunOfKeys) {
  cross([](Case& c) { change(c, {.batch = 1, .seqlen_q = 9, .seqlen_k = 9000}); });
}

TEST(Contract19_Dropout, OfCaches) {
  cross(read_pages);
  cross([](Case& c) { c.leftpad = {3, 50}; });
}

TEST(Contract19_Dropout, SplitSize) {
  cross([](Case& c) { change(c, {.seqlen_k = 500, .split_size = 128, .threads = 3}); });
}

TEST(Contract19_Dropout, OddHeadDimensions) {
  cross([](Case& c) { change(c, {.head_dim_qk = 40, .head_dim_v = 72}); });
  cross([](Case& c) { change(c, {.head_dim_qk = 33, .head_dim_v = 7}); });
}

TEST(Contract19_Dropout, WithFunctions) {
  for (const Named& f : crossed_functions()) {
    SCOPED_TRACE(f.name);
    cross([&](Case& c) {
      change(c, {.score_function = f.score, .mask_function = f.mask});
      c.captured = f.captured;
    });
  }
}

TEST(Contract19_Dropout, ThreadsChangeNoBit) {
  Case c = with(dropped(DType::f32), {.seqlen_q = 300, .seqlen_k = 400});
  Call call(c);
  on_every_runner(c, [&](Runner& runner) {
    const Results one = run(runner, call);
    call.spec.threads = 4;
    EXPECT_TRUE(same_bits(run(runner, call), one));
    call.spec.threads = 1;
  });
}

/// The LSE is that of the whole softmax, so that it is the one of the call without dropout.
TEST(Contract19_Dropout, LeavesTheLse) {
  for (const DType dtype : float_dtypes) {
    Call with(dropped(dtype));
    Call without(dropped(dtype, 0.0F));
    on_every_runner(with.spec, [&](Runner& runner) {
      run(runner, with, false);
      run(runner, without, false);
      for (std::int64_t n = 0; n < with.lse.numel(); ++n) {
        ASSERT_NEAR(with.lse.get(n), without.lse.get(n), 1e-5 * std::max(1.0, std::abs(without.lse.get(n))));
      }
    });
  }
}

/// Another seed, offset, head or sequence keeps others, and each keeps the share that it is to.
TEST(Contract19_Dropout, KeepsItsShare) {
  constexpr std::int64_t keys = 512;
  constexpr std::int64_t queries = 256;
  const double p = 0.2;
  for (const auto& [dtype, seed] : {std::pair{DType::f32, 0U}, {DType::f32, 1U}, {DType::bf16, 77U}}) {
    Case c = dropped(dtype, static_cast<float>(p));
    c.options.dropout_seed = seed;
    change(c, {.seqlen_q = queries, .seqlen_k = keys});
    Call call(c);
    // All weights are 1 / keys, and values are 1: out is the share kept, times 1 / (1 - p).
    for (std::int64_t n = 0; n < call.q.numel(); ++n) call.q.set(n, 0.0);
    for (std::int64_t n = 0; n < call.v.numel(); ++n) call.v.set(n, 1.0);
    on_every_runner(c, [&](Runner& runner) {
      run(runner, call, false);
      std::vector<double> rows;
      for (std::int64_t n = 0; n < call.out.numel(); n += c.head_dim_v)
        rows.push_back(call.out.get(n) * (1.0 - p));
      double mean = 0.0;
      for (const double share : rows) mean += share / static_cast<double>(rows.size());
      double variance = 0.0;
      for (const double share : rows)
        variance += (share - mean) * (share - mean) / static_cast<double>(rows.size());
      // Of n draws the mean is off by sqrt(p (1 - p) / n); 5 times that comes once in a million.
      const double of_row = p * (1.0 - p) / static_cast<double>(keys);
      EXPECT_NEAR(mean, 1.0 - p, 5.0 * std::sqrt(of_row / static_cast<double>(rows.size())));
      EXPECT_NEAR(variance, of_row, 0.2 * of_row);
    });
  }
}

}  // namespace
}  // namespace tandem::harness
