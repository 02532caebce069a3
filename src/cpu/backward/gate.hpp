// The backward pass of an output gate, before the others: out = O * s with s = sigmoid(gate), so that
//
//   dO = dout * s      dgate = dout * O * s * (1 - s) = dout * out * (1 - s)
//
// and the sum of dO * O over a row is that of dout * out. O is not needed.
#pragma once

#include <cstddef>

#include "problem/problem.hpp"

namespace tandem::cpu {

/// Bytes of dO; 0 without a gate.
std::size_t gated_bytes(const Problem& problem);

/// Writes dO to `memory` and dgate, where it is wanted. The problem returned has that dO as its dout.
Problem behind_gate(std::byte* memory, const Problem& problem, int threads);

/// The gradient of out.
inline const Operand& gated_dout(const Problem& p) {
  return p.gate.given() ? p.gated_dout : p.dout;
}

}  // namespace tandem::cpu
