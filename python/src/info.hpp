// What tandem.info(), tandem.stats() and the planner's devices are made of.
#pragma once

#include <nanobind/nanobind.h>

namespace tandem::python {

namespace nb = nanobind;

/// The instruction sets of this processor, and the one that calls take.
nb::dict cpu_info();

/// By the names that `tandem info --json` has.
nb::dict gpu_info();

/// {name: index} of the GPUs that a call can be planned for without one.
nb::dict described_devices();

/// What tandem.stats() returns.
nb::dict stats_info();

/// What counts the joules of a GPU, or of the CPU for a device below 0, and a function that reads them; or
/// why nothing does, and None.
nb::tuple energy_meter(int device);

/// The processor's arithmetic peak, measured for `seconds` by so many threads.
nb::dict peak_info(int threads, double seconds);

}  // namespace tandem::python
