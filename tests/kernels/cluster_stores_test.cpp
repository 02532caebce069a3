// Blocks of clusters of any size that store into each other's shared memory, right and with seeded faults.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fault_of.hpp"
#include "launch.hpp"
#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"

namespace tandem::kernel_tests {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr unsigned threads = 64;
constexpr u32 rounds = 5;

enum class Mistake {
  none,
  never_waits_for_begin,
  arrives_not,
  initialises_late,
  one_buffer,
  never_waits,
  reads_early,
  announces_less,
  announces_more,
  leaves_one_out,
  sends_to_nobody,
  ends_early,
  arrives_twice
};

template <u32 blocks>
struct Shared {
  ptx::Float4 received[2][blocks][threads];
  ptx::Mbarrier full[2];
};

/// In each round every block sends every block, itself too, 16 bytes of each thread, and adds up what it
/// gets.
template <u32 blocks, Mistake mistake>
void exchange(float* sums) {
  auto& shared = *reinterpret_cast<Shared<blocks>*>(ptx::dynamic_shared());
  const u32 thread = ptx::thread_index();
  const u32 rank = ptx::block_index() % blocks;
  const auto initialise = [&] {
    if (thread != 0) return;
    for (ptx::Mbarrier& bar : shared.full) ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
  };
  if (mistake != Mistake::initialises_late) initialise();
  ptx::sync_block();
  if (mistake != Mistake::arrives_not || thread > 0 || rank > 0) ptx::arrive_cluster();
  if (mistake == Mistake::arrives_twice) ptx::arrive_cluster();
  if (mistake == Mistake::initialises_late) {
    initialise();
    ptx::sync_block();
  }
  if (mistake != Mistake::never_waits_for_begin) ptx::wait_cluster();
  float sum = 0.0F;
  const u32 last = mistake == Mistake::ends_early && rank == 0 ? rounds - 1 : rounds;
  for (u32 round = 0; round < last; ++round) {
    const u32 at = mistake == Mistake::one_buffer ? 0 : round % 2;
    const u32 parity = mistake == Mistake::one_buffer ? round % 2 : round / 2 % 2;
    constexpr u32 bytes = blocks * threads * 16;
    if (thread == 0) {
      ptx::mbarrier_arrive_expect(shared.full[at], mistake == Mistake::announces_less   ? bytes - 16
                                                   : mistake == Mistake::announces_more ? bytes + 16
                                                                                        : bytes);
    }
    const float number = static_cast<float>(100 * round + rank);
    for (u32 to = 0; to < blocks; ++to) {
      if (mistake == Mistake::leaves_one_out && round == 3 && rank == 1 && to == 0 && thread == 5) continue;
      const u32 target = mistake == Mistake::sends_to_nobody && to == 1 ? blocks : to;
      ptx::store_async(target, &shared.received[at][rank][thread], {number, 0.0F, 1.0F, 0.0F},
                       shared.full[at]);
    }
    if (mistake != Mistake::never_waits && mistake != Mistake::reads_early)
      ptx::mbarrier_wait(shared.full[at], parity);
    if (mistake != Mistake::never_waits) {
      for (u32 from = 0; from < blocks; ++from)
        sum += ptx::load_shared(&shared.received[at][from][threads - 1 - thread]).x;
    }
    if (mistake == Mistake::reads_early) ptx::mbarrier_wait(shared.full[at], parity);
    ptx::sync_block();  // all have read before one sends again
  }
  ptx::store_global(sums + ptx::block_index() * threads + thread, sum);
}

template <u32 blocks, Mistake mistake>
std::vector<float> run(std::uint64_t seed) {
  const emulator::Grid grid{
      .blocks = 2 * blocks, .threads = threads, .shared_bytes = sizeof(Shared<blocks>), .cluster = blocks};
  std::vector<float> sums(static_cast<std::size_t>(grid.blocks) * threads);
  emulator::Options options{.seed = seed, .host_threads = 2, .buffers = {emulator::writable(sums)}};
  emulator::launch([&] { exchange<blocks, mistake>(sums.data()); }, grid, options);
  return sums;
}

template <Mistake mistake>
std::string fault(std::uint64_t seed) {
  return fault_of([&] { run<4, mistake>(seed); });
}

template <u32 blocks>
void expect_sums() {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const std::vector<float> sums = run<blocks, Mistake::none>(seed);
    constexpr float of_ranks = blocks * (blocks - 1) / 2 * rounds;
    constexpr float of_rounds = 100 * blocks * (rounds * (rounds - 1) / 2);
    for (const float sum : sums) ASSERT_EQ(sum, of_ranks + of_rounds) << "seed " << seed;
  }
}

TEST(ClusterStores, ReachEveryBlockInEveryInterleaving) {
  expect_sums<2>();
  expect_sums<4>();
  expect_sums<16>();
}

TEST(ClusterStores, BeforeABlockIsKnownToHaveBegunAreAFault) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    EXPECT_THAT(fault<Mistake::never_waits_for_begin>(seed),
                HasSubstr("between arriving at its barrier and waiting there"));
    EXPECT_THAT(fault<Mistake::initialises_late>(seed),
                HasSubstr("none that it knows is initialised and fenced"));
  }
  const auto unasked = [] {
    auto& shared = *reinterpret_cast<Shared<2>*>(ptx::dynamic_shared());
    ptx::store_async(ptx::block_index() ^ 1, &shared.received[0][0][0], {}, shared.full[0]);
  };
  EXPECT_THAT(
      fault_of(unasked, {.blocks = 2, .threads = 32, .shared_bytes = sizeof(Shared<2>), .cluster = 2}),
      HasSubstr("may not have begun: wait_cluster is missing"));
}

TEST(ClusterStores, ABarrierWithoutAllArrivalsIsADeadlock) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    EXPECT_THAT(fault<Mistake::arrives_not>(seed),
                AnyOf(HasSubstr("waits for the threads of the cluster"), HasSubstr("and has not arrived")));
    EXPECT_THAT(fault<Mistake::arrives_twice>(seed), HasSubstr("arrives twice at the cluster's barrier"));
  }
}

TEST(ClusterStores, OverWhatABlockStillReadsAreAFault) {
  for (std::uint64_t seed = 0; seed < 4; ++seed)
    EXPECT_THAT(fault<Mistake::one_buffer>(seed), HasSubstr("a store of another block"));
}

TEST(ClusterStores, ReadBeforeTheyHaveComeAreAFault) {
  for (std::uint64_t seed = 0; seed < 4; ++seed)
    EXPECT_THAT(fault<Mistake::reads_early>(seed),
                AnyOf(HasSubstr("nobody wrote"), HasSubstr("not waited for")));
}

TEST(ClusterStores, WrongByteCountsAreAFault) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    EXPECT_THAT(fault<Mistake::announces_less>(seed),
                AnyOf(HasSubstr("wrong byte count"), HasSubstr(" -16 bytes are missing"),
                      HasSubstr("nobody wrote"), HasSubstr("not waited for")));
    EXPECT_THAT(fault<Mistake::announces_more>(seed), HasSubstr(" 16 bytes are missing"));
    EXPECT_THAT(fault<Mistake::leaves_one_out>(seed), HasSubstr(" bytes are missing"));
    EXPECT_THAT(fault<Mistake::sends_to_nobody>(seed), HasSubstr("block 4 of a cluster of 4"));
  }
}

/// A block that does not wait for what is sent to it may have ended when it comes.
TEST(ClusterStores, ToABlockThatDoesNotWaitForThemAreAFault) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const auto late = AnyOf(HasSubstr("before it had waited"), HasSubstr("which has ended"),
                            HasSubstr("ended before what another block"), HasSubstr("overwrites bytes"),
                            HasSubstr("a store of another block"), HasSubstr("more arrivals than expected"),
                            HasSubstr("bytes are missing"));
    EXPECT_THAT(fault<Mistake::never_waits>(seed), late);
    EXPECT_THAT(fault<Mistake::ends_early>(seed), late);
  }
}

}  // namespace
}  // namespace tandem::kernel_tests
