#include "signals.hpp"

#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>

namespace nb = nanobind;

namespace tandem::python {
namespace {

bool signal_raises(void* /*context*/) {
  const nb::gil_scoped_acquire locked;
  return PyErr_CheckSignals() != 0;
}

unsigned long main_thread = 0;
std::atomic<bool> ended = false;

bool in_main_thread() {
  return PyThread_get_thread_ident() == main_thread;
}

}  // namespace

void find_main_thread() {
  main_thread =
      nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
}

// No other thread may be asked: as the interpreter ends, Python ends threads that want the GIL, in the midst
// of what they do.
void hear_signals(Execution& execution) {
  if (in_main_thread()) execution.interrupted = signal_raises;
}

void hear_signals_and_end(Execution& execution) {
  execution.interrupted = in_main_thread() ? signal_raises : [](void* /*context*/) { return ended.load(); };
}

void end_calls() {
  ended = true;
}

void raise_later() {
  if (!in_main_thread()) return;
  const nb::gil_scoped_acquire locked;
  if (PyErr_Occurred() == nullptr) return;
  auto* raised = new nb::python_error;
  const auto raise = [](void* error) {
    const std::unique_ptr<nb::python_error> owned(static_cast<nb::python_error*>(error));
    owned->restore();
    return -1;
  };
  if (Py_AddPendingCall(raise, raised) == 0) return;
  // Python's queue is full.
  raised->discard_as_unraisable("a call of tandem's that a signal ended");
  delete raised;
}

}  // namespace tandem::python
