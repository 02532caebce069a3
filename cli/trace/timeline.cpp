#include "trace/timeline.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>

namespace tandem::cli::trace {
namespace {

using Stretches = std::vector<Stretch>;
using Iterator = Stretches::const_iterator;

Span span_of(const Stretch& s) {
  return {.activity = s.activity, .name = s.name, .detail = s.detail, .begin = s.begin, .end = s.end};
}

/// Whether the phase that the stretch is in ends with it.
bool ends_a_phase(const Stretch& s) {
  return s.activity == Activity::issue || (s.activity == Activity::wait && s.between_warpgroups);
}

/// Neighbours of one kind, with nothing between them, become one.
Stretches merged(const Stretches& stretches) {
  Stretches result;
  for (const Stretch& s : stretches) {
    if (s.begin == s.end) continue;
    if (!result.empty()) {
      Stretch& last = result.back();
      if (last.end == s.begin && last.activity == s.activity && s.activity != Activity::wait &&
          last.arithmetic == s.arithmetic && last.name == s.name) {
        last.end = s.end;
        last.exponentials |= s.exponentials;
        last.stores |= s.stores;
        continue;
      }
    }
    result.push_back(s);
  }
  return result;
}

/// The spans of [first, last), in which no phase ends.
void add_phase(std::vector<Span>& spans, Iterator first, Iterator last) {
  const auto has_arithmetic = [](const Stretch& s) { return s.arithmetic; };
  const Iterator begin = std::find_if(first, last, has_arithmetic);
  const Iterator end =
      std::find_if(std::make_reverse_iterator(last), std::make_reverse_iterator(begin), has_arithmetic)
          .base();
  const bool stores = std::any_of(begin, end, [](const Stretch& s) { return s.stores; });
  const bool exponentials = std::any_of(begin, end, [](const Stretch& s) { return s.exponentials; });
  for (Iterator s = first; s != last; ++s) {
    const bool inside = s >= begin && s < end && (stores || exponentials);
    if (inside && s == begin) {
      spans.push_back({.activity = stores ? Activity::epilogue : Activity::softmax,
                       .name = stores ? "epilogue" : "softmax",
                       .begin = begin->begin,
                       .end = std::prev(end)->end});
    }
    if (!inside || s->activity == Activity::wait) spans.push_back(span_of(*s));
  }
}

/// When the tensor cores have products of a warpgroup for which `counts` is true: disjoint spans in order.
template <typename Counts>
std::vector<Span> busy_with(const Timeline& timeline, const Counts& counts) {
  std::vector<Span> all;
  for (const Track& track : timeline.tracks) {
    if (track.role != Track::Role::tensor_cores) continue;
    std::copy_if(track.spans.begin(), track.spans.end(), std::back_inserter(all),
                 [&](const Span& s) { return counts(s.warpgroup); });
  }
  std::stable_sort(all.begin(), all.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  std::vector<Span> disjoint;
  for (const Span& s : all) {
    if (!disjoint.empty() && s.begin <= disjoint.back().end) {
      disjoint.back().end = std::max(disjoint.back().end, s.end);
    } else {
      disjoint.push_back(s);
    }
  }
  return disjoint;
}

/// Cycles of the span in which one of `others` is on, too.
std::uint64_t shared_cycles(const Span& span, const std::vector<Span>& others) {
  std::uint64_t cycles = 0;
  for (const Span& other : others) {
    const std::uint64_t first = std::max(span.begin, other.begin);
    const std::uint64_t last = std::min(span.end, other.end);
    if (first < last) cycles += last - first;
  }
  return cycles;
}

WarpgroupTotal total_of(const Track& track, const Timeline& timeline) {
  WarpgroupTotal total{.track = track.name};
  const std::vector<Span> others =
      busy_with(timeline, [&](int warpgroup) { return warpgroup != track.warpgroup; });
  const Span* phase = nullptr;
  for (const Span& s : track.spans) {
    const bool inside = phase != nullptr && s.begin < phase->end;
    if (!inside) phase = nullptr;
    switch (s.activity) {
      case Activity::softmax:
        total.softmax += s.cycles();
        total.softmax_under_others += shared_cycles(s, others);
        break;
      case Activity::epilogue: total.epilogue += s.cycles(); break;
      case Activity::issue: total.issue += s.cycles(); break;
      case Activity::wait: {
        total.wait += s.cycles();
        if (!inside) break;
        if (phase->activity == Activity::epilogue) {
          total.epilogue -= s.cycles();
        } else {
          total.softmax -= s.cycles();
          total.softmax_under_others -= shared_cycles(s, others);
        }
        break;
      }
      default: break;
    }
    if (s.activity == Activity::softmax || s.activity == Activity::epilogue) phase = &s;
  }
  return total;
}

void add_wait(std::vector<WaitTotal>& waits, const Track& track, const Span& span) {
  const auto same = [&](const WaitTotal& w) { return w.track == track.name && w.name == span.name; };
  auto found = std::find_if(waits.begin(), waits.end(), same);
  if (found == waits.end()) found = waits.insert(waits.end(), {.track = track.name, .name = span.name});
  found->cycles += span.cycles();
  found->longest = std::max(found->longest, span.cycles());
  ++found->count;
}

}  // namespace

const char* name_of(Activity activity) {
  switch (activity) {
    case Activity::wait: return "wait";
    case Activity::issue: return "issue";
    case Activity::softmax: return "softmax";
    case Activity::epilogue: return "epilogue";
    case Activity::other: return "other";
    case Activity::product: return "product";
    case Activity::copy: return "copy";
  }
  return "unknown";
}

std::vector<Span> spans_of(const std::vector<Stretch>& stretches) {
  const Stretches all = merged(stretches);
  std::vector<Span> spans;
  Iterator first = all.begin();
  for (Iterator s = all.begin(); s != all.end(); ++s) {
    if (!ends_a_phase(*s)) continue;
    add_phase(spans, first, s);
    spans.push_back(span_of(*s));
    first = std::next(s);
  }
  add_phase(spans, first, all.end());
  return spans;
}

std::vector<Track> copy_tracks(std::vector<Span> copies) {
  std::stable_sort(copies.begin(), copies.end(),
                   [](const Span& a, const Span& b) { return a.begin < b.begin; });
  std::vector<Track> tracks;
  for (const Span& copy : copies) {
    auto free = std::find_if(tracks.begin(), tracks.end(),
                             [&](const Track& t) { return t.spans.back().end <= copy.begin; });
    if (free == tracks.end()) {
      free = tracks.insert(tracks.end(), {.role = Track::Role::tma,
                                          .name = fmt::format("TMA in flight {}", tracks.size() + 1)});
    }
    free->spans.push_back(copy);
  }
  return tracks;
}

Summary summarize(const Timeline& timeline) {
  Summary summary;
  for (const Span& s : busy_with(timeline, [](int) { return true; })) summary.tensor_cores_busy += s.cycles();
  for (const Track& track : timeline.tracks) {
    const bool consumer = track.role == Track::Role::warpgroup;
    if (consumer) summary.warpgroups.push_back(total_of(track, timeline));
    for (const Span& s : track.spans) {
      if (s.activity != Activity::wait) continue;
      add_wait(summary.waits, track, s);
      if (!consumer || s.cycles() <= summary.longest_wait.cycles()) continue;
      summary.longest_wait = s;
      summary.longest_wait_of = track.name;
    }
  }
  std::stable_sort(summary.waits.begin(), summary.waits.end(),
                   [](const WaitTotal& a, const WaitTotal& b) { return a.cycles > b.cycles; });
  return summary;
}

}  // namespace tandem::cli::trace
