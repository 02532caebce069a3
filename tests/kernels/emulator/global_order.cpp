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

}  // namespace tandem::emulator
