#include "plan/few_queries.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/config/forward.hpp"

namespace tandem {
namespace {

/// The fewest keys worth sharing.
constexpr int worth_sharing = 256;

}  // namespace

bool takes_heads_as_rows(const Problem& p) {
  return queries_of(p) <= few && best_head_rows(p).heads > 1;
}

bool takes_decode(const Problem& p) {
  return !has_wide_heads(p) && !p.has_function() && p.split_size == 0 && p.group() > 0 &&
         queries_of(p) * p.group() <= decode_rows;
}

double tiles_of_few_queries(const Problem& p) {
  const int unit = takes_decode(p) ? decode_rows : few;
  const HeadRows rows = takes_heads_as_rows(p) ? best_head_rows(p, unit) : HeadRows{.queries = unit};
  const std::int64_t tiles_a_head = (queries_of(p) + rows.queries - 1) / rows.queries;
  return static_cast<double>(std::max<std::int64_t>(p.batch, 1) * rows.tile_heads(p) * tiles_a_head);
}

bool shares_keys(const Problem& p) {
  constexpr double multiprocessors = 132;
  // Bytes a microsecond of one multiprocessor. It widens keys of 8 bits more slowly than memory brings them.
  const double alone = p.mixed() && takes_decode(p) ? 22e3 : 43e3;
  constexpr double together = 4.1e6;  // all of them
  constexpr double combining = 7;     // microseconds
  const std::int64_t keys = p.packed_k ? p.rows_k / std::max<std::int64_t>(p.batch, 1) : p.rows_k;
  const double count = tiles_of_few_queries(p);
  if (queries_of(p) > few || keys < worth_sharing || count >= 4 * multiprocessors) return false;
  if (has_lengths(p)) return true;
  const double bytes =
      static_cast<double>(keys * (p.head_dim_qk + p.head_dim_v)) * static_cast<double>(size_of(p.k.dtype));
  const double shared = count * bytes / together + combining;
  if (takes_decode(p)) {
    constexpr double ctas = 2 * multiprocessors;  // whose tiles the last round may leave some without
    const double at_once = std::min(count, ctas);
    return shared < std::ceil(count / ctas) * bytes / std::min(alone, together / at_once);
  }
  return shared < std::ceil(count / multiprocessors) * bytes / alone && count < multiprocessors;
}

bool shares_splits(const Problem& p) {
  constexpr double enough_tiles = 4 * 132;  // of 64 rows
  return queries_of(p) <= few && p.rows_k > p.split_size && !(p.packed_q && p.packed_k) &&
         tiles_of_few_queries(p) < enough_tiles;
}

std::string words_of_rows(const Problem& p, const Tiling& tiling) {
  if (!tiling.heads_as_rows) return fmt::format("{} queries", tiling.block_m);
  const HeadRows rows = best_head_rows(p, tiling.unit());
  return fmt::format("{} queries of {} heads that share keys", tiling.block_m / tiling.unit() * rows.queries,
                     rows.heads);
}

}  // namespace tandem
