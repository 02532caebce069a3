// How a call runs, and what `tandem._core` has for calls of attention, their plans and quantize.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "api/call.hpp"
#include "arrays.hpp"
#include "signals.hpp"
#include "tandem/attention.hpp"
#include "tandem/error.hpp"

namespace tandem::python {

/// Calls `work(execution)` without the GIL. A signal whose handler raises ends it with what that raised.
template <typename F>
void run_interruptible(Execution execution, F&& work) {
  hear_signals(execution);
  try {
    const nanobind::gil_scoped_release unlocked;
    work(execution);
  } catch (const Error& error) {
    if (error.status() == Status::interrupted && PyErr_Occurred() != nullptr) throw nanobind::python_error();
    throw;
  }
}

/// Checks, plans and runs. Scratch memory of a call on a GPU comes from PyTorch where q does, and is kept
/// until the launch: what comes later on the stream may have the memory.
template <typename Args>
void run(nanobind::handle q, const Args& args, Execution execution) {
  const Call call(args, execution, Memory::present);
  Made scratch;
  if (call.plan.backend == Device::Kind::cuda) {
    scratch = scratch_beside(q, call.plan.workspace_bytes, args.q.device);
    execution.workspace = scratch.view.data;
    execution.workspace_bytes = execution.workspace != nullptr ? call.plan.workspace_bytes : 0;
  }
  run_interruptible(execution, [&call](const Execution& e) { tandem::run(call, e); });
}

void define_calls(nanobind::module_& m);

}  // namespace tandem::python
