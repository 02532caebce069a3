#include "cluster.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "block.hpp"

namespace tandem::emulator {

bool Cluster::send(std::uint32_t rank, Message message) {
  const std::lock_guard lock(mutex_);
  if (finished_[rank]) return false;
  mail_[rank].push_back(std::move(message));
  changed_.notify_all();
  return true;
}

std::optional<Message> Cluster::take(std::uint32_t rank) {
  const std::lock_guard lock(mutex_);
  if (mail_[rank].empty()) return std::nullopt;
  Message message = std::move(mail_[rank].front());
  mail_[rank].pop_front();
  return message;
}

bool Cluster::wait(std::uint32_t rank) {
  std::unique_lock lock(mutex_);
  idle_[rank] = true;
  changed_.notify_all();
  const auto hopeless = [&] {
    for (std::uint32_t other = 0; other < size; ++other) {
      if (!finished_[other] && !(idle_[other] && mail_[other].empty())) return false;
    }
    return true;
  };
  changed_.wait(lock, [&] { return !mail_[rank].empty() || hopeless(); });
  const bool some = !mail_[rank].empty();
  if (some) idle_[rank] = false;  // else it stays so, for the others to see
  return some;
}

void Cluster::join_barrier(std::uint32_t rank, const Clocks& known) {
  const std::lock_guard lock(mutex_);
  joined_[rank] = known;
  if (std::any_of(joined_.begin(), joined_.end(), [](const auto& j) { return !j; })) return;
  Clocks all = *joined_[0];
  for (std::uint32_t from = 1; from < size; ++from) join(all, *joined_[from]);
  for (std::uint32_t to = 0; to < size; ++to)
    mail_[to].push_back({.kind = Message::Kind::joined, .known = all});
  joined_.assign(size, std::nullopt);
  changed_.notify_all();
}

bool Cluster::finish(std::uint32_t rank) {
  const std::lock_guard lock(mutex_);
  finished_[rank] = true;
  changed_.notify_all();
  return mail_[rank].empty();
}

void join(Clocks& into, const Clocks& from) {
  for (std::size_t rank = 0; rank < into.size(); ++rank) {
    if (!into[rank].empty() && !from[rank].empty()) join(into[rank], from[rank]);
  }
}

void Block::send(std::uint32_t to, Message message) {
  message.sender = rank();
  if (!cluster().send(to, std::move(message)))
    fail("reaches into another block of the cluster, which has ended: sync_cluster is missing");
}

std::uint32_t Block::other_rank() {
  if (cluster().size != 2) fail("an instruction of pairs, in clusters of another size");
  return rank() ^ 1;
}

void Block::reach(std::uint32_t to) {
  if (to >= cluster().size) fail(fmt::format("block {} of a cluster of {}", to, cluster().size));
  if (self().cluster_arrived)
    fail("reaches into another block of the cluster between arriving at its barrier and waiting there");
  const Clock& known = to == rank() ? self().clock : self().peers[to];
  if (std::all_of(known.begin(), known.end(), [](std::uint32_t x) { return x == 0; }))
    fail("reaches into another block of the cluster, which may not have begun: wait_cluster is missing");
}

void Block::leave_cluster() {
  // By luck alone the other block had not ended before.
  if (reached_other_)
    fail("ended after it had reached into the other block of the cluster: sync_cluster is missing");
  for (std::size_t i = 0; i < barriers_.size(); ++i) {
    const auto waited = [&](const Thread& t) { return t.phases_seen[i] >= barriers_[i].stored; };
    if (std::none_of(threads_.begin(), threads_.end(), waited))
      fail(fmt::format("ended before it had waited at mbarrier +{} for what blocks of its cluster store",
                       barriers_[i].offset));
  }
  if (!cluster_->finish(rank()))
    fail("ended before what another block of its cluster sent: sync_cluster is missing");
}

Clocks Block::peer_clocks() const {
  Clocks clocks(grid_.cluster);
  for (std::uint32_t r = 0; r < grid_.cluster; ++r) {
    if (r != rank()) clocks[r].resize(components_.count());
  }
  return clocks;
}

Clocks Block::known(const Thread& thread) const {
  Clocks all = thread.peers;
  all[rank()] = thread.clock;
  return all;
}

Cluster& Block::cluster() {
  if (cluster_ == nullptr) fail("an instruction of clusters, in a grid without");
  return *cluster_;
}

void Block::receive() {
  if (cluster_ == nullptr) return;
  while (std::optional<Message> message = cluster_->take(rank())) apply(*message);
}

void Block::apply(const Message& message) {
  if (message.kind == Message::Kind::joined) {
    cluster_joined_ = message.known;
    ++cluster_barriers_;
    for (Thread* t : cluster_waiting_) learn_joined(*t);
    wake_all(cluster_waiting_);
    return;
  }
  Barrier* at = nullptr;
  for (Barrier& b : barriers_) {
    if (b.offset == message.barrier && b.fenced != 0) at = &b;
  }
  if (at == nullptr || message.own[at->init.component()] < at->fenced) {
    fail(fmt::format(
        "another block of the cluster reaches for an mbarrier at +{}: none that it knows is initialised and "
        "fenced",
        message.barrier));
  }
  Barrier& b = *at;
  join(b.peers_arriving, message.known);
  if (message.kind != Message::Kind::copy) join(b.arriving, message.own);
  if (message.kind == Message::Kind::arrival) {
    if (b.pending == 0)
      fail(fmt::format("the other block of the cluster arrives at mbarrier +{}, whose arrivals have all come",
                       b.offset));
    --b.pending;
  } else {
    const auto bytes = static_cast<std::uint32_t>(message.data.size());
    const Event completion(components_.barrier(barrier_index(b)), static_cast<std::uint32_t>(b.phase) + 1);
    check(shadow_.copy_in(message.target, bytes, completion, message.own), message.target,
          message.kind == Message::Kind::copy ? "a copy from the other block" : "a store of another block");
    std::memcpy(shared_ + message.target, message.data.data(), bytes);
    if (message.kind == Message::Kind::copy) {
      std::uint32_t& read = b.peers_arriving[message.sender][message.source_read.component()];
      read = std::max(read, message.source_read.clock());
    } else {
      b.stored = b.phase + 1;
    }
    b.bytes -= bytes;
    if (b.pending == 0 && b.bytes < 0)
      fail(fmt::format("wrong byte count at mbarrier +{}: {} bytes more than announced", b.offset, -b.bytes));
  }
  complete_phase_if_due(b);
}

void sync_cluster() {
  Block& block = Block::current();
  block.cluster();
  block.arrive_cluster(block.known(block.self()));
  block.wait_cluster();
}

/// A relaxed arrival tells others no more than that the thread has begun, and which mbarriers it has made.
void arrive_cluster() {
  Block& block = Block::current();
  const std::uint32_t size = block.cluster().size;
  const Thread& self = block.self();
  Clocks known(size);
  for (Clock& clock : known) clock.resize(block.components().count());
  known[block.rank()][self.index] = std::max(1U, self.fenced_barriers);
  block.arrive_cluster(known);
}

void wait_cluster() {
  Block::current().cluster();
  Block::current().wait_cluster();
}

void Block::arrive_cluster(const Clocks& known) {
  Thread& thread = self();
  if (thread.cluster_arrived) fail("arrives twice at the cluster's barrier, and has not waited between");
  thread.cluster_arrived = true;
  if (cluster_seen_.empty()) {
    cluster_seen_ = known;
  } else {
    join(cluster_seen_, known);
  }
  thread.cluster_barrier = cluster_barriers_ + 1;
  tick();
  if (++cluster_arrivals_ < threads_.size()) return;
  cluster_arrivals_ = 0;
  reached_other_ = false;
  cluster_->join_barrier(rank(), cluster_seen_);
  cluster_seen_.clear();
}

void Block::wait_cluster() {
  Thread& thread = self();
  if (!thread.cluster_arrived) fail("waits at the cluster's barrier, and has not arrived");
  if (cluster_barriers_ < thread.cluster_barrier) {
    cluster_waiting_.push_back(&thread);
    suspend({Wait::Kind::cluster, 0, 0});
  } else {
    learn_joined(thread);
  }
}

void Block::learn_joined(Thread& thread) {
  thread.cluster_arrived = false;
  join(thread.clock, cluster_joined_[rank()]);
  join(thread.peers, cluster_joined_);
}

void mbarrier_arrive_other(void* bar) {
  Block& block = Block::current();
  Thread& self = block.self();
  const std::uint32_t other = block.other_rank();
  block.reach_other();
  block.send(other, {.kind = Message::Kind::arrival,
                     .barrier = block.shared_offset(bar, 8, "mbarrier_arrive_other"),
                     .own = self.peers[other],
                     .known = block.known(self)});
  block.tick();
  block.maybe_yield();
}

void bulk_send(void* target, const void* source, std::uint32_t bytes, void* bar) {
  Block& block = Block::current();
  Thread& self = block.self();
  const std::uint32_t other = block.other_rank();
  block.reach_other();
  const char* what = "bulk_send";
  const std::uint32_t from = block.shared_offset(source, bytes, what);
  Message message{.kind = Message::Kind::copy,
                  .barrier = block.shared_offset(bar, 8, what),
                  .target = block.shared_offset(target, bytes, what),
                  .own = self.peers[other],
                  .known = Clocks(2),
                  .source_read = Event(block.components().storer(block.storer_of(self)), ++self.stores)};
  if (from % 16 != 0 || message.target % 16 != 0 || bytes % 16 != 0 || bytes == 0)
    block.fail(fmt::format("{}: {} bytes from +{} to +{} are not in units of 16", what, bytes, from,
                           message.target));
  for (std::uint32_t at = from; at < from + bytes; at += 16)
    block.check(block.shadow().copy_out(at, message.source_read, self.clock), at, what);
  block.later([&block, other, from, bytes, message = std::move(message)]() mutable {
    message.data.assign(block.shared() + from, block.shared() + from + bytes);
    block.send(other, std::move(message));
  });
  block.maybe_yield();
}

/// The sender need not outlive it; the receiver has to wait for it before it ends. What the sender's block
/// has read before it is read: another store may answer it, and take the place of that.
void store_async(std::uint32_t to, void* target, const void* data, std::uint32_t bytes, void* bar) {
  Block& block = Block::current();
  Thread& self = block.self();
  const char* what = "store_async";
  block.reach(to);
  Message message{.kind = Message::Kind::store,
                  .barrier = block.shared_offset(bar, 8, what),
                  .target = block.shared_offset(target, bytes, what),
                  .own = to == block.rank() ? self.clock : self.peers[to],
                  .known = block.known(self)};
  if (message.target % bytes != 0)
    block.fail(fmt::format("{}: {} bytes to +{}, which is no multiple", what, bytes, message.target));
  const char* const first = static_cast<const char*>(data);
  message.data.assign(first, first + bytes);
  block.send(to, std::move(message));
  block.tick();
  block.maybe_yield();
}

}  // namespace tandem::emulator
