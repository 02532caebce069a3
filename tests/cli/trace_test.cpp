// The model of time behind `tandem trace`, on steps written by hand, and what is made of its spans.
#include <gtest/gtest.h>

#include <tuple>

#include "trace/device_timeline.hpp"
#include "trace/model.hpp"

namespace tandem::cli::trace {
namespace {

using emulator::Recording;
using emulator::Step;
using Kind = emulator::Step::Kind;

/// A warpgroup's warps that all do the same.
void add_warpgroup(Recording& recording, const std::vector<Step>& steps) {
  for (int w = 0; w < 4; ++w) recording.warps.push_back(steps);
}

Step product(std::uint64_t number, bool registers = false) {
  return {.kind = Kind::issue_product,
          .registers = registers,
          .thing = 16,
          .number = number,
          .amount = 2 * 64 * 128 * 16};
}

Timeline timeline_of(const Recording& recording, const Costs& costs = {}, bool producer = false) {
  const Roles roles{.warps = static_cast<int>(recording.warps.size()), .producer = producer};
  return model(recording, {}, roles, costs);
}

Track track(const Timeline& timeline, const std::string& name) {
  for (const Track& t : timeline.tracks) {
    if (t.name == name) return t;
  }
  throw std::runtime_error("no track " + name);
}

TEST(TraceModel, AProductTakesItsOperationsAtTheTensorCoresRate) {
  Recording recording;
  add_warpgroup(recording, {product(1), product(2), {.kind = Kind::wait_products, .number = 2}});
  const Timeline timeline = timeline_of(recording);
  const Track products = track(timeline, "tensor cores");
  ASSERT_EQ(products.spans.size(), 1U);
  EXPECT_EQ(products.spans[0].cycles(), 128U);
  EXPECT_EQ(timeline.cycles, 128 + Costs{}.barrier);
  Step bytes = product(1);
  bytes.thing = 8;
  bytes.amount *= 2;
  Recording of_bytes;
  add_warpgroup(of_bytes, {bytes, {.kind = Kind::wait_products, .number = 1}});
  EXPECT_EQ(track(timeline_of(of_bytes), "tensor cores").spans[0].cycles(), 64U);
}

TEST(TraceModel, TheTensorCoresServeWarpgroupsInTurn) {
  Recording recording;
  const std::vector<Step> steps = {product(1), product(2), {.kind = Kind::wait_products, .number = 2}};
  add_warpgroup(recording, steps);
  add_warpgroup(recording, steps);
  std::vector<int> order;
  const Track products = track(timeline_of(recording), "tensor cores");
  for (const Span& s : products.spans) order.push_back(s.warpgroup);
  ASSERT_EQ(order.size(), 4U);
  EXPECT_NE(order[0], order[1]);
  EXPECT_EQ(order[0], order[2]);
}

TEST(TraceModel, AWarpgroupIssuesNoFurtherThanTheQueueReaches) {
  Recording recording;
  add_warpgroup(recording,
                {product(1), product(2), product(3), product(4), {.kind = Kind::wait_products, .number = 4}});
  const Track warpgroup = track(timeline_of(recording), "warpgroup 0");
  // The fourth is issued when the second is done, at 128.
  ASSERT_EQ(warpgroup.spans.front().activity, Activity::issue);
  EXPECT_EQ(warpgroup.spans.front().end, 128 + Costs{}.product_issue);
}

TEST(TraceModel, ExponentialsOfOneQuadrantShareItsUnit) {
  Step exponentials;
  exponentials.work = {.special = 16};
  Recording alone;
  add_warpgroup(alone, {exponentials});
  EXPECT_EQ(timeline_of(alone).cycles, 16 * Costs{}.special);
  Recording both = alone;
  add_warpgroup(both, {exponentials});
  EXPECT_EQ(timeline_of(both).cycles, 2 * 16 * Costs{}.special_unit);
}

TEST(TraceModel, AWaitEndsWhenArrivalsAndBytesHaveCome) {
  Recording recording;
  std::vector<Step> loads = {{.kind = Kind::arrive, .thing = 8, .number = 0},
                             {.kind = Kind::load, .thing = 8, .number = 0, .amount = 3200},
                             {.kind = Kind::load, .thing = 8, .number = 0, .amount = 3200}};
  recording.warps = {loads, {}, {}, {}};
  add_warpgroup(recording, {{.kind = Kind::wait, .thing = 8, .number = 0}});
  const Costs costs;
  const Timeline timeline = timeline_of(recording, costs, true);
  const Track warpgroup = track(timeline, "warpgroup 0");
  ASSERT_EQ(warpgroup.spans.size(), 1U);
  EXPECT_EQ(warpgroup.spans[0].end, 6400 / costs.copy_rate + costs.copy_latency + costs.barrier);
  const Track copies = track(timeline, "TMA in flight 1");
  ASSERT_EQ(copies.spans.size(), 1U) << "copies to one phase are one";
  EXPECT_EQ(copies.spans[0].detail, "6400 bytes");
  const Summary summary = summarize(timeline);
  EXPECT_EQ(summary.longest_wait_of, "warpgroup 0");
  EXPECT_EQ(summary.longest_wait.name, "mbarrier +8");
}

TEST(TraceModel, ANamedBarrierHoldsWhoWaitsUntilAllHaveCome) {
  Step work;
  work.work = {.arithmetic = 16};
  Recording recording;
  add_warpgroup(recording, {{.kind = Kind::join_named, .thing = 1, .number = 0}});
  add_warpgroup(recording, {work, {.kind = Kind::arrive_named, .thing = 1, .number = 0}});
  const Track first = track(timeline_of(recording), "warpgroup 0");
  ASSERT_EQ(first.spans.size(), 1U);
  EXPECT_EQ(first.spans[0].name, "named barrier 1");
  EXPECT_EQ(first.spans[0].end, 16 * Costs{}.arithmetic + Costs{}.barrier);
}

TEST(TraceModel, RefusesWhatNobodyEnds) {
  Recording nobody;
  add_warpgroup(nobody, {{.kind = Kind::wait, .thing = 8, .number = 3}});
  EXPECT_THROW(timeline_of(nobody), std::exception);
  Recording never;
  add_warpgroup(never, {{.kind = Kind::wait_products, .number = 1}});
  EXPECT_THROW(timeline_of(never), std::exception);
}

Stretch compute(std::uint64_t begin, std::uint64_t end, bool exponentials, bool stores = false) {
  return {.begin = begin,
          .end = end,
          .name = "other",
          .arithmetic = true,
          .exponentials = exponentials,
          .stores = stores};
}
Stretch wait(std::uint64_t begin, std::uint64_t end, bool between_warpgroups = false) {
  return {.activity = Activity::wait,
          .begin = begin,
          .end = end,
          .name = "K full",
          .between_warpgroups = between_warpgroups};
}
Stretch issue(std::uint64_t begin, std::uint64_t end) {
  return {.activity = Activity::issue, .begin = begin, .end = end, .name = "issue"};
}

TEST(TraceSpans, ASoftmaxHasItsWaitsInside) {
  const std::vector<Span> spans = spans_of({wait(0, 5), issue(5, 10), wait(10, 20), compute(20, 30, false),
                                            wait(30, 40), compute(40, 50, true), wait(50, 60, true),
                                            issue(60, 70), wait(70, 80), compute(80, 90, false, true)});
  std::vector<std::pair<std::string, std::uint64_t>> found;
  found.reserve(spans.size());
  for (const Span& s : spans) found.emplace_back(s.name, s.begin);
  const decltype(found) expected = {{"K full", 0},   {"issue", 5},   {"K full", 10},
                                    {"softmax", 20}, {"K full", 30}, {"K full", 50},
                                    {"issue", 60},   {"K full", 70}, {"epilogue", 80}};
  EXPECT_EQ(found, expected);
  EXPECT_EQ(spans[3].end, 50U);
  const Summary summary = summarize(
      {.tracks = {{.role = Track::Role::warpgroup, .name = "warpgroup 0", .warpgroup = 0, .spans = spans}},
       .cycles = 90});
  ASSERT_EQ(summary.warpgroups.size(), 1U);
  EXPECT_EQ(summary.warpgroups[0].softmax, 20U) << "without the wait inside";
  EXPECT_EQ(summary.warpgroups[0].wait, 45U);
  EXPECT_EQ(summary.warpgroups[0].epilogue, 10U);
}

TEST(TraceSpans, SoftmaxUnderAnothersProductsCounts) {
  const Timeline timeline{
      .tracks =
          {{.role = Track::Role::warpgroup,
            .name = "warpgroup 0",
            .warpgroup = 0,
            .spans = {{.activity = Activity::softmax, .name = "softmax", .begin = 100, .end = 200}}},
           {.role = Track::Role::tensor_cores,
            .name = "tensor cores",
            .spans =
                {{.activity = Activity::product, .name = "product", .begin = 50, .end = 120, .warpgroup = 0},
                 {.activity = Activity::product, .name = "product", .begin = 120, .end = 150, .warpgroup = 1},
                 {.activity = Activity::product,
                  .name = "product",
                  .begin = 190,
                  .end = 300,
                  .warpgroup = 1}}}},
      .cycles = 300};
  EXPECT_EQ(summarize(timeline).warpgroups[0].softmax_under_others, 40U);
}

TEST(TraceSpans, CopiesThatOverlapAreOnTracksOfTheirOwn) {
  const std::vector<Track> tracks = copy_tracks({{.name = "b", .begin = 5, .end = 20},
                                                 {.name = "a", .begin = 0, .end = 10},
                                                 {.name = "c", .begin = 10, .end = 15}});
  ASSERT_EQ(tracks.size(), 2U);
  EXPECT_EQ(tracks[0].spans.size(), 2U);
  EXPECT_EQ(tracks[1].spans[0].name, "b");
}

TraceRecord at(unsigned int clock, TraceEvent event, unsigned int thing = 0) {
  return {.clock = clock, .what = static_cast<unsigned int>(event) << 24 | thing};
}

TEST(TraceOfAGpu, IsReadFromTimestamps) {
  using Event = TraceEvent;
  // The clock goes through 2^32. The producer loads; the consumer waits for K, multiplies twice, and is in
  // its softmax behind the first product.
  constexpr unsigned int start = 0xFFFFFFF0U;
  std::vector<std::vector<TraceRecord>> warps(8);
  warps[0] = {at(start, Event::load, 8), at(start + 5, Event::load, 8), at(start + 10, Event::wait, 16),
              at(start + 500, Event::wait_end, 16)};
  warps[4] = {at(start + 2, Event::wait, 8),
              at(start + 100, Event::wait_end, 8),
              at(start + 110, Event::issue),
              at(start + 130, Event::issue_end),
              at(start + 132, Event::issue),
              at(start + 150, Event::issue_end),
              at(start + 150, Event::wait_products, 1),
              at(start + 200, Event::wait_products_end, 1),
              at(start + 201, Event::exponentials),
              at(start + 300, Event::wait_products, 0),
              at(start + 310, Event::wait_products_end, 0),
              at(start + 350, Event::join, 1),
              at(start + 360, Event::join_end, 1),
              at(start + 370, Event::issue),
              at(start + 380, Event::issue_end),
              at(start + 380, Event::wait_products, 0),
              at(start + 400, Event::wait_products_end, 0),
              at(start + 410, Event::stores),
              at(start + 480, Event::wait, 8),
              at(start + 490, Event::wait_end, 8)};
  Names names;
  names.barriers[8] = {"K full", "buffer 0"};
  names.barriers[16] = {"K free", "buffer 0"};
  names.named[1] = "ping-pong";
  const Timeline timeline = timeline_of(warps, names, {.warps = 8, .producer = true});
  EXPECT_EQ(timeline.cycles, 500U);
  const auto found = [](const Track& t) {
    std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t>> all;
    for (const Span& s : t.spans) {
      if (s.activity != Activity::other) all.emplace_back(s.name, s.begin, s.end);
    }
    return all;
  };
  using Spans = decltype(found(Track{}));
  EXPECT_EQ(found(track(timeline, "producer")), (Spans{{"K free", 10, 500}}));
  EXPECT_EQ(found(track(timeline, "warpgroup 0")), (Spans{{"K full", 2, 100},
                                                          {"issue products", 110, 130},
                                                          {"issue products", 132, 150},
                                                          {"own products", 150, 200},
                                                          {"softmax", 200, 350},
                                                          {"own products", 300, 310},
                                                          {"ping-pong", 350, 360},
                                                          {"issue products", 370, 380},
                                                          {"own products", 380, 400},
                                                          {"epilogue", 400, 480},
                                                          {"K full", 480, 490}}));
  EXPECT_EQ(found(track(timeline, "products of 0")),
            (Spans{{"products", 110, 200}, {"products", 200, 310}, {"products", 370, 400}}));
  EXPECT_EQ(found(track(timeline, "TMA in flight 1")), (Spans{{"K", 0, 100}}));
  const Summary summary = summarize(timeline);
  EXPECT_EQ(summary.longest_wait.name, "K full");
  EXPECT_EQ(summary.tensor_cores_busy, 230U);
}

}  // namespace
}  // namespace tandem::cli::trace
