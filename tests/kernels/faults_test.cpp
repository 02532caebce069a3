// Seeded faults: the emulator must catch every mistake of pipelined_gemm.cuh, in every interleaving, and name
// it; and the kernel without a mistake must run, and be right, in all of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <random>

#include "fault_of.hpp"
#include "launch.hpp"
#include "pipelined_gemm.cuh"

namespace tandem::kernel_tests {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
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
    return emulator::encode({.base = data.data(),
                             .rank = 4,
                             .dims = {columns, rows, 1, 1},
                             .strides = {columns * 2, columns * rows * 2, columns * rows * 2},
                             .box = {64, 64, 1, 1}});
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
    emulator::Options options{
        .seed = seed,
        .buffers = {emulator::readable(a.data), emulator::readable(b.data), emulator::readable(bias),
                    emulator::writable(c.data), emulator::writable(checksum), emulator::writable(stored)}};
    const GemmParams params{a.map(), b.map(), c.map(), bias.data(), k_blocks, checksum.data(), stored.data()};
    emulator::launch(&pipelined_gemm<mistake>, params,
                     {.blocks = 2, .threads = gemm_threads, .shared_bytes = sizeof(GemmShared)}, options);
  }
};

/// Shared memory read before the copy that fills it has been waited for, or even asked for.
const auto unready = AnyOf(HasSubstr("reads bytes of a copy that it has not waited for"),
                           HasSubstr("reads shared memory that nobody wrote"));

TEST(FaultlessKernel, IsRightInEveryInterleaving) {
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

struct Seeded {
  const char* name;
  void (Gemm::*run)(std::uint64_t seed);
  Matcher<const std::string&> text;

  friend void PrintTo(const Seeded& s, std::ostream* out) { *out << s.name; }
};
class Faults : public ::testing::TestWithParam<Seeded> {};

TEST_P(Faults, AreReportedInEveryInterleaving) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    Gemm gemm;
    EXPECT_THAT(fault_of([&] { (gemm.*GetParam().run)(seed); }), GetParam().text) << "seed " << seed;
  }
}

const Seeded faults[] = {
    // Barriers.
    {"DroppedArrive", &Gemm::run<Mistake::dropped_arrive>,
     AllOf(HasSubstr("deadlock"), HasSubstr("waits at mbarrier +"), HasSubstr("1 of 4 arrivals"))},
    // Five arrivals a lap where four complete a phase: after four laps the buffer is refilled a lap early.
    {"ExtraArrive", &Gemm::run<Mistake::extra_arrive>,
     AllOf(HasSubstr("tma_load"),
           AnyOf(HasSubstr("may still be reading"), HasSubstr("not been waited for")))},
    {"NoWaitForFull", &Gemm::run<Mistake::no_wait_for_full>, AllOf(HasSubstr("wgmma operand"), unready)},
    {"OneLaneWaitsForFull", &Gemm::run<Mistake::one_lane_waits_for_full>,
     AllOf(HasSubstr("wgmma operand"), unready)},
    {"RefillBeforeReadersAreDone", &Gemm::run<Mistake::no_wait_for_empty>,
     AnyOf(HasSubstr("tma_load at +0: overwrites bytes"), HasSubstr("more arrivals than expected"))},
    {"WrongStage", &Gemm::run<Mistake::wrong_stage>, AllOf(HasSubstr("wgmma operand"), unready)},
    {"WrongPhase", &Gemm::run<Mistake::wrong_phase>, AllOf(HasSubstr("wgmma operand"), unready)},
    {"PhaseBitNeverFlips", &Gemm::run<Mistake::laps_behind>, AnyOf(unready, HasSubstr("two phases behind"))},
    {"ReleaseBeforeTheProductsHaveRead", &Gemm::run<Mistake::early_release>,
     AllOf(HasSubstr("tma_load"), HasSubstr("may still be reading"))},
    {"TooFewBytesAnnounced", &Gemm::run<Mistake::too_few_bytes>, HasSubstr("wrong byte count")},
    {"TooManyBytesAnnounced", &Gemm::run<Mistake::too_many_bytes>,
     AllOf(HasSubstr("deadlock"), HasSubstr("0 of 1 arrivals and 16 bytes are missing, 0 copies in flight"))},
    {"NoInitFence", &Gemm::run<Mistake::no_init_fence>, HasSubstr("fence_mbarrier_init")},
    {"NoSyncAfterInit", &Gemm::run<Mistake::no_sync_after_init>,
     AnyOf(HasSubstr("no mbarrier was initialised"), HasSubstr("no barrier in between"))},
    {"BarrierOverwritten", &Gemm::run<Mistake::barrier_overwritten>, HasSubstr("overwrites an mbarrier")},
    // Tensor cores.
    {"NoWgmmaFence", &Gemm::run<Mistake::no_wgmma_fence>, HasSubstr("no wgmma_fence")},
    {"NoWgmmaWait", &Gemm::run<Mistake::no_wgmma_wait>,
     AnyOf(HasSubstr("wgmma_wait has not handed it back"), HasSubstr("may still be reading"))},
    {"OneWarpWaitsAgain", &Gemm::run<Mistake::one_warp_waits_again>,
     HasSubstr("in a branch that a warp takes alone")},
    {"PinnedBeforeWait", &Gemm::run<Mistake::pinned_before_wait>,
     HasSubstr("wgmma_wait has not handed it back")},
    {"AccumulatorReadEarly", &Gemm::run<Mistake::read_accumulator_early>,
     HasSubstr("wgmma_wait has not handed it back")},
    {"AccumulatorWrittenEarly", &Gemm::run<Mistake::write_accumulator_early>,
     HasSubstr("wrote accumulator register 3")},
    {"DescriptorsDiffer", &Gemm::run<Mistake::other_descriptor_in_one_warp>, HasSubstr("differs from WGMMA")},
    {"OneWarpSkipsAProduct", &Gemm::run<Mistake::one_warp_skips_a_product>,
     AnyOf(HasSubstr("differs from WGMMA"), HasSubstr("was issued by 96 of 128 threads"))},
    {"MisalignedDescriptor", &Gemm::run<Mistake::misaligned_descriptor>, HasSubstr("misaligned descriptor")},
    {"OperandOutsideShared", &Gemm::run<Mistake::operand_outside_shared>, HasSubstr("outside shared memory")},
    // Ordinary accesses.
    {"NoProxyFence", &Gemm::run<Mistake::no_proxy_fence>,
     AllOf(HasSubstr("tma_store"), HasSubstr("without a fence_async_shared"))},
    {"NoBarrierBeforeStore", &Gemm::run<Mistake::no_barrier_before_store>,
     AllOf(HasSubstr("tma_store"), AnyOf(HasSubstr("no barrier between them"), HasSubstr("nobody wrote")))},
    {"NamedBarrierWithTheWrongCount", &Gemm::run<Mistake::wrong_barrier_count>,
     AllOf(HasSubstr("named barrier 1 with the wrong count"), HasSubstr("96"), HasSubstr("128"))},
    {"WarpMissingAtNamedBarrier", &Gemm::run<Mistake::missing_at_barrier>,
     AllOf(HasSubstr("deadlock"), HasSubstr("waits at named barrier 1: 96 of 128 threads have arrived"))},
    {"DivergedWarp", &Gemm::run<Mistake::diverged_warp>, HasSubstr("has diverged")},
    {"NoStoreWait", &Gemm::run<Mistake::no_store_wait>, HasSubstr("tma_store_wait is missing")},
    {"NoWrittenWait", &Gemm::run<Mistake::no_written_wait>, HasSubstr("tma_store_wait_written is missing")},
    {"StagingRewrittenEarly", &Gemm::run<Mistake::staging_rewritten_early>,
     HasSubstr("that a bulk store may still be reading")},
    {"SharedOutOfBounds", &Gemm::run<Mistake::shared_out_of_bounds>, HasSubstr("outside shared memory")},
    {"GlobalOutOfBounds", &Gemm::run<Mistake::global_out_of_bounds>,
     HasSubstr("out of bounds: 4 bytes at offset 8 of a buffer of 8")},
    {"ReadOnlyBufferWritten", &Gemm::run<Mistake::read_only_buffer_written>,
     HasSubstr("writes a buffer that is only to be read")},
    {"MisalignedGlobal", &Gemm::run<Mistake::misaligned_global>, HasSubstr("is not aligned to 4 bytes")},
    {"UninitialisedShared", &Gemm::run<Mistake::uninitialised_shared>,
     HasSubstr("reads shared memory that nobody wrote")},
    {"GlobalStoredTwice", &Gemm::run<Mistake::global_stored_twice>,
     AllOf(HasSubstr("global store: stores over what thread"), HasSubstr("with no barrier between them"))},
    {"GlobalOfAnotherBlock", &Gemm::run<Mistake::global_of_another_block>,
     HasSubstr("global store: stores over what block 0 stored")},
};
INSTANTIATE_TEST_SUITE_P(Seeded, Faults, ::testing::ValuesIn(faults),
                         [](const auto& at) { return std::string(at.param.name); });

/// Where the store comes later there is nothing to see.
TEST(GlobalRead, ThatNothingOrdersIsReported) {
  int seen = 0;
  for (std::uint64_t seed = 0; seed < 4 * seeds; ++seed) {
    const std::string fault = fault_of([&] { Gemm().run<Mistake::global_read_unordered>(seed); });
    if (fault.empty()) continue;
    EXPECT_THAT(fault, HasSubstr("global load: reads what thread 0 stored"));
    ++seen;
  }
  EXPECT_GE(seen, 4);
}

}  // namespace
}  // namespace tandem::kernel_tests
