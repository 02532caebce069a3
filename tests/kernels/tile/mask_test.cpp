// Which blocks are visited, which of them without a mask, and what the mask leaves, against the definition.
#include "tile/mask.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

namespace tandem::tile {
namespace {

constexpr int block_m = 64;
constexpr int block_n = 16;

/// The contract's line on masks, as it is written.
bool sees(const Visibility& v, int query, int key) {
  const int distance = key - (query + v.seqlen_k - v.seqlen_q);
  return query < v.seqlen_q && key < v.seqlen_k && (v.left == Visibility::unbounded || distance >= -v.left) &&
         (v.right == Visibility::unbounded || distance <= v.right);
}

/// Calls f for random lengths and windows and each tile of queries, [first, end).
void for_each_tile(const std::function<void(const Visibility& v, int first, int end)>& f) {
  std::mt19937 random(1);
  const auto below = [&random](int end) { return static_cast<int>(random() % static_cast<unsigned>(end)); };
  for (int n = 0; n < 300; ++n) {
    const auto window = [&] { return below(3) == 0 ? Visibility::unbounded : below(4) == 0 ? 0 : below(90); };
    const Visibility v{1 + below(200), 1 + below(200), window(), window()};
    SCOPED_TRACE(testing::Message() << v.seqlen_q << " queries, " << v.seqlen_k << " keys, left " << v.left
                                    << ", right " << v.right);
    for (int first = 0; first < v.seqlen_q; first += block_m) f(v, first, first + block_m);
  }
}

/// Of the queries [first, end) that are in use: how many (query, key) pairs of a key block are visible.
int visible_pairs(const Visibility& v, int first, int end, int block) {
  int pairs = 0;
  for (int i = first; i < end && i < v.seqlen_q; ++i) {
    for (int j = block * block_n; j < (block + 1) * block_n; ++j) pairs += sees(v, i, j) ? 1 : 0;
  }
  return pairs;
}

TEST(TileMask, KeyBlocksAreThoseThatAnyQuerySeesAndInnerOnesThoseThatAllSee) {
  int inner = 0;
  for_each_tile([&](const Visibility& v, int first, int end) {
    const BlockRange r = BlockRange::of<block_n>(v, first, end);
    const int rows = std::min(end, v.seqlen_q) - first;
    for (int block = 0; block * block_n < v.seqlen_k; ++block) {
      const int pairs = visible_pairs(v, first, end, block);
      const bool in_range = r.first <= block && block < r.end;
      const bool is_inner = r.inner_first <= block && block < r.inner_end;
      EXPECT_TRUE(in_range || pairs == 0) << block;
      EXPECT_EQ(is_inner, pairs == rows * block_n) << block;
      inner += is_inner ? 1 : 0;
    }
  });
  EXPECT_GT(inner, 100);
}

TEST(TileMask, QueryBlocksAreTheSamePairsFromTheOtherSide) {
  for_each_tile([](const Visibility& v, int first, int) {
    const BlockRange of_queries = BlockRange::of<block_n>(v, first, first + block_m);
    for (int n = 0; n * block_n < v.seqlen_k; ++n) {
      const QueryBlockRange r = QueryBlockRange::of<block_m>(v, n * block_n, (n + 1) * block_n);
      const int m = first / block_m;
      if (visible_pairs(v, first, first + block_m, n) > 0) {
        EXPECT_TRUE(r.first <= m && m < r.end) << n;
        EXPECT_TRUE(of_queries.first <= n && n < of_queries.end) << n;
      }
      if (r.inner_first <= m && m < r.inner_end) {
        const int rows = std::min(first + block_m, v.seqlen_q) - first;
        EXPECT_EQ(visible_pairs(v, first, first + block_m, n), rows * block_n) << n;
      }
    }
  });
}

TEST(TileMask, TheWalkGoesDownThroughAllBlocksAndSparesTheMaskInside) {
  for_each_tile([](const Visibility& v, int first, int end) {
    const BlockRange all = BlockRange::of<block_n>(v, first, end);
    const int visited_before = 1;  // the kernels mask the last block, which the sequence may end in
    int block = all.end - 1 - visited_before;
    int expected = block;
    const auto step = [&](bool masked) {
      EXPECT_EQ(block, expected--);
      const int rows = std::min(end, v.seqlen_q) - first;
      EXPECT_TRUE(masked || visible_pairs(v, first, end, block) == rows * block_n) << block;
    };
    if (v.left == Visibility::unbounded && v.right == Visibility::unbounded) {
      walk_blocks<Mask{}>(block, all, all, step);
    } else if (v.left == Visibility::unbounded) {
      walk_blocks<Mask{.causal = true}>(block, all, all, step);
    } else if (v.right == Visibility::unbounded) {
      walk_blocks<Mask{.local = true}>(block, all, all, step);
    } else {
      walk_blocks<Mask{.causal = true, .local = true}>(block, all, all, step);
    }
    EXPECT_EQ(expected, std::min(all.first - 1, all.end - 2));
  });
}

TEST(TileMask, ScoresOfInvisibleKeysBecomeMinusInfinityAndNoOther) {
  constexpr int columns = 112;  // more than the mask's word has bits
  for_each_tile([](const Visibility& v, int first, int) {
    for (const int key : {0, 16, 96}) {
      for (int thread = 0; thread < warpgroup_size; ++thread) {
        const FragmentPosition position(thread);
        float s[columns / 2];
        for (float& score : s) score = 1.0F;
        apply_mask(s, v, first, key, position);
        for (int i = 0; i < columns / 2; ++i) {
          const int query = first + position.row(i / 2 % 2);
          if (query >= v.seqlen_q) continue;  // computed and not stored
          const bool visible = sees(v, query, key + position.col(i / 4) + i % 2);
          ASSERT_EQ(s[i], visible ? 1.0F : -INFINITY) << "thread " << thread << ", element " << i;
        }
      }
    }
  });
}

}  // namespace
}  // namespace tandem::tile
