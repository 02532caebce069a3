// The counters behind tandem::stats(). Each thread counts in cells of its own, which no other writes, so that
// counting takes neither a lock nor an atomic addition; a reader adds the cells of all threads.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "tandem/error.hpp"
#include "tandem/stats.hpp"
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace tandem {

/// Calls that are counted together: CallStats has the meanings. The texts are literals.
struct CallKind {
  const char* operation = "";
  const char* backend = "";
  const char* family = "";
  const char* kernel = "";
};

/// What one call amounts to.
struct CallWork {
  std::uint64_t bytes = 0;
  std::uint64_t operations = 0;
  std::uint64_t workspace_bytes = 0;
};

/// A clock that is read faster than steady_clock: 8 to 16 ns in place of 23 on an AMD EPYC. stats() knows its
/// rate.
inline std::uint64_t ticks() noexcept {
#if defined(__x86_64__)
  return __rdtsc();
#else
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

void count_call(const CallKind& kind, const CallWork& work, std::uint64_t ticks) noexcept;
void count_kernel(const char* origin, std::chrono::nanoseconds spent) noexcept;
void count_error(Status status, const char* rule) noexcept;

/// Whether anybody takes events. Costs a load.
bool events_are_watched() noexcept;
/// Whether this call of this thread is to be one.
bool is_sampled() noexcept;
void send_event(const Event& event) noexcept;
/// `ticks` as nanoseconds.
std::uint64_t nanoseconds_of(std::uint64_t ticks) noexcept;

/// Throws an Error, counted by a rule that is not its message's format.
[[noreturn]] inline void fail_by(const char* rule, Status status, const std::string& message) {
  count_error(status, rule);
  throw Error(status, message);
}

/// Throws an Error, counted by its rule: the format, which says what to do, too.
template <typename... Values>
[[noreturn]] void fail(Status status, fmt::format_string<Values...> rule, Values&&... values) {
  fail_by(static_cast<fmt::string_view>(rule).data(), status,
          fmt::format(rule, std::forward<Values>(values)...));
}

}  // namespace tandem
