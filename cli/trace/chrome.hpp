// A timeline as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.
#pragma once

#include <string>

#include "trace/timeline.hpp"

namespace tandem::cli::trace {

/// The trace event format: a begin and an end for each span, one thread a track. A microsecond of the file is
/// 1000 cycles. `title` names the process.
std::string to_chrome_trace(const Timeline& timeline, const std::string& title);

}  // namespace tandem::cli::trace
