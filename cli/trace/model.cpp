#include "trace/model.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "tandem/error.hpp"

namespace tandem::cli::trace {
namespace {

using emulator::Recording;
using emulator::Step;
using emulator::Work;

constexpr std::size_t warps_a_group = 4;
constexpr std::size_t quadrants = 4;

struct Warp {
  std::size_t index = 0;
  const std::vector<Step>* steps = nullptr;
  std::size_t next = 0;
  std::uint64_t since = 0;  ///< when it began to wait
  std::uint64_t stores_done = 0;
  std::vector<Stretch> stretches = {};

  [[nodiscard]] const Step& step() const { return (*steps)[next]; }
};

/// A phase of an mbarrier, or a generation of a named barrier.
struct Phase {
  std::uint64_t left = 0;  ///< arrivals and copies that have not come
  std::vector<Warp*> waiting = {};
};

/// A copy of the phase that its bytes complete.
struct Copy {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t bytes = 0;
};

/// A warpgroup's products.
struct Products {
  std::map<std::uint64_t, std::size_t> issued;  ///< by number: warps that have
  std::deque<const Step*> ready;
  std::uint64_t done = 0;
  std::vector<Warp*> issuers;
  std::vector<Warp*> waiting;
};

class Model {
 public:
  Model(const Recording& recording, const Names& names, const Roles& roles, const Costs& costs);
  Timeline run();

 private:
  using Key = std::pair<std::uint32_t, std::uint64_t>;  ///< barrier and phase
  static constexpr std::uint32_t named = 1U << 31;      ///< marks a named barrier's number

  static Key key_of(const Step& step);
  void at(std::uint64_t time, std::function<void()> action) { actions_.emplace(time, std::move(action)); }
  void advance(Warp& warp);
  bool begin(Warp& warp);
  void resume(Warp& warp, Activity activity);
  void work(Warp& warp, const Work& work);
  void contribute(Key key);
  void load(const Step& step);
  void store(Warp& warp, const Step& step);
  void start_product();
  void finish_product(std::size_t group);
  Names::Barrier name_of_wait(const Step& step) const;
  [[nodiscard]] std::string name_of_product(bool registers) const {
    return registers ? names_.products_of_registers : names_.products_of_shared;
  }
  Timeline timeline();

  const Names& names_;
  const Roles& roles_;
  const Costs& costs_;
  std::vector<Warp> warps_;
  std::vector<Products> products_;
  std::map<Key, Phase> phases_;
  std::map<Key, Copy> copies_;
  std::multimap<std::uint64_t, std::function<void()>> actions_;
  std::uint64_t now_ = 0;
  std::array<std::uint64_t, quadrants> special_free_{};
  std::uint64_t copies_free_ = 0;
  std::uint64_t stores_free_ = 0;
  bool multiplying_ = false;
  std::size_t last_group_ = 0;  ///< whose product the tensor cores had last
  std::vector<Span> multiplied_;
};

std::uint64_t cycles_of(std::uint64_t amount, std::uint64_t rate) {
  return (amount + rate - 1) / rate;
}

Model::Model(const Recording& recording, const Names& names, const Roles& roles, const Costs& costs)
    : names_(names),
      roles_(roles),
      costs_(costs),
      warps_(recording.warps.size()),
      products_((recording.warps.size() + warps_a_group - 1) / warps_a_group) {
  for (std::size_t w = 0; w < warps_.size(); ++w) {
    warps_[w].index = w;
    warps_[w].steps = &recording.warps[w];
    for (const Step& step : recording.warps[w]) {
      switch (step.kind) {
        case Step::Kind::arrive:
        case Step::Kind::load:
        case Step::Kind::join_named:
        case Step::Kind::arrive_named: ++phases_[key_of(step)].left; break;
        default: break;
      }
    }
  }
}

Model::Key Model::key_of(const Step& step) {
  const bool of_named = step.kind == Step::Kind::join_named || step.kind == Step::Kind::arrive_named;
  return {step.thing | (of_named ? named : 0U), step.number};
}

Timeline Model::run() {
  for (Warp& warp : warps_) at(0, [this, &warp] { advance(warp); });
  while (!actions_.empty()) {
    now_ = actions_.begin()->first;
    const std::function<void()> action = std::move(actions_.begin()->second);
    actions_.erase(actions_.begin());
    action();
  }
  for (const Warp& warp : warps_) {
    if (warp.next == warp.steps->size()) continue;
    throw Error(Status::internal, fmt::format("the model of time stands still: warp {} waits for {}",
                                              warp.index, name_of_wait(warp.step()).name));
  }
  return timeline();
}

/// Takes steps until one takes time or waits.
void Model::advance(Warp& warp) {
  while (warp.next < warp.steps->size() && begin(warp)) ++warp.next;
}

/// Begins the warp's next step; false if it has not ended at once. Then what ends it calls advance.
bool Model::begin(Warp& warp) {
  const Step& step = warp.step();
  Products& products = products_[warp.index / warps_a_group];
  warp.since = now_;
  switch (step.kind) {
    case Step::Kind::work: work(warp, step.work); return false;
    case Step::Kind::arrive:
    case Step::Kind::arrive_named: contribute(key_of(step)); return true;
    case Step::Kind::load: load(step); return true;
    case Step::Kind::store: store(warp, step); return true;
    case Step::Kind::join_named:
    case Step::Kind::wait: {
      const auto found = phases_.find(key_of(step));
      if (found == phases_.end())
        throw Error(Status::internal, "the model of time: nobody arrives at " + name_of_wait(step).name);
      Phase& phase = found->second;
      if (step.kind == Step::Kind::wait && phase.left == 0) return true;
      phase.waiting.push_back(&warp);
      if (step.kind == Step::Kind::join_named) contribute(key_of(step));
      return false;
    }
    case Step::Kind::wait_products:
      if (products.done >= step.number) return true;
      products.waiting.push_back(&warp);
      return false;
    case Step::Kind::wait_stores: return warp.stores_done >= step.number;
    case Step::Kind::issue_product:
      if (step.number > products.done + costs_.product_queue) {
        products.issuers.push_back(&warp);
        return false;
      }
      if (++products.issued[step.number] == warps_a_group) {
        products.ready.push_back(&step);
        start_product();
      }
      at(now_ + costs_.product_issue, [this, &warp] { resume(warp, Activity::issue); });
      return false;
  }
  return true;
}

/// The step that has kept the warp since `since` has ended.
void Model::resume(Warp& warp, Activity activity) {
  const Step& step = warp.step();
  Stretch stretch{.activity = activity, .begin = warp.since, .end = now_};
  if (activity == Activity::wait) {
    const Names::Barrier name = name_of_wait(step);
    stretch.name = name.name;
    stretch.detail = name.detail;
    stretch.between_warpgroups = step.kind == Step::Kind::join_named;
  } else {
    stretch.name = "issue " + name_of_product(step.registers);
  }
  warp.stretches.push_back(stretch);
  ++warp.next;
  advance(warp);
}

/// Instructions of one warp follow each other; exponentials of the warps of a quadrant share its unit.
void Model::work(Warp& warp, const Work& work) {
  std::uint64_t end = now_ + work.special * costs_.special + work.arithmetic * costs_.arithmetic +
                      work.exchanges * costs_.exchange + work.shared * costs_.shared_access;
  if (work.special > 0) {
    std::uint64_t& free = special_free_[warp.index % quadrants];
    free = std::max(free, now_) + work.special * costs_.special_unit;
    end = std::max(end, free);
  }
  if (work.loads > 0) end += costs_.global_latency;
  if (work.stored > 0) {
    stores_free_ = std::max(stores_free_, now_) + cycles_of(32ULL * work.stored, costs_.store_rate);
    end = std::max(end, stores_free_);
  }
  warp.stretches.push_back({.begin = now_,
                            .end = end,
                            .name = "other",
                            .arithmetic = work.special + work.arithmetic + work.stored > 0,
                            .exponentials = work.special > 0,
                            .stores = work.stored > 0});
  at(end, [this, &warp] {
    ++warp.next;
    advance(warp);
  });
}

void Model::contribute(Key key) {
  Phase& phase = phases_.at(key);
  if (--phase.left > 0) return;
  for (Warp* warp : std::exchange(phase.waiting, {})) {
    at(now_ + costs_.barrier, [this, warp] { resume(*warp, Activity::wait); });
  }
}

void Model::load(const Step& step) {
  const Key key = key_of(step);
  copies_free_ = std::max(copies_free_, now_) + cycles_of(step.amount, costs_.copy_rate);
  const std::uint64_t done = copies_free_ + costs_.copy_latency;
  Copy& copy = copies_.try_emplace(key, Copy{.begin = now_}).first->second;
  copy.end = std::max(copy.end, done);
  copy.bytes += step.amount;
  at(done, [this, key] { contribute(key); });
}

void Model::store(Warp& warp, const Step& step) {
  copies_free_ = std::max(copies_free_, now_) + cycles_of(step.amount, costs_.copy_rate);
  at(copies_free_ + costs_.copy_latency, [this, &warp, number = step.number] {
    warp.stores_done = number;
    if (warp.next == warp.steps->size()) return;
    const Step& now = warp.step();
    if (now.kind == Step::Kind::wait_stores && now.number == number) resume(warp, Activity::wait);
  });
}

/// The tensor cores take one product after another, of the warpgroups in turn.
void Model::start_product() {
  for (std::size_t i = 1; i <= products_.size() && !multiplying_; ++i) {
    const std::size_t group = (last_group_ + i) % products_.size();
    Products& products = products_[group];
    if (products.ready.empty()) continue;
    const Step& step = *products.ready.front();
    products.ready.pop_front();
    multiplying_ = true;
    last_group_ = group;
    const std::uint64_t rate = costs_.product_rate * 16 / step.thing;
    const std::uint64_t end = now_ + cycles_of(step.amount, rate);
    multiplied_.push_back({.activity = Activity::product,
                           .name = name_of_product(step.registers),
                           .begin = now_,
                           .end = end,
                           .warpgroup = static_cast<int>(group) - (roles_.producer ? 1 : 0)});
    at(end, [this, group] { finish_product(group); });
  }
}

void Model::finish_product(std::size_t group) {
  Products& products = products_[group];
  multiplying_ = false;
  ++products.done;
  const auto may_go = [&](const Warp* w, std::uint64_t ahead) {
    return w->step().number <= products.done + ahead;
  };
  for (Warp* warp : std::exchange(products.waiting, {})) {
    if (may_go(warp, 0)) {
      at(now_ + costs_.barrier, [this, warp] { resume(*warp, Activity::wait); });
    } else {
      products.waiting.push_back(warp);
    }
  }
  for (Warp* warp : std::exchange(products.issuers, {})) {
    const std::uint64_t since = warp->since;
    if (!may_go(warp, costs_.product_queue)) {
      products.issuers.push_back(warp);
      continue;
    }
    begin(*warp);
    warp->since = since;
  }
  start_product();
}

Names::Barrier Model::name_of_wait(const Step& step) const {
  switch (step.kind) {
    case Step::Kind::wait: {
      const auto found = names_.barriers.find(step.thing);
      if (found == names_.barriers.end()) return {.name = fmt::format("mbarrier +{}", step.thing)};
      return {.name = found->second.name,
              .detail = fmt::format("{}, phase {}", found->second.detail, step.number)};
    }
    case Step::Kind::join_named: {
      const auto found = names_.named.find(step.thing);
      return {
          .name = found == names_.named.end() ? fmt::format("named barrier {}", step.thing) : found->second,
          .detail = fmt::format("named barrier {}", step.thing)};
    }
    case Step::Kind::wait_stores: return {.name = "stores"};
    default: return {.name = "own products"};
  }
}

/// Products of one kind and warpgroup that follow each other are one span.
std::vector<Span> merged(const std::vector<Span>& products) {
  std::vector<Span> result;
  for (const Span& s : products) {
    if (!result.empty() && result.back().end == s.begin && result.back().name == s.name &&
        result.back().warpgroup == s.warpgroup) {
      result.back().end = s.end;
    } else {
      result.push_back(s);
    }
  }
  for (Span& s : result) s.detail = fmt::format("warpgroup {}", s.warpgroup);
  return result;
}

Timeline Model::timeline() {
  Timeline t{.tracks = {}, .cycles = now_};
  for (std::size_t w = 0; w < warps_.size(); w += warps_a_group) {
    const bool producer = roles_.producer && w == 0;
    const int warpgroup = static_cast<int>(w / warps_a_group) - (roles_.producer ? 1 : 0);
    t.tracks.push_back({.role = producer ? Track::Role::producer : Track::Role::warpgroup,
                        .name = producer ? "producer" : fmt::format("warpgroup {}", warpgroup),
                        .warpgroup = producer ? -1 : warpgroup,
                        .spans = spans_of(warps_[w].stretches)});
  }
  t.tracks.push_back(
      {.role = Track::Role::tensor_cores, .name = "tensor cores", .spans = merged(multiplied_)});
  std::vector<Span> copies;
  for (const auto& [key, copy] : copies_) {
    const auto found = names_.barriers.find(key.first);
    const std::string name = found == names_.barriers.end() ? "copy" : found->second.name;
    copies.push_back({.activity = Activity::copy,
                      .name = name.substr(0, name.find(" full")),
                      .detail = fmt::format("{} bytes", copy.bytes),
                      .begin = copy.begin,
                      .end = copy.end});
  }
  for (Track& track : copy_tracks(std::move(copies))) t.tracks.push_back(std::move(track));
  return t;
}

}  // namespace

std::span<const CostName> cost_names() {
  static constexpr CostName names[] = {{"product_rate", &Costs::product_rate},
                                       {"product_queue", &Costs::product_queue},
                                       {"product_issue", &Costs::product_issue},
                                       {"special_unit", &Costs::special_unit},
                                       {"special", &Costs::special},
                                       {"arithmetic", &Costs::arithmetic},
                                       {"exchange", &Costs::exchange},
                                       {"shared_access", &Costs::shared_access},
                                       {"global_latency", &Costs::global_latency},
                                       {"store_rate", &Costs::store_rate},
                                       {"copy_rate", &Costs::copy_rate},
                                       {"copy_latency", &Costs::copy_latency},
                                       {"barrier", &Costs::barrier}};
  return names;
}

Timeline model(const Recording& recording, const Names& names, const Roles& roles, const Costs& costs) {
  return Model(recording, names, roles, costs).run();
}

}  // namespace tandem::cli::trace
