// Blocks of one cluster: what they send each other. Each runs in a host thread of its own and takes what has
// come in between two steps of its scheduler.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "clock.hpp"

namespace tandem::emulator {

/// What one block of a pair does in the other. Clocks: `own` counts the receiver's components, `other` the
/// sender's, both as the sender knew them.
struct Message {
  enum class Kind { arrival, copy, joined };
  Kind kind = Kind::arrival;
  std::uint32_t barrier = 0;  ///< offset in shared memory, as is `target`
  std::uint32_t target = 0;
  std::vector<char> data = {};
  Clock own = {};
  Clock other = {};
  Event source_read = {};  ///< of a copy: its source is free for whoever knows this of the sender
};

class Cluster {
 public:
  static constexpr std::uint32_t size = 2;

  /// False where the block at `rank` has ended.
  bool send(std::uint32_t rank, Message message);
  /// What has come in for `rank`, if anything has.
  std::optional<Message> take(std::uint32_t rank);
  /// Waits for a message; false where none can come, since the other block waits too, or has ended.
  bool wait(std::uint32_t rank);
  /// All threads of the block at `rank` have come to the cluster's barrier, and know this. Both blocks get a
  /// message `joined` once both have come.
  void join_barrier(std::uint32_t rank, const Clock& own, const Clock& other);
  /// The block has ended. False where messages to it are left.
  bool finish(std::uint32_t rank);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<std::deque<Message>, size> mail_;
  std::array<bool, size> idle_ = {};
  std::array<bool, size> finished_ = {};
  std::array<std::optional<Message>, size> joined_;
};

}  // namespace tandem::emulator
