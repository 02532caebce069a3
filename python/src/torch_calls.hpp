// Calls of plain PyTorch tensors in one step: read, checked, planned, run, and recorded for autograd.
#pragma once

#include <nanobind/nanobind.h>

namespace tandem::python {

void define_torch_calls(nanobind::module_& m);

}  // namespace tandem::python
