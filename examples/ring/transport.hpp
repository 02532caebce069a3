// How the processes of a ring reach one another: each sends to the next one and receives from the one before.
// Sockets (sockets.hpp) and MPI (mpi.hpp) are two ways; NCCL's ncclSend and ncclRecv in a group are a third.
#pragma once

#include <cstddef>
#include <exception>
#include <span>

class Transport {
 public:
  Transport(int rank, int ranks) : rank_(rank), ranks_(ranks) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  /// Begins to send `from` to rank + 1 and to fill `to` by what rank - 1 sends, which must have its size.
  /// Both stay as they are until wait() returns; one shift is under way at a time.
  virtual void start(std::span<const std::byte> from, std::span<std::byte> to) = 0;
  /// Throws std::runtime_error if a neighbour has ended.
  virtual void wait() = 0;

 private:
  int rank_;
  int ranks_;
};

/// A shift from its start to wait(), or to the end of its scope where an error is on its way: memory that is
/// being sent outlives it.
class Shift {
 public:
  Shift(Transport& transport, std::span<const std::byte> from, std::span<std::byte> to)
      : transport_(transport) {
    transport_.start(from, to);
  }
  ~Shift() {
    try {
      if (!done_) transport_.wait();
    } catch (const std::exception&) {  // the error on its way is the first one
    }
  }
  Shift(const Shift&) = delete;
  Shift& operator=(const Shift&) = delete;
  void wait() {
    done_ = true;
    transport_.wait();
  }

 private:
  Transport& transport_;
  bool done_ = false;
};
