// What the emulator writes down of a block for `tandem trace`.
#include <gtest/gtest.h>

#include <algorithm>

#include "launch.hpp"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

namespace tandem {
namespace {

using emulator::Recording;
using emulator::Step;
using Kind = emulator::Step::Kind;

struct Shared {
  ptx::Mbarrier full;
};

/// Warp 1 computes and arrives; warp 0 waits, twice.
void handover(int /*nothing*/) {
  auto& shared = *reinterpret_cast<Shared*>(ptx::dynamic_shared());
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_init(shared.full, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_block();
  for (tandem::u32 phase = 0; phase < 2; ++phase) {
    if (ptx::thread_index() / 32 == 0) {
      ptx::mbarrier_wait(shared.full, phase % 2);
    } else if (ptx::thread_index() == 32) {
      static_cast<void>(ptx::exp2(ptx::fma(1.0F, 2.0F, 3.0F)));
      ptx::mbarrier_arrive(shared.full);
    }
    ptx::sync_block();
  }
}

Recording record(const emulator::Options& given, const emulator::Grid& grid) {
  Recording recording;
  emulator::Options options = given;
  options.recording = &recording;
  emulator::launch(&handover, 0, grid, options);
  return recording;
}
constexpr emulator::Grid two_warps{.blocks = 1, .threads = 64, .shared_bytes = 1024};

std::vector<Kind> kinds(const std::vector<Step>& steps) {
  std::vector<Kind> all;
  for (const Step& s : steps) all.push_back(s.kind);
  return all;
}

TEST(Recording, HasEachWarpsStepsInOrder) {
  const Recording recording = record({}, two_warps);
  ASSERT_EQ(recording.warps.size(), 2U);
  EXPECT_EQ(kinds(recording.warps[0]), (std::vector<Kind>{Kind::join_named, Kind::wait, Kind::join_named,
                                                          Kind::wait, Kind::join_named}));
  EXPECT_EQ(kinds(recording.warps[1]),
            (std::vector<Kind>{Kind::join_named, Kind::work, Kind::arrive, Kind::join_named, Kind::work,
                               Kind::arrive, Kind::join_named}));
  const emulator::Work work{.special = 1, .arithmetic = 1};
  EXPECT_EQ(recording.warps[1][1].work, work);
  for (const std::size_t phase : {0U, 1U}) {
    EXPECT_EQ(recording.warps[0][1 + 2 * phase].number, phase);
    EXPECT_EQ(recording.warps[1][2 + 3 * phase].number, phase);
  }
}

TEST(Recording, IsOfOneBlock) {
  Recording recording;
  recording.block = 2;
  emulator::Options options{.recording = &recording};
  emulator::launch(&handover, 0, {.blocks = 2, .threads = 64, .shared_bytes = 1024}, options);
  EXPECT_TRUE(recording.warps.empty()) << "there is no block 2";
  recording.block = 1;
  emulator::launch(&handover, 0, {.blocks = 2, .threads = 64, .shared_bytes = 1024}, options);
  EXPECT_EQ(recording.warps.size(), 2U);
}

TEST(Recording, RefusesARandomInterleaving) {
  EXPECT_THROW(record({.seed = 3}, two_warps), emulator::Fault);
}

}  // namespace
}  // namespace tandem
