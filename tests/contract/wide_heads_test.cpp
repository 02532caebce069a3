// Contract line 11 for heads of more than 256 dimensions, which the CPU alone has: what latent attention
// (MLA) asks for, 576 dimensions of q and k and 512 of v, where v is the first columns of k.
#include <set>

#include "contract/contract.hpp"
#include "harness/pairwise.hpp"

namespace tandem::harness {
namespace {

struct Shape {
  std::int64_t head_dim_qk, head_dim_v;
};

/// Keys in a cache: in pages, in entries chosen by index, or at their places; padded on the left or not.
void make_cache(Random& random, Case& c) {
  c.packed_k = false;
  c.lengths_k.clear();
  c.slack_k = 0;
  c.k = random_layout(random, 4, false);
  c.v = random_layout(random, 4, false);
  c.used_k.clear();
  for (std::int64_t b = 0; b < c.batch; ++b) c.used_k.push_back(random.between(0, c.seqlen_k));
  const int kind = static_cast<int>(random.between(0, 2));
  if (kind == 0) c.page_size = random.pick<std::int64_t>({1, 16, 24, 64});
  if (kind == 1) {
    c.cache_batch = c.batch + 2;
    for (std::int64_t b = 0; b < c.batch; ++b) c.cache_index.push_back(random.between(0, c.batch + 1));
    c.used_k.assign(c.used_k.size(), c.used_k[0]);  // two sequences may have one entry
  }
  if (kind == 2 || random.chance(0.5)) {
    const std::int64_t padding = random.between(0, *std::ranges::min_element(c.used_k));
    c.leftpad.assign(c.used_k.size(), padding);
  }
  if (random.chance(0.4)) {
    c.key_dtype = random.pick({DType::e4m3, DType::s8});
    c.scales = c.key_dtype == DType::s8 ? 2 : static_cast<int>(random.between(0, 2));
  }
}

/// random_case with these head dimensions, half of the cases from a cache, and v in k or not.
Case wide_case(std::uint64_t seed, const Shape& shape) {
  Random random(seed + 1);
  Case c = with(random_case(seed, 90), {.head_dim_qk = shape.head_dim_qk, .head_dim_v = shape.head_dim_v});
  c.batch = std::min<std::int64_t>(c.batch, 2);  // the oracle's time
  for (std::vector<std::int64_t>* lengths : {&c.lengths_q, &c.lengths_k, &c.used_q, &c.used_k}) {
    if (!lengths->empty()) lengths->resize(static_cast<std::size_t>(c.batch));
  }
  // As in random_case: f32 results are right to 1e-5 for logits of some units.
  if (c.result_dtype() == DType::f32 && std::abs(c.options.scale.value_or(0.0F)) > 0.05F) {
    c.options.scale.reset();
  }
  if (c.dtype != DType::e4m3 && random.chance(0.5)) make_cache(random, c);
  c.v_in_k = c.scales == 0 && random.chance(0.4);
  return c;
}

/// The features of a case, and what the emulator's choice of cases does without.
std::vector<Feature> all_features_of(const Case& c) {
  std::vector<Feature> features = features_of(c);
  features.push_back({"dtype of keys", c.key_dtype ? static_cast<int>(*c.key_dtype) : -1});
  features.push_back({"v in k", c.v_in_k ? 1 : 0});
  features.push_back({"page size", static_cast<int>(c.page_size)});
  return features;
}

/// Every kind of every feature that random cases have meets the shape.
void expect_every_feature(const Shape& shape) {
  std::set<std::pair<std::size_t, int>> met;
  const int count = effort(300);
  for (int n = 0; n < count; ++n) {
    const Case c = wide_case(static_cast<std::uint64_t>(n), shape);
    const std::vector<Feature> features = all_features_of(c);
    bool some_new = false;
    for (std::size_t i = 0; i < features.size(); ++i) some_new |= met.insert({i, features[i].kind}).second;
    if (some_new) run_everywhere(c);
  }
}
TEST(Contract11_WideHeads, EveryFeatureWith576And512) {
  expect_every_feature({576, 512});
}
TEST(Contract11_WideHeads, EveryFeatureWith320And256) {
  expect_every_feature({320, 256});
}
TEST(Contract11_WideHeads, EveryFeatureWith512) {
  expect_every_feature({512, 512});
}
TEST(Contract11_WideHeads, EveryFeatureWith264) {
  expect_every_feature({264, 264});
}

/// A step of decoding and a prefill out of one cache of latent vectors, the query heads of one kv head.
TEST(Contract11_WideHeads, ValuesThatAreColumnsOfTheKeys) {
  for (const DType dtype : float_dtypes) {
    for (const auto& [heads, seqlen_q] :
         {std::pair{4, 1}, {16, 1}, {16, 2}, {2, 40}, {40, 3}, {128, 1}, {128, 2}}) {
      for (const std::int64_t page_size : {0, 64}) {
        Case c = with(plain_case(dtype), {.heads_q = heads, .heads_kv = 1, .head_dim_qk = 576});
        change(c, {.head_dim_v = 512, .seqlen_q = seqlen_q, .seqlen_k = 256, .used_k = {219, 64}});
        if (heads == 40) {  // two tiles of twenty heads, few enough to emulate
          change(c, {.batch = 1, .used_k = {219}});
        }
        change(c, {.page_size = page_size, .v_in_k = true, .causal = true});
        run_everywhere(c);
      }
    }
  }
}

/// Values have the same bits in memory of their own and as columns of the keys.
TEST(Contract18_WideHeads, ColumnsOfTheKeysGiveTheBitsOfACopy) {
  for (const DType dtype : float_dtypes) {
    for (const bool eight_bit : {false, true}) {
      for (const std::int64_t seqlen_q : {1, 30}) {
        Case c = plain_case(dtype);
        if (eight_bit) c.key_dtype = DType::e4m3;
        change(c, {.heads_kv = 1, .head_dim_qk = 576, .head_dim_v = 512, .seqlen_q = seqlen_q});
        c.v_in_k = true;
        Call one(c);
        c.v_in_k = false;
        Call two(c);
        copy(one.q, two.q);
        copy(one.k, two.k);
        copy(one.v, two.v);
        on_every_runner(c, [&](Runner& runner) {
          EXPECT_TRUE(same_bits(run(runner, one, false), run(runner, two, false)));
        });
      }
    }
  }
}

TEST(Contract11_WideHeads, UpTo1024AndOthersPadded) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::e4m3}) {
    for (const auto& [d_qk, d_v] : {std::pair{1024, 1024}, {1024, 8}, {8, 1024}, {333, 511}}) {
      Case c = with(plain_case(dtype), {.batch = 1, .head_dim_qk = d_qk, .head_dim_v = d_v, .seqlen_q = 20});
      change(c, {.seqlen_k = 150, .causal = true});
      run_everywhere(c);
      c.seqlen_q = 2;
      run_everywhere(c);
    }
  }
}

}  // namespace
}  // namespace tandem::harness
