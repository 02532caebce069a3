// A ring of shared-memory buffers between a producer and its consumers.
#pragma once

#include "ptx/mbarrier.cuh"

namespace tandem::tile {

/// Position in a ring of `stages` buffers; `phase` flips with each lap.
template <int stages>
struct RingPosition {
  int stage = 0;
  u32 phase = 0;

  TANDEM_DEVICE void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

/// A pair of barriers a buffer: `full` completes when its bytes have come in, `empty` when every consumer
/// warp has released it.
template <int stages>
struct Ring {
  ptx::Mbarrier full[stages];
  ptx::Mbarrier empty[stages];
  using Position = RingPosition<stages>;

  /// One thread calls. A buffer is free after `consumer_arrivals` releases. It is full after
  /// `producer_arrivals` arrivals and the bytes that they announce.
  TANDEM_DEVICE void init(u32 consumer_arrivals, u32 producer_arrivals = 1) {
#pragma unroll
    for (int s = 0; s < stages; ++s) {
      ptx::mbarrier_init(full[s], producer_arrivals);
      ptx::mbarrier_init(empty[s], consumer_arrivals);
    }
  }

  /// Producer: waits until the buffer is free, then announces the bytes that the caller's copies will bring.
  TANDEM_DEVICE ptx::Mbarrier& acquire(Position at, u32 bytes) {
    wait_free(at);
    return announce(at, bytes);
  }
  /// The two halves of `acquire`. The thread may write into the buffer between them.
  TANDEM_DEVICE void wait_free(Position at) {
    ptx::mbarrier_wait(empty[at.stage], at.phase ^ 1);
  }
  TANDEM_DEVICE ptx::Mbarrier& announce(Position at, u32 bytes) {
    ptx::mbarrier_arrive_expect(full[at.stage], bytes);
    return full[at.stage];
  }
  /// Producer: what its own stores have written is there.
  TANDEM_DEVICE void hand_over(Position at) {
    ptx::mbarrier_arrive(full[at.stage]);
  }
  /// Consumer: waits for the bytes.
  TANDEM_DEVICE void wait(Position at) {
    ptx::mbarrier_wait(full[at.stage], at.phase);
  }
  /// Consumer: gives the buffer back; one lane of each warp calls it.
  TANDEM_DEVICE void release(Position at) {
    ptx::mbarrier_arrive(empty[at.stage]);
  }
};

/// A ring in each CTA of a cluster of two whose producers copy to both: a buffer is free when the consumers
/// of both have released it, and full when the copies of both have come. Those of the other CTA may come
/// before this one has announced them: its arrival is what keeps the phase open. Consumers do no more than
/// read, or have fenced what they wrote for the tensor cores.
template <int stages>
struct PairRing : Ring<stages> {
  using typename Ring<stages>::Position;

  /// `consumer_arrivals`: of one CTA.
  TANDEM_DEVICE void init(u32 consumer_arrivals) { Ring<stages>::init(2 * consumer_arrivals); }
  /// Consumer: what it has read is free, for the producers of both CTAs.
  TANDEM_DEVICE void release(Position at) {
    ptx::mbarrier_arrive(this->empty[at.stage]);
    ptx::mbarrier_release_other(this->empty[at.stage]);
  }
};

}  // namespace tandem::tile
