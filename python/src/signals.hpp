// Ctrl-C amid a call: Python's signal handlers run in it, and what they raise ends it.
#pragma once

#include "tandem/attention.hpp"

namespace tandem::python {

/// Learns which thread is Python's main one. To be called first, with the GIL.
void find_main_thread();

/// Has Python's main thread run signal handlers in a call with `execution`; what they raise,
/// KeyboardInterrupt as a rule, ends the call with Status::interrupted and stays set in the thread. Calls of
/// other threads run to their end. With or without the GIL.
void hear_signals(Execution& execution);

/// As above for a call from code of others (XLA), whose own threads' calls end once end_calls() was called.
void hear_signals_and_end(Execution& execution);
void end_calls();

/// After such a call of Python's main thread: takes the exception that ended it, and has Python raise it as
/// soon as it runs code of its own again.
void raise_later();

}  // namespace tandem::python
