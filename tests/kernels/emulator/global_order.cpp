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
  for (std::uintptr_t word = address / 4; word * 4 < address + bytes; ++word) {
    std::array<std::uint32_t, 4>& writers = writer_[word];
    for (std::uintptr_t i = 0; i < 4; ++i) {
      const std::uintptr_t at = word * 4 + i;
      if (at < address || at >= address + bytes) continue;
      if (!ordered && writers[i] != 0 && writers[i] != block + 1)
        return fmt::format("stores over what block {} stored", writers[i] - 1);
      writers[i] = block + 1;
    }
  }
  return "";
}

std::string GlobalOrder::load(std::uintptr_t address, std::size_t bytes, std::uint32_t thread,
                              const Clock& observer) {
  if (writer_.empty()) return "";
  for (std::uintptr_t word = address / 4; word * 4 < address + bytes; ++word) {
    const auto found = writer_.find(word);
    if (found == writer_.end()) continue;
    for (std::uintptr_t i = 0; i < 4; ++i) {
      const std::uintptr_t at = word * 4 + i;
      const Event writer = found->second[i];
      if (at >= address && at < address + bytes && !ordered(writer, thread, observer))
        return fmt::format("reads what thread {} stored, with no barrier between them", writer.component());
    }
  }
  return "";
}

std::string GlobalOrder::store(std::uintptr_t address, std::size_t bytes, std::uint32_t thread,
                               const Clock& observer) {
  const Event self(thread, observer[thread]);
  for (std::uintptr_t word = address / 4; word * 4 < address + bytes; ++word) {
    std::array<Event, 4>& writers = writer_[word];
    for (std::uintptr_t i = 0; i < 4; ++i) {
      const std::uintptr_t at = word * 4 + i;
      if (at < address || at >= address + bytes) continue;
      if (!ordered(writers[i], thread, observer))
        return fmt::format("stores over what thread {} stored, with no barrier between them",
                           writers[i].component());
      writers[i] = self;
    }
  }
  return "";
}

}  // namespace tandem::emulator
