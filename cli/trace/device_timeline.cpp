#include "trace/device_timeline.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

namespace tandem::cli::trace {
namespace {

constexpr std::size_t warps_a_group = 4;

/// A record with its time since the first one.
struct Moment {
  TraceEvent event;
  unsigned int thing;
  std::uint64_t time;
};
using Moments = std::vector<Moment>;

/// Clocks are counted modulo 2^32, and a CTA is faster than that.
std::vector<Moments> moments_of(const std::vector<std::vector<TraceRecord>>& warps) {
  std::optional<unsigned int> first;
  for (const auto& warp : warps) {
    if (warp.empty()) continue;
    const unsigned int clock = warp.front().clock;
    if (!first || static_cast<int>(clock - *first) < 0) first = clock;
  }
  std::vector<Moments> all(warps.size());
  for (std::size_t w = 0; w < warps.size(); ++w) {
    for (const TraceRecord& r : warps[w])
      all[w].push_back({.event = r.event(), .thing = r.thing(), .time = r.clock - first.value_or(0)});
  }
  return all;
}

/// What a warp was in between two moments.
class Reader {
 public:
  Reader(const Names& names, int warpgroup) : names_(names), warpgroup_(warpgroup) {}

  void read(const Moments& moments) {
    if (moments.empty()) return;
    last_ = moments.front().time;
    for (const Moment& m : moments) take(m);
  }
  [[nodiscard]] const std::vector<Stretch>& stretches() const { return stretches_; }
  [[nodiscard]] const std::vector<Span>& products() const { return products_; }

 private:
  void take(const Moment& m) {
    switch (m.event) {
      case TraceEvent::wait:
      case TraceEvent::join:
      case TraceEvent::wait_products: compute(m.time); break;
      case TraceEvent::issue:
        compute(m.time);
        scores_ = false;
        begun_ = m.time;
        break;
      case TraceEvent::wait_end: {
        const auto found = names_.barriers.find(m.thing);
        const bool known = found != names_.barriers.end();
        add(Activity::wait, m, known ? found->second.name : fmt::format("mbarrier +{}", m.thing),
            known ? found->second.detail : "");
        break;
      }
      case TraceEvent::join_end: {
        const auto found = names_.named.find(m.thing);
        const std::string number = fmt::format("named barrier {}", m.thing);
        add(Activity::wait, m, found == names_.named.end() ? number : found->second, number);
        stretches_.back().between_warpgroups = true;
        break;
      }
      case TraceEvent::issue_end:
        add(Activity::issue, m, "issue products");
        unfinished_.push_back(begun_);
        break;
      case TraceEvent::wait_products_end:
        add(Activity::wait, m, "own products");
        finish(m);
        scores_ = true;
        break;
      case TraceEvent::exponentials: exponentials_ = true; break;
      case TraceEvent::stores: stores_ = true; break;
      case TraceEvent::load: break;
    }
  }

  void add(Activity activity, const Moment& m, std::string name, std::string detail = {}) {
    stretches_.push_back({.activity = activity,
                          .begin = last_,
                          .end = m.time,
                          .name = std::move(name),
                          .detail = std::move(detail)});
    last_ = m.time;
  }

  /// What lies between two other things is arithmetic once scores or O have been waited for.
  void compute(std::uint64_t until) {
    stretches_.push_back({.begin = last_,
                          .end = until,
                          .name = "other",
                          .arithmetic = scores_ || exponentials_ || stores_,
                          .exponentials = exponentials_,
                          .stores = stores_});
    exponentials_ = stores_ = false;
    last_ = until;
  }

  /// A batch begins when it is issued and the one before is done.
  void finish(const Moment& m) {
    while (unfinished_.size() > m.thing) {
      const std::uint64_t before = products_.empty() ? 0 : products_.back().end;
      const std::uint64_t begin = std::max(unfinished_.front(), before);
      unfinished_.pop_front();
      if (begin == m.time) continue;
      products_.push_back({.activity = Activity::product,
                           .name = "products",
                           .begin = begin,
                           .end = m.time,
                           .warpgroup = warpgroup_});
    }
  }

  const Names& names_;
  int warpgroup_;
  std::uint64_t last_ = 0;
  std::uint64_t begun_ = 0;
  bool scores_ = false;
  bool exponentials_ = false;
  bool stores_ = false;
  std::deque<std::uint64_t> unfinished_;
  std::vector<Stretch> stretches_;
  std::vector<Span> products_;
};

/// A copy is in flight until the first consumer has waited for it.
std::vector<Span> copies_of(const std::vector<Moments>& warps, const Names& names, const Roles& roles) {
  struct Event {
    std::uint64_t time;
    bool load;
    unsigned int barrier;
  };
  std::vector<Event> events;
  for (std::size_t w = 0; w < warps.size(); ++w) {
    const bool producer = roles.producer && w < warps_a_group;
    for (const Moment& m : warps[w]) {
      if (m.event == TraceEvent::load) events.push_back({m.time, true, m.thing});
      if (m.event == TraceEvent::wait_end && !producer) events.push_back({m.time, false, m.thing});
    }
  }
  std::stable_sort(events.begin(), events.end(),
                   [](const Event& a, const Event& b) { return a.time < b.time; });
  std::map<unsigned int, std::uint64_t> open;
  std::vector<Span> copies;
  for (const Event& e : events) {
    if (e.load) {
      open.try_emplace(e.barrier, e.time);
      continue;
    }
    const auto found = open.find(e.barrier);
    if (found == open.end()) continue;
    const auto barrier = names.barriers.find(e.barrier);
    const std::string name = barrier == names.barriers.end() ? "copy" : barrier->second.name;
    copies.push_back({.activity = Activity::copy,
                      .name = name.substr(0, name.find(" full")),
                      .detail = "until the first wait for it ended",
                      .begin = found->second,
                      .end = e.time});
    open.erase(found);
  }
  return copies;
}

}  // namespace

Timeline timeline_of(const std::vector<std::vector<TraceRecord>>& warps, const Names& names,
                     const Roles& roles) {
  const std::vector<Moments> moments = moments_of(warps);
  Timeline t;
  std::vector<Track> products;
  for (std::size_t w = 0; w < moments.size(); w += warps_a_group) {
    const bool producer = roles.producer && w == 0;
    const int warpgroup = producer ? -1 : static_cast<int>(w / warps_a_group) - (roles.producer ? 1 : 0);
    Reader reader(names, warpgroup);
    reader.read(moments[w]);
    t.tracks.push_back({.role = producer ? Track::Role::producer : Track::Role::warpgroup,
                        .name = producer ? "producer" : fmt::format("warpgroup {}", warpgroup),
                        .warpgroup = warpgroup,
                        .spans = spans_of(reader.stretches())});
    if (producer) continue;
    products.push_back({.role = Track::Role::tensor_cores,
                        .name = fmt::format("products of {}", warpgroup),
                        .warpgroup = warpgroup,
                        .spans = reader.products()});
  }
  for (Track& track : products) t.tracks.push_back(std::move(track));
  for (Track& track : copy_tracks(copies_of(moments, names, roles))) t.tracks.push_back(std::move(track));
  for (const Moments& warp : moments) {
    if (!warp.empty()) t.cycles = std::max(t.cycles, warp.back().time);
  }
  return t;
}

}  // namespace tandem::cli::trace
