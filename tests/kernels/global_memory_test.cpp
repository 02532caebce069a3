// Global memory in the emulator: what the grid before writes, and the read-only cache.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "fault_of.hpp"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"

namespace tandem::kernel_tests {
namespace {

using ::testing::HasSubstr;

/// What is wrong if one thread of 32 does this beside another grid.
std::string beside_grid(const std::function<void()>& access, emulator::Options options) {
  return fault_of(
      [&] {
        if (ptx::thread_index() == 0) access();
      },
      {.threads = 32}, options);
}

TEST(GlobalMemory, WhatThePreviousGridWritesIsReadAfterItsEnd) {
  const std::vector<float> scales(8, 1.0F);
  const std::vector<float> others(8, 1.0F);
  const emulator::Options options{.buffers = {emulator::readable(scales), emulator::readable(others)},
                                  .of_previous_grid = {emulator::readable(scales)}};
  const auto read = [&](const std::vector<float>& from, bool waits_first) {
    return beside_grid(
        [&] {
          if (waits_first) ptx::wait_for_previous_grid();
          ptx::load_global(&from[2]);
          ptx::wait_for_previous_grid();
        },
        options);
  };
  EXPECT_EQ(read(others, false), "");
  EXPECT_EQ(read(scales, true), "");
  EXPECT_THAT(read(scales, false), HasSubstr("the previous grid writes there"));
}

TEST(GlobalMemory, AGridEndsBehindTheOneBesideWhichItStarted) {
  const std::vector<float> data(8);
  const auto kernel = [](std::uint32_t waiting) {
    if (ptx::block_index() == waiting) ptx::wait_for_previous_grid();
  };
  for (const emulator::Options& options :
       {emulator::Options{.of_previous_grid = {emulator::readable(data)}},
        emulator::Options{.of_running_grid = {emulator::readable(data)}}}) {
    const emulator::Grid grid{.blocks = 3, .threads = 32};
    EXPECT_EQ(fault_of([&] { kernel(2); }, grid, options), "");
    EXPECT_THAT(fault_of([&] { kernel(3); }, grid, options), HasSubstr("no block of it has waited"));
  }
}

TEST(GlobalMemory, TheReadOnlyCacheIsForWhatNobodyWrites) {
  std::vector<float> data(8, 1.0F);
  emulator::Options options{.buffers = {emulator::writable(data)}};
  const auto read_back = [&](bool read_only) {
    return beside_grid(
        [&] {
          ptx::store_global(&data[2], 2.0F);
          read_only ? ptx::load_global(&data[2]) : ptx::load_written(&data[2]);
        },
        options);
  };
  EXPECT_EQ(read_back(false), "");
  EXPECT_THAT(read_back(true), HasSubstr("through the read-only cache, of what block 0 of this grid"));
  options.of_running_grid = {emulator::readable(data)};
  const auto read = [&](bool read_only) {
    return beside_grid(
        [&] {
          read_only ? ptx::load_global(&data[3]) : ptx::load_written(&data[3]);
          ptx::wait_for_previous_grid();
        },
        options);
  };
  EXPECT_EQ(read(false), "");
  EXPECT_THAT(read(true), HasSubstr("of what a grid that has not ended writes"));
}

/// Block 0 stores in bulk and increments a semaphore, block 1 reads the semaphore and then what was stored.
struct Handed {
  bool waits_written = true;
  bool reads_semaphore = true;
  bool fences_before = false;
  bool fences_after = true;
};
std::string fault_of_handing(const Handed& how) {
  alignas(16) static u32 data[4];
  std::vector<u32> semaphore(1, 0);
  const emulator::Options options{.buffers = {{data, sizeof(data), true}, emulator::writable(semaphore)}};
  const auto store = [&](char* shared) {
    ptx::store_shared(reinterpret_cast<ptx::Vec4*>(shared), {7U, 7U, 7U, 7U});
    ptx::fence_async_shared();
    ptx::bulk_store(data, shared, 16);
    ptx::tma_store_commit();
    if (how.waits_written) {
      ptx::tma_store_wait_written<0>();
    } else {
      ptx::tma_store_wait<0>();
    }
    ptx::semaphore_increment(semaphore.data());
  };
  const auto load = [&](char* shared) {
    auto& full = *reinterpret_cast<ptx::Mbarrier*>(shared + 16);
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
    if (how.fences_before) ptx::fence_async_global();
    if (how.reads_semaphore) ptx::semaphore_wait(semaphore.data(), 1);
    if (how.fences_after) ptx::fence_async_global();
    ptx::mbarrier_arrive_expect(full, 16);
    ptx::bulk_load(shared, data, 16, full);
    ptx::mbarrier_wait(full, 0);
  };
  return fault_of(
      [&] {
        if (ptx::thread_index() == 0)
          ptx::block_index() == 0 ? store(ptx::dynamic_shared()) : load(ptx::dynamic_shared());
      },
      {.blocks = 2, .threads = 32, .shared_bytes = 1024}, options);
}

TEST(GlobalMemory, WhatIsStoredInBulkIsReadInBulkBehindASemaphoreAndAFence) {
  EXPECT_EQ(fault_of_handing({}), "");
  EXPECT_THAT(fault_of_handing({.waits_written = false}), HasSubstr("tma_store_wait_written is missing"));
  const auto unseen = HasSubstr("reads what thread 0 of the grid has stored in bulk");
  EXPECT_THAT(fault_of_handing({.reads_semaphore = false}), unseen);
  EXPECT_THAT(fault_of_handing({.fences_after = false}), unseen);
  EXPECT_THAT(fault_of_handing({.fences_before = true, .fences_after = false}), unseen);
}

}  // namespace
}  // namespace tandem::kernel_tests
