// The ring of buffers between a producer and its consumers: all arrives, in order, in every interleaving.
#include "tile/pipeline.cuh"

#include <gtest/gtest.h>

#include <string>

#include "launch.hpp"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace tandem::tile {
namespace {

constexpr int stages = 3;
constexpr int items = 11;  // more than three laps
constexpr int consumer_warps = 2;

struct Shared {
  Ring<stages> ring;
  u32 item[stages];
};

/// Warp 0 hands numbers to the others. `refill_early`: it does not ask whether the buffer is free.
std::string fault_of_ring(std::uint64_t seed, bool refill_early) {
  const auto kernel = [&] {
    auto& s = *reinterpret_cast<Shared*>(ptx::dynamic_shared());
    if (ptx::thread_index() == 0) {
      s.ring.init(consumer_warps);
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
    Ring<stages>::Position at;
    if (ptx::thread_index() < warp_size) {
      if (ptx::thread_index() != 0) return;
      for (u32 n = 0; n < items; ++n, at.advance()) {
        if (!refill_early) s.ring.wait_free(at);
        ptx::store_shared(&s.item[at.stage], 100 + n);
        s.ring.hand_over(at);
      }
      return;
    }
    for (u32 n = 0; n < items; ++n, at.advance()) {
      s.ring.wait(at);
      const u32 got = ptx::load_shared(&s.item[at.stage]);
      if (got != 100 + n) throw emulator::Fault("got " + std::to_string(got));
      ptx::sync_warp();
      if (ptx::thread_index() % warp_size == 0) s.ring.release(at);
    }
  };
  try {
    emulator::launch(kernel, {.threads = (1 + consumer_warps) * warp_size, .shared_bytes = sizeof(Shared)},
                     {.seed = seed});
  } catch (const emulator::Fault& fault) {
    return fault.what();
  }
  return "";
}

TEST(TileRing, HandsOverEveryItemInOrder) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) EXPECT_EQ(fault_of_ring(seed, false), "") << seed;
}

TEST(TileRing, ABufferThatIsNotFreeIsNotToBeFilled) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) EXPECT_NE(fault_of_ring(seed, true), "") << seed;
}

TEST(TileRing, ThePhaseFlipsWithEachLap) {
  RingPosition<2> at;
  for (int n = 0; n < 8; ++n, at.advance()) {
    EXPECT_EQ(at.stage, n % 2);
    EXPECT_EQ(at.phase, static_cast<u32>(n / 2 % 2));
  }
}

}  // namespace
}  // namespace tandem::tile
