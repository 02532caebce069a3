// Gradients by 8-bit products in fp64, by the recipe that the kernels follow.
#pragma once

#include <vector>

#include "harness/call.hpp"

namespace tandem::kernel_tests {

/// In the order of the call's gradients, each as its box has them.
struct RecipeGradients {
  std::vector<double> dq, dk, dv;
};

/// Of the call's q, k, v, dout, dlse, and the out, LSE and largest logits that forward has left, of head
/// dimension 128.
RecipeGradients gradients_by_recipe(const harness::Call& call);

}  // namespace tandem::kernel_tests
