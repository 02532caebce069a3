// Every Config family of the forward kernel in the emulator, on random problems, against the oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "api/make_problem.hpp"
#include "forward/emulated_forward.hpp"
#include "harness/changes.hpp"
#include "harness/expect.hpp"
#include "ops/forward/plan.hpp"

namespace tandem::kernel_tests {
namespace {

const auto cases_a_family = static_cast<std::uint64_t>(harness::effort(6));

std::vector<EmulatedForward> all_of(std::initializer_list<std::span<const EmulatedForward>> families) {
  std::vector<EmulatedForward> all;
  for (const auto& family : families) all.insert(all.end(), family.begin(), family.end());
  return all;
}

std::vector<EmulatedForward> group_forwards() {
  std::vector<EmulatedForward> groups =
      all_of({heads_as_rows_forwards(), mixed_heads_as_rows_forwards(), row_scales_heads_as_rows_forwards(),
              decode_forwards(), decode_bytes_forwards(), wide_heads_forwards(), grouped_sm80_forwards()});
  std::erase_if(groups, [](const EmulatedForward& kernel) { return !kernel.config.tiling.heads_as_rows; });
  return groups;
}

std::vector<EmulatedForward> all_forwards() {
  return all_of({narrow_forwards(),
                 wide_forwards(),
                 widest_forwards(),
                 short_tile_forwards(),
                 maxima_forwards(),
                 gated_forwards(),
                 split_forwards(),
                 heads_as_rows_forwards(),
                 mixed_split_forwards(),
                 mixed_forwards(),
                 mixed_heads_as_rows_forwards(),
                 row_scales_split_forwards(),
                 row_scales_forwards(),
                 row_scales_heads_as_rows_forwards(),
                 decode_forwards(),
                 decode_bytes_forwards(),
                 wide_heads_forwards(),
                 pair_forwards(),
                 sm80_forwards(),
                 split_sm80_forwards(),
                 grouped_sm80_forwards()});
}

/// The kernel's results of a case, against the oracle's.
void expect_the_oracles_results(EmulatorRunner& runner, const harness::Case& spec) {
  SCOPED_TRACE(runner.name() + ": " + spec.describe());
  ASSERT_EQ(runner.refuses(spec), "");
  harness::Call call(spec);
  if (runner.finds_maxima()) call.ask_for_max_logits();
  const harness::Expected expected = harness::expect(call, Pass::forward);
  call.prepare(Pass::forward);
  try {
    runner.forward(call);
  } catch (const emulator::Fault& fault) {
    ADD_FAILURE() << fault.what();
    return;
  }
  EXPECT_TRUE(harness::correct(call, Pass::forward, expected));
}

class EmulatedForwardTest : public ::testing::TestWithParam<EmulatedForward> {};

TEST_P(EmulatedForwardTest, RandomProblemsMatchTheOracle) {
  EmulatorRunner runner(GetParam());
  for (std::uint64_t seed = 0; seed < cases_a_family; ++seed) {
    runner.seed = seed;
    runner.split_blocks = seed % 2 == 0 ? 5 : 40;
    expect_the_oracles_results(runner, random_forward_case(seed, GetParam().config));
  }
}

/// Random problems rarely have the widest heads that a Config can take, and so leave its last registers
/// empty.
TEST_P(EmulatedForwardTest, TheWidestHeadsMatchTheOracle) {
  EmulatorRunner runner(GetParam());
  harness::Case spec = random_forward_case(1, GetParam().config);
  spec.head_dim_qk = GetParam().config.tiling.head_dim_qk;
  spec.head_dim_v = GetParam().config.tiling.head_dim_v;
  expect_the_oracles_results(runner, spec);
}

/// The mask of a case, whether its Config has one of each sequence or one of all.
void set_causal(harness::Case& spec, bool causal) {
  if (spec.causal_by_sequence.empty()) {
    spec.options.causal = causal;
  } else {
    spec.causal_by_sequence.assign(static_cast<std::size_t>(spec.batch), causal ? 1 : 0);
  }
}

/// A case of one sequence and head, of these lengths.
harness::Case one_head(const EmulatedConfig& config, std::int64_t queries, std::int64_t keys) {
  harness::Case spec = random_forward_case(1, config);
  spec.packed_q = spec.packed_k = spec.sink = false;
  spec.used_q.clear();
  spec.used_k.clear();
  change(spec, {.batch = 1, .heads = 1, .seqlen_q = queries, .seqlen_k = keys});
  spec.q = spec.k = spec.v = spec.out = spec.gate_layout = {};
  spec.leftpad.clear();
  if (config.mask.by_sequence) spec.causal_by_sequence = {0};
  if (config.keys == KeySource::entries) {
    spec.cache_batch = 1;
    spec.cache_index = {0};
  }
  if (in_pages(config.keys)) {
    const std::int64_t padding = config.keys == KeySource::padded_pages ? 6 : 0;
    spec.page_size = keys % 2 == 0 ? 2 : 1;
    spec.seqlen_k += padding;
    spec.used_k = {spec.seqlen_k};
    if (padding > 0) spec.leftpad = {padding};
  }
  return spec;
}

class EmulatedCausalForwardTest : public EmulatedForwardTest {};

/// Blocks that the diagonal cuts are computed by halves, masked or skipped by where it cuts them.
TEST_P(EmulatedCausalForwardTest, DiagonalsBesideTheCornersOfBlocksMatchTheOracle) {
  const EmulatedConfig& config = GetParam().config;
  EmulatorRunner runner(GetParam());
  for (const auto& [queries, keys] : diagonals(config.tiling.block_m, config.tiling.block_n)) {
    harness::Case spec = one_head(config, queries, keys);
    set_causal(spec, true);
    spec.options.window_left = -1;
    expect_the_oracles_results(runner, spec);
    if (!config.mask.local) continue;
    spec.options.window_left = config.tiling.block_n / 2 + 1;
    expect_the_oracles_results(runner, spec);
  }
}

TEST_P(EmulatedForwardTest, OneQueryIsATileOfHeads) {
  EmulatorRunner runner(GetParam());
  if (GetParam().config.mask.local) GTEST_SKIP() << "such a call is not folded";
  harness::Case spec = one_head(GetParam().config, 1, 200);
  spec.used_k =
      GetParam().config.mask.varlen ? std::vector<std::int64_t>{130, 0} : std::vector<std::int64_t>{};
  if (GetParam().config.keys == KeySource::entries) spec.cache_index = {0, 0};
  if (GetParam().config.keys == KeySource::padded_pages) spec.leftpad = {6, 0};
  spec.batch = 2;
  if (!spec.causal_by_sequence.empty()) spec.causal_by_sequence = {0, 1};
  change(spec, {.heads_q = 6, .heads_kv = 2});
  harness::Call call(spec);
  Problem folded = make_problem(call.forward_args());
  fold_heads_into_rows(folded);
  ASSERT_EQ(folded.rows_q, 3);
  ASSERT_EQ(folded.heads_q, 2);
  expect_the_oracles_results(runner, spec);
}

/// CTAs in the middle of a tile merge what those before them have, before the last one merges the rest.
TEST_P(EmulatedForwardTest, ManyPartsOfATile) {
  const auto* const decode = std::get_if<DecodeConfig>(&GetParam().config.of_kernel);
  if (decode == nullptr || !decode->schedule.split) GTEST_SKIP() << "it merges no parts itself";
  EmulatorRunner runner(GetParam());
  runner.seed = 1;
  runner.split_blocks = 140;
  for (const std::int64_t blocks : {17, 39, 40, 55}) {
    const std::int64_t keys = 2 * blocks * decode->tiling.block_n - 5;
    harness::Case spec = one_head(GetParam().config, 1, (keys + 63) / 64 * 64);
    if (decode->mask.varlen) spec.used_k = {keys};
    if (decode->keys == KeySource::padded_pages) spec.leftpad = {0};
    spec.options.window_left = -1;
    expect_the_oracles_results(runner, spec);
  }
}

/// Heads as rows of tiles.
class EmulatedGroupTest : public EmulatedForwardTest {
 protected:
  /// Heads that share keys, and queries.
  using Groups = std::vector<std::array<std::int64_t, 2>>;

  /// Of masks that differ; `heads_kv` tells of each shape how many KV heads it has.
  template <typename HeadsKv>
  static void expect_groups(const Groups& shapes, const HeadsKv& heads_kv) {
    const EmulatedConfig& config = GetParam().config;
    EmulatorRunner runner(GetParam());
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const auto [group, queries] = shapes[i];
      harness::Case spec =
          one_head(config, queries, config.tiling.block_n + static_cast<std::int64_t>(i) - 2);
      spec.heads_kv = heads_kv(i);
      spec.heads_q = spec.heads_kv * group;
      set_causal(spec, i % 3 != 1);
      change(spec, {.window_left = config.mask.local && i % 2 == 0 ? queries + 20 : -1, .sink = i % 2 == 1});
      runner.seed = i;
      expect_the_oracles_results(runner, spec);
    }
  }
};

/// Groups that divide 64 rows, that leave some, and that take two tiles, of which the last has fewer heads;
/// one query, tiles that are full, and one query more. Keys end beside the edges of blocks.
TEST_P(EmulatedGroupTest, EveryRowIsItsQueryAndHead) {
  const Groups shapes{{8, 1},  {8, 8},  {8, 9},  {7, 9},  {7, 10}, {3, 5},
                      {48, 2}, {71, 1}, {71, 2}, {64, 3}, {5, 40}};
  expect_groups(shapes, [](std::size_t) { return std::int64_t{2}; });
}

/// A NaN in one query of one head makes that row NaN, and no other, wherever it is among the rows of a tile.
TEST_P(EmulatedGroupTest, ANaNInAQueryStaysInItsRow) {
  EmulatorRunner runner(GetParam());
  harness::Case spec = one_head(GetParam().config, 10, 150);
  spec.heads_q = 7;
  set_causal(spec, true);
  spec.options.window_left = -1;
  harness::Call call(spec);
  const std::int64_t row = 3 * 7 + 4;
  call.q.set(row * spec.head_dim_qk, std::nan(""));
  call.prepare(Pass::forward);
  runner.forward(call);
  for (std::int64_t r = 0; r < 70; ++r) {
    EXPECT_EQ(std::isnan(call.out.get(r * spec.head_dim_v)), r == row)
        << "query " << r / 7 << ", head " << r % 7;
  }
}

class EmulatedPairsTest : public EmulatedGroupTest {
 protected:
  /// A step of sequences with these keys, and room for `room` each, by 128 heads over one.
  static harness::Case step_of(const std::vector<std::int64_t>& keys, std::int64_t room) {
    const EmulatedConfig& config = GetParam().config;
    harness::Case spec = one_head(config, 1, room);
    change(spec, {.batch = static_cast<std::int64_t>(keys.size()), .heads_q = 128});
    spec.sink = true;  // of narrow heads they would else be rows of one head
    change(spec, {.used_k = keys, .window_left = -1});
    if (config.keys == KeySource::entries) {
      spec.cache_index.assign(keys.size(), 0);
      spec.used_k.assign(keys.size(), keys[0]);
    }
    if (!spec.leftpad.empty()) spec.leftpad.assign(keys.size(), 0);
    if (!spec.causal_by_sequence.empty()) spec.causal_by_sequence.assign(keys.size(), 0);
    return spec;
  }
};

/// Tiles that are full and that are not, of one query and of several, whose masks differ, of one KV head or
/// two with a pair or two each. Keys end beside the edges of blocks.
TEST_P(EmulatedPairsTest, EveryRowIsItsQueryAndHead) {
  const Groups shapes{{128, 1}, {128, 2}, {65, 1}, {40, 3}, {71, 1}, {250, 1}, {127, 2}};
  expect_groups(shapes, [](std::size_t i) { return std::int64_t{i % 2 == 0 ? 1 : 2}; });
}

/// One cluster for all tiles, several whose shares cut tiles, and one a tile; sequences without keys among
/// others.
TEST_P(EmulatedPairsTest, SharesOfEverySizeMatchTheOracle) {
  EmulatorRunner runner(GetParam());
  runner.seed = 3;
  for (const unsigned multiprocessors : {1U, 5U, 6U, 40U}) {
    runner.split_blocks = multiprocessors;
    expect_the_oracles_results(runner, step_of({690, 0, 310}, 700));
    expect_the_oracles_results(runner, step_of({0, 64, 1, 0}, 130));
    expect_the_oracles_results(runner, step_of({256, 256, 256, 256}, 256));
  }
}

/// Out and LSE of a case of one sequence.
std::vector<double> results_of(const EmulatedForward& kernel, const harness::Case& spec) {
  EmulatorRunner runner(kernel);
  EXPECT_EQ(runner.refuses(spec), "");
  harness::Call call(spec);
  call.prepare(Pass::forward);
  runner.forward(call);
  std::vector<double> numbers;
  for (std::int64_t i = 0; i < spec.seqlen_q * spec.heads_q * spec.head_dim_v; ++i)
    numbers.push_back(call.out.get(i));
  for (std::int64_t i = 0; i < spec.seqlen_q * spec.heads_q; ++i) numbers.push_back(call.lse.get(i));
  return numbers;
}

/// Which heads share a tile, and which tile, changes no bit of a call with a split size.
TEST(EmulatedGroup, HeadsAsRowsChangeNoBitOfACallWithASplitSize) {
  std::size_t compared = 0;
  for (const EmulatedForward& rows : group_forwards()) {
    for (const EmulatedForward& heads :
         all_of({split_forwards(), mixed_split_forwards(), mixed_forwards()})) {
      auto same = std::get<ForwardConfig>(heads.config.of_kernel);
      same.tiling.heads_as_rows = true;
      if (!same.schedule.invariant || rows.config.of_kernel != gpu::KernelConfig(same)) continue;
      for (const std::int64_t window : {-1, 70}) {
        harness::Case spec = one_head(rows.config, 6, 300);
        change(spec, {.heads_q = 7, .causal = true, .window_left = window, .split_size = 128});
        change(spec, {.sink = window > 0, .lse = true});
        EXPECT_EQ(results_of(rows, spec), results_of(heads, spec)) << rows.config.describe();
        ++compared;
      }
    }
  }
  EXPECT_GE(compared, 14U);
}

/// Nor of a call by the family sm80 without one, whose blocks have as many keys.
TEST(EmulatedGroup, HeadsAsRowsOfSm80ChangeNoBit) {
  std::size_t compared = 0;
  for (const EmulatedForward& rows : grouped_sm80_forwards()) {
    for (const EmulatedForward& tiles : all_of({sm80_forwards(), general_sm80_forwards()})) {
      auto same = std::get<Sm80ForwardConfig>(tiles.config.of_kernel);
      same.tiling.heads_as_rows = true;
      same.tiling.block_m = 64;
      if (same.schedule.invariant || rows.config.of_kernel != gpu::KernelConfig(same)) continue;
      harness::Case spec = one_head(rows.config, 30, 300);
      change(spec, {.heads_q = 2, .causal = true, .window_left = 250, .lse = true});
      EXPECT_EQ(results_of(rows, spec), results_of(tiles, spec)) << rows.config.describe();
      ++compared;
    }
  }
  EXPECT_GE(compared, 3U);
}

std::string name_of(const ::testing::TestParamInfo<EmulatedForward>& parameter) {
  std::string name = parameter.param.config.describe();
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == ' ' || c == '='; }, '_');
  return name;
}

std::vector<EmulatedForward> causal_forwards() {
  std::vector<EmulatedForward> some = all_forwards();
  std::erase_if(some, [](const EmulatedForward& kernel) {
    return !kernel.config.mask.causal || kernel.config.pairs;  // one head is no pair
  });
  return some;
}

INSTANTIATE_TEST_SUITE_P(Families, EmulatedGroupTest, ::testing::ValuesIn(group_forwards()), name_of);
INSTANTIATE_TEST_SUITE_P(Families, EmulatedPairsTest,
                         ::testing::ValuesIn(pair_forwards().begin(), pair_forwards().end()), name_of);
INSTANTIATE_TEST_SUITE_P(Families, EmulatedForwardTest, ::testing::ValuesIn(all_forwards()), name_of);
INSTANTIATE_TEST_SUITE_P(Families, EmulatedCausalForwardTest, ::testing::ValuesIn(causal_forwards()),
                         name_of);

}  // namespace
}  // namespace tandem::kernel_tests
