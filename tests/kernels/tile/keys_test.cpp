// Where the keys of a tile lie, dense and varlen, for any ratio of query heads to key heads.
#include "kernels/tile/keys.cuh"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace tandem::tile
