// What plain PyTorch would compute in the inputs' own dtype: the yardstick of the contract's accuracy rule.
//
// The model is eager PyTorch, one rounding to the dtype after every operator, sums in fp32 inside an
// operator:
//
//   s = (q @ k^T) * scale            softcap: s = tanh(s / cap) * cap            masked: s = -inf
//   p = softmax(cat(s, sink))        (the sink's column is dropped)              o = p @ v
//
// and its backward as autograd differentiates those operators. records/numerics.md compares it with PyTorch
// itself. Beside it stands PyTorch's fused attention: everything is f32, but P and dS, which are rounded once
// to be factors of a product, and the results; delta is the sum of dout times out as rounded.
#pragma once

#include "cpu/reference/reference.hpp"
#include "problem/problem.hpp"

namespace tandem::harness {

enum class Model { eager, fused };

/// Results in the layout of the reference, every value one that `dtype` holds (lse: fp32). e4m3 inputs are
/// dequantised to `dtype` first.
reference::Forward same_dtype_forward(const Problem& problem, DType dtype, Model model);
reference::Backward same_dtype_backward(const Problem& problem, DType dtype, Model model);

}  // namespace tandem::harness
