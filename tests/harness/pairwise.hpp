// Which of very many cases to run where there is time for some: enough that every two features that meet in
// one of all the cases meet in one of those that run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "call.hpp"

namespace tandem::harness {

/// One thing that a kernel may treat differently, and which of its kinds a case has.
struct Feature {
  const char* name;
  int kind;
};

/// The features of a case, always the same ones in the same order: dtype, masks, varlen, heads, sink,
/// softcap, head dimensions, layout, caches, what is asked for; and lengths by what is left of them beside
/// whole tiles of `tile` rows, for queries and keys.
std::vector<Feature> features_of(const Case& spec, std::int64_t tile = 128);

/// A length's class modulo the tile: 0, 1, a part of a tile, all of it but a row, whole tiles, and the same
/// beyond the first tile.
int length_class(std::int64_t length, std::int64_t tile);

/// Pairs of features that cases had.
class PairwiseCover {
 public:
  /// Adds a case's pairs; false if it has no new one.
  bool add(const std::vector<Feature>& features);
  /// Pairs that `other` has and this has not, in words.
  [[nodiscard]] std::vector<std::string> missing(const PairwiseCover& other) const;
  [[nodiscard]] std::size_t pairs() const { return pairs_.size(); }

 private:
  /// Two features by their place in features_of, each with its kind.
  std::set<std::array<int, 4>> pairs_;
};

/// Goes through cases in the order they come in, and takes one if two of its features have not met before. So
/// the cases taken have every pair that all of them have, and which they are depends on nothing but the
/// order.
class PairwiseChoice {
 public:
  /// Whether to run this case. One that was taken is taken again whenever it comes.
  bool take(const Case& spec);
  [[nodiscard]] const PairwiseCover& all() const { return all_; }

 private:
  PairwiseCover all_;  ///< of taken cases, and so of all
  std::set<std::string> taken_;
};

}  // namespace tandem::harness
