// Which thread of the block stored each byte of global memory last, to see accesses that nothing orders.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>

#include "clock.hpp"

namespace tandem::emulator {

/// Which block of a launch stored each byte of global memory. Blocks that run beside each other are ordered
/// by semaphores and counters alone.
class BlockStores {
 public:
  /// What is wrong with a store by `block`, which is `ordered` if it has seen what others have announced.
  std::string store(std::uintptr_t address, std::size_t bytes, std::uint32_t block, bool ordered);

 private:
  std::mutex mutex_;
  std::unordered_map<std::uintptr_t, std::array<std::uint32_t, 4>> writer_;  ///< block + 1, by four bytes
};

/// Ordinary loads and stores of one block. Atomic operations and TMA are not followed.
class GlobalOrder {
 public:
  /// Each says what is wrong with an access to `bytes` from `address` on by `thread`, which has seen
  /// `observer` ("" if nothing). The same number stored twice by threads that nothing orders is a fault, too.
  std::string load(std::uintptr_t address, std::size_t bytes, std::uint32_t thread, const Clock& observer);
  std::string store(std::uintptr_t address, std::size_t bytes, std::uint32_t thread, const Clock& observer);

 private:
  std::unordered_map<std::uintptr_t, std::array<Event, 4>> writer_;  ///< by four bytes
};

}  // namespace tandem::emulator
