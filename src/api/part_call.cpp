// Which call a piece of queries and a piece of keys make.
#include <algorithm>

#include "api/check.hpp"
#include "api/part_rows.hpp"

namespace tandem {
namespace {

constexpr std::int64_t last_place = std::int64_t{1} << 60;

void check_place(const char* name, std::int64_t value) {
  if (value >= 0 && value <= last_place) return;
  check::invalid("{} is {}; places in a sequence, and counts, are from 0 to 2^60", name, value);
}

/// A bound of the window, such that adding it to a place does not overflow.
std::int64_t bound(const char* name, std::int64_t value) {
  check::window_bound(name, value);
  return std::min(value, 2 * last_place);
}

/// A call of n queries and m keys aligns its mask to the bottom right corner: query i sees keys
/// i + m - n - left to i + m - n + right. Between two pieces query i sees key j where low <= j - i <= high.
/// Without the queries that see none and the keys that none sees this is a call: its last query sees its last
/// key, so that left and right are not negative.
PartCall between(const Piece& queries, const Piece& keys, std::int64_t left, std::int64_t right) {
  const std::int64_t apart = queries.first - keys.first, n = queries.count, m = keys.count;
  // Beyond the corners of the pieces where the mask is unbounded.
  const std::int64_t high = right < 0 ? m : apart + right;
  const std::int64_t low = left < 0 ? -n : apart - left;
  const std::int64_t first = std::max<std::int64_t>(0, -high), last = std::min(n, m - low);
  const std::int64_t first_key = std::max<std::int64_t>(0, first + low), last_key = std::min(m, last + high);
  if (first >= last || first_key >= last_key) return {};
  return {.queries = {first, last - first},
          .keys = {first_key, last_key - first_key},
          .window_left = left < 0 ? -1 : last_key - last - low,
          .window_right = right < 0 ? -1 : high + last - last_key};
}

PartCall checked(const Piece& queries, const Piece& keys, const PartOptions& options) {
  const std::int64_t left = bound("window_left", options.window_left);
  const std::int64_t right = bound("window_right", options.window_right);
  return between(queries, keys, left, options.causal ? 0 : right);
}

}  // namespace

PartCall part_call(const Piece& queries, const Piece& keys, const PartOptions& options) {
  check_place("queries.first", queries.first);
  check_place("queries.count", queries.count);
  check_place("keys.first", keys.first);
  check_place("keys.count", keys.count);
  return checked(queries, keys, options);
}

PartCall call_of(const PartInputs& args) {
  check_place("first_query", args.first_query);
  check_place("first_key", args.first_key);
  return checked({args.first_query, args.q.shape[1]}, {args.first_key, args.k.shape[1]}, args.options);
}

}  // namespace tandem
