// Where the keys of a tile lie, dense and varlen, for any ratio of query heads to key heads.
#include "tile/keys.cuh"

#include <gtest/gtest.h>

#include <climits>
#include <vector>

#include "launch.hpp"
#include "ops/forward/sm90/key_groups.cuh"

namespace tandem::tile {
namespace {

/// A tile that only notes where it was to be loaded from.
struct Noted {
  int row = -1, head = -1, batch = -1;
  void load(const TensorMap&, ptx::Mbarrier&, int r, int h, int b, ptx::CacheHint hint) {
    row = r;
    head = h;
    batch = b;
    EXPECT_EQ(hint, ptx::CacheHint::last);
  }
};

TEST(TileKeys, AreLoadedFromTheSequencesRowsAndTheKeyHead) {
  for (const bool packed : {false, true}) {
    for (const int group : {1, 3}) {
      ForwardParams p{};
      p.heads_q = 6;
      p.heads_kv = 6 / group;
      p.packed_k = packed;
      TileIndex t;
      t.head = 4;
      t.batch = 2;
      t.begin_k = packed ? 1000 : 0;
      const TensorMap map{};
      ptx::Mbarrier full{};
      Noted tile;
      load_keys(tile, map, full, p, t, 48);
      EXPECT_EQ(tile.row, packed ? 1048 : 48);
      EXPECT_EQ(tile.head, 4 / group);
      EXPECT_EQ(tile.batch, packed ? 0 : 2);
    }
  }
}

TEST(TilePages, NumbersAreQuotients) {
  for (const int rows : {1, 2, 3, 7, 16, 48, 64, 100, 255, 256, 65536, 1 << 30, INT_MAX}) {
    const PageDivider divider(rows);
    for (const int near : {0, 1, rows, 1000 * (rows / 1001), INT_MAX / rows * rows, 1 << 20, INT_MAX - 5}) {
      for (int at = near < 3 ? 0 : near - 3; at < near + 3 && at >= 0; ++at) {
        ASSERT_EQ(divider.divide(at), at / rows) << at << " / " << rows;
      }
    }
  }
}

/// No entry of the table is read past the sequence's end, and what names no page is none.
TEST(TilePages, PlacesAreThoseOfTheTable) {
  const std::vector<int> table = {5, 2, 9, 7};
  ForwardParams p{};
  p.pages = {.data = table.data(),
             .batch_stride = 4,
             .stride = 1,
             .count = 8,
             .page_size = 6,
             .box_rows = 6,
             .wide = false};
  const auto place = [&] {
    TileIndex t;
    t.seqlen_k = 21;
    const PageDivider divider(6);
    const auto at = [&](int key, int row) { return page_place(p, t, divider, key, row); };
    EXPECT_EQ(at(0, 0).page, 5);
    EXPECT_EQ(at(6, 1).page, 2);
    EXPECT_EQ(at(6, 1).row, 1);
    EXPECT_EQ(at(12, 2).page, -1) << "page 9 of 8";
    EXPECT_EQ(at(18, 2).page, 7);
    EXPECT_EQ(at(18, 3).page, -1) << "behind the end";
    EXPECT_EQ(at(18, 600).page, -1);
    t.begin_k = 3;
    t.seqlen_k = 18;
    EXPECT_EQ(page_place<KeySource::padded_pages>(p, t, divider, 0, 3).page, 2);
    EXPECT_EQ(page_place<KeySource::padded_pages>(p, t, divider, 0, 17).row, 2);
  };
  emulator::launch(place, {.threads = 32}, {.buffers = {emulator::readable(table)}});
}

/// Every strip of K is in one group, and what a product reads of V is a group of its own.
template <int head_dim_qk, int head_dim_v>
void expect_groups_to_cover() {
  constexpr LatentConfig config{.tiling = {.head_dim_qk = head_dim_qk, .head_dim_v = head_dim_v},
                                .v_in_k = true};
  using Groups = KeyGroups<config>;
  std::vector<int> times(head_dim_qk / Groups::strip);
  for (int g = 0; g < Groups::count; ++g) {
    for (int s = 0; s < Groups::strips(g); ++s)
      ++times.at(static_cast<std::size_t>(Groups::first_strip(g) + s));
  }
  EXPECT_EQ(times, std::vector<int>(times.size(), 1)) << head_dim_qk << " and " << head_dim_v;
  for (int part = 0; part < latent_slices; ++part) {
    for (int product = 0; product < Groups::columns / Groups::width; ++product) {
      const int group = Groups::of(part, product);
      EXPECT_EQ(Groups::first_strip(group) * Groups::strip, part * Groups::columns + product * Groups::width);
      EXPECT_EQ(Groups::strips(group) * Groups::strip, Groups::width);
      EXPECT_EQ(Groups::warps(group), 8);
    }
  }
}

TEST(TileKeys, GroupsOfStripsCoverATile) {
  expect_groups_to_cover<576, 512>();
  expect_groups_to_cover<512, 512>();
  expect_groups_to_cover<576, 384>();
  expect_groups_to_cover<192, 128>();
}

}  // namespace
}  // namespace tandem::tile
