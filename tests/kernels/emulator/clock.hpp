// Vector clocks: for each component, how far it has come as seen from somewhere.
//
// Components of a block with T threads, in this order:
//   T threads          how many releases (arrivals, barriers, fences) the thread has made
//   T fenced threads   up to which of its clocks the thread's ordinary writes are visible to the asynchronous
//   units max_barriers       how many phases of the mbarrier have completed; its copies' writes carry the
//   phase's number max_warpgroups     how many WGMMAs of the warpgroup have retired; its operand reads carry
//   the instruction's number max_storers        how many bulk stores of a storing thread have read their
//   shared memory
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tandem::emulator {

constexpr std::uint32_t max_threads = 640;
constexpr std::uint32_t max_barriers = 64;
constexpr std::uint32_t max_warpgroups = max_threads / 128;
constexpr std::uint32_t max_storers = 16;

using Clock = std::vector<std::uint32_t>;

void join(Clock& into, const Clock& from);

/// What is known of the blocks of a cluster, by rank; of who knows it empty.
using Clocks = std::vector<Clock>;

void join(Clocks& into, const Clocks& from);

/// A moment on one component, packed: what a word of shared memory remembers of its last writer. 0: never.
struct Event {
  static constexpr std::uint32_t clock_bits = 20;
  static constexpr std::uint32_t clock_limit = 1U << clock_bits;
  std::uint32_t bits = 0;

  Event() = default;
  Event(std::uint32_t component, std::uint32_t clock) : bits(component << clock_bits | clock) {}
  [[nodiscard]] std::uint32_t component() const { return bits >> clock_bits; }
  [[nodiscard]] std::uint32_t clock() const { return bits & (clock_limit - 1); }
  [[nodiscard]] bool never() const { return bits == 0; }
  [[nodiscard]] bool known_to(const Clock& observer) const { return observer[component()] >= clock(); }
  bool operator==(const Event&) const = default;
};

/// Where components begin in a block of `threads`.
struct Components {
  std::uint32_t threads;
  [[nodiscard]] std::uint32_t fenced(std::uint32_t thread) const { return threads + thread; }
  [[nodiscard]] std::uint32_t barrier(std::uint32_t index) const { return 2 * threads + index; }
  [[nodiscard]] std::uint32_t warpgroup(std::uint32_t index) const { return barrier(max_barriers) + index; }
  [[nodiscard]] std::uint32_t storer(std::uint32_t index) const { return warpgroup(max_warpgroups) + index; }
  [[nodiscard]] std::uint32_t count() const { return storer(max_storers); }
  [[nodiscard]] bool is_thread(Event e) const { return e.component() < threads; }
  [[nodiscard]] bool is_barrier(Event e) const {
    return e.component() >= barrier(0) && e.component() < barrier(max_barriers);
  }
};

}  // namespace tandem::emulator
