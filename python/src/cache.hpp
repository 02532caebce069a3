// append_kv and merge for Python.
#pragma once

#include <nanobind/nanobind.h>

namespace tandem::python {

void define_cache(nanobind::module_& m);

}  // namespace tandem::python
