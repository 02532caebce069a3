// The tiles that the CTAs of a grid compute: together each once, with the lengths of their sequences.
#include "tile/walk.cuh"
#include "tile/split.cuh"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "launch.hpp"
#include "ptx/barrier.cuh"

namespace tandem::tile {
namespace {

constexpr Tiling tiling{.block_m = 64, .block_n = 32};
constexpr int block_m = tiling.block_m;

/// Which rows of which head tiles cover: [head][row of q, or row of (batch, row)].
struct Coverage {
  std::vector<std::vector<int>> times;
  explicit Coverage(const ForwardParams& p)
      : times(static_cast<std::size_t>(p.heads_q),
              std::vector<int>(static_cast<std::size_t>((p.packed_q ? 1 : p.batch) * p.rows_q))) {}
  void add(const ForwardParams& p, const TileIndex& t) {
    for (int i = t.m * block_m; i < (t.m + 1) * block_m && i < t.end_q; ++i) {
      const int row = (p.packed_q ? 0 : t.batch * p.rows_q) + t.begin_q + i;
      ++times.at(static_cast<std::size_t>(t.head)).at(static_cast<std::size_t>(row));
    }
  }
  void expect_each_once() const {
    for (const auto& head : times) {
      for (std::size_t row = 0; row < head.size(); ++row) ASSERT_EQ(head[row], 1) << "row " << row;
    }
  }
};

/// Warp 0 produces and warp 1 consumes, in five CTAs. Calls f(tile) for each that the consumers get. The
/// producers must get the same ones.
template <Mask M, bool dynamic, typename F>
void walk(ForwardParams p, std::uint64_t seed, const F& f, std::vector<emulator::Buffer> buffers = {}) {
  std::vector<u32> counter(1);
  if (dynamic) p.tile_counter = counter.data();
  buffers.push_back(emulator::writable(counter));
  std::map<u32, std::string> produced;
  std::map<u32, std::string> consumed;
  const auto kernel = [&] {
    auto& shared = *reinterpret_cast<DynamicScheduler::Shared*>(ptx::dynamic_shared());
    if (ptx::thread_index() == 0) {
      shared.ring.init(1);
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
    const bool leader = ptx::thread_index() % warp_size == 0;
    const bool producer = ptx::thread_index() < warp_size;
    QueryTiles<tiling, M, dynamic> tiles(p, shared);
    QueryTile t;
    while (producer ? tiles.template next<true>(t, leader) : tiles.template next<false>(t, leader)) {
      if (!leader) continue;
      auto& list = producer ? produced : consumed;
      list[ptx::block_index()] += std::to_string(t.index.batch) + "/" + std::to_string(t.index.head) + "/" +
                                  std::to_string(t.index.m) + " ";
      if (!producer) f(t);
    }
  };
  emulator::launch(kernel, {.blocks = 5, .threads = 64, .shared_bytes = sizeof(DynamicScheduler::Shared)},
                   {.seed = seed, .buffers = buffers});
  EXPECT_EQ(produced, consumed);
}

ForwardParams dense_params() {
  ForwardParams p{};
  p.batch = 2;
  p.heads_q = p.heads_kv = 3;
  p.rows_q = 150;
  p.rows_k = 170;
  p.m_blocks = 3;
  p.heads_in_order = 4;  // of six; the last two are interleaved where tiles differ in work
  p.window_left = Visibility::unbounded;
  p.window_right = 0;
  return p;
}

template <Mask M, bool dynamic>
void expect_dense_tiles_once() {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    const ForwardParams p = dense_params();
    Coverage coverage(p);
    walk<M, dynamic>(p, seed, [&](const QueryTile& t) {
      coverage.add(p, t.index);
      EXPECT_EQ(t.index.seqlen_q, 150);
      EXPECT_EQ(t.index.seqlen_k, 170);
      // 170 keys are six blocks of 32; causal, tile m ends with key 64 m + 83.
      EXPECT_EQ(t.blocks.end, M.causal ? std::min(6, (64 * t.index.m + 84 + 31) / 32) : 6);
      EXPECT_EQ(t.blocks.first, 0);
    });
    coverage.expect_each_once();
  }
}

TEST(TileWalk, DenseTilesOfAFixedOrder) {
  expect_dense_tiles_once<Mask{}, false>();
  expect_dense_tiles_once<Mask{.causal = true}, false>();
}

TEST(TileWalk, DenseTilesFromACounter) {
  expect_dense_tiles_once<Mask{}, true>();
  expect_dense_tiles_once<Mask{.causal = true}, true>();
}

/// 70 sequences: more than two rounds of a warp's lanes. Some are empty, and rows lie before the first and
/// past the last, which are written too.
template <Mask M, bool dynamic>
void expect_varlen_tiles_once() {
  constexpr int sequences = 70;
  std::vector<int> cu_q{9};
  std::vector<int> cu_k{0};
  std::vector<int> used_q;
  for (int b = 0; b < sequences; ++b) {
    const int length = b % 7 == 3 ? 0 : b * 37 % 150;
    cu_q.push_back(cu_q.back() + length);
    cu_k.push_back(cu_k.back() + 20 + b);
    used_q.push_back(b % 5 == 1 ? length / 2 : length);
  }
  ForwardParams p = dense_params();
  p.batch = sequences;
  p.packed_q = p.packed_k = true;
  p.rows_q = cu_q.back() + 77;
  p.rows_k = cu_k.back();
  p.cu_seqlens_q = {cu_q.data(), 1, false};
  p.cu_seqlens_k = {cu_k.data(), 1, false};
  p.seqused_q = {used_q.data(), 1, false};
  Coverage coverage(p);
  walk<M, dynamic>(p, 1,
                   [&](const QueryTile& t) {
                     coverage.add(p, t.index);
                     const bool of_sequence = t.index.batch < sequences;
                     const auto b = static_cast<std::size_t>(of_sequence ? t.index.batch : 0);
                     EXPECT_EQ(t.index.seqlen_q, of_sequence ? used_q[b] : 0);
                     EXPECT_EQ(t.index.seqlen_k, of_sequence ? 20 + t.index.batch : 0);
                     if (of_sequence) {
                       EXPECT_EQ(t.index.begin_q, cu_q[b]);
                       EXPECT_EQ(t.index.begin_k, cu_k[b]);
                       EXPECT_EQ(t.index.end_q, cu_q[b + 1] - cu_q[b]);
                     }
                   },
                   {emulator::readable(cu_q), emulator::readable(cu_k), emulator::readable(used_q)});
  coverage.expect_each_once();
}

/// Lengths of 64 bits: what no int can be becomes one that is as wrong, for the clamping that follows.
TEST(TileWalk, LengthsOf64BitsAreIntsOrTheLargestOrNegative) {
  const std::vector<long long> given{5, 0, 1LL << 31, (1LL << 40) + 5, -3, -(1LL << 40) + 5};
  std::vector<int> got(given.size());
  const LengthArray lengths{given.data(), 1, true};
  emulator::launch(
      [&] {
        const auto i = static_cast<int>(ptx::thread_index());
        if (i < static_cast<int>(got.size())) got[static_cast<std::size_t>(i)] = length_at(lengths, i);
      },
      {.threads = 32}, {.buffers = {emulator::readable(given)}});
  EXPECT_EQ(got, (std::vector<int>{5, 0, 0x7fffffff, 0x7fffffff, -1, -1}));
}

TEST(TileWalk, VarlenTilesOfAFixedOrder) {
  expect_varlen_tiles_once<Mask{.varlen = true}, false>();
  expect_varlen_tiles_once<Mask{.causal = true, .varlen = true}, false>();
}

TEST(TileWalk, VarlenTilesFromACounter) {
  expect_varlen_tiles_once<Mask{.varlen = true}, true>();
  expect_varlen_tiles_once<Mask{.causal = true, .varlen = true}, true>();
}

/// Divides the sequences that begin at `cu` among `ctas` CTAs: every tile's parts together, or its whole, are
/// all of its keys, and no part lies past `places`, the number of partial results that there is room for.
/// Returns how many tiles there are.
template <bool by_split>
int expect_tiles_once(const std::vector<int>& cu, unsigned ctas, int places, int items) {
  const auto sequences = static_cast<int>(cu.size()) - 1;
  ForwardParams p = dense_params();
  p.batch = sequences;
  p.packed_q = p.packed_k = true;
  p.rows_q = p.rows_k = 300;
  p.window_right = Visibility::unbounded;
  p.cu_seqlens_q = p.cu_seqlens_k = {cu.data(), 1, false};
  p.split_ctas = p.split_few_ctas = static_cast<short>(ctas);
  p.split_least = 1;
  p.split_blocks = 2;
  p.split_items = items;
  std::map<std::string, int> keys;  // seen by the tile
  const auto kernel = [&] {
    DynamicScheduler::Shared unused;
    SplitQueryTiles<tiling, Mask{.varlen = true}, KeySource::rows, by_split> tiles(p, unused);
    QueryTile t;
    const bool leader = ptx::thread_index() == 0;
    while (tiles.template next<true>(t, leader)) {
      if (!leader) continue;
      EXPECT_LT(t.part, places);
      const std::string name = std::to_string(t.index.batch) + "/" + std::to_string(t.index.head) + "/" +
                               std::to_string(t.index.m);
      const int seen =
          std::min(t.blocks.end * tiling.block_n, t.index.seqlen_k) - t.blocks.first * tiling.block_n;
      EXPECT_LE(keys[name] += std::max(0, seen), t.index.seqlen_k) << name;
      EXPECT_TRUE(seen > 0 || t.index.seqlen_k == 0) << name;
    }
  };
  emulator::launch(kernel, {.blocks = ctas, .threads = 32}, {.buffers = {emulator::readable(cu)}});
  int tiles = 0;
  for (int b = 0; b < sequences; ++b) {
    const int length = std::max(0, cu[static_cast<std::size_t>(b) + 1] - cu[static_cast<std::size_t>(b)]);
    for (int m = 0; m < ceil_div(length, block_m); ++m) {
      for (int head = 0; head < 3; ++head, ++tiles) {
        const std::string name = std::to_string(b) + "/" + std::to_string(head) + "/" + std::to_string(m);
        EXPECT_EQ(keys[name], length) << name;
      }
    }
  }
  return tiles;
}

/// 150 blocks of 15 tiles: the CTAs' borders lie within tiles.
TEST(KeySplits, PartsOfATileAreItsKeysOnce) {
  for (const unsigned ctas : {4U, 7U, 40U}) {
    expect_tiles_once<false>({0, 300}, ctas, 2 * static_cast<int>(ctas), 15);
    expect_tiles_once<true>({0, 300}, ctas, 15 * 5, 15 * 5);
  }
}

/// Sequences that overlap have far more tiles and splits than can lie in q and k side by side.
TEST(KeySplits, SequencesThatOverlapStayInTheWorkspace) {
  constexpr int tiles = 3 * (300 / block_m + 20);
  std::vector<int> cu{0, 300};
  for (int b = 1; b < 20; ++b) cu.push_back(b % 2 == 0 ? 300 : 10 * b);
  EXPECT_GT(expect_tiles_once<false>(cu, 3, 2 * 3, tiles), tiles);
  EXPECT_GT(expect_tiles_once<true>(cu, 3, tiles, tiles), tiles);
}

/// All CTAs share a line that has enough blocks for each of them, few a shorter one.
TEST(KeySplits, AsManyCtasAsHaveEnoughBlocks) {
  ForwardParams p{};
  p.split_ctas = 8;
  p.split_few_ctas = 4;
  p.split_least = 1;
  const auto enough = static_cast<u32>(8 * enough_blocks);
  const auto share = [&](u32 total) {
    return share_of(p, LineLength{.total = total, .largest = 1, .tiles = 1});
  };
  EXPECT_EQ(share(enough), static_cast<u32>(enough_blocks));
  EXPECT_EQ(share(enough - 1), static_cast<u32>(2 * enough_blocks));
}

}  // namespace
}  // namespace tandem::tile
