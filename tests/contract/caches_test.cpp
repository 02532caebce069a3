// Contract lines 17 and 18: keys and values in pages, in entries chosen by index, behind padding.
#include <cmath>

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

TEST(Contract17_Caches, PagesOfAnySize) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t page_size : {1, 2, 3, 7, 16, 32, 48, 64, 100, 128, 256}) {
      for (const bool causal : {false, true}) {
        Case c = with(cache_case(dtype, page_size), {.causal = causal, .check = page_size % 2 == 0});
        for (const std::int64_t seqlen_q : {1, 5, 70}) {
          c.seqlen_q = seqlen_q;
          run_everywhere(c);
        }
      }
    }
  }
}

TEST(Contract17_Caches, PagesWithEveryFeature) {
  for (const std::uint64_t seed : {1, 2, 3, 4, 5, 6, 7, 8}) {
    Random random(seed);
    Case c = cache_case(random.pick({DType::f32, DType::bf16, DType::f16}),
                        random.pick<std::int64_t>({1, 16, 24, 64}));
    c.seed = seed;
    take_random_features(c, random);
    run_everywhere(c);
  }
}

TEST(Contract17_Caches, EntriesChosenByIndexAndPaddingOnTheLeft) {
  for (const DType dtype : float_dtypes) {
    Case c = with(plain_case(dtype), {.batch = 3});
    c.cache_batch = 5;
    c.cache_index = {4, 0, 4};
    change(c, {.used_k = {139, 17, 139}, .causal = true, .check = true});
    run_everywhere(c);
    c.leftpad = {0, 17, 60};
    run_everywhere(c);
    c.cache_index.clear();
    run_everywhere(c);
  }
}

const std::vector<DType> eight_bits{DType::e4m3, DType::s8};

TEST(Contract17_Caches, EightBitsInPagesOfAnySize) {
  for (const DType keys : eight_bits) {
    for (const DType dtype : float_dtypes) {
      for (const std::int64_t page_size : {1, 3, 16, 100}) {
        Case c = with(cache_case(dtype, page_size), {.key_dtype = keys, .causal = page_size != 3});
        change(c, {.check = page_size == 16, .scales = page_size == 1 ? 1 : 2});
        for (const std::int64_t seqlen_q : {1, 5, 70}) {
          c.seqlen_q = seqlen_q;
          run_everywhere(c);
        }
      }
    }
  }
}

/// From seed 11 on strides are multiples of 16 bytes, as TMA takes them.
TEST(Contract17_Caches, EightBitsWithEveryFeature) {
  for (const std::uint64_t seed : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18}) {
    Random random(seed);
    Case c = cache_case(random.pick({DType::f32, DType::bf16, DType::f16}),
                        random.pick<std::int64_t>({1, 16, 24, 64}));
    c.seed = seed;
    c.key_dtype = random.pick({DType::e4m3, DType::s8});
    c.scales = c.key_dtype == DType::s8 ? 2 : static_cast<int>(random.between(0, 2));
    take_random_features(c, random, seed > 10);
    if (seed > 10) c.dtype = DType::bf16;
    run_everywhere(c);
  }
}

TEST(Contract17_Caches, EightBitsInEntriesChosenByIndex) {
  for (const DType keys : eight_bits) {
    Case c = with(plain_case(DType::bf16), {.key_dtype = keys, .batch = 3, .scales = 2});
    c.cache_batch = 5;
    c.cache_index = {4, 0, 4};
    change(c, {.used_k = {139, 17, 139}, .leftpad = {0, 17, 60}, .causal = true});
    run_everywhere(c);
  }
}

/// A NaN in a visible key of 8 bits reaches the rows that see it, and no other.
TEST(Contract17_Caches, EightBitsKeepNaN) {
  for (const std::int64_t seqlen_q : {2, 70}) {
    Case c = with(cache_case(DType::bf16, 16), {.key_dtype = DType::e4m3, .seqlen_q = seqlen_q});
    c.options.causal = true;
    Call call(c);
    const auto [page, at] = call.cache_place(0, c.used_k[0] - 1);  // the last query alone sees it
    call.k.set(((page * c.page_size + at) * c.heads_kv + 1) * c.head_dim_qk + 5, std::nan(""));
    on_every_runner(c, [&](Runner& runner) {
      call.prepare(Pass::forward);
      runner.forward(call);
      for (std::int64_t n = 0; n < call.out.numel(); ++n) {
        const std::int64_t row = n / c.head_dim_v / c.heads_q;
        const bool sees = row == seqlen_q - 1 && n / c.head_dim_v % c.heads_q >= c.heads_q / 2;
        ASSERT_EQ(std::isnan(call.out.get(n)), sees) << n;
      }
    });
  }
}

/// Lengths whose last rows are around the edge of a page.
TEST(Contract17_Caches, PrefixesAroundTheEdgesOfPages) {
  for (const std::int64_t length : {1, 14, 15, 16, 17, 31, 32, 33, 47, 128, 129}) {
    for (const std::int64_t seqlen_q : {1, 129}) {
      Case c = with(cache_case(DType::bf16, 16), {.seqlen_q = seqlen_q, .used_k = {length, length - 1, 141}});
      c.options.causal = true;
      run_everywhere(c);
      c.key_dtype = DType::e4m3;
      run_everywhere(c);
    }
  }
}

/// Pages that fall and rise along a sequence, one of them twice, shared with another sequence.
TEST(Contract17_Caches, PagesThatRepeatAndAreShared) {
  for (const bool eight_bit : {false, true}) {
    for (const std::int64_t seqlen_q : {1, 70}) {
      Case c = cache_case(DType::bf16, 16);
      if (eight_bit) c.key_dtype = DType::s8, c.scales = 1;
      change(c, {.batch = 2, .seqlen_q = seqlen_q, .used_k = {112, 80}});
      Call call(c);
      const std::vector<double> first{9, 3, 8, 3, 0, 7, 1};
      const std::vector<double> second{9, 3, 2, 0, 8};
      for (std::size_t n = 0; n < first.size(); ++n) call.page_table.set(static_cast<int>(n), first[n]);
      for (std::size_t n = 0; n < second.size(); ++n) {
        call.page_table.set(c.pages_per_sequence() + static_cast<int>(n), second[n]);
      }
      Random random(5);
      for (Box* box : {&call.k, &call.v}) {
        for (std::int64_t n = 0; n < box->numel(); ++n) box->set(n, std::round(4.0 * random.normal()) / 4.0);
      }
      run_everywhere(call);
    }
  }
}

/// Gives a third of the entries of the page table numbers of no page.
void name_no_page(Call& call, Random& random) {
  const auto pages = static_cast<double>(call.k.view().shape[0]);
  for (std::int64_t n = 0; n < call.page_table.numel(); ++n) {
    if (random.chance(2.0 / 3)) continue;
    call.page_table.set(n, random.pick({-1.0, pages, 2147483647.0, -2147483648.0}));
  }
}

/// Rows in use that the page table places in no page are zeros, in K, in V and under their scales.
TEST(Contract17_Caches, PagesThatDoNotExistAreZeros) {
  for (const DType dtype : float_dtypes) {
    for (const DType keys : {dtype, DType::e4m3, DType::s8}) {
      for (const std::int64_t page_size : {1, 7, 16, 64}) {
        Random random(static_cast<std::uint64_t>(page_size));
        Case c = cache_case(dtype, page_size);
        if (keys != dtype) c.key_dtype = keys, c.scales = page_size == 7 ? 1 : page_size == 16 ? 2 : 3;
        if (page_size == 7) c.leftpad = {7, 0, 30};
        c.options.causal = page_size != 64;
        for (const std::int64_t seqlen_q : {1, 5, 70}) {
          change(c, {.seqlen_q = seqlen_q, .metadata = seqlen_q == 1 ? DType::i64 : DType::i32});
          c.options.split_size = seqlen_q == 5 ? 128 : 0;
          Call call(c);
          name_no_page(call, random);
          run_everywhere(call);
        }
      }
    }
  }
}

/// Of many heads that lie between the rows of a page, and with every other feature.
TEST(Contract17_Caches, PagesThatDoNotExistWithEveryFeature) {
  for (const std::uint64_t seed : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}) {
    Random random(seed);
    Case c = cache_case(random.pick({DType::f32, DType::bf16, DType::f16}),
                        random.pick<std::int64_t>({1, 16, 24, 64}));
    c.seed = seed;
    c.heads_kv = random.pick<std::int64_t>({2, 5, 8});
    take_random_features(c, random, seed > 5);
    if (random.chance(0.5)) c.score_function = "sub(s, mul(0.1, real(k)))";
    Call call(c);
    name_no_page(call, random);
    run_everywhere(call);
  }
}

/// Logits so far above those of the keys behind that they are computed anew, where a page among them is not.
TEST(Contract17_Caches, PagesThatDoNotExistBesideFarLogits) {
  for (const std::int64_t seqlen_q : {1, 40, 70}) {
    Case c = with(cache_case(DType::bf16, 16), {.batch = 1, .seqlen_q = seqlen_q, .seqlen_k = 512});
    c.used_k = {512};
    Call call(c);
    for (Box* box : {&call.q, &call.k}) {
      for (std::int64_t n = 0; n < box->numel(); ++n) box->set(n, 1.0);
    }
    // Logits are 8, and those of the 128 keys at the end 1600 less.
    const std::int64_t inner = c.heads_kv * c.head_dim_qk;
    for (std::int64_t row = 384; row < 512; ++row) {
      const auto [page, at] = call.cache_place(0, row);
      for (std::int64_t n = 0; n < inner; ++n) call.k.set((page * c.page_size + at) * inner + n, -200.0);
    }
    for (const std::int64_t entry : {3, 9, 20, 30}) call.page_table.set(entry, -1.0);
    run_everywhere(call);
  }
}

TEST(Contract18_Caches, PagesGiveTheBitsOfContiguousKeys) {
  for (const DType dtype : float_dtypes) expect_bits_of_pages(plain_case(dtype), 515, {1, 8, 13, 104});
}

TEST(Contract18_Caches, EightBitPagesGiveTheBitsOfContiguousOnes) {
  for (const DType keys : eight_bits) {
    expect_bits_of_pages(with(plain_case(DType::bf16), {.key_dtype = keys, .scales = 2}), 299, {1, 16, 19});
  }
}

TEST(Contract18_Caches, ARequestDoesNotNoticeAPrefillBesideIt) {
  for (const auto& [eight_bit, split_size] : {std::pair{false, 0}, {true, 0}, {false, 256}, {true, 256}}) {
    Case both = cache_case(DType::bf16, 16);
    if (eight_bit) both.key_dtype = DType::e4m3;
    both.options.split_size = split_size;
    expect_bits_beside_a_prefill(both, 1555);
  }
}

/// 32,768 pages of a sequence, in a cache of more elements than 32 bits count: entries of the table and
/// offsets of pages need 64 bits.
TEST(Contract12_Caches, ThirtyTwoThousandPagesOfALargeCache) {
  Case c = with({}, {.dtype = DType::bf16, .heads = 1, .seqlen_q = 1, .seqlen_k = 32768, .used_k = {32768}});
  c.page_size = 1;
  c.k.pad = c.v.pad = 65536;
  c.k.sparse = c.v.sparse = true;
  run_everywhere(c);
}

/// Whatever the table, the lengths, the padding and the index hold: nothing is read or written out of bounds.
TEST(Contract12_Caches, NoAccessOutOfBoundsWhateverTheyContain) {
  const std::vector<double> nonsense{-1, 0, 1, 7, 100, 2147483647, -2147483648.0};
  for (const DType metadata : {DType::i32, DType::i64}) {
    for (const std::uint64_t seed : {1, 2, 3, 4, 5, 6}) {
      Case c = with(cache_case(DType::bf16, 16), {.metadata = metadata, .leftpad = {1, 2, 3}});
      if (seed % 2 == 0) {
        c.page_size = 0;
        c.cache_index = {0, 1, 2};
        c.cache_batch = 3;
      }
      c.k.ends_at_guard = c.v.ends_at_guard = c.out.ends_at_guard = true;
      Call call(c);
      Random random(seed);
      for (Box* box : {&call.k, &call.v}) fill(*box, random, 1.0);
      for (Box* box : {&call.page_table, &call.leftpad_k, &call.cache_batch_idx, &call.seqused_k}) {
        for (std::int64_t n = 0; box->given() && n < box->numel(); ++n) {
          box->set(n, nonsense[static_cast<std::size_t>(random.between(0, 6))]);
        }
      }
      on_every_runner(c, [&](Runner& runner) {
        call.prepare(Pass::forward);
        runner.forward(call);
        EXPECT_EQ(call.out.changed_outside(), "");
        for (const double value : call.out.values()) ASSERT_FALSE(std::isnan(value));
      });
    }
  }
}

}  // namespace
}  // namespace tandem::harness
