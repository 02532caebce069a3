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
  const std::uint32_t other = rank ^ 1;
  idle_[rank] = true;
  changed_.notify_all();
  const auto hopeless = [&] { return finished_[other] || (idle_[other] && mail_[other].empty()); };
  changed_.wait(lock, [&] { return !mail_[rank].empty() || hopeless(); });
  const bool some = !mail_[rank].empty();
  if (some) idle_[rank] = false;  // else it stays so, for the other to see
  return some;
}

void Cluster::join_barrier(std::uint32_t rank, const Clock& own, const Clock& other) {
  const std::lock_guard lock(mutex_);
  // In the sender's words here; `own` and `other` change places for the receiver.
  joined_[rank] = Message{.kind = Message::Kind::joined, .own = other, .other = own};
  if (!joined_[0] || !joined_[1]) return;
  for (const std::uint32_t to : {0U, 1U}) mail_[to].push_back(*joined_[to ^ 1]);
  joined_ = {};
  changed_.notify_all();
}

bool Cluster::finish(std::uint32_t rank) {
  const std::lock_guard lock(mutex_);
  finished_[rank] = true;
  changed_.notify_all();
  return mail_[rank].empty();
}

void Block::send_other(Message message) {
  if (!cluster().send(rank() ^ 1, std::move(message)))
    fail("reaches into the other block of the cluster, which has ended: sync_cluster is missing");
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
    for (Thread* t : cluster_waiting_) {
      join(t->clock, cluster_seen_);
      join(t->clock, message.own);
      join(t->other, cluster_other_seen_);
      join(t->other, message.other);
    }
    cluster_seen_.clear();
    reached_other_ = false;
    wake_all(cluster_waiting_);
    return;
  }
  Barrier* at = nullptr;
  for (Barrier& b : barriers_) {
    if (b.offset == message.barrier && b.init_fenced) at = &b;
  }
  if (at == nullptr) {
    fail(fmt::format(
        "the other block of the cluster reaches for an mbarrier at +{}: none is initialised and fenced",
        message.barrier));
  }
  Barrier& b = *at;
  join(b.other_arriving, message.other);
  if (message.kind == Message::Kind::arrival) {
    if (b.pending == 0)
      fail(fmt::format("the other block of the cluster arrives at mbarrier +{}, whose arrivals have all come",
                       b.offset));
    join(b.arriving, message.own);
    --b.pending;
  } else {
    const auto bytes = static_cast<std::uint32_t>(message.data.size());
    const Event completion(components_.barrier(barrier_index(b)), static_cast<std::uint32_t>(b.phase) + 1);
    check(shadow_.copy_in(message.target, bytes, completion, message.own), message.target,
          "a copy from the other block");
    std::memcpy(shared_ + message.target, message.data.data(), bytes);
    std::uint32_t& read = b.other_arriving[message.source_read.component()];
    read = std::max(read, message.source_read.clock());
    b.bytes -= bytes;
    if (b.pending == 0 && b.bytes < 0)
      fail(fmt::format("wrong byte count at mbarrier +{}: {} bytes more than announced", b.offset, -b.bytes));
  }
  complete_phase_if_due(b);
}

void sync_cluster() {
  Block& block = Block::current();
  block.cluster();
  block.join_cluster();
}

void Block::join_cluster() {
  Thread& thread = self();
  if (cluster_seen_.empty()) {
    cluster_seen_.assign(components_.count(), 0);
    cluster_other_seen_.assign(components_.count(), 0);
  }
  join(cluster_seen_, thread.clock);
  join(cluster_other_seen_, thread.other);
  tick();
  cluster_waiting_.push_back(&thread);
  if (cluster_waiting_.size() == threads_.size()) {
    cluster_->join_barrier(rank(), cluster_seen_, cluster_other_seen_);
  }
  suspend({Wait::Kind::cluster, 0, 0});
}

void mbarrier_arrive_other(void* bar) {
  Block& block = Block::current();
  Thread& self = block.self();
  block.cluster();
  block.reach_other();
  block.send_other({.kind = Message::Kind::arrival,
                    .barrier = block.shared_offset(bar, 8, "mbarrier_arrive_other"),
                    .own = self.other,
                    .other = self.clock});
  block.tick();
  block.maybe_yield();
}

void bulk_send(void* target, const void* source, std::uint32_t bytes, void* bar) {
  Block& block = Block::current();
  Thread& self = block.self();
  block.cluster();
  block.reach_other();
  const char* what = "bulk_send";
  const std::uint32_t from = block.shared_offset(source, bytes, what);
  Message message{.kind = Message::Kind::copy,
                  .barrier = block.shared_offset(bar, 8, what),
                  .target = block.shared_offset(target, bytes, what),
                  .own = self.other,
                  .other = Clock(self.clock.size()),
                  .source_read = Event(block.components().storer(block.storer_of(self)), ++self.stores)};
  if (from % 16 != 0 || message.target % 16 != 0 || bytes % 16 != 0 || bytes == 0)
    block.fail(fmt::format("{}: {} bytes from +{} to +{} are not in units of 16", what, bytes, from,
                           message.target));
  for (std::uint32_t at = from; at < from + bytes; at += 16)
    block.check(block.shadow().copy_out(at, message.source_read, self.clock), at, what);
  block.later([&block, from, bytes, message = std::move(message)]() mutable {
    message.data.assign(block.shared() + from, block.shared() + from + bytes);
    block.send_other(std::move(message));
  });
  block.maybe_yield();
}

}  // namespace tandem::emulator
