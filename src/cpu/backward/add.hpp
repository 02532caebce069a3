// Gradients that are added to what the caller's tensors hold, as those of parts are.
#pragma once

#include <cstddef>

#include "problem/problem.hpp"

namespace tandem::cpu {

/// Bytes of the gradients that a call adds; 0 of one that writes them all.
std::size_t added_bytes(const Problem& problem);

/// The problem whose gradients go to `memory` of so many bytes, contiguous, in place of those that are added.
Problem with_gradients_in(std::byte* memory, Problem problem);

/// Adds to the gradients of `to` those of `from`, which with_gradients_in made of it.
void add_gradients(const Problem& to, const Problem& from, int threads);

}  // namespace tandem::cpu
