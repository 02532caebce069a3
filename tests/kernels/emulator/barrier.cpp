// mbarriers, named barriers and fences.
#include <fmt/format.h>

#include <algorithm>

#include "block.hpp"

namespace tandem::emulator {
namespace {

/// The thread has seen `phases` phases of the barrier complete.
void acquire(Thread& thread, const Barrier& b, std::uint32_t index, std::uint64_t phases) {
  if (thread.phases_seen[index] == phases) return;
  thread.phases_seen[index] = phases;
  join(thread.clock, b.completed);
  join(thread.peers, b.peers_completed);
}

void arrive(Block& block, Barrier& b, const char* what) {
  if (b.pending == 0) {
    block.fail(
        fmt::format("{}: more arrivals than expected at mbarrier +{}: phase {} takes {} and has them all",
                    what, b.offset, b.phase, b.arrivals));
  }
  record({.kind = Step::Kind::arrive, .thing = b.offset, .number = b.phase});
  join(b.arriving, block.self().clock);
  block.tick();
  --b.pending;
  block.complete_phase_if_due(b);
}

void named_barrier(int id, int threads, bool waits, const char* what) {
  Block& block = Block::current();
  Thread& self = block.self();
  const auto count = static_cast<std::uint32_t>(threads);
  if (id < 0 || id > 15) block.fail(fmt::format("{}: no named barrier {}", what, id));
  if (threads <= 0 || threads % 32 != 0 || count > block.grid().threads) {
    block.fail(fmt::format("{}: named barrier {} for {} threads in a block of {}", what, id, threads,
                           block.grid().threads));
  }
  NamedBarrier& b = block.named_barriers[static_cast<std::size_t>(id)];
  if (b.arrived == 0) {
    b.expected = count;
    b.first = self.index;
    b.present.assign(block.grid().threads, false);
    b.seen.assign(block.components().count(), 0);
  }
  if (b.expected != count) {
    block.fail(
        fmt::format("{}: named barrier {} with the wrong count: {} threads here, {} where thread {} arrived",
                    what, id, count, b.expected, b.first));
  }
  if (b.present[self.index]) {
    block.fail(fmt::format("{}: arrives twice at named barrier {} before its {} threads have come", what, id,
                           count));
  }
  b.present[self.index] = true;
  record({.kind = waits ? Step::Kind::join_named : Step::Kind::arrive_named,
          .thing = static_cast<std::uint32_t>(id),
          .number = b.generation});
  join(b.seen, self.clock);
  block.tick();
  if (++b.arrived == b.expected) {
    b.arrived = 0;
    ++b.generation;
    for (Thread* t : b.waiting) join(t->clock, b.seen);
    block.wake_all(b.waiting);
    if (waits) join(self.clock, b.seen);
    block.maybe_yield();
  } else if (waits) {
    b.waiting.push_back(&self);
    block.suspend({Wait::Kind::named_barrier, static_cast<std::uint32_t>(id), b.generation});
  } else {
    block.maybe_yield();
  }
}

}  // namespace

Barrier& Block::create_barrier(void* p, std::uint32_t arrivals) {
  const std::uint32_t offset = shared_offset(p, 8, "mbarrier_init");
  if (offset % 8 != 0) fail(fmt::format("mbarrier_init at +{}: not aligned to 8 bytes", offset));
  for (const Barrier& b : barriers_) {
    if (b.offset == offset) fail(fmt::format("mbarrier_init at +{}: it is already initialised", offset));
  }
  if (barriers_.size() == max_barriers) fail(fmt::format("more than {} mbarriers", max_barriers));
  if (arrivals == 0 || arrivals >= 1U << 20)
    fail(fmt::format("mbarrier_init at +{}: {} arrivals", offset, arrivals));
  Barrier& b = barriers_.emplace_back();
  b.offset = offset;
  b.arrivals = b.pending = arrivals;
  b.init = Event(self().index, self().clock[self().index]);
  b.arriving.resize(components_.count());
  b.completed.resize(components_.count());
  if (cluster_ != nullptr) {
    b.peers_arriving = peer_clocks();
    b.peers_completed = peer_clocks();
  }
  for (Thread& t : threads_) t.phases_seen.push_back(0);
  shadow_.reserve_barrier(offset);
  return b;
}

Barrier& Block::barrier(void* p, const char* what) {
  const std::uint32_t offset = shared_offset(p, 8, what);
  for (Barrier& b : barriers_) {
    if (b.offset != offset) continue;
    if (b.init.component() != self().index && !b.init.known_to(self().clock)) {
      fail(fmt::format("{}: mbarrier +{} was initialised by thread {} with no barrier in between", what,
                       offset, b.init.component()));
    }
    return b;
  }
  fail(fmt::format("{}: no mbarrier was initialised at +{}", what, offset));
}

void Block::initialised_barriers_fenced() {
  Thread& thread = self();
  tick();
  thread.fenced_barriers = thread.clock[thread.index];
  for (Barrier& b : barriers_) {
    if (b.fenced == 0 && b.init.component() == thread.index) b.fenced = thread.fenced_barriers;
  }
}

void Block::complete_phase_if_due(Barrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  const std::uint32_t index = barrier_index(b);
  ++b.phase;
  b.pending = b.arrivals;
  b.arriving[components_.barrier(index)] = static_cast<std::uint32_t>(b.phase);
  join(b.completed, b.arriving);
  join(b.peers_completed, b.peers_arriving);
  for (Thread* t : b.waiting) acquire(*t, b, index, b.phase);
  wake_all(b.waiting);
}

void mbarrier_init(void* bar, std::uint32_t arrivals) {
  Block::current().create_barrier(bar, arrivals);
}

void fence_mbarrier_init() {
  Block::current().initialised_barriers_fenced();
}

void mbarrier_arrive(void* bar) {
  Block& block = Block::current();
  arrive(block, block.barrier(bar, "mbarrier_arrive"), "mbarrier_arrive");
  block.maybe_yield();
}

void mbarrier_arrive_expect(void* bar, std::uint32_t bytes) {
  Block& block = Block::current();
  Barrier& b = block.barrier(bar, "mbarrier_arrive_expect");
  b.bytes += bytes;
  arrive(block, b, "mbarrier_arrive_expect");
  block.maybe_yield();
}

void mbarrier_wait(void* bar, std::uint32_t parity) {
  Block& block = Block::current();
  Thread& self = block.self();
  Barrier& b = block.barrier(bar, "mbarrier_wait");
  const std::uint32_t index = block.barrier_index(b);
  if (parity > 1) block.fail(fmt::format("mbarrier_wait at +{}: parity {}", b.offset, parity));
  // A fresh barrier's phase of parity 1 counts as completed: no phase is waited for then.
  if (b.phase % 2 == parity || b.phase > 0) {
    record({.kind = Step::Kind::wait,
            .thing = b.offset,
            .number = b.phase % 2 == parity ? b.phase : b.phase - 1});
  }
  if (b.phase % 2 != parity) {
    acquire(self, b, index, b.phase);
    return;
  }
  // A thread that knows of `seen` phases, since it has waited for them or has met one that has, waits for the
  // next one now. The parity it asks for is that of a phase that has not completed, so phase `seen` went by,
  // and only luck could have let it see it.
  const std::uint64_t seen = self.clock[block.components().barrier(index)];
  if (!block.options().skipped_phases && b.phase > seen) {
    block.fail(fmt::format(
        "mbarrier_wait at +{}: two phases behind: it has seen {} phases complete, {} have, and it waits for "
        "parity {}",
        b.offset, seen, b.phase, parity));
  }
  b.waiting.push_back(&self);
  block.suspend({Wait::Kind::barrier, index, b.phase});
}

void sync_block() {
  named_barrier(0, static_cast<int>(Block::current().grid().threads), true, "sync_block");
}
void named_barrier_sync(int id, int threads) {
  named_barrier(id, threads, true, "named_barrier_sync");
}
void named_barrier_arrive(int id, int threads) {
  named_barrier(id, threads, false, "named_barrier_arrive");
}

void fence_async_shared() {
  Block& block = Block::current();
  Thread& self = block.self();
  // A proxy fence lies on every path of causality through it: it covers what this thread wrote, and what it
  // knows that others wrote.
  const Components& components = block.components();
  for (std::uint32_t thread = 0; thread < components.threads; ++thread) {
    std::uint32_t& fenced = self.clock[components.fenced(thread)];
    fenced = std::max(fenced, self.clock[thread]);
  }
  block.tick();
}

}  // namespace tandem::emulator
