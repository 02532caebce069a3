// What is known of each word of shared memory: who wrote it last, through which proxy, and who may still be
// reading it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "clock.hpp"
#include "matrix.hpp"

namespace tandem::emulator {

class Shadow {
 public:
  Shadow(std::uint32_t bytes, Components components);

  /// Each checks an access to [offset, offset + bytes) by whoever has seen `observer`, records it, and
  /// returns what is wrong with it ("" if nothing). Offsets are from the start of dynamic shared memory.
  std::string read(std::uint32_t offset, std::uint32_t bytes, std::uint32_t thread, const Clock& observer);
  std::string write(std::uint32_t offset, std::uint32_t bytes, std::uint32_t thread, const Clock& observer);
  /// A copy by a thread (cp.async), from its start to the thread's wait: nobody may read the bytes.
  void begin_copy(std::uint32_t offset, std::uint32_t bytes);
  std::string end_copy(std::uint32_t offset, std::uint32_t bytes, std::uint32_t thread,
                       const Clock& observer);
  /// A copy into shared memory: `completion` is the barrier's phase that will cover it.
  std::string copy_in(std::uint32_t offset, std::uint32_t bytes, Event completion, const Clock& observer);
  /// 16 bytes that a bulk store reads until `completion`.
  std::string copy_out(std::uint32_t offset, Event completion, const Clock& observer);

  /// 16 bytes that WGMMA `instruction` (from 1) of a warpgroup reads; adds their writers to `sources`.
  void matrix_read(std::uint32_t offset, std::uint32_t warpgroup, std::uint32_t instruction,
                   std::vector<Source>& sources);
  /// Whether nothing is wrong with the asynchronous units reading what `source` wrote on behalf of
  /// `observer`. Each thread asks for each operand of each product.
  [[nodiscard]] bool async_sees(Event source, const Clock& observer) const {
    if (!is_written(source)) return false;
    const std::uint32_t writer = source.component();
    return observer[components_.is_thread(source) ? components_.fenced(writer) : writer] >= source.clock();
  }
  /// What is, where something is.
  [[nodiscard]] std::string async_fault(Event source, const Clock& observer) const;

  /// Marks a barrier's 8 bytes: nobody else may touch them.
  void reserve_barrier(std::uint32_t offset);

 private:
  static constexpr std::uint32_t shared_readers =
      1U << 31;  ///< the rest of the word is an index into read_sets_

  /// By a thread or a copy, whose clocks tell who may read it.
  [[nodiscard]] bool is_written(Event source) const {
    return !source.never() && source != reserved_ && source != copying_;
  }
  /// Whether nothing is wrong with `thread` reading what `source` wrote.
  [[nodiscard]] bool ordinary_sees(Event source, std::uint32_t thread, const Clock& observer) const {
    return is_written(source) && (source.component() == thread || source.known_to(observer));
  }
  /// What is, where something is.
  [[nodiscard]] std::string ordinary_fault(Event source) const;
  [[nodiscard]] std::string readers_done(std::uint32_t offset, std::uint32_t bytes,
                                         const Clock& observer) const;
  std::uint32_t new_read_set();
  void forget_readers(std::uint32_t offset, std::uint32_t bytes);
  [[nodiscard]] std::string writer_name(Event e) const;

  Components components_;
  Event reserved_;                     ///< the writer of barriers
  Event copying_;                      ///< the writer of bytes that a thread's copy will bring
  std::vector<Event> writer_;          ///< by 4-byte word
  std::vector<std::uint32_t> reader_;  ///< by 4-byte word: an Event's bits, or shared_readers | index
  std::vector<std::vector<Event>> read_sets_;
  /// In the last set: a thread reads words that other threads read in one order.
  std::size_t place_ = 0;
  std::vector<std::uint32_t> free_read_sets_;  ///< of read_sets_: those of no word; they keep their memory
  std::vector<std::uint32_t> matrix_reader_[max_warpgroups];  ///< by 16 bytes: the last instruction
  std::uint32_t matrix_readers_ =
      0;  ///< warpgroups from 0 on, of which some have read: none, of sm80's kernels
  std::vector<Event> store_reader_;  ///< by 16 bytes
};

}  // namespace tandem::emulator
