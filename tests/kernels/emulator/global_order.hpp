// Which thread of the block stored each byte of global memory last, to see accesses that nothing orders.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "clock.hpp"

namespace tandem::emulator {

/// A T of each byte of global memory, T() until it is set; kept by pages, as stores lie beside each other.
template <typename T>
class OfBytes {
 public:
  [[nodiscard]] bool empty() const { return pages_.empty(); }
  /// f(T&) of each byte, up to the first that returns a text, which this returns. Where `create` is not set,
  /// bytes of pages of which none has been set are left out.
  template <typename F>
  std::string for_each(std::uintptr_t address, std::size_t bytes, bool create, const F& f) {
    for (std::uintptr_t at = address; at < address + bytes;) {
      const std::uintptr_t end = std::min(address + bytes, (at / page_bytes + 1) * page_bytes);
      Page* const page = page_of(at / page_bytes, create);
      for (; page != nullptr && at < end; ++at) {
        if (std::string wrong = f((*page)[at % page_bytes]); !wrong.empty()) return wrong;
      }
      at = end;
    }
    return "";
  }

 private:
  static constexpr std::uintptr_t page_bytes = 256;
  using Page = std::array<T, page_bytes>;

  Page* page_of(std::uintptr_t number, bool create) {
    if (last_ != nullptr && number == last_number_) return last_;
    auto found = pages_.find(number);
    if (found == pages_.end()) {
      if (!create) return nullptr;
      found = pages_.emplace(number, std::make_unique<Page>()).first;
    }
    last_number_ = number;
    return last_ = found->second.get();
  }

  std::unordered_map<std::uintptr_t, std::unique_ptr<Page>> pages_;
  std::uintptr_t last_number_ = 0;
  Page* last_ = nullptr;  ///< of number last_number_
};

/// By number of a thread in the grid: how many of its bulk stores are known of.
using StoresKnown = std::unordered_map<std::uint64_t, std::uint32_t>;

/// Bulk stores of a launch to global memory, which TMA reads again in the same launch: once the storing
/// thread has waited for them and incremented a semaphore, and the reading one has seen that and fenced.
class BulkStores {
 public:
  /// Store `number`, from 1, of a thread.
  void store(std::uintptr_t address, std::size_t bytes, std::uint64_t thread, std::uint32_t number);
  /// The thread increments a semaphore behind `number` stores, and hands on what it knows.
  void release(std::uintptr_t semaphore, std::uint64_t thread, std::uint32_t number,
               const StoresKnown& known);
  /// A thread that knows `known` has read a semaphore.
  void acquire(std::uintptr_t semaphore, StoresKnown& known);
  /// What is wrong with a read of a thread for which these stores were fenced ("" if nothing).
  std::string load(std::uintptr_t address, std::size_t bytes, const StoresKnown& fenced);

 private:
  struct Store {
    std::uint64_t thread = 0;
    std::uint32_t number = 0;  ///< 0: there is none
  };
  std::mutex mutex_;
  std::atomic<bool> any_{false};
  OfBytes<Store> stores_;  ///< of each 16 bytes
  std::unordered_map<std::uintptr_t, StoresKnown> semaphores_;
};

/// Which block of a launch stored each byte of global memory. Blocks that run beside each other are ordered
/// by semaphores and counters alone.
class BlockStores {
 public:
  /// What is wrong with a store by `block`, which is `ordered` if it has seen what others have announced.
  std::string store(std::uintptr_t address, std::size_t bytes, std::uint32_t block, bool ordered);
  /// What is wrong with a load through the read-only cache, which knows nothing of this grid's stores.
  std::string read_only_load(std::uintptr_t address, std::size_t bytes);

  BulkStores bulk;  ///< those of the launch

 private:
  std::mutex mutex_;
  std::atomic<bool> any_{false};
  OfBytes<std::uint32_t> writer_;  ///< block + 1
};

/// Ordinary loads and stores of one block. Atomic operations and TMA are not followed.
class GlobalOrder {
 public:
  /// Each says what is wrong with an access to `bytes` from `address` on by `thread`, which has seen
  /// `observer` ("" if nothing). The same number stored twice by threads that nothing orders is a fault, too.
  std::string load(std::uintptr_t address, std::size_t bytes, std::uint32_t thread, const Clock& observer);
  std::string store(std::uintptr_t address, std::size_t bytes, std::uint32_t thread, const Clock& observer);

 private:
  OfBytes<Event> writer_;
};

}  // namespace tandem::emulator
