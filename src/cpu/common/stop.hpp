// Ending a call before it is done: what its threads ask between pieces of work.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <thread>

#include "tandem/error.hpp"

namespace tandem::cpu {

/// Asks Execution::interrupted for one call. The caller's own thread asks it, at most every `pause`, since a
/// question may take a lock (Python's); the others learn what it heard.
class Stop {
 public:
  Stop(bool (*interrupted)(void*), void* context) : interrupted_(interrupted), context_(context) {}

  /// Whether the call is to end. From any of its threads, between any two pieces of work.
  bool wanted() {
    if (interrupted_ == nullptr) return false;
    if (std::this_thread::get_id() == caller_) ask();
    return heard();
  }
  [[nodiscard]] bool heard() const { return wanted_.load(std::memory_order_relaxed); }
  /// For the caller's thread, once the others are done.
  void throw_if_heard() const {
    if (!heard()) return;
    if (thrown_) std::rethrow_exception(thrown_);
    throw Error(Status::interrupted,
                "the call was interrupted; its outputs are incomplete: compute them again");
  }

  /// wanted() for the kernels, which share no inline code with the rest.
  static bool wanted(void* self) { return static_cast<Stop*>(self)->wanted(); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds pause{50};

  void ask() {
    const Clock::time_point now = Clock::now();
    if (now - asked_ < pause || heard()) return;
    asked_ = now;
    bool ends = true;
    try {
      ends = interrupted_(context_);
    } catch (...) {  // which may not leave a parallel region
      thrown_ = std::current_exception();
    }
    if (ends) wanted_.store(true, std::memory_order_relaxed);
  }

  bool (*interrupted_)(void*);
  void* context_;
  const std::thread::id caller_ = std::this_thread::get_id();
  Clock::time_point asked_ = Clock::now();  ///< the caller's thread alone reads and writes it
  std::exception_ptr thrown_;               ///< by the question
  std::atomic<bool> wanted_{false};
};

}  // namespace tandem::cpu
