// Checks of what cu_seqlens and seqused contain. Called for options.check alone, since the backends clamp
// whatever they find, and reading device memory waits for the device.
#pragma once

#include "problem/problem.hpp"

namespace tandem::check {

/// cu_seqlens ascend from 0 to at most the rows of their tensor; seqused is at most the length of its
/// sequence.
void lengths_contents(const Problem& problem);

}  // namespace tandem::check
