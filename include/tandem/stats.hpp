// What the library has done in this process: counters that are always on and cost a call 20 to 40 ns.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tandem/export.h"

namespace tandem {

/// Calls of one kind that have returned, those that an error ended while they ran among them.
struct CallStats {
  std::string_view operation;  ///< "forward", "backward", "append", "merge" or "quantize"
  std::string_view backend;    ///< "cpu" or "cuda"
  /// The instruction set of a CPU's kernel ("avx512", "neon", ...), or whose instructions a GPU's kernel is
  /// written in: "sm90", "sm80", or "common" for any. "portable": neither instructions of this processor's
  /// vector units nor a kernel compiled for this GPU, which is slower.
  std::string_view family;
  std::string_view kernel;  ///< the main one of the call; "none" where there was nothing to launch
  std::uint64_t calls = 0;
  std::uint64_t nanoseconds = 0;     ///< in the library once planned; a GPU's work is queued, not waited for
  std::uint64_t bytes = 0;           ///< that are read and written once, as the shapes say
  std::uint64_t operations = 0;      ///< FLOP of the products, as the shapes, `causal` and windows say
  std::uint64_t workspace_peak = 0;  ///< the most scratch bytes of one of them
};

/// GPU kernels that were looked for: once a process and kernel, and for each device from memory.
struct KernelStats {
  std::string_view origin;  ///< "memory", "disk", "shipped", "portable" (shipped as PTX) or "compiled"
  std::uint64_t kernels = 0;
  std::uint64_t nanoseconds = 0;
};

/// Errors that were thrown.
struct ErrorStats {
  std::string_view status;  ///< the name of its Status: "invalid_argument"
  std::string_view rule;    ///< the message with {} where it has values
  std::uint64_t errors = 0;
};

/// All counters; rows in the order of their texts.
struct Stats {
  std::vector<CallStats> calls;
  std::vector<KernelStats> kernels;
  std::vector<ErrorStats> errors;
};

/// The sum over all threads, since the process began or was forked. No call waits for a reader. Texts are
/// the library's own and stay.
TANDEM_API Stats stats();

/// The counters in Prometheus's text format, for a program that serves them at /metrics.
TANDEM_API std::string stats_text();

/// A call that has returned, or a GPU kernel that was found outside of memory.
struct Event {
  std::string_view operation;  ///< as CallStats has it; "kernel"
  std::string_view subject;    ///< the problem in a line, with its shapes; the kernel's expression
  std::string_view backend, family;
  std::string_view kernel;  ///< as CallStats has it; a kernel's origin, as KernelStats has it
  std::string_view plan;    ///< what `explain` says of a call of forward or backward; else empty
  std::uint64_t nanoseconds = 0;
};

/// Takes an event, whose texts are gone afterwards. Called by the threads that call the library, several at
/// once; it must not throw.
using EventSink = void (*)(const Event& event);

/// From now on every kernel, and of the calls of each thread the first and then every `every`-th, is an event
/// for `sink`. A null sink, or `every` of 0: none is, as before the first call. For the whole process.
TANDEM_API void set_events(EventSink sink, unsigned every) noexcept;

}  // namespace tandem
