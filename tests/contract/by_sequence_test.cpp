// Contract line 4 for batches whose sequences have masks of their own, and line 20 for results in f32 of
// 16-bit inputs, as parts that are merged later want them.
#include <cmath>

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

const std::vector<DType> sixteen_bits{DType::f16, DType::bf16};

/// Three sequences, causal or not: of equal lengths, packed, or in pages.
enum class Layout3 { dense, packed, pages };
Case three(DType dtype, Layout3 layout, std::int64_t seqlen_q) {
  Case c = with(plain_case(dtype), {.batch = 3, .seqlen_q = seqlen_q});
  c.causal_by_sequence = {1, 0, 1};
  if (layout == Layout3::packed) {
    change(c, {.packed = true, .lengths_q = {seqlen_q, seqlen_q / 2, 1}});
    change(c, {.lengths_k = {100, seqlen_q / 2, 33}, .slack_q = 3, .slack_k = 3});
  }
  if (layout == Layout3::pages) {
    change(c, {.seqlen_k = 144, .used_k = {141, 16, 97}, .page_size = 16});
  }
  return c;
}

constexpr Layout3 layouts[] = {Layout3::dense, Layout3::packed, Layout3::pages};

/// Head dimensions, group, window, softcap, split size and sink.
void draw_features(Case& c, Random& random) {
  c.head_dim_qk = 8 * random.between(1, 32);
  c.head_dim_v = 8 * random.between(1, 32);
  if (random.chance(0.5)) c.head_dim_qk = c.head_dim_v = 64;
  c.heads_q = c.heads_kv * random.pick<std::int64_t>({1, 3, 8});
  c.options.window_left = random.between(-1, 40);
  c.options.softcap = random.chance(0.3) ? 15.0F : 0.0F;
  c.options.split_size = random.chance(0.3) ? 128 : 0;
  c.sink = random.chance(0.5);
}

TEST(Contract04_BySequence, CausalAndNotInOneCall) {
  for (const DType dtype : float_dtypes) {
    for (const Layout3 layout : layouts) {
      for (const std::int64_t seqlen_q : {1, 5, 70}) {
        Case c = three(dtype, layout, seqlen_q);
        run_everywhere(c);
        c.causal_by_sequence = {0, 1, 0};
        run_everywhere(c);
      }
    }
  }
}

/// A causal sequence's right bound is 0, another's stays; the left bound is that of both.
TEST(Contract04_BySequence, WithWindows) {
  for (const DType dtype : float_dtypes) {
    for (const Layout3 layout : layouts) {
      Case c = with(three(dtype, layout, 40), {.window_left = 20});
      run_everywhere(c);
      c.options.window_right = 9;
      run_everywhere(c);
      c.options.window_left = -1;
      run_everywhere(c);
    }
  }
}

/// Any number but 0 says yes, also one whose lower 32 bits are 0.
TEST(Contract04_BySequence, AnyNumberButZeroIsCausal) {
  for (const DType dtype : float_dtypes) {
    Case c = three(dtype, Layout3::pages, 5);
    c.causal_by_sequence = {-1, 0, 7};
    run_everywhere(c);
    c.metadata = DType::i64;
    c.causal_by_sequence = {std::int64_t{1} << 40, 0, -(std::int64_t{1} << 40)};
    run_everywhere(c);
  }
}

/// More queries than keys: a causal sequence's first queries see none.
TEST(Contract04_BySequence, QueriesThatSeeNoKey) {
  for (const DType dtype : float_dtypes) {
    for (const bool sink : {false, true}) {
      Case c = with(three(dtype, Layout3::pages, 70), {.used_k = {30, 30, 0}});
      c.causal_by_sequence = {1, 0, 1};
      c.sink = sink;
      run_everywhere(c);
    }
  }
}

TEST(Contract04_BySequence, WithEveryFeature) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    Case c = three(random.pick({DType::f32, DType::bf16, DType::f16}), layouts[seed % 3],
                   random.pick<std::int64_t>({1, 3, 20, 66}));
    c.seed = seed;
    for (std::int64_t& flag : c.causal_by_sequence) flag = random.between(0, 1);
    draw_features(c, random);
    c.metadata = random.pick({DType::i32, DType::i64});
    c.f32_out = c.dtype != DType::f32 && random.chance(0.5);
    if (c.page_size > 0 && random.chance(0.3)) {
      change(c, {.key_dtype = DType::e4m3, .head_dim = 64});
    }
    run_everywhere(c);
  }
}

/// With a split size a sequence of such a batch has the bits that a call with its own mask gives.
TEST(Contract16_BySequence, BitsOfACallWithItsOwnMask) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t seqlen_q : {4, 70}) {
      Case c = with(three(dtype, Layout3::pages, seqlen_q), {.seqlen_k = 320, .used_k = {300, 129, 256}});
      c.options.split_size = 128;
      on_every_runner(c, [&](Runner& runner) {
        Call both(c);
        run(runner, both, false);
        for (const bool causal : {false, true}) {
          Case one = c;
          one.causal_by_sequence.clear();
          one.options.causal = causal;
          Call own(one);
          for (const auto& [from, to] : {std::pair{&both.q, &own.q}, {&both.k, &own.k}, {&both.v, &own.v}}) {
            copy(*from, *to);
          }
          copy(both.page_table, own.page_table);
          run(runner, own, false);
          const std::int64_t width = seqlen_q * c.heads_q * c.head_dim_v;
          for (std::int64_t b = 0; b < c.batch; ++b) {
            if ((c.causal_by_sequence[static_cast<std::size_t>(b)] != 0) != causal) continue;
            EXPECT_TRUE(same_bits(part(both.out, b * width, width), part(own.out, b * width, width))) << b;
          }
        }
      });
    }
  }
}

TEST(Contract20_OutInF32, WithEveryFeature) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed + 100);
    Case c = three(random.pick({DType::bf16, DType::f16}), layouts[seed % 3],
                   random.pick<std::int64_t>({1, 3, 20, 66}));
    change(c, {.f32_out = true, .seed = seed});
    c.causal_by_sequence.clear();
    c.options.causal = random.chance(0.5);
    draw_features(c, random);
    c.out = random_layout(random, c.packed_q ? 3 : 4, false);
    run_everywhere(c);
  }
}

/// That f32 was written, and not 16 bits in f32: of random numbers hardly one in 2^13 is a 16-bit one.
TEST(Contract20_OutInF32, HasMoreDigitsThanTheInputs) {
  for (const DType dtype : sixteen_bits) {
    for (const auto& [seqlen_q, split_size] : {std::pair{1, 0}, {5, 0}, {70, 0}, {5, 128}, {70, 128}}) {
      for (const Layout3 layout : {Layout3::dense, Layout3::pages}) {
        Case c = three(dtype, layout, seqlen_q);
        c.causal_by_sequence.clear();
        change(c, {.split_size = split_size, .f32_out = true});
        Call call(c);
        run_everywhere(call);
        on_every_runner(c, [&](Runner& runner) {
          call.prepare(Pass::forward);
          runner.forward(call);
          Box rounded(dtype, {call.out.numel()}, {}, false);
          std::int64_t of_sixteen_bits = 0;
          for (std::int64_t n = 0; n < call.out.numel(); ++n) {
            rounded.set(n, call.out.get(n));
            of_sixteen_bits += rounded.get(n) == call.out.get(n) ? 1 : 0;
          }
          EXPECT_LT(of_sixteen_bits, call.out.numel() / 50);
        });
      }
    }
  }
}

}  // namespace
}  // namespace tandem::harness
