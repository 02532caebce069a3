// Two blocks of a cluster that send each other numbers, right and with seeded faults.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/tma.cuh"
#include "launch.hpp"

namespace tandem::kernel_tests {
namespace {

using emulator::Fault;
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
  emulator::Options options;
  options.seed = seed;
  options.host_threads = 2;
  options.buffers = {emulator::writable(sums)};
  emulator::launch([&] { exchange<mistake>(sums.data()); }, grid, options);
  return sums;
}

template <Mistake mistake>
std::string fault(std::uint64_t seed) {
  try {
    run<mistake>(seed);
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "";
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

TEST(Cluster, GridsWithoutPairsAreRefused) {
  const auto fault_of = [](const std::function<void()>& kernel, const emulator::Grid& of) -> std::string {
    try {
      emulator::launch(kernel, of, {});
    } catch (const Fault& fault) {
      return fault.what();
    }
    return "";
  };
  EXPECT_THAT(fault_of([] {}, {.blocks = 3, .cluster = 2}), HasSubstr("3 blocks in clusters of 2"));
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
