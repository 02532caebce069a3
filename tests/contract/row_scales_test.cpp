// Contract lines 7, 16, 17 and 18 of caches in 8 bits with a scale for each row and KV head.
#include <cmath>
#include <limits>

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr int by_row = 3;

Case row_scale_case(DType keys, std::int64_t page_size, DType dtype = DType::bf16) {
  return with(cache_case(dtype, page_size), {.key_dtype = keys, .scales = by_row});
}

const std::vector<DType> eight_bits{DType::e4m3, DType::s8};

TEST(Contract17_RowScales, PagesOfAnySize) {
  for (const DType keys : eight_bits) {
    for (const DType dtype : float_dtypes) {
      for (const std::int64_t page_size : {1, 3, 16, 100}) {
        Case c = with(row_scale_case(keys, page_size, dtype), {.causal = page_size != 3});
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
    take_random_features(c, random, seed > 10);
    c.options.split_size = random.chance(0.3) ? 128 : 0;
    if (random.chance(0.2)) c.options.scale = random.pick({-0.125F, 0.0F});
    if (random.chance(0.5)) c.scale_layout.order = {0, 2, 1};
    if (random.chance(0.5)) c.scale_layout.pad = 5;
    c.threads = static_cast<int>(random.between(1, 3));
    if (seed > 10) {
      c.dtype = DType::bf16;
    } else if (seed % 3 == 0) {
      change(c, {.dtype = DType::e4m3, .out_dtype = DType::f32});
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
      Case c = with(plain_case(DType::bf16), {.key_dtype = keys, .batch = 3, .seqlen_q = seqlen_q});
      c.scales = by_row;
      c.cache_batch = 5;
      c.cache_index = {4, 0, 4};
      change(c, {.used_k = {139, 17, 139}, .causal = true});
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
      change(c, {.seqlen_q = seqlen_q, .scales = by_row});
      run_everywhere(c);
      c.used_k = {139, 77};
      run_everywhere(c);
    }
    Case c = with(plain_case(DType::f32), {.key_dtype = DType::e4m3, .scales = by_row});
    pack_four_sequences(c);
    run_everywhere(c);
  }
}

TEST(Contract17_RowScales, RowsThatSeeOneKey) {
  for (const DType keys : eight_bits) {
    for (const std::int64_t seqlen_q : {1, 129}) {
      Case c = with(row_scale_case(keys, 16), {.seqlen_q = seqlen_q, .used_k = {1, 16, 17}, .causal = true});
      run_everywhere(c);
      change(c, {.softcap = 2.0F, .window_left = 0});
      run_everywhere(c);
    }
  }
}

/// Scales of rows of zeros are 0; negative ones turn the signs.
TEST(Contract17_RowScales, ZeroAndNegativeScales) {
  for (const std::int64_t seqlen_q : {2, 70}) {
    Call call(with(row_scale_case(DType::e4m3, 16), {.seqlen_q = seqlen_q}));
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
        Case c = with(row_scale_case(keys, 16), {.seqlen_q = seqlen_q, .causal = true});
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
    Case dense = with(plain_case(DType::bf16), {.key_dtype = keys, .scales = by_row});
    dense.leftpad = {0};  // a cache, which no runner copies first
    expect_bits_of_pages(dense, 299, {1, 16, 19});
  }
}

TEST(Contract16_RowScales, ARequestDoesNotNoticeAPrefillBesideIt) {
  expect_bits_beside_a_prefill(with(row_scale_case(DType::e4m3, 16), {.split_size = 256}), 755);
}

}  // namespace
}  // namespace tandem::harness
