// Blocks of one cluster: what they send each other. Each runs in a host thread of its own and takes what has
// come in between two steps of its scheduler.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "clock.hpp"

namespace tandem::emulator {

constexpr std::uint32_t max_cluster = 16;

/// What one block of a cluster does in another, or in itself.
struct Message {
  enum class Kind { arrival, copy, store, joined };
  Kind kind = Kind::arrival;
  std::uint32_t sender = 0;   ///< rank
  std::uint32_t barrier = 0;  ///< offset in shared memory, as is `target`
  std::uint32_t target = 0;
  std::vector<char> data = {};
  Clock own = {};          ///< what the sender knew of the receiver
  Clocks known = {};       ///< what the receiver's barrier learns, by rank
  Event source_read = {};  ///< of a copy: its source is free for whoever knows this of the sender
};

class Cluster {
 public:
  explicit Cluster(std::uint32_t blocks)
      : size(blocks), mail_(blocks), idle_(blocks), finished_(blocks), joined_(blocks) {}
  const std::uint32_t size;

  /// False where the block at `rank` has ended.
  bool send(std::uint32_t rank, Message message);
  /// What has come in for `rank`, if anything has.
  std::optional<Message> take(std::uint32_t rank);
  /// Waits for a message; false where none can come, since the other blocks wait too, or have ended.
  bool wait(std::uint32_t rank);
  /// All threads of the block at `rank` have come to the cluster's barrier, and know this, by rank. All
  /// blocks get a message `joined` once all have come.
  void join_barrier(std::uint32_t rank, const Clocks& known);
  /// The block has ended. False where messages to it are left.
  bool finish(std::uint32_t rank);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<Message>> mail_;
  std::vector<bool> idle_;
  std::vector<bool> finished_;
  std::vector<std::optional<Clocks>> joined_;
};

}  // namespace tandem::emulator
