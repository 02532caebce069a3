#include "global_order.hpp"

#include <fmt/format.h>

namespace tandem::emulator {

namespace {

bool ordered(Event writer, std::uint32_t thread, const Clock& observer) {
  return writer.never() || writer.component() == thread || writer.known_to(observer);
}

}  // namespace

std::string BlockStores::store(std::uintptr_t address, std::size_t bytes, std::uint32_t block, bool ordered) {
  const std::lock_guard lock(mutex_);
  any_ = true;
  return writer_.for_each(address, bytes, true, [&](std::uint32_t& writer) -> std::string {
    if (!ordered && writer != 0 && writer != block + 1)
      return fmt::format("stores over what block {} stored", writer - 1);
    writer = block + 1;
    return "";
  });
}

std::string BlockStores::read_only_load(std::uintptr_t address, std::size_t bytes) {
  if (!any_) return "";
  const std::lock_guard lock(mutex_);
  return writer_.for_each(address, bytes, false, [](std::uint32_t writer) -> std::string {
    if (writer == 0) return "";
    return fmt::format("through the read-only cache, of what block {} of this grid has stored", writer - 1);
  });
}

std::string GlobalOrder::load(std::uintptr_t address, std::size_t bytes, std::uint32_t thread,
                              const Clock& observer) {
  if (writer_.empty()) return "";
  return writer_.for_each(address, bytes, false, [&](Event writer) -> std::string {
    if (ordered(writer, thread, observer)) return "";
    return fmt::format("reads what thread {} stored, with no barrier between them", writer.component());
  });
}

std::string GlobalOrder::store(std::uintptr_t address, std::size_t bytes, std::uint32_t thread,
                               const Clock& observer) {
  return writer_.for_each(address, bytes, true, [&](Event& writer) -> std::string {
    if (!ordered(writer, thread, observer))
      return fmt::format("stores over what thread {} stored, with no barrier between them",
                         writer.component());
    writer = Event(thread, observer[thread]);
    return "";
  });
}

namespace {

constexpr std::size_t store_unit = 16;

void learn(StoresKnown& into, const StoresKnown& from) {
  for (const auto& [thread, number] : from) into[thread] = std::max(into[thread], number);
}

}  // namespace

void BulkStores::store(std::uintptr_t address, std::size_t bytes, std::uint64_t thread,
                       std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  any_ = true;
  stores_.for_each(address / store_unit, (bytes + store_unit - 1) / store_unit, true, [&](Store& store) {
    store = {thread, number};
    return std::string();
  });
}

void BulkStores::release(std::uintptr_t semaphore, std::uint64_t thread, std::uint32_t number,
                         const StoresKnown& known) {
  if (!any_) return;
  const std::lock_guard lock(mutex_);
  learn(semaphores_[semaphore], known);
  learn(semaphores_[semaphore], {{thread, number}});
}

void BulkStores::acquire(std::uintptr_t semaphore, StoresKnown& known) {
  if (!any_) return;
  const std::lock_guard lock(mutex_);
  if (const auto found = semaphores_.find(semaphore); found != semaphores_.end()) learn(known, found->second);
}

std::string BulkStores::load(std::uintptr_t address, std::size_t bytes, const StoresKnown& fenced) {
  if (!any_) return "";
  const std::lock_guard lock(mutex_);
  return stores_.for_each(address / store_unit, (bytes + store_unit - 1) / store_unit, false,
                          [&](const Store& store) -> std::string {
                            if (store.number == 0) return "";
                            const auto known = fenced.find(store.thread);
                            if (known != fenced.end() && known->second >= store.number) return "";
                            return fmt::format(
                                "reads what thread {} of the grid has stored in bulk: it has not seen a "
                                "semaphore behind that store, or has not called fence_async_global since",
                                store.thread);
                          });
}

}  // namespace tandem::emulator
