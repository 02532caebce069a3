// The choice of cases by pairs of features: nothing that all cases try together is left out, and what tells
// cases apart for a kernel is among the features.
#include "harness/pairwise.hpp"

#include <gtest/gtest.h>

#include <set>

namespace tandem::harness {
namespace {

constexpr std::uint64_t many = 2000;

std::vector<std::uint64_t> chosen() {
  PairwiseChoice choice;
  std::vector<std::uint64_t> seeds;
  for (std::uint64_t seed = 0; seed < many; ++seed) {
    if (choice.take(random_case(seed, 300))) seeds.push_back(seed);
  }
  return seeds;
}

TEST(PairwiseChoice, HasEveryPairThatAllCasesHave) {
  PairwiseCover all, some;
  for (std::uint64_t seed = 0; seed < many; ++seed) all.add(features_of(random_case(seed, 300)));
  const std::vector<std::uint64_t> seeds = chosen();
  for (const std::uint64_t seed : seeds) some.add(features_of(random_case(seed, 300)));
  EXPECT_TRUE(some.missing(all).empty()) << some.missing(all).front();
  EXPECT_EQ(some.pairs(), all.pairs());
  EXPECT_GT(all.pairs(), 2000U);
  EXPECT_LT(seeds.size(), many / 2);
  EXPECT_EQ(seeds, chosen()) << "another choice the second time";
}

/// Without any one of the cases that alone have a pair, that pair is missing.
TEST(PairwiseChoice, ACaseLeftOutIsNoticed) {
  const std::vector<std::uint64_t> seeds = chosen();
  PairwiseCover all, some;
  for (const std::uint64_t seed : seeds) all.add(features_of(random_case(seed, 300)));
  for (std::size_t n = 0; n + 1 < seeds.size(); ++n) some.add(features_of(random_case(seeds[n], 300)));
  EXPECT_FALSE(some.missing(all).empty());
}

TEST(PairwiseChoice, TakesACaseAgainButNotOneLikeIt) {
  PairwiseChoice choice;
  Case c;
  EXPECT_TRUE(choice.take(c));
  EXPECT_TRUE(choice.take(c));
  c.seed = 2;
  EXPECT_FALSE(choice.take(c));
  c.sink = true;
  EXPECT_TRUE(choice.take(c));
}

TEST(Features, TellApartWhatKernelsTreatDifferently) {
  const auto kinds = [](const Case& c) {
    std::vector<int> all;
    for (const Feature& feature : features_of(c)) all.push_back(feature.kind);
    return all;
  };
  std::vector<Case> cases(14);
  cases[1].dtype = DType::bf16;
  cases[2].options.causal = true;
  cases[3].options.window_left = 30;
  cases[4].options.window_right = 128;
  cases[5].packed_q = true;
  cases[5].lengths_q = {64};
  cases[6].used_k = {64};
  cases[7].heads_q = 2;
  cases[8].sink = true;
  cases[9].options.softcap = 2.0F;
  cases[10].head_dim_qk = 72;
  cases[11].head_dim_v = 128;
  cases[12].seqlen_k = 65;
  cases[13].q.pad = 3;
  std::set<std::vector<int>> different;
  for (const Case& c : cases) different.insert(kinds(c));
  EXPECT_EQ(different.size(), cases.size());
}

TEST(Features, LengthsAreToldApartModuloTheTile) {
  std::set<int> classes;
  for (const std::int64_t length : {0, 1, 30, 70, 127, 128, 129, 150, 250, 255, 256}) {
    classes.insert(length_class(length, 128));
  }
  EXPECT_EQ(classes.size(), 11U);
  EXPECT_EQ(length_class(129, 128), length_class(257, 128));
  EXPECT_EQ(length_class(200, 128), length_class(328, 128));
}

}  // namespace
}  // namespace tandem::harness
