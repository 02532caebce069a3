// Who follows a call of PyTorch's tensors: PyTorch's own states, asked without a frame of Python.
#pragma once

#include <nanobind/nanobind.h>

namespace tandem::python {

/// Makes the states known. `idle`: pairs of a function and what it gives while neither a mode, a transform
/// nor a trace follows what is called. `forward_ad`: the module whose `_current_level` is below 0 while there
/// is no forward mode. The others are functions that give a bool: whether a profiler records, autograd does,
/// and deterministic algorithms are asked for.
void know_states(const nanobind::tuple& idle, nanobind::handle forward_ad, nanobind::handle profiled,
                 nanobind::handle recording, nanobind::handle deterministic);

/// Whether a mode, a transform, forward mode or a trace follows what is called. A compiler that does is to be
/// asked first, in Python, where it sees the question.
bool is_followed();

bool is_profiled();
bool is_recording();
bool is_deterministic();

}  // namespace tandem::python
