// Attention as targets of XLA's foreign function interface, which jax.ffi calls.
#pragma once

#include <vector>

namespace tandem::python {

struct JaxHandler {
  const char* target;
  const char* platform;
  const void* function;  // an XLA_FFI_Handler
};

/// None where this was built without jaxlib's headers.
std::vector<JaxHandler> jax_handlers();

}  // namespace tandem::python
