// Contract line 22: queries that choose their keys. An index names a key of the query's sequence wherever it
// lies; what names none is hidden, and a key that is named twice counts twice. Keys that nobody names are NaN
// in all of these (harness/call_indices.cpp). On the CPU alone: no GPU kernel takes indices yet.
#include <cmath>

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

/// A third of the keys, about, of each query.
Case choosing(DType dtype) {
  return with(plain_case(dtype), {.seqlen_q = 21, .topk = 40});
}

void leave_padding(Case& c) {
  change(c, {.used_k = {139, 77}, .leftpad = {7, 20}});
}
void choose_entries(Case& c) {
  c.cache_batch = 5;
  c.cache_index = {4, 0};
  change(c, {.used_k = {139, 50}});
}

TEST(Contract22_Indices, WhereverKeysLie) {
  for (const DType dtype : float_dtypes) {
    for (const auto place :
         {+[](Case&) {}, pack_four_sequences, use_fewer_rows, read_pages, leave_padding, choose_entries}) {
      for (const bool by_head : {false, true}) {
        Case c = with(choosing(dtype), {.topk_by_head = by_head, .topk_lengths = !by_head});
        c.metadata = by_head ? DType::i64 : DType::i32;
        place(c);
        run_everywhere(c);
      }
    }
  }
}

/// The mask is by the numbers of keys, whatever their order among the indices.
TEST(Contract22_Indices, BesideEveryMask) {
  for (const DType dtype : float_dtypes) {
    for (const auto mask : {see_a_window, cap_a_window}) {
      Case c = choosing(dtype);
      mask(c);
      run_everywhere(c);
      c = with(choosing(dtype), {.seqlen_q = 75, .seqlen_k = 60, .causal = true, .sink = true, .dlse = true});
      run_everywhere(c);
    }
    Case c = with(choosing(dtype), {.seqlen_q = 75});
    c.causal_by_sequence = {1, 0};
    run_everywhere(c);
  }
}

/// Heads of a KV head from one to more than a tile of the backward pass has, and a cache of latent vectors.
TEST(Contract22_Indices, GroupsOfAnySize) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t group : {1, 8, 9, 33, 260}) {
      Case c = with(choosing(dtype), {.heads_q = group, .heads_kv = 1, .seqlen_q = 3, .sink = group == 9});
      run_everywhere(c);
      c = with(c, {.head_dim_qk = 72, .head_dim_v = 40, .v_in_k = true});
      run_everywhere(c);
    }
    Case latent =
        with(choosing(dtype), {.heads_q = 16, .heads_kv = 1, .head_dim_qk = 576, .head_dim_v = 512});
    run_everywhere(with(latent, {.seqlen_q = 2, .v_in_k = true}));
    run_everywhere(with(latent, {.heads_q = 8, .seqlen_q = 2, .used_k = {139, 60}, .page_size = 16}));
  }
}

/// Lists that are cut into splits, and runs of keys of the backward pass.
TEST(Contract22_Indices, LongLists) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t group : {2, 12}) {
      Case c = with(choosing(dtype), {.batch = 1, .heads_q = group, .heads_kv = 1, .seqlen_q = 2});
      run_everywhere(with(c, {.seqlen_k = 700, .topk = 5000, .topk_lengths = true, .threads = 3}));
    }
  }
}

TEST(Contract22_Indices, OneIndex) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t group : {1, 12}) {
      Case c = with(choosing(dtype), {.heads_q = 2 * group, .topk = 1, .sink = group == 12});
      run_everywhere(c);
      c.topk_lengths = true;
      run_everywhere(c);
    }
  }
}

TEST(Contract22_Indices, KeysOfEightBits) {
  for (const DType keys : {DType::e4m3, DType::s8}) {
    for (const DType dtype : float_dtypes) {
      for (const int scales : {1, 2, 3}) {
        Case c = with(choosing(dtype), {.key_dtype = keys, .scales = scales});
        if (scales < 3) run_everywhere(c);
        read_pages(c);
        run_everywhere(with(c, {.heads_q = 20}));
      }
    }
  }
}

TEST(Contract22_Indices, WithEveryFeature) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    Random random(seed);
    Case c = cache_case(random.pick({DType::f32, DType::bf16, DType::f16}), 16);
    if (random.chance(0.5)) {
      c = with(plain_case(c.dtype), {.batch = 3});
      c.unwanted = static_cast<unsigned>(random.between(0, 6));
      c.dlse = random.chance(0.5);
    }
    c.seed = seed;
    take_random_features(c, random);
    if (c.page_size == 0) c.leftpad.clear();
    change(c, {.topk = random.between(1, 90), .topk_by_head = random.chance(0.5)});
    c.topk_lengths = random.chance(0.5);
    c.gate = seed % 2 == 0;
    c.threads = static_cast<int>(random.between(1, 3));
    c.indices = random_layout(random, c.packed_q == c.topk_by_head ? 3 : c.packed_q ? 2 : 4, true);
    c.f32_out = c.page_size > 0 && c.dtype != DType::f32 && random.chance(0.5);
    run_everywhere(c);
  }
}

/// Gradients in f32, and added to what there is.
TEST(Contract22_Indices, GradientsInF32) {
  for (const DType dtype : float_dtypes) {
    Case c = with(choosing(dtype), {.threads = 2});
    c.f32_gradients = 3;
    run_everywhere(c);
    c.added = 3;
    run_everywhere(c);
  }
}

/// What a key counts that is named again and again is what so many keys alike count: the oracle of these
/// knows no indices.
TEST(Contract22_Indices, AKeyThatIsNamedTwiceCountsTwice) {
  for (const DType dtype : float_dtypes) {
    Case c = with(plain_case(dtype), {.batch = 1, .seqlen_q = 1, .seqlen_k = 20, .topk = 6});
    Call chosen(c);
    Call alike(with(c, {.seqlen_k = 5, .topk = 0}));
    constexpr std::int64_t numbers[] = {17, 5, 17, -1, 17, 2};
    for (const auto& [from, to] : {std::pair{&chosen.q, &alike.q}, {&chosen.dout, &alike.dout}})
      copy(*from, *to);
    std::int64_t row = 0;
    for (std::int64_t n = 0; n < 6; ++n) {
      chosen.indices.set(n, static_cast<double>(numbers[n]));
      if (numbers[n] < 0) continue;
      for (const auto& [from, to] : {std::pair{&chosen.k, &alike.k}, {&chosen.v, &alike.v}}) {
        const std::int64_t inner = c.heads_kv * c.head_dim_qk;
        copy(*from, *to, numbers[n] * inner, row * inner, inner);
      }
      ++row;
    }
    const Expected expected = expect(alike, Pass::forward);
    on_every_runner(c, [&](Runner& runner) {
      chosen.prepare(Pass::forward);
      runner.forward(chosen);
      EXPECT_TRUE(correct(chosen, Pass::forward, expected));
    });
    run_everywhere(chosen);
  }
}

/// A NaN in a key makes the rows NaN that name it, and those alone.
TEST(Contract22_Indices, ANaNReachesWhoNamesIt) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t group : {2, 12}) {
      Call call(with(choosing(dtype), {.heads_q = 2 * group}));
      call.k.set(50 * call.spec.heads_kv * call.spec.head_dim_qk, std::nan(""));
      run_everywhere(call);
    }
  }
}

/// No bit depends on threads, also where these wait for one another to add to dk and dv.
TEST(Contract15_Indices, BitsOfAnyNumberOfThreads) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t heads_kv : {1, 2}) {
      Call call(with(choosing(dtype), {.heads_q = 10, .heads_kv = heads_kv, .sink = true}));
      on_every_runner(call.spec, [&](Runner& runner) {
        call.spec.threads = 1;
        const Results alone = run(runner, call);
        for (const int threads : {2, 5}) {
          call.spec.threads = threads;
          EXPECT_TRUE(same_bits(alone, run(runner, call))) << threads;
        }
      });
    }
  }
}

/// And none on pages.
TEST(Contract18_Indices, BitsOfPages) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t heads_q : {4, 40}) {
      Case dense = with(choosing(dtype), {.batch = 1, .heads_q = heads_q, .used_k = {130}});
      Call call(dense);
      Case paged = with(dense, {.page_size = 16});
      Call cache(paged);
      copy_rows(call, cache);
      copy(call.indices, cache.indices);
      on_every_runner(paged, [&](Runner& runner) {
        EXPECT_TRUE(same_bits(run(runner, call, false), run(runner, cache, false)));
      });
    }
  }
}

}  // namespace
}  // namespace tandem::harness
