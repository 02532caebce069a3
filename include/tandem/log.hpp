// What the library is doing, for those who ask: it prints nothing of its own accord.
#pragma once

#include "tandem/export.h"

namespace tandem {

/// `info`: a kernel's first use, with where it came from and how long that took. `debug`: every call too.
enum class LogLevel { off = 0, info = 1, debug = 2 };

/// Takes a message, NUL-terminated and without a newline, of `level` info or debug. Called by the threads
/// that call the library, several at once; it must not throw.
using LogSink = void (*)(LogLevel level, const char* message);

/// From now on messages up to `level` go to `sink`; nothing is logged before the first call. A null `sink` is
/// LogLevel::off. For the whole process; safe from any thread.
TANDEM_API void set_log(LogLevel level, LogSink sink) noexcept;

}  // namespace tandem
