// The forward pass: O = softmax(scale Q K^T) V. A persistent kernel with one CTA an SM.
//
// A producer warp fills shared memory through TMA; each consumer warpgroup owns 64 queries. Within a
// warpgroup, S of block i + 1 and P V of block i are in flight together, and the softmax of block i + 1
// starts before P V ends (two-stage pipelining). Between warpgroups, named barriers give the tensor cores to
// one after the other, so that the exponentials of one run under the products of the others (ping-pong).
// K and V of 8 bits are converted in shared memory by a warpgroup of its own (forward_converter.cuh). All
// four producer warps copy K and V from small pages (forward_gatherer.cuh). Method: FlashAttention-3 (Shah et
// al. 2024, arXiv:2407.08608), algorithm 2. docs/kernels/forward.md has the arithmetic.
#pragma once

#include "ops/forward/config.hpp"
#include "ops/forward/sm90/forward_converter.cuh"
#include "ops/forward/sm90/forward_gatherer.cuh"
#include "ops/forward/sm90/forward_rows.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"

namespace tandem {

template <ForwardConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), 1) forward(const __grid_constant__ ForwardKernelParams<C> p) {
  static_assert(C.teams * sizeof(ForwardShared<C>) == forward_shared_bytes(C));
  auto* const teams = reinterpret_cast<ForwardShared<C>*>(ptx::dynamic_shared());
  auto& shared = teams[0];
  const int warp = ptx::warp_index();
  for (int team = 1; team < C.teams; ++team) prepare_forward<C>(p, teams[team], teams[team]);
  begin_forward<C>(p, shared, shared);

  auto consume = [&](int number) {
    const int team = C.teams == 1 ? 0 : number / C.consumers();
    const int warpgroup = number - team * C.consumers();
    ForwardConsumer<C> consumer(p, teams[team], warpgroup,
                                static_cast<int>(ptx::thread_index()) % warpgroup_size, team);
    if (warpgroup == C.consumers() - 1) consumer.pingpong_pass();
    consumer.run();
  };
  if constexpr (C.schedule.specialised) {
    if (warp < 4) {
      ptx::release_registers<C.registers().producer>();
      if constexpr (C.gathers()) {
        ForwardGatherer<C>(p, shared, warp).run();
      } else {
        if (warp < C.teams) {
          ForwardLoader<C> loader(p, teams[warp]);
          if constexpr (C.teams > 1) loader.tiles.dynamic_tiles.set_team(warp, C.teams);
          loader.run();
        }
      }
    } else if (C.has_byte_keys() && warp < 8) {
      if constexpr (C.has_byte_keys()) {
        ptx::release_registers<C.registers().converter>();
        ForwardConverter<C> converter(p, shared, warp - 4);
        converter.run();
      }
    } else {
      ptx::claim_registers<C.registers().consumer>();
      consume(warp / 4 - (C.has_byte_keys() ? 2 : 1));
    }
  } else {
    consume(warp / 4);
  }
}

}  // namespace tandem
