// Two blocks of a cluster that send each other numbers, and that load boxes of a tensor for both, right and
// with seeded faults.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "fault_of.hpp"
#include "launch.hpp"
#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "tile/pipeline.cuh"

namespace tandem::kernel_tests {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr unsigned threads = 64;

struct Shared {
  alignas(16) u32 sent[threads];
  u32 received[threads];
  ptx::Mbarrier full;
  ptx::Mbarrier empty;
};

enum class Mistake {
  none,
  sends_unasked,
  frees_early,
  never_frees,
  announces_less,
  announces_more,
  ends_early
};

template <Mistake mistake>
void exchange(u32* sums) {
  auto& shared = *reinterpret_cast<Shared*>(ptx::dynamic_shared());
  const u32 thread = ptx::thread_index();
  const u32 rank = ptx::block_index() % 2;
  constexpr u32 announced = sizeof(Shared::sent) + (mistake == Mistake::announces_more   ? 16
                                                    : mistake == Mistake::announces_less ? -16
                                                                                         : 0);
  const auto number = [thread](u32 sender, u32 round) { return 1000 * sender + 100 * round + thread; };
  if (thread == 0) {
    ptx::mbarrier_init(shared.full, 1);
    ptx::mbarrier_init(shared.empty, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_cluster();
  u32 sum = 0;
  for (u32 round = 0; round < 4; ++round) {
    if (mistake != Mistake::sends_unasked) ptx::mbarrier_wait(shared.empty, round % 2 ^ 1);
    ptx::store_shared(shared.sent + thread, number(rank, round));
    ptx::fence_async_shared();
    ptx::sync_block();
    if (thread == 0) {
      ptx::mbarrier_arrive_expect(shared.full, announced);
      ptx::bulk_send(shared.received, shared.sent, sizeof(shared.sent), shared.full);
    }
    ptx::mbarrier_wait(shared.full, round % 2);
    if (mistake != Mistake::frees_early) {
      sum += ptx::load_shared(shared.received + thread);
      ptx::sync_block();
    }
    if (thread == 0 && mistake != Mistake::never_frees) ptx::mbarrier_arrive_other(shared.empty);
    if (mistake == Mistake::frees_early) sum += ptx::load_shared(shared.received + thread);
  }
  ptx::store_global(sums + ptx::block_index() * threads + thread, sum);
  if (mistake != Mistake::ends_early) ptx::sync_cluster();
}

constexpr emulator::Grid grid{.blocks = 6, .threads = threads, .shared_bytes = sizeof(Shared), .cluster = 2};

template <Mistake mistake>
std::vector<u32> run(std::uint64_t seed) {
  std::vector<u32> sums(grid.blocks * threads);
  emulator::Options options{.seed = seed, .host_threads = 2, .buffers = {emulator::writable(sums)}};
  emulator::launch([&] { exchange<mistake>(sums.data()); }, grid, options);
  return sums;
}

template <Mistake mistake>
std::string fault(std::uint64_t seed) {
  return fault_of([&] { run<mistake>(seed); });
}

TEST(Cluster, BlocksExchangeNumbersInEveryInterleaving) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const std::vector<u32> sums = run<Mistake::none>(seed);
    for (u32 i = 0; i < sums.size(); ++i) {
      const u32 sender = i / threads % 2 ^ 1;
      EXPECT_EQ(sums[i], 4 * (1000 * sender + i % threads) + 600) << i << ", seed " << seed;
    }
  }
}

TEST(Cluster, NumbersOverwrittenBeforeTheyAreReadAreAFault) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    EXPECT_THAT(fault<Mistake::sends_unasked>(seed), HasSubstr("a bulk store may still be reading"));
    EXPECT_THAT(fault<Mistake::frees_early>(seed),
                AnyOf(HasSubstr("overwrites bytes that thread"), HasSubstr("has not waited for")));
  }
}

TEST(Cluster, ABufferThatIsNeverFreedIsADeadlock) {
  for (std::uint64_t seed = 0; seed < 4; ++seed)
    EXPECT_THAT(fault<Mistake::never_frees>(seed), HasSubstr("1 of 1 arrivals and 0 bytes are missing"));
}

TEST(Cluster, WrongByteCountsAreAFault) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    // Announced after the bytes have come, they leave the phase open for ever.
    EXPECT_THAT(fault<Mistake::announces_less>(seed),
                AnyOf(HasSubstr("wrong byte count"), HasSubstr(" -16 bytes are missing")));
    EXPECT_THAT(fault<Mistake::announces_more>(seed), HasSubstr(" 16 bytes are missing"));
  }
}

TEST(Cluster, ABlockThatEndsWhileTheOtherMayBeReachedIsAFault) {
  for (std::uint64_t seed = 0; seed < 4; ++seed)
    EXPECT_THAT(fault<Mistake::ends_early>(seed), HasSubstr("sync_cluster is missing"));
}

// ---- Boxes for both ----

constexpr int loads = 6;  ///< tiles, of two strips of 8 rows and 128 bytes each
constexpr u32 strip_bytes = 1024;

struct LoadShared {
  alignas(1024) char strips[2][2][strip_bytes];
  tile::PairRing<2> ring;
};

enum class LoadMistake {
  none,
  waits_for_own_consumers,
  releases_before_reading,
  never_releases_other,
  announces_its_half,
  loads_both_halves,
  leaves_a_strip_out,
  ends_early
};

/// The blocks of a cluster sum up the same tiles, each of which has one strip from either block. Thread 0
/// loads.
template <LoadMistake mistake>
void load_for_both(const TensorMap& map, u32* sums) {
  auto& shared = *reinterpret_cast<LoadShared*>(ptx::dynamic_shared());
  const u32 thread = ptx::thread_index();
  const int rank = static_cast<int>(ptx::block_index()) % 2;
  constexpr bool own_alone = mistake == LoadMistake::waits_for_own_consumers;
  constexpr u32 announced = mistake == LoadMistake::announces_its_half ? strip_bytes : 2 * strip_bytes;
  if (thread == 0) {
    if (own_alone) {
      shared.ring.tile::Ring<2>::init(threads / warp_size);
    } else {
      shared.ring.init(threads / warp_size);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::sync_cluster();
  u32 sum = 0;
  tile::PairRing<2>::Position at;
  for (int i = 0; i < loads; ++i) {
    if (thread == 0) {
      ptx::Mbarrier& full = shared.ring.acquire(at, announced);
      for (int s = 0; s < 2; ++s) {
        if (s != (rank + at.stage) % 2 && mistake != LoadMistake::loads_both_halves) continue;
        if (mistake == LoadMistake::leaves_a_strip_out && rank == 1 && i == 3) continue;
        ptx::tma_load_both(shared.strips[at.stage][s], map, full, 64 * s, 8 * i, 0, 0, ptx::CacheHint::first);
      }
    }
    const auto release = [&] {
      ptx::sync_warp();
      if (thread % warp_size != 0) return;
      if (own_alone || mistake == LoadMistake::never_releases_other) {
        shared.ring.tile::Ring<2>::release(at);
      } else {
        shared.ring.release(at);
      }
    };
    shared.ring.wait(at);
    if (mistake == LoadMistake::releases_before_reading) release();
    const auto* const words = reinterpret_cast<const u32*>(shared.strips[at.stage]);
    for (u32 w = thread; w < 2 * strip_bytes / 4; w += threads) {
      const u32 two = ptx::load_shared(words + w);
      sum += (two & 0xffff) + (two >> 16);
    }
    if (mistake != LoadMistake::releases_before_reading) release();
    at.advance();
  }
  ptx::store_global(sums + ptx::block_index() * threads + thread, sum);
  if (mistake != LoadMistake::ends_early) ptx::sync_cluster();
}

/// What each block has summed up of the numbers from 0 on.
template <LoadMistake mistake>
std::vector<u32> sums_of_loads(std::uint64_t seed) {
  std::vector<std::uint16_t> data(8 * loads * 128);
  std::iota(data.begin(), data.end(), std::uint16_t{0});
  TensorMapSpec spec;
  spec.base = data.data();
  spec.rank = 4;
  spec.dims = {128, 8 * loads, 1, 1};
  spec.strides = {256, 256 * 8 * loads, 256 * 8 * loads};
  spec.box = {64, 8, 1, 1};
  const TensorMap map = emulator::encode(spec);
  std::vector<u32> sums(4 * threads);
  emulator::Options options{.seed = seed, .buffers = {emulator::readable(data), emulator::writable(sums)}};
  emulator::launch([&] { load_for_both<mistake>(map, sums.data()); },
                   {.blocks = 4, .threads = threads, .shared_bytes = sizeof(LoadShared), .cluster = 2},
                   options);
  std::vector<u32> by_block;
  for (auto of = sums.begin(); of != sums.end(); of += threads)
    by_block.push_back(std::accumulate(of, of + threads, 0U));
  return by_block;
}

template <LoadMistake mistake>
std::string fault_of_loads(std::uint64_t seed) {
  return fault_of([&] { sums_of_loads<mistake>(seed); });
}

TEST(ClusterLoads, BothBlocksHaveWhatEitherLoads) {
  constexpr u32 count = 8 * loads * 128;
  for (std::uint64_t seed = 0; seed < 8; ++seed)
    EXPECT_EQ(sums_of_loads<LoadMistake::none>(seed), std::vector<u32>(4, count * (count - 1) / 2)) << seed;
}

TEST(ClusterLoads, TilesThatTheOtherBlockStillReadsAreNotReplaced) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const auto some = AnyOf(HasSubstr("overwrites bytes that thread"), HasSubstr("has not waited for"),
                            HasSubstr("has not been waited for"));
    EXPECT_THAT(fault_of_loads<LoadMistake::waits_for_own_consumers>(seed), some);
    EXPECT_THAT(fault_of_loads<LoadMistake::releases_before_reading>(seed), some);
  }
}

TEST(ClusterLoads, ATileThatOneBlockNeverReleasesIsADeadlock) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    EXPECT_THAT(fault_of_loads<LoadMistake::never_releases_other>(seed),
                HasSubstr("2 of 4 arrivals and 0 bytes are missing"));
  }
}

TEST(ClusterLoads, WrongByteCountsAreAFault) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    EXPECT_THAT(fault_of_loads<LoadMistake::announces_its_half>(seed),
                AnyOf(HasSubstr("wrong byte count"), HasSubstr(" -1024 bytes are missing"),
                      HasSubstr("that nobody wrote"), HasSubstr("has not waited for")));
    EXPECT_THAT(
        fault_of_loads<LoadMistake::loads_both_halves>(seed),
        AnyOf(HasSubstr("wrong byte count"), HasSubstr(" bytes are missing"), HasSubstr("overwrites bytes")));
    EXPECT_THAT(fault_of_loads<LoadMistake::leaves_a_strip_out>(seed), HasSubstr(" 1024 bytes are missing"));
  }
}

TEST(ClusterLoads, ABlockThatEndsWhileTheOtherMayBeReachedIsAFault) {
  for (std::uint64_t seed = 0; seed < 4; ++seed)
    EXPECT_THAT(fault_of_loads<LoadMistake::ends_early>(seed), HasSubstr("sync_cluster is missing"));
}

TEST(Cluster, GridsThatClustersDoNotDivideAreRefused) {
  EXPECT_THAT(fault_of([] {}, {.blocks = 3, .cluster = 2}), HasSubstr("3 blocks in clusters of 2"));
  EXPECT_THAT(fault_of([] {}, {.blocks = 32, .cluster = 32}), HasSubstr("32 blocks in clusters of 32"));
  EXPECT_THAT(fault_of([] { ptx::sync_cluster(); }, {}), HasSubstr("in a grid without"));
  EXPECT_THAT(fault_of(
                  [] {
                    if (ptx::block_index() == 0) ptx::sync_cluster();
                  },
                  {.blocks = 2, .cluster = 2}),
              HasSubstr("waits for the threads of the cluster"));
}

}  // namespace
}  // namespace tandem::kernel_tests
