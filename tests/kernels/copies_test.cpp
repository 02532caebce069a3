// Copies to shared memory by threads (cp.async): when their bytes may be read and overwritten.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "fault_of.hpp"
#include "launch.hpp"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"

namespace tandem::kernel_tests {
namespace {

using ::testing::HasSubstr;

/// What is wrong with reading, behind a barrier, what other threads have copied in two groups: `waits` is
/// called before it, and `first` tells which group is read.
std::string fault_of_copies(const std::function<void()>& waits, bool first) {
  const std::vector<std::uint32_t> source(256, 7);
  const auto kernel = [&] {
    auto* const shared = reinterpret_cast<ptx::Vec4*>(ptx::dynamic_shared());
    const auto* const global = reinterpret_cast<const ptx::Vec4*>(source.data());
    const int thread = static_cast<int>(ptx::thread_index());
    ptx::copy_async_or_zero(shared + thread, global + thread, thread != 5);
    ptx::commit_copies();
    ptx::copy_async(shared + 32 + thread, global + 32 + thread);
    ptx::commit_copies();
    waits();
    ptx::sync_block();
    const int read = thread ^ 1;
    const ptx::Vec4 got = ptx::load_shared(shared + (first ? 0 : 32) + read);
    EXPECT_EQ(got.z, first && read == 5 ? 0U : 7U);
  };
  return fault_of(kernel, {.threads = 32, .shared_bytes = 1024}, {.buffers = {emulator::readable(source)}});
}

TEST(Copies, CopiesArriveWhenTheirThreadHasWaited) {
  const auto nothing = [] {};
  const char* const early = "reads bytes of a copy that its thread has not waited for";
  EXPECT_THAT(fault_of_copies(nothing, true), HasSubstr(early));
  EXPECT_THAT(fault_of_copies([] { ptx::wait_for_copy_groups<2>(); }, true), HasSubstr(early));
  EXPECT_EQ(fault_of_copies([] { ptx::wait_for_copy_groups<1>(); }, true), "");
  EXPECT_THAT(fault_of_copies([] { ptx::wait_for_copy_groups<1>(); }, false), HasSubstr(early));
  EXPECT_EQ(fault_of_copies([] { ptx::wait_for_copy_groups<0>(); }, false), "");
  EXPECT_EQ(fault_of_copies(ptx::wait_for_copies, false), "");
}

/// A copy may land at any time between its start and the wait: nobody may use its bytes then.
TEST(Copies, WhatACopyOverwritesHasBeenRead) {
  const std::vector<std::uint32_t> source(128, 7);
  const auto fault = [&](bool syncs, bool writes) {
    return fault_of(
        [&] {
          auto* const shared = reinterpret_cast<ptx::Vec4*>(ptx::dynamic_shared());
          const auto* const global = reinterpret_cast<const ptx::Vec4*>(source.data());
          const int thread = static_cast<int>(ptx::thread_index());
          ptx::store_shared(shared + thread, ptx::Vec4{});
          ptx::sync_block();
          ptx::load_shared(shared + (thread ^ 1));
          if (syncs) ptx::sync_block();
          ptx::copy_async(shared + thread, global + thread);
          if (writes) ptx::store_shared(shared + thread, ptx::Vec4{});
          ptx::wait_for_copies();
        },
        {.threads = 32, .shared_bytes = 512}, {.buffers = {emulator::readable(source)}});
  };
  EXPECT_EQ(fault(true, false), "");
  EXPECT_THAT(fault(false, false), HasSubstr("with no barrier between them"));
  EXPECT_THAT(fault(true, true), HasSubstr("overwrites bytes of a copy that its thread has not waited for"));
}

}  // namespace
}  // namespace tandem::kernel_tests
