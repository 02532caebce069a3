// Decoding: attention of tiles of 16 rows, whose time is that of reading K and V. A persistent kernel with
// two CTAs an SM where shared memory allows, so that one reads while the other begins or ends a tile.
//
// A producer warp fills shared memory through TMA, as in the forward kernel. Each of four consumer warps owns
// a quarter of the keys of every block, with its own softmax and its own O of all 16 rows; products are
// mma.sync's, whose 16 rows are a tile's. Warps meet at a tile's end alone, where they add up what each has.
// The result goes to global memory from there. Where CTAs share a tile's keys, a cluster merges what they
// have in shared memory (cluster_parts.cuh), or one of them merges partial results (decode_merge.cuh). K and
// V of 8 bits become 16-bit elements in registers. docs/kernels/decode.md has the arithmetic.
#pragma once

#include "ops/decode/sm90/decode_epilogue.cuh"
#include "ops/decode/sm90/decode_merge.cuh"

namespace tandem {

template <DecodeConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), ctas_per_sm(C))
    decode(const __grid_constant__ ForwardKernelParams<C> p) {
  static_assert(sizeof(DecodeShared<C>) == forward_shared_bytes(C));
  auto& shared = *reinterpret_cast<DecodeShared<C>*>(ptx::dynamic_shared());
  const int warp = ptx::warp_index();
  if (C.cluster() > 1 && ptx::thread_index() == decode_warps * warp_size) {
    ptx::prefetch_tensor_map(p.k);
    ptx::prefetch_tensor_map(p.v);
    ptx::prefetch_tensor_map(p.q);
  }
  begin_forward<C>(p, shared, shared.in);
  if (warp == decode_warps) {
    ForwardLoader<C>(p, shared.in).run();
    if constexpr (C.cluster() > 1) ptx::wait_cluster();
  } else {
    DecodeConsumer<C>(p, shared, warp, static_cast<int>(ptx::thread_index()) % warp_size).run();
  }
}

}  // namespace tandem
