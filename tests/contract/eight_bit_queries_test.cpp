// Contract lines 7, 16, 17 and 18 of e4m3 queries on an e4m3 cache: the exact formula on values times scales.
#include <cmath>

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

/// cache_case of e4m3 queries, keys and values, with a scale for each sequence and KV head.
Case eight_bit_case(std::int64_t page_size) {
  return with(cache_case(DType::e4m3, page_size), {.out_dtype = DType::bf16, .scales = 2});
}

TEST(Contract17_Caches, EightBitQueriesInPagesOfAnySize) {
  for (const DType out : float_dtypes) {
    for (const std::int64_t page_size : {1, 3, 16, 100}) {
      for (const int scales : {0, 1, 2}) {
        Case c = with(eight_bit_case(page_size), {.out_dtype = out, .causal = page_size != 3});
        change(c, {.check = page_size == 16, .scales = scales});
        for (const std::int64_t seqlen_q : {1, 5, 70}) {
          c.seqlen_q = seqlen_q;
          run_everywhere(c);
        }
      }
    }
  }
}

/// From seed 13 on strides are multiples of 16 bytes, as TMA takes them, and no function hides keys.
TEST(Contract17_Caches, EightBitQueriesWithEveryFeature) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    Case c = with(eight_bit_case(random.pick<std::int64_t>({1, 16, 24, 64})), {.seed = seed});
    c.out_dtype = random.pick({DType::f32, DType::f16, DType::bf16});
    c.scales = static_cast<int>(random.between(0, 2));
    take_random_features(c, random, seed > 12);
    c.options.split_size = random.chance(0.3) ? 128 : 0;
    c.q = random_layout(random, c.packed_q ? 3 : 4, true);
    if (seed <= 12 && random.chance(0.3)) c.mask_function = "le(mod(k, 5), 3)";
    c.threads = static_cast<int>(random.between(1, 3));
    if (seed > 12) c.out_dtype = DType::bf16;
    run_everywhere(c);
  }
}

/// Scales go with the sequence, not with the entry of the cache that it reads.
TEST(Contract17_Caches, EightBitQueriesInEntriesChosenByIndex) {
  Case c = with(plain_case(DType::e4m3), {.batch = 3, .scales = 2});
  c.cache_batch = 5;
  c.cache_index = {4, 0, 4};
  change(c, {.used_k = {139, 17, 139}, .leftpad = {0, 17, 60}, .causal = true});
  for (const DType out : {DType::f32, DType::bf16}) {
    c.out_dtype = out;
    for (const std::int64_t seqlen_q : {1, 75}) {
      c.seqlen_q = seqlen_q;
      run_everywhere(c);
    }
  }
}

/// A NaN in a visible key reaches the rows that see it, and no other; so does one in a query.
TEST(Contract07_NaN, EightBitQueriesAndKeysKeepIt) {
  for (const std::int64_t seqlen_q : {2, 70}) {
    Case c = with(eight_bit_case(16), {.seqlen_q = seqlen_q, .causal = true});
    Call call(c);
    const auto [page, at] = call.cache_place(0, c.used_k[0] - 1);  // the last query alone sees it
    call.k.set(((page * c.page_size + at) * c.heads_kv + 1) * c.head_dim_qk + 5, std::nan(""));
    call.q.set(3, std::nan(""));  // of the first row and head
    on_every_runner(c, [&](Runner& runner) {
      call.prepare(Pass::forward);
      runner.forward(call);
      for (std::int64_t n = 0; n < call.out.numel(); ++n) {
        const std::int64_t row = n / c.head_dim_v / c.heads_q;
        const std::int64_t head = n / c.head_dim_v % c.heads_q;
        const bool sees = row == seqlen_q - 1 && head >= c.heads_q / 2;
        ASSERT_EQ(std::isnan(call.out.get(n)), sees || (row == 0 && head == 0)) << n;
      }
    });
  }
}

TEST(Contract18_Caches, EightBitQueriesGetTheBitsOfContiguousKeysFromPages) {
  Case dense = with(plain_case(DType::e4m3), {.out_dtype = DType::bf16, .scales = 2});
  expect_bits_of_pages(dense, 299, {1, 16, 19});
}

}  // namespace
}  // namespace tandem::harness
