// What one CTA did and when: tracks of spans, and what can be said of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tandem::cli::trace {

enum class Activity : int {
  wait,      ///< at a barrier, or for own products
  issue,     ///< issuing products; a warp waits here too while the queue of the tensor cores is full
  softmax,   ///< from a block's scores to its probabilities
  epilogue,  ///< from accumulators to global memory
  other,     ///< any other instructions
  product,   ///< on the tensor cores
  copy       ///< by TMA, from its issue until its barrier has the bytes
};
const char* name_of(Activity activity);

/// Cycles [begin, end).
struct Span {
  Activity activity = Activity::other;
  std::string name;
  std::string detail = {};
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  int warpgroup = -1;  ///< whose product it is

  [[nodiscard]] std::uint64_t cycles() const { return end - begin; }
};

/// Spans in order of their begin, outer ones first; any two are disjoint or nested.
struct Track {
  enum class Role { producer, warpgroup, tensor_cores, tma };
  Role role = Role::producer;
  std::string name;
  int warpgroup = -1;  ///< consumer warpgroups count from 0
  std::vector<Span> spans = {};
};

struct Timeline {
  std::vector<Track> tracks;
  std::uint64_t cycles = 0;
};

/// What a track spent on waits of one name.
struct WaitTotal {
  std::string track;
  std::string name;
  std::uint64_t cycles = 0;
  std::uint64_t longest = 0;
  int count = 0;
};

/// What a consumer warpgroup spent its time on.
struct WarpgroupTotal {
  std::string track;
  std::uint64_t softmax = 0;               ///< without the waits inside
  std::uint64_t softmax_under_others = 0;  ///< while the tensor cores had another warpgroup's products
  std::uint64_t issue = 0;
  std::uint64_t wait = 0;
  std::uint64_t epilogue = 0;
};

struct Summary {
  std::uint64_t tensor_cores_busy = 0;
  std::vector<WarpgroupTotal> warpgroups;
  std::vector<WaitTotal> waits;  ///< the largest first
  /// The longest single wait of a consumer warpgroup: a producer that waits for free buffers is ahead, as it
  /// should be. Empty name: nobody waited.
  Span longest_wait;
  std::string longest_wait_of;
};
Summary summarize(const Timeline& timeline);

/// A stretch of a warp's time, as recorded or modelled.
struct Stretch {
  Activity activity = Activity::other;  ///< wait, issue or other
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::string name = {};
  std::string detail = {};
  bool between_warpgroups = false;  ///< a wait at a named barrier
  bool arithmetic = false;          ///< `other` has arithmetic, exponentials, stores to global memory
  bool exponentials = false;
  bool stores = false;
};

/// Finds softmax and epilogue: the arithmetic between two issues of products, with exponentials or with
/// stores in it. Waits in the middle of it become inner spans.
std::vector<Span> spans_of(const std::vector<Stretch>& stretches);

/// Copies that overlap, as tracks each of which has one at a time.
std::vector<Track> copy_tracks(std::vector<Span> copies);

}  // namespace tandem::cli::trace
