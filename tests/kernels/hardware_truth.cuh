// One kernel that shows what the instructions of src/ptx do: swizzles, register layouts, roundings,
// votes. It runs in the emulator and on a GPU, and must write the same bytes
// (tests/gpu/hardware_truth_test.cpp compares them; what a GPU wrote is recorded in hardware_truth.bin, so
// that the comparison needs none). Each launch runs one section, so that an instruction that faults on a GPU,
// which ends its context, is known by its section and takes no other with it.
#pragma once

#include "hardware_truth_products.cuh"
#include "hardware_truth_sections.cuh"

namespace tandem::kernel_tests {

/// Where TMA puts a box's bytes, two edges of the tensor included.
TANDEM_DEVICE void truth_swizzle(Truth& t, Swizzle swizzle) {
  const int cols = 16 << static_cast<int>(swizzle);
  t.load(t.s.stage, t.p.source[static_cast<int>(swizzle)], swizzle, 1, truth_load_row, truth_load_col(cols));
  t.record_shared(t.s.stage, 32 * cols / 2);
}

/// Where it takes them from, when it stores and when it adds.
TANDEM_DEVICE void truth_store(Truth& t, const TensorMap& map, int cols, bool add, int row, int col) {
  for (int i = t.thread; i < 32 * cols / 2; i += truth_threads) {
    ptx::store_shared(reinterpret_cast<u32*>(t.s.stage) + i,
                      add ? 0x3f800000U : static_cast<u32>(i * 0x20001 + 1));
  }
  ptx::fence_async_shared();
  ptx::sync_block();
  if (t.thread == 0) {
    if (add) {
      ptx::tma_reduce_add(map, t.s.stage, col, row, 0, 0);
    } else {
      ptx::tma_store(map, t.s.stage, col, row, 0, 0);
    }
    ptx::tma_store_commit();
    ptx::tma_store_wait<0>();
  }
  ptx::sync_block();
}

/// Each warp stores four 8 x 8 matrices, one below the other, in rows of 32 bytes.
TANDEM_DEVICE void truth_stmatrix(Truth& t) {
  char* base = t.s.stage + t.thread / 32 * 1024;
  for (int i = t.thread; i < 1024; i += truth_threads) {
    ptx::store_shared(reinterpret_cast<u32*>(t.s.stage) + i, 0U);
  }
  ptx::sync_block();
  const u32 tag = static_cast<u32>(t.thread) << 8;
  ptx::stmatrix_x4(base + t.thread % 32 * 32, tag, tag + 1, tag + 2, tag + 3);
  ptx::sync_block();
  t.record_shared(t.s.stage, 1024);
}

TANDEM_DEVICE void truth_warp(Truth& t) {
  const u32 lane = static_cast<u32>(t.thread) % 32;
  const u32 elected = ptx::ballot(ptx::elect_one());
  const u32 words[7] = {ptx::shuffle_xor(lane * 3, 5), ptx::shuffle(lane * 7, 11),
                        ptx::shuffle_up(lane + 100, 4), ptx::ballot(lane % 3 == 1),
                        ptx::reduce_or(lane == 9 ? 0x500U : lane & 3),
                        // Exactly one lane; which one is the hardware's choice.
                        elected != 0 && (elected & (elected - 1)) == 0 ? 1U : 0U,
                        // The largest is lane 30's, as an unsigned number.
                        ptx::reduce_max((lane % 31) << 27 | lane)};
  if (t.thread < 32) {
    for (int i = 0; i < 7; ++i) ptx::store_global(t.out + i * 32 + t.thread, words[i]);
  }
}

/// Roundings, and those values of the approximations that are exact everywhere. An H100 has 2^0.25 one place
/// above, and the logarithms of 0.5, 0.25 and 2^-126 one place beside the exact ones.
TANDEM_DEVICE void truth_math(Truth& t) {
  union {
    u32 bits;
    float f;
  } x, y;
  x.bits = ptx::load_global(t.p.numbers + t.thread % 64);
  y.bits = ptx::load_global(t.p.numbers + (t.thread + 17) % 64);
  const u32 number = t.thread % 64;
  const bool ordinary = number >= 16 || number == 7 || number == 10 || number == 11;
  const float special = ordinary ? 1.0F : x.f;
  const float results[5] = {ptx::fmax(x.f, y.f), ptx::fma(x.f, y.f, 1.5F), ptx::exp2(special),
                            ptx::log2(special), ptx::reciprocal(special)};
  const u32 packed[3] = {ptx::pack_bf16(x.f, y.f), ptx::pack_f16(x.f, y.f),
                         ptx::pack_f16(x.f * 0x1p-14F, y.f * 0x1p-10F)};
  if (t.thread < 64) {
    for (int i = 0; i < 5; ++i) {
      union {
        float f;
        u32 bits;
      } word;
      word.f = results[i];
      ptx::store_global(t.out + i * 64 + t.thread, word.f != word.f ? 0x7fffffffU : word.bits);
    }
    for (int i = 0; i < 3; ++i) ptx::store_global(t.out + (5 + i) * 64 + t.thread, packed[i]);
  }
}

/// e4m3's roundings: as they are, and about its smallest numbers.
TANDEM_DEVICE void truth_pack_e4m3(Truth& t) {
  union {
    u32 bits;
    float f;
  } x, y;
  x.bits = ptx::load_global(t.p.numbers + t.thread % 64);
  y.bits = ptx::load_global(t.p.numbers + (t.thread + 17) % 64);
  const u32 packed[2] = {ptx::pack_e4m3(x.f, y.f, x.f * 0x1p-4F, y.f * 0x1p-6F),
                         ptx::pack_e4m3(x.f * 0x1p-8F, y.f * 0x1p-9F, x.f * 0x1p-10F, y.f * 0x1p-11F)};
  if (t.thread < 64) {
    for (int i = 0; i < 2; ++i) ptx::store_global(t.out + i * 64 + t.thread, packed[i]);
  }
}

/// Copies by threads, in two groups: what is there once the first has been waited for, zeros included, and
/// then the rest.
TANDEM_DEVICE void truth_copies(Truth& t) {
  auto* const to = reinterpret_cast<ptx::Vec4*>(t.s.stage);
  const auto* const from = reinterpret_cast<const ptx::Vec4*>(t.p.plain);
  t.out = t.p.late;
  ptx::copy_async_or_zero(to + t.thread, from + t.thread, t.thread % 3 != 0);
  ptx::commit_copies();
  ptx::copy_async(to + truth_threads + t.thread, from + truth_threads + t.thread);
  ptx::commit_copies();
  ptx::wait_for_copy_groups<1>();
  ptx::sync_block();
  t.record_shared(t.s.stage, 4 * truth_threads);
  ptx::wait_for_copy_groups<0>();
  ptx::sync_block();
  t.record_shared(t.s.stage + 16 * truth_threads, 4 * truth_threads);
}

/// Stores of each CTA of a cluster to all of them, itself included.
TANDEM_DEVICE void truth_cluster_stores(Truth& t) {
  const u32 rank = ptx::block_index();
  auto* const four = reinterpret_cast<ptx::Float4*>(t.s.stage);
  auto* const two = reinterpret_cast<ptx::Float2*>(four + truth_cluster * truth_senders);
  ptx::arrive_cluster();
  ptx::wait_cluster();
  if (t.thread == 0) ptx::mbarrier_arrive_expect(t.s.bar, truth_received_words * 4);
  if (t.thread < truth_senders) {
    const u32 to_place = rank * truth_senders + static_cast<u32>(t.thread);
    for (u32 to = 0; to < truth_cluster; ++to) {
      const auto number = static_cast<float>(100 * to_place + to);
      ptx::store_async(to, four + to_place, {number, number + 0.25F, -number, 1.0F}, t.s.bar);
      ptx::store_async(to, two + to_place, {number + 0.5F, 2.0F}, t.s.bar);
    }
  }
  ptx::mbarrier_wait(t.s.bar, 0);
  t.out = t.p.late + truth_copied_words + rank * truth_received_words;
  t.record_shared(t.s.stage, truth_received_words);
}

TANDEM_KERNEL __launch_bounds__(truth_threads, 1) hardware_truth(const __grid_constant__ TruthParams p) {
  auto& s = *reinterpret_cast<TruthShared*>(ptx::dynamic_shared());
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_init(s.bar, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_block();
  Truth t(p, s, p.section);
  switch (p.section) {
    case TruthSection::load_b32: truth_swizzle(t, Swizzle::b32); break;
    case TruthSection::load_b64: truth_swizzle(t, Swizzle::b64); break;
    case TruthSection::load_b128: truth_swizzle(t, Swizzle::b128); break;
    case TruthSection::wgmma_k_major_b32: truth_k_major<Swizzle::b32>(t); break;
    case TruthSection::wgmma_k_major_b64: truth_k_major<Swizzle::b64>(t); break;
    case TruthSection::wgmma_k_major_b128: truth_k_major<Swizzle::b128>(t); break;
    case TruthSection::wgmma_mn_major_b32: truth_mn_major<Swizzle::b32>(t); break;
    case TruthSection::wgmma_mn_major_b64: truth_mn_major<Swizzle::b64>(t); break;
    case TruthSection::wgmma_mn_major_b128: truth_mn_major<Swizzle::b128>(t); break;
    case TruthSection::wgmma_registers: truth_registers(t); break;
    case TruthSection::wgmma_f16: truth_f16(t); break;
    case TruthSection::stmatrix: truth_stmatrix(t); break;
    case TruthSection::warp: truth_warp(t); break;
    case TruthSection::math: truth_math(t); break;
    case TruthSection::wgmma_e4m3: truth_bytes_shared<Bytes::e4m3>(t, 2); break;
    case TruthSection::wgmma_s8: truth_bytes_shared<Bytes::s8>(t, 4); break;
    case TruthSection::wgmma_e4m3_registers: truth_bytes_registers<Bytes::e4m3>(t); break;
    case TruthSection::wgmma_u8_registers: truth_bytes_registers<Bytes::u8>(t); break;
    case TruthSection::pack_e4m3: truth_pack_e4m3(t); break;
    case TruthSection::mma_bf16: truth_mma<Element::bf16>(t); break;
    case TruthSection::mma_f16: truth_mma<Element::f16>(t); break;
    // A store that begins at a negative row is an illegal instruction, unlike a load.
    case TruthSection::store_b32: truth_store(t, p.target[0], 16, false, 8, 0); break;
    case TruthSection::store_b64: truth_store(t, p.target[1], 32, false, 40, 16); break;
    case TruthSection::store_b128: truth_store(t, p.target[2], 64, false, 100, 72); break;
    case TruthSection::copies: truth_copies(t); break;
    case TruthSection::cluster_stores: truth_cluster_stores(t); break;
    case TruthSection::reduce_add: truth_store(t, p.sum, 64, true, 120, 104); break;
  }
}

}  // namespace tandem::kernel_tests
