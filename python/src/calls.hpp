// What `tandem._core` has for calls of attention, their plans and quantize.
#pragma once

#include <nanobind/nanobind.h>

namespace tandem::python {

void define_calls(nanobind::module_& m);

}  // namespace tandem::python
