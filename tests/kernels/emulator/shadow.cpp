#include "shadow.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "cpu/common/vector_clones.hpp"

namespace tandem::emulator {

namespace {

constexpr const char* unwaited = "reads bytes of a copy that its thread has not waited for";

}  // namespace

TANDEM_VECTOR_CLONES void join(Clock& into, const Clock& from) {
  std::uint32_t* a = into.data();
  const std::uint32_t* b = from.data();
  const std::size_t n = into.size();
  // Clocks stay below 2^31, and signed maxima are what every x86-64 has a vector compare for.
  for (std::size_t i = 0; i < n; ++i) {
    const auto x = static_cast<std::int32_t>(a[i]);
    const auto y = static_cast<std::int32_t>(b[i]);
    a[i] = static_cast<std::uint32_t>(x < y ? y : x);
  }
}

Shadow::Shadow(std::uint32_t bytes, Components components)
    : components_(components), reserved_(components.count(), 1), copying_(components.count(), 2) {
  writer_.resize((bytes + 3) / 4);
  reader_.resize(writer_.size());
  store_reader_.resize((bytes + 15) / 16);
  for (auto& v : matrix_reader_) v.resize(store_reader_.size());
}

std::string Shadow::writer_name(Event e) const {
  if (e == reserved_) return "an mbarrier";
  if (components_.is_thread(e)) return fmt::format("thread {}", e.component());
  return fmt::format("TMA (barrier #{}, phase {})", e.component() - components_.barrier(0), e.clock() - 1);
}

std::string Shadow::ordinary_fault(Event source) const {
  if (source.never()) return "reads shared memory that nobody wrote";
  if (source == reserved_) return "reads an mbarrier's bytes";
  if (source == copying_) return unwaited;
  if (components_.is_barrier(source)) {
    return fmt::format("reads bytes of a copy that it has not waited for: {}", writer_name(source));
  }
  return fmt::format("reads what {} wrote, with no barrier between them", writer_name(source));
}

std::string Shadow::async_fault(Event source, const Clock& observer) const {
  if (!is_written(source) || !components_.is_thread(source) || !source.known_to(observer))
    return ordinary_fault(source);
  return fmt::format("reads what {} wrote without a fence_async_shared between them", writer_name(source));
}

std::string Shadow::readers_done(std::uint32_t offset, std::uint32_t bytes, const Clock& observer) const {
  const std::uint32_t end = offset + bytes;
  for (std::uint32_t g = 0; g < matrix_readers_; ++g) {
    const std::uint32_t retired = observer[components_.warpgroup(g)];
    for (std::uint32_t i = offset / 16; i * 16 < end; ++i) {
      if (matrix_reader_[g][i] <= retired) continue;
      return fmt::format(
          "overwrites bytes at +{} that a WGMMA of warpgroup {} may still be reading (its {}th; {} are known "
          "to have retired)",
          i * 16, g, matrix_reader_[g][i], retired);
    }
  }
  for (std::uint32_t i = offset / 16; i * 16 < end; ++i) {
    if (store_reader_[i].never() || store_reader_[i].known_to(observer)) continue;
    return fmt::format("overwrites bytes at +{} that a bulk store may still be reading", i * 16);
  }
  for (std::uint32_t i = offset / 4; i * 4 < end; ++i) {
    if (reader_[i] == 0) continue;
    Event one;
    one.bits = reader_[i];
    const bool shared = (reader_[i] & shared_readers) != 0;
    const std::span<const Event> readers =
        shared ? std::span<const Event>(read_sets_[reader_[i] & ~shared_readers]) : std::span(&one, 1);
    for (const Event reader : readers) {
      if (reader.known_to(observer)) continue;
      return fmt::format("overwrites bytes that thread {} reads, with no barrier between them",
                         reader.component());
    }
  }
  return "";
}

void Shadow::forget_readers(std::uint32_t offset, std::uint32_t bytes) {
  const std::uint32_t end = offset + bytes;
  for (std::uint32_t i = offset / 4; i * 4 < end; ++i) {
    if ((reader_[i] & shared_readers) != 0) free_read_sets_.push_back(reader_[i] & ~shared_readers);
    reader_[i] = 0;
  }
  // Sixteen-byte readers are forgotten only where all sixteen bytes are new: others are still known to be
  // read.
  const std::uint32_t first = (offset + 15) / 16;
  const std::uint32_t last = end / 16;
  if (first >= last) return;
  std::fill(store_reader_.begin() + first, store_reader_.begin() + last, Event());
  for (std::uint32_t g = 0; g < matrix_readers_; ++g)
    std::fill(matrix_reader_[g].begin() + first, matrix_reader_[g].begin() + last, 0U);
}

std::uint32_t Shadow::new_read_set() {
  if (free_read_sets_.empty()) {
    read_sets_.emplace_back();
    return static_cast<std::uint32_t>(read_sets_.size() - 1);
  }
  const std::uint32_t set = free_read_sets_.back();
  free_read_sets_.pop_back();
  return set;
}

std::string Shadow::read(std::uint32_t offset, std::uint32_t bytes, std::uint32_t thread,
                         const Clock& observer) {
  Event now;
  now = Event(thread, observer[thread]);
  for (std::uint32_t i = offset / 4; i * 4 < offset + bytes; ++i) {
    if (!ordinary_sees(writer_[i], thread, observer)) return ordinary_fault(writer_[i]);
    Event last;
    last.bits = reader_[i];
    if ((last.bits & shared_readers) != 0) {
      auto& set = read_sets_[last.bits & ~shared_readers];
      const auto mine = [thread](Event e) { return e.component() == thread; };
      if (place_ >= set.size() || !mine(set[place_])) {
        place_ = static_cast<std::size_t>(std::find_if(set.begin(), set.end(), mine) - set.begin());
        if (place_ == set.size()) set.emplace_back();
      }
      set[place_] = now;
    } else if (last.never() || last.known_to(observer)) {
      reader_[i] = now.bits;
    } else {
      reader_[i] = shared_readers | new_read_set();
      read_sets_[reader_[i] & ~shared_readers].assign({last, now});
    }
  }
  return "";
}

std::string Shadow::write(std::uint32_t offset, std::uint32_t bytes, std::uint32_t thread,
                          const Clock& observer) {
  if (std::string wrong = readers_done(offset, bytes, observer); !wrong.empty()) return wrong;
  for (std::uint32_t i = offset / 4; i * 4 < offset + bytes; ++i) {
    const Event w = writer_[i];
    if (w == reserved_) return "overwrites an mbarrier";
    if (w == copying_) return "overwrites bytes of a copy that its thread has not waited for";
    // Two threads may write the halves of one word.
    const bool whole_word = bytes >= 4;
    if (whole_word && !w.never() && w.component() != thread && !w.known_to(observer)) {
      return fmt::format("overwrites what {} wrote, with no barrier between them", writer_name(w));
    }
    writer_[i] = Event(thread, observer[thread]);
  }
  forget_readers(offset, bytes);
  return "";
}

void Shadow::begin_copy(std::uint32_t offset, std::uint32_t bytes) {
  std::fill(writer_.begin() + offset / 4, writer_.begin() + (offset + bytes) / 4, copying_);
}

std::string Shadow::end_copy(std::uint32_t offset, std::uint32_t bytes, std::uint32_t thread,
                             const Clock& observer) {
  if (std::string wrong = readers_done(offset, bytes, observer); !wrong.empty()) return wrong;
  const Event now(thread, observer[thread]);
  std::fill(writer_.begin() + offset / 4, writer_.begin() + (offset + bytes) / 4, now);
  return "";
}

std::string Shadow::copy_in(std::uint32_t offset, std::uint32_t bytes, Event completion,
                            const Clock& observer) {
  if (std::string wrong = readers_done(offset, bytes, observer); !wrong.empty()) return wrong;
  Event accepted;
  for (std::uint32_t i = offset / 4; i * 4 < offset + bytes; ++i) {
    const Event w = writer_[i];
    if (w == accepted) continue;
    if (w == reserved_) return "overwrites an mbarrier";
    if (w == copying_) return "overwrites bytes of a copy that its thread has not waited for";
    if (components_.is_barrier(w) && !w.known_to(observer)) {
      return fmt::format("overwrites bytes of a copy that has not been waited for: {}", writer_name(w));
    }
    if (components_.is_thread(w) && observer[components_.fenced(w.component())] < w.clock()) {
      if (!w.known_to(observer))
        return fmt::format("overwrites what {} wrote, with no barrier between them", writer_name(w));
      return fmt::format("overwrites what {} wrote without a fence_async_shared between them",
                         writer_name(w));
    }
    accepted = w;
  }
  std::fill(writer_.begin() + offset / 4, writer_.begin() + (offset + bytes) / 4, completion);
  forget_readers(offset, bytes);
  return "";
}

std::string Shadow::copy_out(std::uint32_t offset, Event completion, const Clock& observer) {
  for (std::uint32_t i = offset / 4; i * 4 < offset + 16; ++i) {
    if (!async_sees(writer_[i], observer)) return async_fault(writer_[i], observer);
  }
  store_reader_[offset / 16] = completion;
  return "";
}

void Shadow::matrix_read(std::uint32_t offset, std::uint32_t warpgroup, std::uint32_t instruction,
                         std::vector<Source>& sources) {
  for (std::uint32_t i = offset / 4; i < offset / 4 + 4; ++i) {
    const Event w = writer_[i];
    if (!sources.empty() && sources.back().event == w) continue;
    const bool known =
        std::any_of(sources.begin(), sources.end(), [&](const Source& s) { return s.event == w; });
    if (!known) sources.push_back({w, offset});
  }
  matrix_readers_ = std::max(matrix_readers_, warpgroup + 1);
  matrix_reader_[warpgroup][offset / 16] = instruction;
}

void Shadow::reserve_barrier(std::uint32_t offset) {
  writer_[offset / 4] = reserved_;
  writer_[offset / 4 + 1] = reserved_;
}

}  // namespace tandem::emulator
