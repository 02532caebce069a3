#include "problem/log.hpp"

#include <atomic>

namespace tandem {
namespace {

std::atomic<LogSink>& sink() {
  static std::atomic<LogSink> value{nullptr};
  return value;
}

std::atomic<LogLevel>& most() {
  static std::atomic<LogLevel> value{LogLevel::off};
  return value;
}

}  // namespace

void set_log(LogLevel level, LogSink to) noexcept {
  most() = LogLevel::off;  // no level of one with the sink of another
  sink() = to;
  most() = to == nullptr ? LogLevel::off : level;
}

bool logs(LogLevel level) noexcept {
  return level <= most().load(std::memory_order_relaxed);
}

void send_to_log(LogLevel level, const char* message) noexcept {
  if (const LogSink to = sink()) to(level, message);
}

}  // namespace tandem
