// A small kernel with every part that a pipelined kernel has, and a switch for each mistake that one can make
// in it: C (64 x 64) = A (64 x K) B (K x 64) in bf16, one consumer warpgroup, one producer warp, two stages,
// a bulk store. The emulator must catch every mistake, whatever the interleaving.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"

namespace tandem::kernel_tests {

enum class Mistake : int {
  none,
  // Barriers.
  dropped_arrive,           // one warp never releases a buffer
  extra_arrive,             // one warp releases a buffer twice
  no_wait_for_full,         // the consumer does not wait for the copy
  one_lane_waits_for_full,  // only lane 0 of each warp waits
  no_wait_for_empty,        // the producer refills without asking
  wrong_stage,              // the consumer waits for one stage and reads the other
  wrong_phase,              // the consumer waits for the phase before
  laps_behind,              // the consumer forgets to flip its phase bit
  early_release,            // the buffer is released before wgmma_wait
  too_few_bytes,
  too_many_bytes,
  no_init_fence,
  no_sync_after_init,
  barrier_overwritten,
  // Tensor cores.
  no_wgmma_fence,
  no_wgmma_wait,
  one_warp_waits_again,
  pinned_before_wait,
  read_accumulator_early,
  write_accumulator_early,
  other_descriptor_in_one_warp,
  one_warp_skips_a_product,
  misaligned_descriptor,
  operand_outside_shared,
  // Ordinary accesses.
  no_proxy_fence,
  no_barrier_before_store,
  wrong_barrier_count,
  missing_at_barrier,
  diverged_warp,
  no_store_wait,
  no_written_wait,
  staging_rewritten_early,
  shared_out_of_bounds,
  global_out_of_bounds,
  read_only_buffer_written,
  misaligned_global,
  uninitialised_shared,
  global_stored_twice,
  global_of_another_block,
  global_read_unordered,
};

struct GemmParams {
  TensorMap a, b, c;  // dimensions (columns, rows, 1, 1), boxes of 64 x 64
  const float* bias;  // added to all of C
  int k_blocks;
  u32* checksum;  // one word a block
  u32* stored;    // how many blocks have stored C
};

struct GemmShared {
  static constexpr u32 tile_bytes = 64 * 128;
  alignas(1024) char a[2][tile_bytes];
  alignas(1024) char b[2][tile_bytes];
  alignas(1024) char c[tile_bytes];
  ptx::Mbarrier full[2];
  ptx::Mbarrier empty[2];
  u32 word;
};

constexpr int gemm_threads = 160;

template <Mistake mistake>
void gemm_producer(const GemmParams& p, GemmShared& s) {
  if (!ptx::elect_one()) return;
  const u32 announced = 2 * GemmShared::tile_bytes + (mistake == Mistake::too_many_bytes ? 16U : 0U) -
                        (mistake == Mistake::too_few_bytes ? GemmShared::tile_bytes : 0U);
  for (int i = 0; i < p.k_blocks; ++i) {
    const int stage = i % 2;
    const u32 phase = static_cast<u32>(i / 2 % 2);
    if (mistake != Mistake::no_wait_for_empty) ptx::mbarrier_wait(s.empty[stage], phase ^ 1);
    ptx::mbarrier_arrive_expect(s.full[stage], announced);
    ptx::tma_load(s.a[stage], p.a, s.full[stage], 64 * i, 0, 0, 0, ptx::CacheHint::normal);
    ptx::tma_load(s.b[stage], p.b, s.full[stage], 0, 64 * i, 0, 0, ptx::CacheHint::normal);
  }
  if (mistake == Mistake::barrier_overwritten) ptx::store_shared(&s.full[0].state, u64{0});
}

template <Mistake mistake>
void gemm_multiply(const GemmParams& p, GemmShared& s, float (&d)[32]) {
  const int warp = static_cast<int>(ptx::thread_index() / 32);
  const bool leader = ptx::thread_index() % 32 == 0;
  for (int i = 0; i < p.k_blocks; ++i) {
    const int stage = i % 2;
    const int read = mistake == Mistake::wrong_stage ? 1 - stage : stage;
    u32 phase = static_cast<u32>(i / 2 % 2);
    if (mistake == Mistake::wrong_phase) phase ^= 1;
    if (mistake == Mistake::laps_behind) phase = 0;
    const bool waits =
        mistake == Mistake::one_lane_waits_for_full ? leader : mistake != Mistake::no_wait_for_full;
    if (waits) ptx::mbarrier_wait(s.full[stage], phase);

    const char* a_data = mistake == Mistake::misaligned_descriptor ? s.a[read] + 128 : s.a[read];
    const u32 a_stride = mistake == Mistake::operand_outside_shared ? 65536 : 1024;
    const ptx::MatrixDescriptor a = ptx::matrix_descriptor(a_data, 16, a_stride, Swizzle::b128);
    const ptx::MatrixDescriptor b = ptx::matrix_descriptor(s.b[read], 64 * 128, 1024, Swizzle::b128);
    if (mistake != Mistake::no_wgmma_fence) ptx::wgmma_fence();
    for (u32 step = 0; step < 4; ++step) {
      if (mistake == Mistake::one_warp_skips_a_product && warp == 1 && step == 3) continue;
      const u32 a_step = mistake == Mistake::other_descriptor_in_one_warp && warp == 2 ? step ^ 1 : step;
      ptx::wgmma_shared<64, Element::bf16, true>(d, a + a_step * 32, b + step * 2048, i > 0 || step > 0);
    }
    ptx::wgmma_commit();
    if (mistake == Mistake::write_accumulator_early) d[3] = 0.0F;
    if (mistake == Mistake::read_accumulator_early)
      ptx::store_shared(&s.word, ptx::pack_bf16(d[0] * 2.0F, 0.0F));
    if (mistake == Mistake::early_release && leader) ptx::mbarrier_arrive(s.empty[stage]);
    if (mistake == Mistake::pinned_before_wait) ptx::pin_registers(d);
    if (mistake != Mistake::no_wgmma_wait) ptx::wgmma_wait<0>();
    if (mistake == Mistake::one_warp_waits_again && warp == 1) ptx::wgmma_wait<0>();
    if (mistake == Mistake::early_release || !leader) continue;
    if (mistake == Mistake::dropped_arrive && warp == 3 && i == 1) continue;
    ptx::mbarrier_arrive(s.empty[stage]);
    if (mistake == Mistake::extra_arrive && warp == 3) ptx::mbarrier_arrive(s.empty[stage]);
  }
}

/// Puts C into shared memory as TMA expects it, and stores it.
template <Mistake mistake>
void gemm_store(const GemmParams& p, GemmShared& s, const float (&d)[32]) {
  const int thread = static_cast<int>(ptx::thread_index());
  const int lane = thread % 32;
  const float bias = ptx::load_global(p.bias);
  for (int j = 0; j < 8; ++j) {
    for (int h = 0; h < 2; ++h) {
      const int row = thread / 32 * 16 + lane / 4 + 8 * h;
      const int unit = j ^ (row % 8);
      u32* word = reinterpret_cast<u32*>(s.c + row * 128 + unit * 16) + lane % 4;
      if (mistake == Mistake::shared_out_of_bounds) word += 1 << 20;
      ptx::store_shared(word, ptx::pack_bf16(d[4 * j + 2 * h] + bias, d[4 * j + 2 * h + 1] + bias));
    }
  }
  if (mistake != Mistake::no_proxy_fence) ptx::fence_async_shared();
  const bool arrives = mistake != Mistake::no_barrier_before_store &&
                       !(mistake == Mistake::missing_at_barrier && thread / 32 == 2);
  const int count = mistake == Mistake::wrong_barrier_count && thread / 32 == 1 ? 96 : 128;
  if (arrives) ptx::named_barrier_sync(1, count);
  if (mistake == Mistake::diverged_warp && lane >= 16) {
    ptx::sync_warp();
  }
  const bool elected = ptx::elect_one();
  if (thread / 32 == 0 && elected) {
    ptx::tma_store(p.c, s.c, 0, 0, 0, 0);
    ptx::tma_store_commit();
    if (mistake == Mistake::staging_rewritten_early) {
      ptx::store_shared(reinterpret_cast<u32*>(s.c), 0U);
    }
    if (mistake == Mistake::no_store_wait) return;
    ptx::tma_store_wait<0>();
    if (mistake != Mistake::no_written_wait) ptx::tma_store_wait_written<0>();
    ptx::semaphore_increment(p.stored);
  }
}

template <Mistake mistake>
TANDEM_KERNEL __launch_bounds__(gemm_threads, 1) pipelined_gemm(const __grid_constant__ GemmParams p) {
  auto& s = *reinterpret_cast<GemmShared*>(ptx::dynamic_shared());
  if (ptx::thread_index() == 0) {
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(s.full[i], 1);
      ptx::mbarrier_init(s.empty[i], 4);
    }
    if (mistake != Mistake::no_init_fence) ptx::fence_mbarrier_init();
  }
  if (mistake != Mistake::no_sync_after_init) ptx::sync_block();

  if (ptx::thread_index() >= 128) {
    gemm_producer<mistake>(p, s);
    return;
  }
  float d[32];
  gemm_multiply<mistake>(p, s, d);
  gemm_store<mistake>(p, s, d);

  u32* at = p.checksum + ptx::block_index();
  if (mistake == Mistake::global_stored_twice && ptx::thread_index() % 64 == 0) ptx::store_global(at, 0U);
  if (mistake == Mistake::global_of_another_block && ptx::thread_index() == 0)
    ptx::store_global(p.checksum, 0U);
  if (mistake == Mistake::global_read_unordered) {
    if (ptx::thread_index() == 0) ptx::store_global(at, 0U);
    if (ptx::thread_index() == 64 && ptx::load_global(at) != 0) return;
  }
  if (ptx::thread_index() != 0) return;
  if (mistake == Mistake::global_out_of_bounds) at += 2;
  if (mistake == Mistake::read_only_buffer_written) {
    ptx::store_global(const_cast<float*>(p.bias), 1.0F);
  }
  if (mistake == Mistake::misaligned_global) at = reinterpret_cast<u32*>(reinterpret_cast<char*>(at) + 2);
  const u32 word = mistake == Mistake::uninitialised_shared ? ptx::load_shared(&s.word) : 1U;
  ptx::atomic_add(at, word);
}

}  // namespace tandem::kernel_tests
