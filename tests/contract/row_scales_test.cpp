// Contract lines 7, 16, 17 and 18 of caches in 8 bits with a scale for each row and KV head.
#include <cmath>
#include <limits>

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr int by_row = 3;

Case row_scale_case(DType keys, std::int64_t page_size, DType dtype = DType::bf16) {
  Case c = cache_case(dtype, page_size);
  c.key_dtype = keys;
  c.scales = by_row;
  return c;
}

const std::vector<DType> eight_bits{DType::e4m3, DType::s8};

TEST(Contract17_RowScales, PagesOfAnySize) {
  for (const DType keys : eight_bits) {
    for (const DType dtype : float_dtypes) {
      for (const std::int64_t page_size : {1, 3, 16, 100}) {
        Case c = row_scale_case(keys, page_size, dtype);
        c.options.causal = page_size != 3;
        c.options.check = page_size == 16;
        if (page_size == 16) c.scale_layout.order = {0, 2, 1};
        for (const std::int64_t seqlen_q : {1, 5, 70}) {
          c.seqlen_q = seqlen_q;
          run_everywhere(c);
        }
      }
    }
  }
}

/// From seed 11 on strides are multiples of 16 bytes, as TMA takes them. Every third seed has e4m3 queries.
TEST(Contract17_RowScales, EveryFeature) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    Case c = row_scale_case(random.pick({DType::e4m3, DType::s8}), random.pick<std::int64_t>({1, 16, 24, 64}),
                            random.pick({DType::f32, DType::bf16, DType::f16}));
    c.seed = seed;
    c.head_dim_qk = 8 * random.between(1, 32);
    c.head_dim_v = 8 * random.between(1, 32);
    c.heads_q = c.heads_kv * random.pick<std::int64_t>({1, 3, 8});
    c.options.window_left = random.between(-1, 40);
    c.options.causal = random.chance(0.5);
    c.options.softcap = random.chance(0.5) ? 15.0F : 0.0F;
    c.options.split_size = random.chance(0.3) ? 128 : 0;
    if (random.chance(0.2)) c.options.scale = random.pick({-0.125F, 0.0F});
    c.sink = random.chance(0.5);
    c.packed_q = random.chance(0.5);
    c.lengths_q = {1, 40, 9};
    c.metadata = random.pick({DType::i32, DType::i64});
    c.k = random_layout(random, 4, false);
    c.v = random_layout(random, 4, false);
    if (random.chance(0.5)) c.scale_layout.order = {0, 2, 1};
    if (random.chance(0.5)) c.scale_layout.pad = 5;
    if (random.chance(0.5)) c.leftpad = {7, 0, 97};
    c.threads = static_cast<int>(random.between(1, 3));
    if (seed > 10) {
      c.dtype = c.out_dtype = DType::bf16;
      c.head_dim_qk = (c.head_dim_qk + 31) / 32 * 16;
      c.head_dim_v = (c.head_dim_v + 31) / 32 * 16;
      for (Layout* layout : {&c.k, &c.v}) {
        layout->pad = layout->pad / 16 * 16;
        layout->base_offset = 0;
        layout->ends_at_guard = false;
      }
    } else if (seed % 3 == 0) {
      c.dtype = DType::e4m3;
      c.out_dtype = DType::f32;
      c.key_dtype = {};
      c.mask_function = "le(mod(k, 5), 3)";
    }
    run_everywhere(c);
  }
}

/// Scales go with the entry of the cache, whichever sequences read it.
TEST(Contract17_RowScales, EntriesChosenByIndexAndPaddingOnTheLeft) {
  for (const DType keys : eight_bits) {
    for (const std::int64_t seqlen_q : {1, 75}) {
      Case c = plain_case(DType::bf16);
      c.key_dtype = keys;
      c.scales = by_row;
      c.seqlen_q = seqlen_q;
      c.batch = 3;
      c.cache_batch = 5;
      c.cache_index = {4, 0, 4};
      c.used_k = {139, 17, 139};
      c.options.causal = true;
      run_everywhere(c);
      c.leftpad = {0, 17, 60};
      run_everywhere(c);
      c.cache_index.clear();
      run_everywhere(c);
    }
  }
}

/// Keys that are no cache, with lengths or packed, as quantize by row leaves them: beside f32 queries, in
/// whose dtype nothing is rounded, and beside e4m3 ones.
TEST(Contract17_RowScales, EightBitQueriesAndF32OnRowsThatAreNoCache) {
  for (const std::int64_t seqlen_q : {1, 75}) {
    for (const DType dtype : {DType::f32, DType::e4m3}) {
      Case c = plain_case(dtype);
      if (dtype == DType::f32) c.key_dtype = DType::s8;
      c.scales = by_row;
      c.seqlen_q = seqlen_q;
      run_everywhere(c);
      c.used_k = {139, 77};
      run_everywhere(c);
    }
    Case c = plain_case(DType::f32);
    c.key_dtype = DType::e4m3;
    c.scales = by_row;
    pack_four_sequences(c);
    run_everywhere(c);
  }
}

TEST(Contract17_RowScales, RowsThatSeeOneKey) {
  for (const DType keys : eight_bits) {
    for (const std::int64_t seqlen_q : {1, 129}) {
      Case c = row_scale_case(keys, 16);
      c.seqlen_q = seqlen_q;
      c.used_k = {1, 16, 17};
      c.options.causal = true;
      run_everywhere(c);
      c.options.window_left = 0;
      c.options.softcap = 2.0F;
      run_everywhere(c);
    }
  }
}

/// Scales of rows of zeros are 0; negative ones turn the signs.
TEST(Contract17_RowScales, ZeroAndNegativeScales) {
  for (const std::int64_t seqlen_q : {2, 70}) {
    Case c = row_scale_case(DType::e4m3, 16);
    c.seqlen_q = seqlen_q;
    Call call(c);
    for (Box* scale : {&call.k_scale, &call.v_scale}) {
      for (std::int64_t n = 0; n < scale->numel(); n += 3) {
        if (!std::isnan(scale->get(n))) scale->set(n, n % 2 == 0 ? 0.0 : -scale->get(n));
      }
    }
    run_everywhere(call);
  }
}

/// A scale that is NaN, as that of an s8 row with a NaN, reaches the rows that see its key, and no other.
TEST(Contract07_NaN, ScalesByRowKeepIt) {
  for (const DType keys : eight_bits) {
    for (const bool of_v : {false, true}) {
      for (const std::int64_t seqlen_q : {2, 70}) {
        Case c = row_scale_case(keys, 16);
        c.seqlen_q = seqlen_q;
        c.options.causal = true;
        Call call(c);
        const std::int64_t last = c.used_k[0] - 1;  // the last query alone sees it
        // A NaN in a V that a mask hides may reach rows of its tile: all rows see the other key.
        const auto [page, at] = call.cache_place(0, of_v ? 0 : last);
        Box& scale = of_v ? call.v_scale : call.k_scale;
        scale.set((page * c.heads_kv + 1) * c.page_size + at, nan_value);
        on_every_runner(c, [&](Runner& runner) {
          call.prepare(Pass::forward);
          runner.forward(call);
          for (std::int64_t n = 0; n < call.out.numel(); ++n) {
            const std::int64_t row = n / c.head_dim_v / c.heads_q;
            const bool row_sees = of_v ? row < seqlen_q : row == seqlen_q - 1;
            const bool sees = row_sees && n / c.head_dim_v % c.heads_q >= c.heads_q / 2;
            ASSERT_EQ(std::isnan(call.out.get(n)), sees) << n;
          }
        });
      }
    }
  }
}

TEST(Contract18_RowScales, PagesGiveTheBitsOfContiguousKeys) {
  for (const DType keys : eight_bits) {
    for (const std::int64_t seqlen_q : {1, 3, 70}) {
      Case dense = plain_case(DType::bf16);
      dense.key_dtype = keys;
      dense.scales = by_row;
      dense.batch = 1;
      dense.seqlen_q = seqlen_q;
      dense.seqlen_k = 304;
      dense.used_k = {299};
      dense.leftpad = {0};  // a cache, which no runner copies first
      dense.options.causal = true;
      expect_bits_of_pages(dense, {1, 16, 19});
    }
  }
}

/// With a split size: a decoding step alone, and beside the prefill of another request of 129 tokens.
TEST(Contract16_RowScales, ARequestDoesNotNoticeAPrefillBesideIt) {
  Case both = row_scale_case(DType::e4m3, 16);
  both.options.split_size = 256;
  both.batch = 2;
  both.packed_q = true;
  both.lengths_q = {1, 129};
  both.seqlen_k = 800;
  both.used_k = {755, 129};
  both.options.causal = true;
  Case alone = both;
  alone.batch = 1;
  alone.lengths_q = {1};
  alone.used_k = {755};
  Call pair(both), single(alone);
  copy(pair.q, single.q, 0, 0, single.q.numel());
  for (std::int64_t i = 0; i * both.page_size < alone.used_k[0]; ++i) {
    single.page_table.set(i, static_cast<double>(i));
    const auto page = static_cast<std::int64_t>(pair.page_table.get(i));
    const std::int64_t inner = both.page_size * both.heads_kv;
    for (const auto& [from, to] : {std::pair{&pair.k, &single.k}, {&pair.v, &single.v}}) {
      copy(*from, *to, page * inner * both.head_dim_qk, i * inner * both.head_dim_qk,
           inner * both.head_dim_qk);
    }
    copy(pair.k_scale, single.k_scale, page * inner, i * inner, inner);
    copy(pair.v_scale, single.v_scale, page * inner, i * inner, inner);
  }
  on_every_runner(both, [&](Runner& runner) {
    for (const int threads : {1, 3}) {
      pair.spec.threads = threads;
      const Results together = run(runner, pair, false);
      const Results apart = run(runner, single, false);
      const auto row = static_cast<std::ptrdiff_t>(apart[0].size());
      const std::vector<std::byte> first(together[0].begin(), together[0].begin() + row);
      EXPECT_TRUE(!runner.keeps_bits_beside_others(both) || same_bits(first, apart[0])) << threads;
    }
  });
}

}  // namespace
}  // namespace tandem::harness
