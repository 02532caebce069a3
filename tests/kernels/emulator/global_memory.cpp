// Checked accesses to global memory, semaphores, and the grid before this one.
#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "block.hpp"

namespace tandem::emulator {

void check_global(const void* p, std::size_t bytes, bool write) {
  Block& block = Block::current();
  const char* what = write ? "global store" : "global load";
  count(write ? &Work::stored : &Work::loads, write ? static_cast<std::uint32_t>(bytes) : 1);
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  if (address % bytes != 0 && bytes <= 16)
    block.fail(fmt::format("{}: {} is not aligned to {} bytes", what, p, bytes));
  block.check_range(p, bytes, write, what);
}

namespace {

bool overlaps(const Buffer& b, std::uintptr_t address, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(b.data);
  return address < first + b.bytes && first < address + bytes;
}

void refuse_if(const char* what, const std::string& wrong) {
  if (!wrong.empty()) Block::current().fail(fmt::format("{}: {}", what, wrong));
}

}  // namespace

void check_global_load(const void* p, std::size_t bytes) {
  check_global(p, bytes, false);
  Block& block = Block::current();
  if (block.options().unordered) return;
  const Thread& self = block.self();
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  refuse_if("global load", block.global_order().load(address, bytes, self.index, self.clock));
}

void check_read_only_load(const void* p, std::size_t bytes) {
  Block& block = Block::current();
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  for (const Buffer& b : block.options().of_running_grid) {
    if (!block.self().previous_grid_ended && overlaps(b, address, bytes))
      block.fail("global load: through the read-only cache, of what a grid that has not ended writes");
  }
  if (!block.options().unordered) refuse_if("global load", block.stores().read_only_load(address, bytes));
}

void check_global_store(const void* p, std::size_t bytes) {
  check_global(p, bytes, true);
  Block& block = Block::current();
  if (block.options().unordered) return;
  const Thread& self = block.self();
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  refuse_if("global store", block.global_order().store(address, bytes, self.index, self.clock));
  refuse_if("global store", block.stores().store(address, bytes, block.index(), block.after_others()));
}

std::uint32_t atomic_add(std::uint32_t* p, std::uint32_t value) {
  check_global(p, sizeof(*p), true);
  Block::current().order_after_others();
  return std::atomic_ref(*p).fetch_add(value, std::memory_order_relaxed);
}

std::uint32_t semaphore_read(const std::uint32_t* p) {
  check_global(p, sizeof(*p), false);
  Block& block = Block::current();
  block.order_after_others();
  const std::uint32_t now = std::atomic_ref(*const_cast<std::uint32_t*>(p)).load(std::memory_order_acquire);
  block.bulk_stores().acquire(reinterpret_cast<std::uintptr_t>(p), block.self().known_stores);
  return now;
}

std::uint32_t semaphore_claim(std::uint32_t* p) {
  check_global(p, sizeof(*p), true);
  Block::current().order_after_others();
  std::uint32_t before = 0;
  std::atomic_ref(*p).compare_exchange_strong(before, 1, std::memory_order_acq_rel);
  return before;
}

void semaphore_wait(const std::uint32_t* p, std::uint32_t value) {
  constexpr int patience = 1 << 20;
  for (int i = 0; semaphore_read(p) < value; ++i) {
    if (i == patience)
      Block::current().fail(
          fmt::format("deadlock: waits for semaphore value {}, it is {}", value, semaphore_read(p)));
    std::this_thread::yield();
    Block::current().yield();
  }
}

void semaphore_wait_long(const std::uint32_t* p, std::uint32_t value) {
  const auto last = std::chrono::steady_clock::now() + std::chrono::minutes(10);
  while (semaphore_read(p) < value) {
    if (std::chrono::steady_clock::now() > last)
      Block::current().fail(fmt::format("deadlock: waits for {}, it is {}", value, semaphore_read(p)));
    std::this_thread::yield();
    Block::current().yield();
  }
}

void semaphore_increment(std::uint32_t* p) {
  check_global(p, sizeof(*p), true);
  Block& block = Block::current();
  const Thread& self = block.self();
  if (self.stores_written != self.stores)
    block.fail(
        "increments a semaphore while its bulk stores may not be in global memory: tma_store_wait_written is "
        "missing");
  block.bulk_stores().release(reinterpret_cast<std::uintptr_t>(p), block.number_in_grid(), self.stores,
                              self.known_stores);
  std::atomic_ref(*p).fetch_add(1, std::memory_order_release);
}

void flag_raise(unsigned long long* p, unsigned long long raised) {
  check_global(p, sizeof(*p), true);
  const std::atomic_ref flag(*p);
  if (flag.load(std::memory_order_relaxed) == raised)
    Block::current().fail("raises a flag that nobody has lowered");
  flag.store(raised, std::memory_order_release);
}

void flag_take(unsigned long long* p, unsigned long long raised) {
  check_global(p, sizeof(*p), true);
  constexpr int patience = 1 << 20;
  const std::atomic_ref flag(*p);
  for (int i = 0; flag.load(std::memory_order_acquire) != raised; ++i) {
    if (i == patience) Block::current().fail("deadlock: waits for a flag that is not raised");
    std::this_thread::yield();
    Block::current().yield();
  }
  Block::current().order_after_others();
  flag.store(0, std::memory_order_relaxed);
}

void fence_async_global() {
  Thread& self = Block::current().self();
  self.fenced_stores = self.known_stores;
}

void wait_for_previous_grid() {
  Block::current().self().previous_grid_ended = true;
}

void Block::store_in_bulk(const void* p, std::size_t bytes) {
  if (options_.unordered) return;
  bulk_stores().store(reinterpret_cast<std::uintptr_t>(p), bytes, number_in_grid(), self().stores + 1);
}

void Block::check_stores(const void* p, std::size_t bytes, const char* what) {
  refuse_if(what, bulk_stores().load(reinterpret_cast<std::uintptr_t>(p), bytes, self().fenced_stores));
}

void Block::check_range(const void* p, std::size_t bytes, bool write, const char* what) {
  const auto begin = reinterpret_cast<std::uintptr_t>(p);
  for (const Buffer& b : options_.of_previous_grid) {
    if (!self().previous_grid_ended && overlaps(b, begin, bytes))
      fail(fmt::format("{}: the previous grid writes there, and nobody has waited for it", what));
  }
  const Buffer* nearest = nullptr;
  for (const Buffer& b : options_.buffers) {
    const auto first = reinterpret_cast<std::uintptr_t>(b.data);
    if (begin >= first && begin + bytes <= first + b.bytes) {
      if (write && !b.writable) fail(fmt::format("{}: writes a buffer that is only to be read", what));
      return;
    }
    if (first <= begin && (nearest == nullptr || nearest->data < b.data)) nearest = &b;
  }
  if (nearest == nullptr) fail(fmt::format("{}: {} bytes at {} are outside every buffer", what, bytes, p));
  fail(fmt::format("{}: out of bounds: {} bytes at offset {} of a buffer of {}", what, bytes,
                   begin - reinterpret_cast<std::uintptr_t>(nearest->data), nearest->bytes));
}

}  // namespace tandem::emulator
