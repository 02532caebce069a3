// A timeline from the timestamps that a traced kernel wrote on a GPU.
#pragma once

#include <vector>

#include "config/trace.hpp"
#include "trace/model.hpp"

namespace tandem::cli::trace {

/// By warp, in the order in which they were written. The first event is at cycle 0. Two things are not on a
/// GPU's clock: products and copies end, at the latest, when a warp has waited for them.
Timeline timeline_of(const std::vector<std::vector<TraceRecord>>& warps, const Names& names,
                     const Roles& roles);

}  // namespace tandem::cli::trace
