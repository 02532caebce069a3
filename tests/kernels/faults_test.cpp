// Seeded faults: the emulator must catch every mistake of pipelined_gemm.cuh, in every interleaving, and name
// it; and the kernel without a mistake must run, and be right, in all of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <random>

#include "launch.hpp"
#include "pipelined_gemm.cuh"

namespace tandem::kernel_tests {
namespace {

using emulator::Fault;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Matcher;

constexpr int k_blocks = 16;  // laps enough for surplus arrivals to add up to a phase
constexpr int depth = 64 * k_blocks;
constexpr std::uint64_t seeds = 8;

std::uint16_t to_bf16(float x) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16);
}

/// A matrix of small integers, exact in bf16 and in fp32 sums.
struct Matrix {
  int rows;
  int columns;
  std::vector<std::uint16_t> data;

  Matrix(int r, int c, unsigned seed) : rows(r), columns(c), data(static_cast<std::size_t>(r) * c) {
    std::minstd_rand random(seed);
    for (auto& x : data) x = to_bf16(static_cast<float>(static_cast<int>(random() >> 8) % 3 - 1));
  }
  [[nodiscard]] float at(int r, int c) const {
    return std::bit_cast<float>(std::uint32_t{data[static_cast<std::size_t>(r * columns + c)]} << 16);
  }
  [[nodiscard]] TensorMap map() const {
    TensorMapSpec spec;
    spec.base = data.data();
    spec.rank = 4;
    spec.dims = {columns, rows, 1, 1};
    spec.strides = {columns * 2, columns * rows * 2, columns * rows * 2};
    spec.box = {64, 64, 1, 1};
    return emulator::encode(spec);
  }
};

struct Gemm {
  Matrix a{64, depth, 1};
  Matrix b{depth, 64, 2};
  Matrix c{64, 64, 3};
  std::vector<float> bias{2.0F};
  std::vector<std::uint32_t> checksum = std::vector<std::uint32_t>(2);
  std::vector<std::uint32_t> stored{0};

  template <Mistake mistake>
  void run(std::uint64_t seed) {
    emulator::Options options;
    options.seed = seed;
    options.buffers = {emulator::readable(a.data), emulator::readable(b.data),   emulator::readable(bias),
                       emulator::writable(c.data), emulator::writable(checksum), emulator::writable(stored)};
    const GemmParams params{a.map(), b.map(), c.map(), bias.data(), k_blocks, checksum.data(), stored.data()};
    emulator::launch(&pipelined_gemm<mistake>, params,
                     {.blocks = 2, .threads = gemm_threads, .shared_bytes = sizeof(GemmShared)}, options);
  }
};

/// Shared memory read before the copy that fills it has been waited for, or even asked for.
const auto unready = ::testing::AnyOf(HasSubstr("reads bytes of a copy that it has not waited for"),
                                      HasSubstr("reads shared memory that nobody wrote"));

template <Mistake mistake>
void expect_fault(const Matcher<const std::string&>& text) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    try {
      Gemm().run<mistake>(seed);
      ADD_FAILURE() << "nothing was reported";
    } catch (const Fault& fault) {
      EXPECT_THAT(std::string(fault.what()), text);
    }
  }
}

TEST(Faults, TheKernelWithoutMistakeIsRightInEveryInterleaving) {
  for (std::uint64_t seed = 0; seed < 4 * seeds; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Gemm gemm;
    ASSERT_NO_THROW(gemm.run<Mistake::none>(seed));
    for (int i = 0; i < 64; ++i) {
      for (int j = 0; j < 64; ++j) {
        float sum = gemm.bias[0];
        for (int k = 0; k < depth; ++k) sum += gemm.a.at(i, k) * gemm.b.at(k, j);
        ASSERT_EQ(gemm.c.at(i, j), sum) << i << ", " << j;
      }
    }
    EXPECT_EQ(gemm.checksum[0], 1U);
    EXPECT_EQ(gemm.checksum[1], 1U);
    EXPECT_EQ(gemm.stored[0], 2U);
  }
}

// Barriers
// -------------------------------------------------------------------------------------------------------------

TEST(Faults, DroppedArrive) {
  expect_fault<Mistake::dropped_arrive>(
      AllOf(HasSubstr("deadlock"), HasSubstr("waits at mbarrier +"), HasSubstr("1 of 4 arrivals")));
}
TEST(Faults, ExtraArrive) {
  // Five arrivals a lap where four complete a phase: after four laps the buffer is refilled a lap early.
  expect_fault<Mistake::extra_arrive>(
      AllOf(HasSubstr("tma_load"),
            ::testing::AnyOf(HasSubstr("may still be reading"), HasSubstr("not been waited for"))));
}
TEST(Faults, NoWaitForFull) {
  expect_fault<Mistake::no_wait_for_full>(AllOf(HasSubstr("wgmma operand"), unready));
}
TEST(Faults, OneLaneWaitsForFull) {
  expect_fault<Mistake::one_lane_waits_for_full>(AllOf(HasSubstr("wgmma operand"), unready));
}
TEST(Faults, RefillBeforeReadersAreDone) {
  expect_fault<Mistake::no_wait_for_empty>(::testing::AnyOf(HasSubstr("tma_load at +0: overwrites bytes"),
                                                            HasSubstr("more arrivals than expected")));
}
TEST(Faults, WrongStage) {
  expect_fault<Mistake::wrong_stage>(AllOf(HasSubstr("wgmma operand"), unready));
}
TEST(Faults, WrongPhase) {
  expect_fault<Mistake::wrong_phase>(AllOf(HasSubstr("wgmma operand"), unready));
}
TEST(Faults, PhaseBitNeverFlips) {
  expect_fault<Mistake::laps_behind>(::testing::AnyOf(unready, HasSubstr("two phases behind")));
}
TEST(Faults, ReleaseBeforeTheProductsHaveRead) {
  expect_fault<Mistake::early_release>(AllOf(HasSubstr("tma_load"), HasSubstr("may still be reading")));
}
TEST(Faults, TooFewBytesAnnounced) {
  expect_fault<Mistake::too_few_bytes>(HasSubstr("wrong byte count"));
}
TEST(Faults, TooManyBytesAnnounced) {
  expect_fault<Mistake::too_many_bytes>(AllOf(
      HasSubstr("deadlock"), HasSubstr("0 of 1 arrivals and 16 bytes are missing, 0 copies in flight")));
}
TEST(Faults, NoInitFence) {
  expect_fault<Mistake::no_init_fence>(HasSubstr("fence_mbarrier_init"));
}
TEST(Faults, NoSyncAfterInit) {
  expect_fault<Mistake::no_sync_after_init>(
      ::testing::AnyOf(HasSubstr("no mbarrier was initialised"), HasSubstr("no barrier in between")));
}
TEST(Faults, BarrierOverwritten) {
  expect_fault<Mistake::barrier_overwritten>(HasSubstr("overwrites an mbarrier"));
}

// Tensor cores
// ---------------------------------------------------------------------------------------------------------

TEST(Faults, NoWgmmaFence) {
  expect_fault<Mistake::no_wgmma_fence>(HasSubstr("no wgmma_fence"));
}
TEST(Faults, NoWgmmaWait) {
  expect_fault<Mistake::no_wgmma_wait>(
      ::testing::AnyOf(HasSubstr("wgmma_wait has not handed it back"), HasSubstr("may still be reading")));
}
TEST(Faults, OneWarpWaitsAgain) {
  expect_fault<Mistake::one_warp_waits_again>(HasSubstr("in a branch that a warp takes alone"));
}
TEST(Faults, PinnedBeforeWait) {
  expect_fault<Mistake::pinned_before_wait>(HasSubstr("wgmma_wait has not handed it back"));
}
TEST(Faults, AccumulatorReadEarly) {
  expect_fault<Mistake::read_accumulator_early>(HasSubstr("wgmma_wait has not handed it back"));
}
TEST(Faults, AccumulatorWrittenEarly) {
  expect_fault<Mistake::write_accumulator_early>(HasSubstr("wrote accumulator register 3"));
}
TEST(Faults, DescriptorsDiffer) {
  expect_fault<Mistake::other_descriptor_in_one_warp>(HasSubstr("differs from WGMMA"));
}
TEST(Faults, OneWarpSkipsAProduct) {
  expect_fault<Mistake::one_warp_skips_a_product>(
      ::testing::AnyOf(HasSubstr("differs from WGMMA"), HasSubstr("was issued by 96 of 128 threads")));
}
TEST(Faults, MisalignedDescriptor) {
  expect_fault<Mistake::misaligned_descriptor>(HasSubstr("misaligned descriptor"));
}
TEST(Faults, OperandOutsideShared) {
  expect_fault<Mistake::operand_outside_shared>(HasSubstr("outside shared memory"));
}

// Ordinary accesses
// ----------------------------------------------------------------------------------------------------

TEST(Faults, NoProxyFence) {
  expect_fault<Mistake::no_proxy_fence>(
      AllOf(HasSubstr("tma_store"), HasSubstr("without a fence_async_shared")));
}
TEST(Faults, NoBarrierBeforeStore) {
  expect_fault<Mistake::no_barrier_before_store>(
      AllOf(HasSubstr("tma_store"),
            ::testing::AnyOf(HasSubstr("no barrier between them"), HasSubstr("nobody wrote"))));
}
TEST(Faults, NamedBarrierWithTheWrongCount) {
  expect_fault<Mistake::wrong_barrier_count>(
      AllOf(HasSubstr("named barrier 1 with the wrong count"), HasSubstr("96"), HasSubstr("128")));
}
TEST(Faults, WarpMissingAtNamedBarrier) {
  expect_fault<Mistake::missing_at_barrier>(
      AllOf(HasSubstr("deadlock"), HasSubstr("waits at named barrier 1: 96 of 128 threads have arrived")));
}
TEST(Faults, DivergedWarp) {
  expect_fault<Mistake::diverged_warp>(HasSubstr("has diverged"));
}
TEST(Faults, NoStoreWait) {
  expect_fault<Mistake::no_store_wait>(HasSubstr("tma_store_wait is missing"));
}
TEST(Faults, NoWrittenWait) {
  expect_fault<Mistake::no_written_wait>(HasSubstr("tma_store_wait_written is missing"));
}
TEST(Faults, StagingRewrittenEarly) {
  expect_fault<Mistake::staging_rewritten_early>(HasSubstr("that a bulk store may still be reading"));
}
TEST(Faults, SharedOutOfBounds) {
  expect_fault<Mistake::shared_out_of_bounds>(HasSubstr("outside shared memory"));
}
TEST(Faults, GlobalOutOfBounds) {
  expect_fault<Mistake::global_out_of_bounds>(
      HasSubstr("out of bounds: 4 bytes at offset 8 of a buffer of 8"));
}
TEST(Faults, ReadOnlyBufferWritten) {
  expect_fault<Mistake::read_only_buffer_written>(HasSubstr("writes a buffer that is only to be read"));
}
TEST(Faults, MisalignedGlobal) {
  expect_fault<Mistake::misaligned_global>(HasSubstr("is not aligned to 4 bytes"));
}
TEST(Faults, UninitialisedShared) {
  expect_fault<Mistake::uninitialised_shared>(HasSubstr("reads shared memory that nobody wrote"));
}
TEST(Faults, GlobalStoredTwice) {
  expect_fault<Mistake::global_stored_twice>(
      AllOf(HasSubstr("global store: stores over what thread"), HasSubstr("with no barrier between them")));
}
TEST(Faults, GlobalOfAnotherBlock) {
  expect_fault<Mistake::global_of_another_block>(HasSubstr("global store: stores over what block 0 stored"));
}
/// Where the store comes later there is nothing to see.
TEST(Faults, GlobalReadThatNothingOrders) {
  int seen = 0;
  for (std::uint64_t seed = 0; seed < 4 * seeds; ++seed) {
    try {
      Gemm().run<Mistake::global_read_unordered>(seed);
    } catch (const Fault& fault) {
      EXPECT_THAT(std::string(fault.what()), HasSubstr("global load: reads what thread 0 stored"));
      ++seen;
    }
  }
  EXPECT_GE(seen, 4);
}

}  // namespace
}  // namespace tandem::kernel_tests
