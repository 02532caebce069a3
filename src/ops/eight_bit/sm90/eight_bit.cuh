// The forward pass on quantized values: as forward.cuh, with 8-bit operands (e4m3 or s8) and scales, and with
// P V promoted to f32 tile by tile.
//
// V is stored transposed (K-major, as 8-bit WGMMA requires). Its keys are in an order (quantized_layout.hpp)
// in which the scores that a thread holds are the elements of P that it must pass to P V, so that nothing is
// shuffled. Method: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), section 3.3.
// docs/kernels/low-precision.md has the arithmetic.
//
// There are two orders of steps, by how P is rounded: eight_bit_lazy.cuh and eight_bit_by_tile.cuh.
#pragma once

#include "ops/eight_bit/sm90/eight_bit_by_tile.cuh"
#include "ops/eight_bit/sm90/eight_bit_lazy.cuh"
#include "ops/eight_bit/sm90/eight_bit_transpose.cuh"
#include "ptx/registers.cuh"
#include "tile/rotate.cuh"

namespace tandem {

// ---- Consumer ----

template <EightBitConfig C>
TANDEM_DEVICE void EightBitConsumer<C>::compute(const tile::QueryTile& t) {
  typename Select<C.lazy_rescaling(), EightBitLazyRows<C>, EightBitByTileRows<C>>::type rows(*this, t);
  rows.run();
}

/// Undoes V's rotation, and runs the 16-bit kernel's epilogue.
template <EightBitConfig C>
TANDEM_DEVICE void EightBitConsumer<C>::store(const tile::QueryTile& t, float (&o)[outputs],
                                              const Softmax& softmax, const float (&shift)[2]) {
  if constexpr (C.rotated_v) tile::rotate_back<C.tiling.head_dim_v>(o, position, p.forward.head_dim_v);
  typename Select<C.tiling.max_logits, tile::SoftmaxWithMaxima, tile::OnlineSoftmax>::type finished;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    finished.reference[h] = softmax.has_seen_none(h) ? -ptx::infinity() : softmax.reference[h] + shift[h];
    finished.sum[h] = softmax.sum[h];
    if constexpr (C.tiling.max_logits) {
      finished.largest[h] = softmax.has_seen_none(h) ? -ptx::infinity() : softmax.largest_logit[h] + shift[h];
    }
    // In s8 a query's NaN is known from its marker or scale, even if the query sees no key: then out is 0.
    const int query = t.index.m * C.tiling.block_m + warpgroup * 64 + position.row(h);
    if (C.qk == OperandType::s8 && !t.visible.sees_key(query)) {
      finished.reference[h] = -ptx::infinity();
      finished.sum[h] = 0.0F;
      if constexpr (C.tiling.max_logits) finished.largest[h] = -ptx::infinity();
#pragma unroll
      for (int j = 0; j < outputs / 4; ++j) o[4 * j + 2 * h] = o[4 * j + 2 * h + 1] = 0.0F;
    }
  }
  output.template store<false>(t.index, o, finished);  // sums may be in units of V's scales
}

// ---- Entry ----

template <EightBitConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), 1)
    eight_bit_forward(const __grid_constant__ EightBitKernelParams<C> p) {
  static_assert(sizeof(EightBitShared<C>) == eight_bit_shared_bytes(C));
  auto& shared = *reinterpret_cast<EightBitShared<C>*>(ptx::dynamic_shared());
  const int warp = ptx::warp_index();
  if (ptx::thread_index() == 0) {
    shared.k_ring.init(C.consumers() * 4);
    shared.v_ring.init(C.consumers() * 4);
    if constexpr (C.in_place) {
      for (ptx::Mbarrier& full : shared.strip_barriers.full) ptx::mbarrier_init(full, 1);
    }
    for (int w = 0; w < C.consumers(); ++w) shared.q_ring[w].init(4);
    shared.tiles.ring.init(C.consumers() * 4);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_block();
  ptx::wait_for_previous_grid();  // the quantiser's

  if (warp < 4) {
    ptx::release_registers<C.registers().producer>();
    if (warp == 0) {
      EightBitLoader<C> loader(p, shared);
      loader.run();
    } else if constexpr (C.in_place) {
      ValueTransposer<C> transposer(p, shared, warp - 1);
      transposer.run();
    }
  } else {
    ptx::claim_registers<C.registers().consumer>();
    EightBitConsumer<C> consumer(p, shared, warp / 4 - 1,
                                 static_cast<int>(ptx::thread_index()) % warpgroup_size);
    if (warp / 4 == C.consumers()) consumer.pingpong_pass();
    consumer.run();
  }
}

}  // namespace tandem
