// Calls with few queries a sequence, as in generation: how they divide into tiles, whatever kernel takes
// them.
#pragma once

#include <string>

#include "kernels/config/types.hpp"
#include "problem/effective.hpp"
#include "problem/problem.hpp"

namespace tandem {

/// Queries that a tile of 64 rows holds.
constexpr int few = 64;

/// Heads that share keys are rows of one tile where that makes fewer tiles than a tile a head: of the few
/// queries that a sequence has, keys are then read once a KV head.
bool takes_heads_as_rows(const Problem& problem);

/// Whether the kernel `decode` serves it: a tile of 16 rows holds all queries that share keys. With a split
/// size or a function every row goes through the forward kernel's products; keys of 8 bits are converted
/// there.
bool takes_decode(const Problem& problem);

/// Tiles of few queries, of which a head's queries are one if heads are not rows.
double tiles_of_few_queries(const Problem& problem);

/// Whether CTAs share the keys of a step of generation or of a few queries at once (docs/kernels/decode.md
/// has the numbers). A tile alone is read at the rate of one multiprocessor; shared ones at that of the
/// memory, and `combine` takes its time. Lengths that only the device knows may be very unequal: whole tiles
/// then wait for the longest, unless they are many.
bool shares_keys(const Problem& problem);

/// The same of the splits of a fixed size: whole tiles that are many keep all multiprocessors busy.
bool shares_splits(const Problem& problem);

/// Why keys are shared, or split at fixed places, in words.
constexpr const char* shared_keys =
    "few queries a sequence: CTAs share the key blocks of all tiles evenly, and combine merges the parts";
constexpr const char* fixed_parts =
    "a fixed split size and few queries: CTAs share the splits of all tiles, and combine merges them in "
    "order";
constexpr const char* fixed_tiles =
    "a fixed split size: a CTA computes the splits of a tile one by one, and merges them in order";

/// What the rows of a tile are, in words.
std::string words_of_rows(const Problem& problem, const Tiling& tiling);

}  // namespace tandem
