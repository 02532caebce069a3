#include "pairwise.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

namespace tandem::harness {
namespace {

std::int64_t longest(bool packed, std::int64_t seqlen, const std::vector<std::int64_t>& lengths,
                     const std::vector<std::int64_t>& used) {
  if (!used.empty()) return *std::ranges::max_element(used);
  if (!packed) return seqlen;
  return lengths.empty() ? 0 : *std::ranges::max_element(lengths);
}

/// Lengths by sequence: all the same, packed, only some rows in use, or both.
int lengths_kind(bool packed, const std::vector<std::int64_t>& used) {
  return (packed ? 1 : 0) + (used.empty() ? 0 : 2);
}

/// Unbounded, or the bound's class as a length has one.
int window_kind(std::int64_t bound, std::int64_t tile) {
  return bound < 0 ? -1 : length_class(bound, tile);
}

/// The kernels' tiles are multiples of 64 columns wide: which one, and whether all of it is in use; of what
/// is left, whether rows of 16 bits are multiples of 32 bytes.
int head_dim_kind(std::int64_t head_dim) {
  return static_cast<int>((head_dim + 63) / 64 * 3 + (head_dim % 64 == 0 ? 0 : head_dim % 16 == 0 ? 1 : 2));
}

/// Every text is a kind of its own.
int functions_kind(const Case& c) {
  if (c.score_function.empty() && c.mask_function.empty()) return 0;
  return static_cast<int>(std::hash<std::string>{}(c.score_function + "|" + c.mask_function) >> 33U) + 1;
}

int scale_kind(const std::optional<float>& scale) {
  if (!scale) return 0;
  return *scale == 0.0F ? 1 : *scale < 0.0F ? 2 : 3;
}

/// What layouts have, any of them: what TMA cannot read or write comes from there.
void add_layouts(const char* const (&names)[6], std::initializer_list<const Layout*> layouts,
                 std::vector<Feature>& features) {
  int order = 0;
  int expanded = 0;
  bool pad = false;
  bool slices = false;
  bool base = false;
  bool guard = false;
  for (const Layout* layout : layouts) {
    int digits = 0;
    for (const int dimension : layout->order) digits = 10 * digits + dimension + 1;
    order = std::max(order, digits);
    expanded = std::max(expanded, static_cast<int>(layout->expanded));
    pad = pad || layout->pad != 0;
    slices = slices || layout->slices != 1;
    base = base || layout->base_offset != 0;
    guard = guard || layout->ends_at_guard;
  }
  const int kinds[] = {order, expanded, pad ? 1 : 0, slices ? 1 : 0, base ? 1 : 0, guard ? 1 : 0};
  for (std::size_t n = 0; n < std::size(kinds); ++n) features.push_back({names[n], kinds[n]});
}

int at_most(std::int64_t value, int most) {
  return static_cast<int>(std::min<std::int64_t>(value, most));
}

template <typename F>
void for_each_pair(const std::vector<Feature>& features, const F& f) {
  const auto count = static_cast<int>(features.size());
  const auto kind = [&](int n) { return features[static_cast<std::size_t>(n)].kind; };
  for (int a = 0; a < count; ++a) {
    for (int b = a + 1; b < count; ++b) f(std::array{a, kind(a), b, kind(b)});
  }
}

}  // namespace

int length_class(std::int64_t length, std::int64_t tile) {
  if (length <= 1) return static_cast<int>(length);
  const std::int64_t rest = length % tile;
  const int part = rest == 0 ? 2 : rest == 1 ? 3 : rest == tile - 1 ? 4 : rest <= tile / 2 ? 5 : 6;
  return length > tile ? part + 5 : part;
}

std::vector<Feature> features_of(const Case& c, std::int64_t tile) {
  const std::int64_t queries = longest(c.packed_q, c.seqlen_q, c.lengths_q, c.used_q);
  const std::int64_t keys = longest(c.packed_k, c.seqlen_k, c.lengths_k, c.used_k);
  std::vector<Feature> features = {
      {"dtype", static_cast<int>(c.dtype)},
      {"head_dim_qk", head_dim_kind(c.head_dim_qk)},
      {"head_dim_v", head_dim_kind(c.head_dim_v)},
      {"queries", length_class(queries, tile)},
      {"keys", length_class(keys, tile)},
      {"more keys than queries", keys > queries    ? 2
                                 : keys == queries ? 1
                                                   : 0},
      {"causal", c.options.causal ? 1 : 0},
      {"window_left", window_kind(c.options.window_left, tile)},
      {"window_right", window_kind(c.options.window_right, tile)},
      {"lengths of queries", lengths_kind(c.packed_q, c.used_q)},
      {"lengths of keys", lengths_kind(c.packed_k, c.used_k)},
      {"batch", at_most(c.batch, 2)},
      {"query heads a kv head", at_most(c.heads_kv > 0 ? c.heads_q / c.heads_kv : 0, 4)},
      {"kv heads", at_most(c.heads_kv, 2)},
      {"sink", c.sink ? 1 : 0},
      {"softcap", c.options.softcap > 0.0F ? 1 : 0},
      {"scale", scale_kind(c.options.scale)},
      {"amplitude", c.amplitude > 1.0 ? 1 : 0},
      {"lse", c.lse ? 1 : 0},
      {"dlse", c.dlse ? 1 : 0},
      {"unwanted gradients", static_cast<int>(c.unwanted)},
      {"deterministic", c.options.deterministic ? 1 : 0},
      {"split size", c.options.split_size > 0 ? 1 : 0},
      {"metadata", static_cast<int>(c.metadata)},
      {"pages", c.page_size == 0          ? 0
                : c.page_size % tile == 0 ? 1
                                          : 2},
      {"left padding", c.leftpad.empty() ? 0 : 1},
      {"chosen cache entries", c.cache_index.empty() ? 0 : 1},
      {"functions", functions_kind(c)},
      {"mask by sequence", c.causal_by_sequence.empty() ? 0 : 1},
      {"indices", c.topk == 0      ? 0
                  : c.topk_by_head ? 2
                                   : 1},
      {"out in f32", c.f32_out ? 1 : 0},
      {"gradients in f32", static_cast<int>(c.f32_gradients)},
      {"gradients that are added", static_cast<int>(c.added)},
      {"places of dropout", c.dropout_places.empty() ? 0 : 1},
  };
  add_layouts({"order of inputs", "expanded inputs", "padded inputs", "sliced inputs", "base of inputs",
               "inputs that end at a page"},
              {&c.q, &c.k, &c.v, &c.dout}, features);
  add_layouts({"order of outputs", "expanded outputs", "padded outputs", "sliced outputs", "base of outputs",
               "outputs that end at a page"},
              {&c.out, &c.dq, &c.dk, &c.dv, &c.lse_layout}, features);
  return features;
}

bool PairwiseCover::add(const std::vector<Feature>& features) {
  bool some_new = false;
  for_each_pair(features, [&](const auto& pair) { some_new |= pairs_.insert(pair).second; });
  return some_new;
}

std::vector<std::string> PairwiseCover::missing(const PairwiseCover& other) const {
  const std::vector<Feature> names = features_of(Case{});
  std::vector<std::string> result;
  for (const auto& [a, kind_a, b, kind_b] : other.pairs_) {
    if (pairs_.contains({a, kind_a, b, kind_b})) continue;
    result.push_back(fmt::format("{} {} with {} {}", names[static_cast<std::size_t>(a)].name, kind_a,
                                 names[static_cast<std::size_t>(b)].name, kind_b));
  }
  return result;
}

bool PairwiseChoice::take(const Case& spec) {
  const bool some_new = all_.add(features_of(spec));
  if (some_new) taken_.insert(spec.describe());
  return some_new || taken_.contains(spec.describe());
}

}  // namespace tandem::harness
