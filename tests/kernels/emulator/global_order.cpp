#include "global_order.hpp"

#include <fmt/format.h>

namespace tandem::emulator {

namespace {

/// f(writer) of each byte, whose writers `words_of` has by four bytes, or null; up to the first that is
/// wrong.
template <typename Words, typename F>
std::string for_each_byte(Words&& words_of, std::uintptr_t address, std::size_t bytes, F&& f) {
  for (std::uintptr_t word = address / 4; word * 4 < address + bytes; ++word) {
    auto* const writers = words_of(word);
    if (writers == nullptr) continue;
    for (std::uintptr_t i = 0; i < 4; ++i) {
      const std::uintptr_t at = word * 4 + i;
      if (at < address || at >= address + bytes) continue;
      if (std::string wrong = f((*writers)[i]); !wrong.empty()) return wrong;
    }
  }
  return "";
}

bool ordered(Event writer, std::uint32_t thread, const Clock& observer) {
  return writer.never() || writer.component() == thread || writer.known_to(observer);
}

}  // namespace

std::string BlockStores::store(std::uintptr_t address, std::size_t bytes, std::uint32_t block, bool ordered) {
  const std::lock_guard lock(mutex_);
  return for_each_byte([&](std::uintptr_t word) { return &writer_[word]; }, address, bytes,
                       [&](std::uint32_t& writer) -> std::string {
                         if (!ordered && writer != 0 && writer != block + 1)
                           return fmt::format("stores over what block {} stored", writer - 1);
                         writer = block + 1;
                         return "";
                       });
}

std::string GlobalOrder::load(std::uintptr_t address, std::size_t bytes, std::uint32_t thread,
                              const Clock& observer) {
  if (writer_.empty()) return "";
  const auto words_of = [&](std::uintptr_t word) {
    const auto found = writer_.find(word);
    return found == writer_.end() ? nullptr : &found->second;
  };
  return for_each_byte(words_of, address, bytes, [&](Event writer) -> std::string {
    if (ordered(writer, thread, observer)) return "";
    return fmt::format("reads what thread {} stored, with no barrier between them", writer.component());
  });
}

std::string GlobalOrder::store(std::uintptr_t address, std::size_t bytes, std::uint32_t thread,
                               const Clock& observer) {
  return for_each_byte([&](std::uintptr_t word) { return &writer_[word]; }, address, bytes,
                       [&](Event& writer) -> std::string {
                         if (!ordered(writer, thread, observer))
                           return fmt::format(
                               "stores over what thread {} stored, with no barrier between them",
                               writer.component());
                         writer = Event(thread, observer[thread]);
                         return "";
                       });
}

}  // namespace tandem::emulator
