// Built where jaxlib, whose wheel has the headers, is not installed.
#include "jax.hpp"

namespace tandem::python {

std::vector<JaxHandler> jax_handlers() {
  return {};
}

}  // namespace tandem::python
