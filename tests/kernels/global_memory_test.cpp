// Global memory in the emulator: what the grid before writes, and the read-only cache.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "fault_of.hpp"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"

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

}  // namespace
}  // namespace tandem::kernel_tests
