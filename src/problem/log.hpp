// Messages to the sink that set_log gave.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "tandem/log.hpp"

namespace tandem {

/// Whether a message of this level goes anywhere. Costs a load.
bool logs(LogLevel level) noexcept;

void send_to_log(LogLevel level, const char* message) noexcept;

template <typename... Values>
void log(LogLevel level, fmt::format_string<Values...> format, Values&&... values) {
  if (logs(level)) send_to_log(level, fmt::format(format, std::forward<Values>(values)...).c_str());
}

}  // namespace tandem
