// Contract line 17 of what is written to a cache: tokens go where the integers say, bit for bit as they are
// defined to, and every other byte stays as it was.
#include <cmath>
#include <limits>
#include <string>

#include "contract/contract.hpp"
#include "harness/element.hpp"
#include "harness/error_of.hpp"

namespace tandem::harness {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

/// Skipped where no runner appends, with its reason.
class Contract17_Append : public testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    for (const Runner* runner : runners()) {
      reason = runner->refuses_append(AppendCase{});
      if (reason.empty()) return;
    }
    GTEST_SKIP() << reason;
  }
};

/// Three sequences in pages; their new tokens cross the edges of pages.
AppendCase paged() {
  AppendCase c;
  c.batch = 3;
  c.seqlen_new = 21;
  c.entry_rows = 16;
  c.max_pages = 4;
  c.before = {0, 15, 43};
  return c;
}

TEST_F(Contract17_Append, RandomCasesWithEveryFeature) {
  for (int seed = 1; seed <= effort(150); ++seed) {
    run_everywhere(random_append(static_cast<std::uint64_t>(seed)));
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
}

TEST_F(Contract17_Append, PagesOfAnySize) {
  for (const std::int64_t page_size : {1, 2, 3, 7, 16, 48, 64, 100, 256}) {
    AppendCase c = paged();
    c.entry_rows = page_size;
    c.max_pages = 64 / page_size + 1;
    c.check = true;
    run_everywhere(c);
    c.seqlen_new = 1;
    run_everywhere(c);
  }
}

/// As many tokens as prefills have, so that their rows are written in runs: from the middle of a run on, over
/// the edges of pages, in sequences of one length and of many.
TEST_F(Contract17_Append, ManyTokens) {
  for (const std::int64_t page_size : {0, 7, 16, 48}) {
    AppendCase c;
    c.heads_kv = 1;
    c.head_dim = c.head_dim_v = 16;
    c.batch = 3;
    c.seqlen_new = 4000;
    c.before = {0, 45, 13};
    c.entry_rows = page_size > 0 ? page_size : 5100;
    c.max_pages = page_size > 0 ? 5100 / page_size : 0;
    run_everywhere(c);
    c.lengths = {3000, 1, 5003};
    run_everywhere(c);
  }
}

TEST_F(Contract17_Append, NothingToAppend) {
  AppendCase c = paged();
  c.seqlen_new = 0;
  run_everywhere(c);
  c.lengths = {0, 0, 0};
  run_everywhere(c);
  c.lengths = {0, 7, 0};
  c.slack = 3;
  run_everywhere(c);
  c.used = {0, 0, 0};
  run_everywhere(c);
  c = paged();
  c.batch = 0;
  c.before = {};
  c.max_pages = 0;
  AppendCall call(c);
  call.cache_seqlens = Box(DType::i32, {0}, {}, false);
  run_everywhere(call);
  // Packed rows of no sequence, whose queries are 0.
  AppendCase rows = paged();
  rows.lengths = {0, 0, 0};
  rows.slack = 5;
  rows.max_pages = 0;
  rows.used = {0, 0, 0};
  rows.index = {0, 0, 0};
  rows.entries = 1;
  rows.rotary_dim = 16;
  rows.heads_q = 2;
  AppendCall of_none(rows);
  of_none.cu_seqlens_new = Box(DType::i32, {1}, {}, false);
  of_none.cu_seqlens_new.set(0, 0.0);
  for (Box* box : {&of_none.seqused_new, &of_none.cache_seqlens, &of_none.cache_batch_idx})
    *box = Box(DType::i32, {0}, {}, false);
  of_none.spec.batch = 0;
  run_everywhere(of_none);
  c.heads_kv = 0;
  AppendCall none(c);
  none.cache_seqlens = Box(DType::i32, {0}, {}, false);
  run_everywhere(none);
}

/// Tokens past the end of a sequence's rows, in entries that do not exist, or before its first row are left
/// out; the others are written.
TEST_F(Contract17_Append, WhatHasNoRowIsLeftOut) {
  AppendCase c = paged();
  c.before = {50, -1, 64};
  run_everywhere(c);
  c.max_pages = 0;
  c.entries = 5;
  c.index = {5, -1, 4};
  c.entry_rows = 30;
  c.before = {0, 0, 20};
  run_everywhere(c);
  c = paged();
  AppendCall call(c);
  call.page_table.set(1, -1.0);
  call.page_table.set(4, 2147483647.0);
  run_everywhere(call);
}

TEST_F(Contract17_Append, SlotsInAnyOrderSomeSkipped) {
  AppendCase c;
  c.entries = 6;
  c.entry_rows = 8;
  c.slots = {47, -1, 0, 13, 12, 31, -2147483647, 48, 8};
  run_everywhere(c);
  c.slots.assign(9, -1);
  c.check = true;
  run_everywhere(c);
}

/// The last of tokens that go to one row is kept, whole: all heads of K and of V are of one token.
TEST_F(Contract17_Append, OfTokensInOneRowTheLastIsKeptWhole) {
  for (const int threads : {1, 2, 3}) {
    AppendCase c;
    c.heads_kv = 8;
    c.head_dim = c.head_dim_v = 128;
    c.entries = 4;
    c.entry_rows = 4;
    c.threads = threads;
    for (std::int64_t n = 0; n < 96; ++n) c.slots.push_back(n * 7 % 5 % 3);
    run_everywhere(c);
    c.slots.clear();
    c.batch = 4;
    c.seqlen_new = 3;
    c.index = {2, 2, 0, 2};
    c.before = {0, 1, 0, 0};
    run_everywhere(c);
  }
}

/// Without `check` nothing is read or written out of bounds, whatever the integers hold.
TEST_F(Contract17_Append, NoAccessOutOfBoundsWhateverTheIntegersHold) {
  const std::vector<double> nonsense{-1, 0, 1, 7, 100, 2147483647, -2147483648.0};
  for (std::uint64_t seed = 1; seed <= 24; ++seed) {
    AppendCase c = random_append(seed);
    c.k_cache.ends_at_guard = c.v_cache.ends_at_guard = c.k_new.ends_at_guard = true;
    AppendCall call(c);
    Random random(seed);
    for (Box* box : {&call.page_table, &call.cache_batch_idx, &call.cache_seqlens, &call.seqused_new,
                     &call.cu_seqlens_new, &call.slot_mapping, &call.rotary_offsets}) {
      for (std::int64_t n = 0; box->given() && n < box->numel(); ++n) {
        double value = nonsense[static_cast<std::size_t>(random.between(0, 6))];
        if (c.metadata == DType::i64 && random.chance(0.3)) value = random.pick({-0x1p63, 0x1p62, -0x1p40});
        box->set(n, value);
      }
    }
    on_every_runner(c, [&](Runner& runner) {
      call.prepare();
      runner.append(call);
      EXPECT_EQ(call.k_cache.changed_outside(), "");
      if (call.v_cache.given()) {
        EXPECT_EQ(call.v_cache.changed_outside(), "");
      }
      if (call.q_out.given()) {
        EXPECT_EQ(call.q_out.changed_outside(), "");
      }
    });
  }
}

TEST_F(Contract17_Append, NaNAndInfinitiesKeepTheirPlace) {
  for (const DType cache : {DType::bf16, DType::e4m3, DType::s8}) {
    for (const bool rotary : {false, true}) {
      AppendCase c = paged();
      c.cache_dtype = cache;
      c.scales = cache == DType::bf16 ? 0 : 2;
      if (rotary && c.scales == 2) c.scales = 3;
      c.rotary_dim = rotary ? 32 : 0;
      c.positions = 128;
      AppendCall call(c);
      for (std::int64_t n = 0; n < call.k_new.numel(); n += 37) {
        const double value = n % 3 == 0 ? nan_value : n % 3 == 1 ? infinity : -infinity;
        call.k_new.set(n, value);
        call.v_new.set(n, value);
      }
      run_everywhere(call);
    }
  }
}

/// Codes of values at and between the codes, where rounding decides, and past their range; scales of 0 and
/// below it.
TEST_F(Contract17_Append, CodesAreRoundedAsTheyAreDefined) {
  for (const DType cache : {DType::e4m3, DType::s8}) {
    for (const double scale : {1.0, -0.5, 0.0, 0.007, 1e-38}) {
      AppendCase c;
      c.dtype = DType::f32;
      c.cache_dtype = cache;
      c.scales = 1;
      c.head_dim = 160;
      c.head_dim_v = 24;
      c.seqlen_new = 4;
      c.before = {3};
      AppendCall call(c);
      for (std::int64_t n = 0; n < call.k_new.numel(); ++n) {
        const double code =
            cache == DType::s8 ? static_cast<double>(n % 300 - 150) / 2.0
                               : std::ldexp(static_cast<double>(n % 64) / 4.0, static_cast<int>(n % 17) - 10);
        call.k_new.set(n, scale == 0.0 ? static_cast<double>(n % 3 - 1) : code * scale);
      }
      call.k_scale.set(0, scale);
      run_everywhere(call);
    }
  }
}

/// All codes, as bf16 and as f16, by scales of each row: 0, below it, NaN, and as large as rows of numbers
/// have.
TEST_F(Contract17_Append, CodesBecomeValues) {
  for (const DType codes : {DType::e4m3, DType::s8}) {
    for (const DType cache : {DType::bf16, DType::f16}) {
      AppendCase c = paged();
      c.dtype = codes;
      c.cache_dtype = cache;
      c.scales = 4;
      c.head_dim = 128;
      c.head_dim_v = 36;
      AppendCall call(c);
      auto* const bytes = static_cast<std::uint8_t*>(call.k_new.view().data);
      for (std::int64_t n = 0; n < call.k_new.numel(); ++n) bytes[n] = static_cast<std::uint8_t>(n * 7);
      const double scales[] = {1.0, 0.0, -0.25, nan_value, 0.007, 30.0};
      for (std::int64_t n = 0; n < call.k_scale.numel(); ++n) call.k_scale.set(n, scales[n % 6]);
      run_everywhere(call);
    }
  }
}

/// Scales by row that an append finds are those that attention reads, of rows that are far apart in size.
TEST_F(Contract17_Append, AttentionReadsTheScalesThatAreFound) {
  for (const DType keys : {DType::e4m3, DType::s8}) {
    Case c = cache_case(DType::bf16, 16);
    c.key_dtype = keys;
    c.scales = 3;
    c.options.causal = true;
    Call call(c);
    AppendCase a;
    a.cache_dtype = keys;
    a.batch = c.batch;
    a.heads_kv = c.heads_kv;
    a.seqlen_new = c.seqlen_k;
    a.used = c.used_k;
    a.before.assign(static_cast<std::size_t>(c.batch), 0);
    a.max_pages = c.pages_per_sequence();
    a.entry_rows = c.page_size;
    a.scales = 3;
    AppendCall append(a);
    copy(call.page_table, append.page_table);
    for (std::int64_t n = 0; n < append.k_new.numel(); ++n) {
      append.k_new.set(n, std::ldexp(append.k_new.get(n), static_cast<int>(n / a.head_dim % 5) - 2));
    }
    on_every_runner(a, [&](Runner& runner) {
      append.prepare();
      runner.append(append);
      ASSERT_TRUE(append.correct());
      copy(append.k_cache, call.k);
      copy(append.v_cache, call.v);
      copy(append.k_scale_cache, call.k_scale);
      copy(append.v_scale_cache, call.v_scale);
      call.prepare(Pass::forward);
      forward(call.forward_args());
      EXPECT_TRUE(correct(call, Pass::forward, expect(call, Pass::forward)));
    });
  }
}

/// K and V alternate in one tensor, as engines keep them: by page, by row, and one after the other.
TEST_F(Contract17_Append, KAndVInterleavedInOneTensor) {
  const AppendCase c = paged();
  const AppendCall call(c);
  const std::int64_t pages = call.k_cache.view().shape[0];
  const std::int64_t inner = c.heads_kv * c.head_dim;
  const std::int64_t page = c.entry_rows * inner;
  for (const int axis : {0, 1, 2}) {
    const auto at = [&](int which, std::int64_t n) {  // of the element with logical index n
      if (axis == 0) return which * pages * page + n;
      if (axis == 1) return (n / page * 2 + which) * page + n % page;
      return (n / inner * 2 + which) * inner + n % inner;
    };
    Random random(5);
    std::vector<std::uint16_t> memory(static_cast<std::size_t>(2 * pages * page));
    for (std::uint16_t& element : memory) element = static_cast<std::uint16_t>(random.bits());
    std::vector<std::uint16_t> expected = memory;
    for (std::int64_t n = 0; n < call.k_new.numel(); ++n) {
      const std::int64_t b = n / inner / c.seqlen_new;
      const std::int64_t row = c.before[static_cast<std::size_t>(b)] + n / inner % c.seqlen_new;
      if (row >= c.max_pages * c.entry_rows) continue;
      const auto entry = static_cast<std::int64_t>(call.page_table.get(b * c.max_pages + row / c.entry_rows));
      const std::int64_t to = (entry * c.entry_rows + row % c.entry_rows) * inner + n % inner;
      encode(c.cache_dtype, expected.data(), at(0, to), call.k_new.get(n));
      encode(c.cache_dtype, expected.data(), at(1, to), call.v_new.get(n));
    }
    const auto view = [&](int which) {
      Tensor t(memory.data() + at(which, 0), c.cache_dtype, {pages, c.entry_rows, c.heads_kv, c.head_dim});
      t.stride[0] = at(which, page) - at(which, 0);
      t.stride[1] = at(which, inner) - at(which, 0);
      return t;
    };
    AppendArgs args = call.args();
    args.k_cache = view(0);
    args.v_cache = view(1);
    append_kv(args);
    EXPECT_TRUE(memory == expected) << "axis " << axis;
  }
}

std::string error_of(const AppendCall& call) {
  return tandem::error_of(Status::invalid_argument, [&] { append_kv(call.args()); });
}

TEST_F(Contract17_Append, WithCheckTwoTokensInOneRowAreAnErrorThatNamesBoth) {
  AppendCase c;
  c.batch = 3;
  c.seqlen_new = 2;
  c.entries = 4;
  c.index = {1, 0, 1};
  c.before = {4, 0, 5};
  c.check = true;
  AppendCall call(c);
  call.prepare();
  EXPECT_EQ(error_of(call),
            "k_new[0, 1] and k_new[2, 0] both go to row 5 of entry 1 of the cache; each token needs a row of "
            "its own");
  EXPECT_FALSE(call.k_cache.changed());
  AppendCase slots;
  slots.entries = 4;
  slots.slots = {3, 70, 5, -1, 70};
  slots.check = true;
  AppendCall by_slot(slots);
  by_slot.prepare();
  EXPECT_EQ(error_of(by_slot),
            "k_new[1] and k_new[4] both go to row 6 of entry 2 of the cache; each token needs a row of its "
            "own");
  EXPECT_FALSE(by_slot.k_cache.changed());
}

}  // namespace
}  // namespace tandem::harness
