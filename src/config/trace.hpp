// What a traced kernel writes: moments of one CTA's warps, each with the SM's clock.
#pragma once

namespace tandem {

/// From 1, so that memory of zeros has none.
enum class TraceEvent : unsigned int {
  wait = 1,           ///< at the mbarrier at `thing`, bytes into dynamic shared memory
  wait_end,           ///< there
  join,               ///< named barrier `thing`
  join_end,           ///< there
  issue,              ///< a batch of products begins
  issue_end,          ///< it has been issued
  wait_products,      ///< until at most `thing` batches are unfinished
  wait_products_end,  ///< no more are; `thing` as before
  load,               ///< a copy begins, whose bytes are credited to the mbarrier at `thing`
  exponentials,       ///< those of a block of scores begin
  stores              ///< those of a tile's results begin
};

struct TraceRecord {
  unsigned int clock;  ///< the SM's, modulo 2^32
  unsigned int what;   ///< TraceEvent << 24 | thing

  [[nodiscard]] constexpr TraceEvent event() const { return static_cast<TraceEvent>(what >> 24); }
  [[nodiscard]] constexpr unsigned int thing() const { return what & 0xFFFFFFU; }
};

/// Where records go; the host writes it to `tandem_trace_target` in the kernel's constant memory.
struct TraceTarget {
  TraceRecord* records;  ///< by warp; zeros before the launch
  unsigned int records_a_warp;
  unsigned int block;  ///< the only one that writes
};

/// Bytes of dynamic shared memory behind the kernel's own: how many records each of 16 warps has.
constexpr int trace_shared_bytes = 64;

}  // namespace tandem
