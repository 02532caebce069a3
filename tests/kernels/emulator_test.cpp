// The emulator itself: scheduling, collectives, barriers, the tensor cores' queue, checks of addresses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "fault_of.hpp"
#include "launch.hpp"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"

namespace tandem::kernel_tests {
namespace {

using emulator::Fault;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Emulator, RefusesLaunchesThatHardwareRefuses) {
  const auto nothing = [] {};
  EXPECT_THAT(fault_of(nothing, {.threads = 100}), HasSubstr("100 threads"));
  EXPECT_THAT(fault_of(nothing, {.threads = 0}), HasSubstr("0 threads"));
  EXPECT_THAT(fault_of(nothing, {.shared_bytes = 300000}), HasSubstr("300000 bytes of shared memory"));
  EXPECT_EQ(fault_of(nothing, {.threads = 512, .shared_bytes = 232448}), "");
}

TEST(Emulator, RunsEveryThreadOfEveryBlockOnAnyNumberOfHostThreads) {
  for (const unsigned host_threads : {1U, 3U}) {
    std::vector<std::uint32_t> seen(7 * 64);
    emulator::Options options{.host_threads = host_threads, .buffers = {emulator::writable(seen)}};
    const auto kernel = [&] {
      ptx::atomic_add(&seen[ptx::block_index() * 64 + ptx::thread_index()], ptx::grid_size());
    };
    EXPECT_EQ(fault_of(kernel, {.blocks = 7, .threads = 64}, options), "");
    EXPECT_EQ(seen, std::vector<std::uint32_t>(7 * 64, 7));
  }
}

/// In which order 64 threads pass a warp's barrier.
std::vector<std::uint32_t> order(std::uint64_t seed) {
  std::vector<std::uint32_t> threads;
  emulator::Options options{.seed = seed};
  emulator::launch(
      [&] {
        ptx::sync_warp();
        threads.push_back(ptx::thread_index());
      },
      {.threads = 64}, options);
  return threads;
}

TEST(Emulator, ASeedIsAnInterleaving) {
  EXPECT_EQ(order(3), order(3));
  EXPECT_NE(order(3), order(4));
  std::vector<std::uint32_t> sorted = order(5);
  std::sort(sorted.begin(), sorted.end());
  std::vector<std::uint32_t> all(64);
  std::iota(all.begin(), all.end(), 0U);
  EXPECT_EQ(sorted, all);
}

TEST(Emulator, HandsOnWhatAKernelThrows) {
  const auto kernel = [] {
    if (ptx::thread_index() == 5) throw std::out_of_range("the kernel's own");
    ptx::sync_block();
  };
  EXPECT_THROW(emulator::launch(kernel, {.threads = 32}, {}), std::out_of_range);
}

TEST(Emulator, NamedBarriersJoinWhoArrivesAndWhoWaits) {
  std::uint32_t value = 0;
  const auto kernel = [&] {
    if (ptx::thread_index() < 32) {
      if (ptx::thread_index() == 0) value = 7;
      ptx::named_barrier_arrive(3, 64);
    } else {
      ptx::named_barrier_sync(3, 64);
      if (value != 7) throw Fault("ran ahead");
    }
  };
  for (std::uint64_t seed = 0; seed < 5; ++seed)
    EXPECT_EQ(fault_of(kernel, {.threads = 64}, {.seed = seed}), "");
  EXPECT_THAT(fault_of(
                  [] {
                    ptx::named_barrier_arrive(1, 64);
                    ptx::named_barrier_arrive(1, 64);
                  },
                  {.threads = 64}),
              HasSubstr("arrives twice at named barrier 1"));
  EXPECT_THAT(fault_of([] { ptx::named_barrier_sync(16, 32); }, {.threads = 32}),
              HasSubstr("no named barrier 16"));
  EXPECT_THAT(fault_of([] { ptx::named_barrier_sync(1, 48); }, {.threads = 64}), HasSubstr("for 48 threads"));
}

struct OneBarrier {
  alignas(1024) char tile[1024];
  ptx::Mbarrier bar;
};
OneBarrier& one_barrier(u32 arrivals) {
  auto& s = *reinterpret_cast<OneBarrier*>(ptx::dynamic_shared());
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_init(s.bar, arrivals);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_block();
  return s;
}
constexpr emulator::Grid one_barrier_grid{.threads = 32, .shared_bytes = sizeof(OneBarrier)};

TEST(Emulator, MbarriersCountArrivalsAndBytes) {
  EXPECT_EQ(fault_of(
                [] {
                  OneBarrier& s = one_barrier(32);
                  ptx::mbarrier_wait(s.bar, 1);  // the phase before the first counts as completed
                  for (u32 phase = 0; phase < 4; ++phase) {
                    ptx::mbarrier_arrive(s.bar);
                    ptx::mbarrier_wait(s.bar, phase % 2);
                  }
                },
                one_barrier_grid),
            "");
  EXPECT_THAT(fault_of(
                  [] {
                    OneBarrier& s = one_barrier(1);
                    if (ptx::thread_index() == 0) ptx::mbarrier_arrive_expect(s.bar, 16);
                    if (ptx::thread_index() == 0) ptx::mbarrier_arrive(s.bar);
                  },
                  one_barrier_grid),
              HasSubstr("more arrivals than expected at mbarrier +1024: phase 0 takes 1"));
  EXPECT_THAT(
      fault_of([] { ptx::mbarrier_wait(one_barrier(40).bar, 0); }, one_barrier_grid),
      AllOf(HasSubstr("deadlock"), HasSubstr("threads 0-31: each waits at mbarrier +1024 for phase 0"),
            HasSubstr("40 of 40 arrivals")));
  EXPECT_THAT(fault_of(
                  [] {
                    one_barrier(1);
                    if (ptx::thread_index() == 0) one_barrier(1);
                    ptx::sync_block();
                  },
                  one_barrier_grid),
              HasSubstr("already initialised"));
}

TEST(Emulator, SeesRacesInSharedMemory) {
  const auto words = [] { return reinterpret_cast<u32*>(ptx::dynamic_shared()); };
  const emulator::Grid grid{.threads = 64, .shared_bytes = 1024};
  EXPECT_THAT(fault_of([&] { ptx::store_shared(words(), 1U); }, grid), HasSubstr("overwrites what thread"));
  EXPECT_THAT(fault_of(
                  [&] {
                    ptx::store_shared(words() + ptx::thread_index(), 1U);
                    ptx::sync_block();
                    ptx::load_shared(words());
                    if (ptx::thread_index() == 1) ptx::store_shared(words(), 2U);
                  },
                  grid),
              HasSubstr("shared store at +0: overwrites bytes that thread"));
  EXPECT_THAT(fault_of(
                  [&] {
                    ptx::store_shared(words() + ptx::thread_index(), 1U);
                    ptx::sync_warp();
                    ptx::load_shared(words() + (ptx::thread_index() + 32) % 64);
                  },
                  grid),
              ::testing::AnyOf(HasSubstr("with no barrier between them"), HasSubstr("nobody wrote")));
  EXPECT_EQ(fault_of(
                [&] {
                  ptx::store_shared(reinterpret_cast<u16*>(ptx::dynamic_shared()) + ptx::thread_index(),
                                    u16{1});
                  ptx::sync_block();
                  ptx::load_shared(words() + ptx::thread_index() / 2);
                },
                grid),
            "");
}

/// One thread's word, stored by another: a fence lies between them at the writer's side of their barrier, at
/// the reader's, before the write or nowhere.
enum class Fence { writer, reader, too_early, none };

std::string fault_of_store(Fence where) {
  alignas(16) static u32 target[4];
  emulator::Options options{.buffers = {{target, sizeof(target), true}}};
  return fault_of(
      [&] {
        auto* word = reinterpret_cast<u32*>(ptx::dynamic_shared());
        if (where == Fence::too_early) ptx::fence_async_shared();
        if (ptx::thread_index() == 1) {
          for (int i = 0; i < 4; ++i) ptx::store_shared(word + i, 7U);
          if (where == Fence::writer) ptx::fence_async_shared();
        }
        ptx::sync_block();
        if (ptx::thread_index() != 0) return;
        if (where == Fence::reader) ptx::fence_async_shared();
        ptx::bulk_store(reinterpret_cast<float*>(target), reinterpret_cast<const float*>(word), 16);
        ptx::tma_store_commit();
        ptx::tma_store_wait<0>();
      },
      {.threads = 32, .shared_bytes = 1024}, options);
}

TEST(Emulator, AFenceServesAtEitherSideOfTheBarrier) {
  EXPECT_EQ(fault_of_store(Fence::writer), "");
  EXPECT_EQ(fault_of_store(Fence::reader), "");
  EXPECT_THAT(fault_of_store(Fence::too_early), HasSubstr("without a fence_async_shared"));
  EXPECT_THAT(fault_of_store(Fence::none), HasSubstr("without a fence_async_shared"));
}

struct MatrixShared {
  alignas(1024) char a[64 * 128];
  alignas(1024) char b[64 * 128];
};

/// Operands of zeros, and what a test does with them.
std::string fault_of_products(const std::function<void(ptx::MatrixDescriptor, ptx::MatrixDescriptor)>& body) {
  return fault_of(
      [&] {
        auto& s = *reinterpret_cast<MatrixShared*>(ptx::dynamic_shared());
        auto* words = reinterpret_cast<u32*>(&s);
        for (u32 i = ptx::thread_index(); i < sizeof(s) / 4; i += 128) ptx::store_shared(words + i, 0U);
        ptx::fence_async_shared();
        ptx::sync_block();
        body(ptx::matrix_descriptor(s.a, 16, 1024, Swizzle::b128),
             ptx::matrix_descriptor(s.b, 16, 1024, Swizzle::b128));
      },
      {.threads = 128, .shared_bytes = sizeof(MatrixShared)}, {.seed = 1});
}

TEST(Emulator, WaitsHandBackFinishedBatchesOnly) {
  const auto kernel = [](bool early) {
    return [early](ptx::MatrixDescriptor a, ptx::MatrixDescriptor b) {
      float first[8];
      float second[8];
      ptx::wgmma_fence();
      ptx::wgmma_shared<16, Element::bf16, false>(first, a, b, false);
      ptx::wgmma_commit();
      ptx::wgmma_shared<16, Element::bf16, false>(second, a, b, false);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      float sum = ptx::shuffle_xor(first[0], 1);
      if (early) sum += ptx::shuffle_xor(second[0], 1);
      ptx::wgmma_wait<0>();
      sum += ptx::shuffle_xor(second[0], 1);
      if (sum != 0.0F) throw Fault("zeros make no zero");
    };
  };
  EXPECT_EQ(fault_of_products(kernel(false)), "");
  EXPECT_THAT(fault_of_products(kernel(true)), HasSubstr("wgmma_wait has not handed it back"));
}

TEST(Emulator, RegistersOfAStayUntilTheWait) {
  const auto kernel = [](ptx::MatrixDescriptor, ptx::MatrixDescriptor b) {
    float d[8];
    u32 a[4] = {0, 0, 0, 0};
    ptx::wgmma_fence();
    ptx::wgmma_registers<16, Element::bf16, false>(d, a, b, false);
    ptx::wgmma_commit();
    a[1] = 5;
    ptx::wgmma_wait<0>();
  };
  EXPECT_THAT(fault_of_products(kernel), HasSubstr("changed the A registers of WGMMA 1 before wgmma_wait"));
}

TEST(Emulator, ProductsAreWaitedForBeforeTheEnd) {
  const auto kernel = [](ptx::MatrixDescriptor a, ptx::MatrixDescriptor b) {
    float d[8];
    ptx::wgmma_fence();
    ptx::wgmma_shared<16, Element::bf16, false>(d, a, b, false);
    ptx::wgmma_commit();
  };
  EXPECT_THAT(fault_of_products(kernel), HasSubstr("ended with WGMMAs that it has not waited for"));
}

TEST(Emulator, RegistersAreWhatTheBlockStartedWith) {
  // 384 threads start with 168 each: 40 and 232 is the most that two consumers and a producer can split.
  const auto split = [](u32 warpgroups_that_release) {
    return [warpgroups_that_release] {
      if (ptx::thread_index() / 128 < warpgroups_that_release) {
        ptx::release_registers<40>();
      } else {
        ptx::claim_registers<232>();
      }
    };
  };
  EXPECT_EQ(fault_of(split(1), {.threads = 384}), "");
  EXPECT_THAT(fault_of(split(0), {.threads = 384}), HasSubstr("claimed 89088 registers"));
  EXPECT_THAT(fault_of([] { ptx::release_registers<240>(); }, {.threads = 384}),
              HasSubstr("it has only 168"));
  EXPECT_THAT(fault_of([] { ptx::claim_registers<40>(); }, {.threads = 384}), HasSubstr("it has 168"));
  EXPECT_THAT(fault_of([] { ptx::release_registers<40>(); }, {.threads = 384}),
              HasSubstr("that no thread claims"));
}

TEST(Emulator, TensorMapsAndTheirBoxesStayInsideTheTensor) {
  alignas(64) static std::uint16_t data[64 * 64];
  TensorMapSpec spec;
  spec.base = data;
  spec.rank = 4;
  spec.dims = {64, 64, 1, 1};
  spec.strides = {128, 8192, 8192};
  spec.box = {64, 8, 1, 1};
  const auto load = [&](const TensorMap& map, std::size_t bytes, int col = 0) {
    emulator::Options options{.buffers = {{data, bytes, false}}};
    return fault_of(
        [&] {
          OneBarrier& s = one_barrier(1);
          if (ptx::thread_index() == 0) {
            ptx::mbarrier_arrive_expect(s.bar, 1024);
            ptx::tma_load(s.tile, map, s.bar, col, 60, 0, 0, ptx::CacheHint::normal);
          }
          ptx::mbarrier_wait(s.bar, 0);
        },
        one_barrier_grid, options);
  };
  EXPECT_EQ(load(emulator::encode(spec), sizeof(data)), "");
  EXPECT_THAT(load(emulator::encode(spec), sizeof(data) - 1), HasSubstr("tma_load: out of bounds"));
  EXPECT_EQ(load(emulator::encode(spec), sizeof(data), -8), "");
  EXPECT_THAT(load(emulator::encode(spec), sizeof(data), 5), HasSubstr("multiple of 16 bytes"));
  EXPECT_THAT(load(TensorMap{}, sizeof(data)), HasSubstr("not a tensor map"));
  const auto store = [&](int row) {
    emulator::Options options{.buffers = {{data, sizeof(data), true}}};
    const TensorMap map = emulator::encode(spec);
    return fault_of(
        [&] {
          OneBarrier& s = one_barrier(1);
          if (ptx::thread_index() != 0) return;
          for (int i = 0; i < 256; ++i) ptx::store_shared(reinterpret_cast<u32*>(s.tile) + i, 0U);
          ptx::fence_async_shared();
          ptx::tma_store(map, s.tile, 0, row, 0, 0);
          ptx::tma_store_commit();
          ptx::tma_store_wait<0>();
        },
        one_barrier_grid, options);
  };
  EXPECT_EQ(store(60), "");
  EXPECT_THAT(store(-4), HasSubstr("negative coordinate"));
  spec.strides[0] = 120;
  EXPECT_THROW(emulator::encode(spec), Fault);
}

}  // namespace
}  // namespace tandem::kernel_tests
