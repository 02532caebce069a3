// Sequence lengths that lie in device memory, read for options.check.
#pragma once

#include <cstdint>
#include <vector>

#include "problem/problem.hpp"

namespace tandem::gpu {

/// The first `count` values, once everything under way on the device is done (whichever stream writes them).
std::vector<std::int64_t> read_lengths(const Lengths& lengths, std::int64_t count, int device);

}  // namespace tandem::gpu
