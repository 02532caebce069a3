// Every Config family of the backward kernels in the emulator, on random problems, against the oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "backward/gradients.hpp"
#include "harness/changes.hpp"
#include "ops/backward/launch.hpp"
#include "tile/backward_tiles.cuh"

namespace tandem::kernel_tests {
namespace {

constexpr std::uint64_t cases_a_family = 3;

std::vector<EmulatedBackward> all_backwards() {
  std::vector<EmulatedBackward> all;
  for (const auto& family : {narrow_backwards(), wide_backwards(), widest_backwards(), sm80_backwards()}) {
    all.insert(all.end(), family.begin(), family.end());
  }
  return all;
}

std::vector<EmulatedBackward> backwards_with(bool Mask::*field) {
  std::vector<EmulatedBackward> some = all_backwards();
  std::erase_if(some, [&](const EmulatedBackward& kernels) { return !(kernels.config.mask.*field); });
  return some;
}

std::string name_of(const ::testing::TestParamInfo<EmulatedBackward>& parameter) {
  std::string name = parameter.param.config.describe();
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == ' ' || c == '='; }, '_');
  return name;
}

void expect_the_oracles_gradients(const EmulatedBackward& kernels, harness::Call& call,
                                  const EmulatedRun& run) {
  try {
    EXPECT_TRUE(gradients_are_right(kernels, call, run));
  } catch (const emulator::Fault& fault) {
    ADD_FAILURE() << fault.what();
  }
}

class EmulatedBackwardTest : public ::testing::TestWithParam<EmulatedBackward> {};

TEST_P(EmulatedBackwardTest, RandomProblemsMatchTheOracle) {
  const EmulatedBackwardConfig& config = GetParam().config;
  for (std::uint64_t seed = 0; seed < cases_a_family; ++seed) {
    const harness::Case spec = random_backward_case(seed, config);
    SCOPED_TRACE(config.describe() + ": " + spec.describe());
    harness::Call call(spec);
    // CTAs that wait for each other's semaphores must run at the same time.
    expect_the_oracles_gradients(GetParam(), call, {.seed = seed, .host_threads = 2});
  }
}

// Over few queries and keys roundings do not average out: with dS from a P of 16 bits, dk of these
// problems has more than the error that is allowed.
TEST(EmulatedBackward, FewQueriesAndKeysAreRoundedOnce) {
  const EmulatedBackward& kernels = narrow_backwards().front();
  ASSERT_TRUE(kernels.config.keeps_p);
  for (const std::uint64_t seed : {58, 100, 110}) {
    harness::Case spec = random_backward_case(seed, kernels.config);
    change(spec, {.batch = 3, .heads = 3, .head_dim = 64, .seqlen = 15});
    spec.options.scale.reset();
    SCOPED_TRACE(spec.describe());
    harness::Call call(spec);
    expect_the_oracles_gradients(kernels, call, {.seed = seed, .host_threads = 2});
  }
}

// From 20 query blocks on turned tiles take blocks without a mask in an order of their own.
TEST(EmulatedBackward, TurnedTilesTakeEachBlockForAllHeads) {
  int turned = 0;
  for (const EmulatedBackward& kernels : wide_backwards()) {
    if (!kernels.config.turned) continue;
    ++turned;
    harness::Case spec = random_backward_case(3, kernels.config);
    spec.sink = false;
    spec.used_q.clear();
    spec.used_k.clear();
    change(spec,
           {.batch = 1, .heads_q = 3, .heads_kv = 1, .head_dim = 128, .seqlen_q = 1400, .seqlen_k = 1390});
    if (kernels.config.mask.varlen)
      change(spec, {.packed = true, .lengths_q = {1400}, .lengths_k = {1390}, .slack_q = 0, .slack_k = 0});
    SCOPED_TRACE(spec.describe());
    harness::Call call(spec);
    expect_the_oracles_gradients(kernels, call, {.seed = 3, .host_threads = 2});
  }
  EXPECT_EQ(turned, 2);
}

// On a GPU the conversion takes SMs that the main kernel's last tiles leave free.
TEST_P(EmulatedBackwardTest, TheConversionWaitsForTheTilesOfItsHead) {
  const EmulatedBackwardConfig& config = GetParam().config;
  const harness::Case spec = random_backward_case(cases_a_family, config);
  SCOPED_TRACE(config.describe() + ": " + spec.describe());
  harness::Call call(spec);
  expect_the_oracles_gradients(GetParam(), call, {.seed = 1, .host_threads = 2, .convert_beside = true});
}

// The contract's tests say so of one Config; here every way of dividing the work, that keys are hidden in.
class EmulatedCausalBackwardTest : public EmulatedBackwardTest {};

TEST_P(EmulatedCausalBackwardTest, NaNInAKeyReachesTheQueriesThatSeeIt) {
  const EmulatedBackwardConfig& config = GetParam().config;
  harness::Case spec =
      random_backward_case(1, BackwardConfig{.tiling = {.element = config.tiling.element,
                                                        .head_dim_qk = config.tiling.head_dim_qk,
                                                        .head_dim_v = config.tiling.head_dim_v},
                                             .mask = {.causal = true}});
  change(spec, {.batch = 1, .heads = 1, .head_dim_qk = config.tiling.head_dim_qk, .seqlen = 150});
  spec.options.softcap = config.transform == ScoreTransform::softcap ? 2.0F : 0.0F;
  change(spec, {.causal = !config.mask.local, .window_left = config.mask.local ? 40 : -1});
  change(spec, {.window_right = config.mask.local ? 5 : -1, .deterministic = config.deterministic});
  SCOPED_TRACE(spec.describe());
  harness::Call call(spec);
  for (const std::int64_t key : {20, 93})
    call.k.set(key * spec.head_dim_qk + 3, std::numeric_limits<double>::quiet_NaN());
  expect_the_oracles_gradients(GetParam(), call, {.host_threads = 2});
}

/// Tiles that the diagonal cuts are masked, or skipped, by where it cuts them.
TEST_P(EmulatedCausalBackwardTest, DiagonalsBesideTheCornersOfTilesMatchTheOracle) {
  const EmulatedBackwardConfig& config = GetParam().config;
  for (const auto& [queries, keys] : diagonals(config.tiling.block_m, config.tile_keys)) {
    harness::Case spec = random_backward_case(1, config);
    spec.packed_q = spec.packed_k = spec.sink = false;
    spec.used_q.clear();
    spec.used_k.clear();
    change(spec, {.batch = 1, .heads = 1, .seqlen_q = queries, .seqlen_k = keys, .causal = true});
    change(spec, {.window_left = config.mask.local ? config.tile_keys / 2 : -1, .window_right = -1});
    spec.q = spec.k = spec.v = spec.out = spec.dout = spec.dq = spec.dk = spec.dv = spec.gate_layout = {};
    SCOPED_TRACE(config.describe() + ": " + spec.describe());
    harness::Call call(spec);
    expect_the_oracles_gradients(GetParam(), call, {.host_threads = 2});
  }
}

/// The most query blocks that a block of the grid meets, over what each would if all were even. `queries`: in
/// tiles of keys; as many as keys if 0.
template <BackwardConfig C>
double unevenness(int tiles, int heads, int sms, int queries = 0) {
  queries = queries == 0 ? tiles : queries;
  Problem p;
  p.batch = 1;
  p.heads_q = p.heads_kv = heads;
  p.rows_q = std::int64_t{queries} * C.tiling.block_n;
  p.rows_k = std::int64_t{tiles} * C.tiling.block_n;
  const bool pairs = gpu::causal_pairs(p, C.tile_keys());
  const int blocks = static_cast<int>(gpu::backward_grid(p, C, sms));
  double most = 0.0;
  double all = 0.0;
  for (int block = 0; block < blocks; ++block) {
    double mine = 0.0;
    for (int round = 0;; ++round) {
      const int number = BackwardTiles<C>::number_of(round, block, blocks, tiles, tiles * heads, pairs);
      if (number >= tiles * heads) break;
      const int n = BackwardTiles<C>::head_tile(number, tiles, tiles * heads, blocks, pairs).n;
      mine += std::min(queries, tiles - n);
    }
    most = std::max(most, mine);
    all += mine;
  }
  return most / (all / sms);
}

// 132 SMs, 16 times as many tiles: the last round is not full.
TEST(BackwardTiles, CausalWorkEvensOut) {
  constexpr BackwardConfig causal{.mask = {.causal = true}};
  constexpr BackwardConfig fixed{.mask = {.causal = true}, .schedule = {.deterministic = true}};
  for (const int tiles : {4, 8, 16, 32, 64, 128, 256}) {
    EXPECT_LT(unevenness<causal>(tiles, 2048 / tiles, 132), tiles < 32 ? 1.032 : 1.016)
        << tiles << " tiles a head";
    EXPECT_LT(unevenness<fixed>(tiles, 2048 / tiles, 132), 1.07)
        << tiles << " tiles a head, in a fixed order";
  }
}

// The last queries of a sequence, as a rank of context parallel has them, or a step of prefill: few keys are
// cut by the diagonal. With pairs the busiest CTA would have 1.13 to 1.55 of the mean.
TEST(BackwardTiles, WorkOfTheLastQueriesEvensOut) {
  constexpr BackwardConfig causal{.mask = {.causal = true}};
  for (const auto& [tiles, queries, heads, most] : {std::tuple{160, 64, 4, 1.05},
                                                    {256, 32, 4, 1.09},
                                                    {160, 64, 8, 1.05},
                                                    {256, 32, 2, 1.1},
                                                    {256, 128, 8, 1.03}}) {
    EXPECT_LT(unevenness<causal>(tiles, heads, 132, queries), most) << tiles << " tiles, " << queries;
  }
}

// However heads and rounds cut each other.
class BackwardTilesTest : public testing::TestWithParam<bool> {};

TEST_P(BackwardTilesTest, EachTileIsAssignedOnce) {
  constexpr BackwardConfig causal{.mask = {.causal = true}};
  using Tiles = BackwardTiles<causal>;
  const bool pairs = GetParam();
  for (const int blocks : {1, 2, 5, 132}) {
    for (const int tiles : {1, 2, 3, 7, 16, 61, 1000}) {
      for (const int heads : {1, 2, 3, 40}) {
        const int all = tiles * heads;
        std::vector<int> assigned(static_cast<std::size_t>(all));
        for (int block = 0; block < blocks; ++block) {
          for (int round = 0;; ++round) {
            const int number = Tiles::number_of(round, block, blocks, tiles, all, pairs);
            if (number >= all) break;
            const auto [head, n] = Tiles::head_tile(number, tiles, all, blocks, pairs);
            ASSERT_TRUE(head >= 0 && head < heads && n >= 0 && n < tiles) << head << ' ' << n;
            ++assigned[static_cast<std::size_t>(head * tiles + n)];
          }
        }
        EXPECT_EQ(std::count(assigned.begin(), assigned.end(), 1), all)
            << tiles << " tiles, " << heads << " heads, " << blocks << " blocks";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InPairsAndSingly, BackwardTilesTest, testing::Bool());

/// Simulates CTAs that each add to one query block of dQ in a step, if its semaphore lets the tile. Returns
/// the steps until all has been added, or -1 if all wait for each other.
template <BackwardConfig C>
int steps_to_add_all(int tiles, int heads, int sms) {
  Problem p;
  p.batch = 1;
  p.heads_q = p.heads_kv = heads;
  p.rows_q = p.rows_k = std::int64_t{tiles} * C.tiling.block_n;
  const int blocks = static_cast<int>(gpu::backward_grid(p, C, sms));
  constexpr int query_blocks_a_tile = C.tiling.block_n / C.tiling.block_m;
  struct At {
    int round = 0;
    int i = -1;  ///< number of the tile's next query block
    BackwardTile t;
    int head = 0;
  };
  std::vector<At> at(static_cast<std::size_t>(blocks));
  const int query_blocks = tiles * query_blocks_a_tile;
  std::vector<unsigned> semaphores(static_cast<std::size_t>(heads * query_blocks));
  for (int steps = 0;; ++steps) {
    bool any = false;
    bool left = false;
    std::vector<unsigned*> added;
    for (int block = 0; block < blocks; ++block) {
      At& a = at[static_cast<std::size_t>(block)];
      if (a.i < 0 || a.i == query_blocks) {
        const int number = BackwardTiles<C>::number_of(a.round, block, blocks, tiles, tiles * heads, true);
        if (number >= tiles * heads) continue;
        const auto place = BackwardTiles<C>::head_tile(number, tiles, tiles * heads, blocks, true);
        a.head = place.head;
        a.t.n = place.n;
        a.t.visible = {tiles * C.tiling.block_n, tiles * C.tiling.block_n, tile::Visibility::unbounded,
                       C.mask.causal ? 0 : tile::Visibility::unbounded};
        BackwardTiles<C>::set_round(a.t, a.head, tiles, a.round, blocks);
        a.t.blocks.end = query_blocks;
        if constexpr (C.schedule.staggered) a.t.start = BackwardTiles<C>::start_of(a.t);
        a.i = C.mask.causal ? a.t.n * query_blocks_a_tile : 0;
        ++a.round;
      }
      left = true;
      const int m = BackwardTiles<C>::passing(a.t, a.i);
      unsigned& semaphore = semaphores[static_cast<std::size_t>(a.head * query_blocks + m)];
      if (semaphore != BackwardTiles<C>::additions_before(a.t, m)) continue;
      added.push_back(&semaphore);
      ++a.i;
      any = true;
    }
    for (unsigned* semaphore : added) ++*semaphore;
    if (!left) return steps;
    if (!any) return -1;
  }
}

// A step is the time that a semaphore takes to be raised and read. If a query block takes as long, nobody
// waits.
TEST(BackwardTiles, AdditionsInAFixedOrderEndOnTime) {
  constexpr BackwardConfig fixed{
      .tiling = {.block_m = 128}, .mask = {.causal = true}, .schedule = {.deterministic = true}};
  constexpr BackwardConfig half{
      .tiling = {.block_m = 64}, .mask = {.causal = true}, .schedule = {.deterministic = true}};
  for (const int tiles : {1, 3, 16, 50, 64, 128, 200, 256}) {
    const int heads = 1024 / tiles;
    const int work = tiles * (tiles + 1) / 2 * heads / 128;
    const int steps = steps_to_add_all<fixed>(tiles, heads, 132);
    EXPECT_GT(steps, 0) << tiles << " tiles a head wait for each other";
    const int half_steps = steps_to_add_all<half>(tiles, heads, 132);
    EXPECT_GT(half_steps, 0) << tiles << " tiles a head wait for each other";
    if (128 % tiles != 0 && tiles % 128 != 0) continue;
    EXPECT_LT(steps, 1.3 * work) << tiles << " tiles a head";
    EXPECT_LT(half_steps, 2.3 * work) << tiles << " tiles a head";
  }
}

// Staggered, nobody waits at all where there are as many query blocks as tiles, however rounds cut the heads.
TEST(BackwardTiles, StaggeredAdditionsInAFixedOrderDoNotWait) {
  constexpr BackwardConfig even{.tiling = {.block_m = 128},
                                .schedule = {.staggered = true, .deterministic = true}};
  constexpr BackwardConfig twice{.tiling = {.block_m = 64},
                                 .schedule = {.staggered = true, .deterministic = true}};
  for (const int tiles : {1, 3, 4, 16, 50, 64, 128, 200, 256}) {
    const int heads = 1024 / tiles;
    const int rounds = (tiles * heads + 131) / 132;
    EXPECT_EQ(steps_to_add_all<even>(tiles, heads, 132), rounds * tiles) << tiles << " tiles a head";
    EXPECT_EQ(steps_to_add_all<twice>(tiles, heads, 132), rounds * tiles * 2) << tiles << " tiles a head";
  }
}

class EmulatedVarlenBackwardTest : public EmulatedBackwardTest {};

// More than a warp tries at a time, some of no rows, and rows that belong to none.
TEST_P(EmulatedVarlenBackwardTest, ManySequencesMatchTheOracle) {
  const EmulatedBackwardConfig& config = GetParam().config;
  harness::Case spec = random_backward_case(1, config);
  change(spec, {.batch = 70, .heads_q = 2, .heads_kv = 1, .packed = true});
  spec.lengths_q.clear();
  spec.lengths_k.clear();
  spec.used_q.clear();
  spec.used_k.clear();
  for (int i = 0; i < spec.batch; ++i) {
    spec.lengths_q.push_back(i * 7 % 11);
    spec.lengths_k.push_back(i * 5 % 13);
  }
  spec.slack_q = spec.slack_k = 9;
  spec.q = spec.k = spec.v = spec.out = spec.dout = spec.dq = spec.dk = spec.dv = spec.gate_layout = {};
  spec.lse_layout = {};
  SCOPED_TRACE(config.describe() + ": " + spec.describe());
  harness::Call call(spec);
  expect_the_oracles_gradients(GetParam(), call, {.host_threads = 2});
}

/// Where cu_seqlens descend, two sequences have rows in common, and count in the same semaphores.
TEST_P(EmulatedVarlenBackwardTest, SequencesThatOverlapEnd) {
  const EmulatedBackwardConfig& config = GetParam().config;
  const std::int64_t rows = 4 * std::max(config.tiling.block_m, config.tile_keys);
  harness::Case spec;
  spec.dtype = config.tiling.element == Element::f16 ? DType::f16 : DType::bf16;
  change(spec, {.out_dtype = config.tiling.element == Element::f16 ? DType::f16 : DType::bf16, .batch = 3});
  change(spec, {.packed = true, .lengths_q = {rows, 20, 30}, .lengths_k = {rows, 20, 30}});
  spec.options.softcap = config.transform == ScoreTransform::softcap ? 2.0F : 0.0F;
  change(spec, {.causal = config.mask.causal, .deterministic = config.deterministic});
  harness::Call call(spec);
  call.rows_overlap = true;
  for (harness::Box* box : {&call.cu_seqlens_q, &call.cu_seqlens_k}) {
    box->set(1, static_cast<double>(rows));
    box->set(2, 20.0);
    box->set(3, static_cast<double>(rows + 50));
  }
  call.prepare(Pass::forward);
  tandem::forward(call.forward_args());
  call.prepare(Pass::backward);
  try {
    run_backward(GetParam(), call, {.host_threads = 2});
  } catch (const emulator::Fault& fault) {
    ADD_FAILURE() << fault.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Families, EmulatedVarlenBackwardTest,
                         ::testing::ValuesIn(backwards_with(&Mask::varlen)), name_of);
INSTANTIATE_TEST_SUITE_P(Families, EmulatedBackwardTest, ::testing::ValuesIn(all_backwards()), name_of);
INSTANTIATE_TEST_SUITE_P(Families, EmulatedCausalBackwardTest,
                         ::testing::ValuesIn(backwards_with(&Mask::causal)), name_of);

}  // namespace
}  // namespace tandem::kernel_tests
