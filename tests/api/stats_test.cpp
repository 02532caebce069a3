// The counters: what each call, error and kernel adds, exact over threads, and from 0 in a forked process.
#include "tandem/stats.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>
#include <vector>

#include "api/call.hpp"
#include "api/trace.hpp"
#include "tandem/attention.hpp"
#include "tandem/cache.hpp"

namespace tandem::test {
namespace {

/// Causal attention of 4 queries, 2 heads, head dimension 8, in f32.
struct Example {
  std::array<float, 4 * 2 * 8> q{};
  std::array<float, 4 * 2 * 8> out{};
  ForwardArgs args;
  Example() {
    args.q = args.k = args.v = ConstTensor(q.data(), DType::f32, {1, 4, 2, 8});
    args.out = Tensor(out.data(), DType::f32, {1, 4, 2, 8});
    args.options.causal = true;
  }
};

void call(int threads = 1) {
  const Example example;
  forward(example.args, {.threads = threads});
}

/// All calls of an operation, as a sum.
CallStats calls_of(std::string_view operation) {
  CallStats sum;
  for (const CallStats& c : stats().calls) {
    if (c.operation != operation) continue;
    sum.backend = c.backend;
    sum.family = c.family;
    sum.kernel = c.kernel;
    sum.calls += c.calls;
    sum.nanoseconds += c.nanoseconds;
    sum.bytes += c.bytes;
    sum.operations += c.operations;
    sum.workspace_peak = std::max(sum.workspace_peak, c.workspace_peak);
  }
  return sum;
}

std::uint64_t errors_of(std::string_view rule) {
  std::uint64_t sum = 0;
  for (const ErrorStats& e : stats().errors) sum += e.rule == rule ? e.errors : 0;
  return sum;
}

TEST(Stats, CountACallByWhatItIsAndDoes) {
  const CallStats before = calls_of("forward");
  const auto start = std::chrono::steady_clock::now();
  call();
  const std::chrono::nanoseconds passed = std::chrono::steady_clock::now() - start;
  const CallStats after = calls_of("forward");
  EXPECT_EQ(after.backend, "cpu");
  EXPECT_EQ(after.family, cpu::name_of(cpu::best_target()));
  EXPECT_EQ(after.kernel, "forward");
  EXPECT_EQ(after.calls, before.calls + 1);
  EXPECT_EQ(after.bytes, before.bytes + 4 * 4 * 2 * 8 * sizeof(float));
  EXPECT_EQ(after.operations, before.operations + 2 * (4 * 4 / 2) * 16 * 2);
  EXPECT_GT(after.workspace_peak, 0U);
  EXPECT_GT(after.nanoseconds, before.nanoseconds);
  // The rate of the clock is known to a thousandth; this process has run for some milliseconds.
  EXPECT_LT(after.nanoseconds - before.nanoseconds, 2 * passed.count());
}

TEST(Stats, CountOtherOperations) {
  std::array<float, 2 * 1 * 2 * 8> outs{};
  std::array<float, 2 * 2 * 1> lses{};
  std::array<float, 2 * 8> out{};
  const ConstTensor o(outs.data(), DType::f32, {1, 1, 2, 8});
  const ConstTensor l(lses.data(), DType::f32, {1, 2, 1});
  const std::uint64_t before = calls_of("merge").calls;
  MergeArgs args;
  const std::array given_outs{o, o};
  const std::array given_lses{l, l};
  args.outs = given_outs;
  args.lses = given_lses;
  args.out = Tensor(out.data(), DType::f32, {1, 1, 2, 8});
  merge(args, {.threads = 1});
  const CallStats after = calls_of("merge");
  EXPECT_EQ(after.calls, before + 1);
  EXPECT_EQ(after.kernel, "merge");
  EXPECT_EQ(after.operations, 0U);
}

TEST(Stats, CountErrorsByTheirRule) {
  constexpr std::string_view rule = "threads is {}; it must be from 1 to {}, or 0 for every core";
  const std::uint64_t before = errors_of(rule);
  const std::uint64_t calls = calls_of("forward").calls;
  for (const int threads : {-1, -2}) {
    EXPECT_THROW(call(threads), Error);
  }
  EXPECT_EQ(errors_of(rule), before + 2);
  EXPECT_EQ(calls_of("forward").calls, calls);
}

TEST(Stats, CountKernelsByTheirOrigin) {
  count_kernel("a test", std::chrono::milliseconds(2));
  const std::vector<KernelStats> kernels = stats().kernels;
  const auto found = std::ranges::find(kernels, "a test", &KernelStats::origin);
  ASSERT_NE(found, kernels.end());
  EXPECT_EQ(found->kernels, 1U);
  EXPECT_EQ(found->nanoseconds, 2'000'000U);
}

// More threads than a machine has cores, in generations, so that one takes the cells of those that ended; and
// readers meanwhile, whose sums never shrink.
TEST(Stats, AreExactOverThreads) {
  constexpr CallKind kind{"of threads", "cpu", "a", "b"};
  constexpr std::uint64_t threads = 32;
  constexpr std::uint64_t calls = 20'000;
  std::atomic<bool> ended = false;
  std::thread reader([&] {
    std::uint64_t seen = 0;
    while (!ended) {
      const std::uint64_t now = calls_of("of threads").calls;
      EXPECT_GE(now, seen);
      seen = now;
    }
  });
  for (int generation = 0; generation < 3; ++generation) {
    std::vector<std::thread> all;
    for (std::uint64_t t = 0; t < threads; ++t) {
      all.emplace_back([&, t] {
        for (std::uint64_t i = 0; i < calls; ++i)
          count_call(kind, {.bytes = t, .operations = 1, .workspace_bytes = t}, 1);
      });
    }
    for (std::thread& thread : all) thread.join();
  }
  ended = true;
  reader.join();
  const CallStats sum = calls_of("of threads");
  EXPECT_EQ(sum.calls, 3 * threads * calls);
  EXPECT_EQ(sum.operations, 3 * threads * calls);
  EXPECT_EQ(sum.bytes, 3 * calls * (threads * (threads - 1) / 2));
  EXPECT_EQ(sum.workspace_peak, threads - 1);
}

TEST(Stats, AForkedProcessBeginsAtZero) {
  call();
  const std::uint64_t before = calls_of("forward").calls;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool zero = stats().calls.empty() && stats().errors.empty();
    count_call({"forward", "cpu", "a", "b"}, {}, 1);
    std::thread([] { count_call({"forward", "cpu", "a", "b"}, {}, 1); }).join();
    _exit(zero && calls_of("forward").calls == 2 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(calls_of("forward").calls, before);
}

// What a call pays: the least of many rounds, since other programs share the processor. 20 ns on an
// AMD EPYC, of which the clock takes 15; the bound leaves room for a slower one.
TEST(Stats, CostACallLittle) {
  const Example example;
  const Call call(example.args, {.threads = 1}, Memory::present);
  double least = 1e9;
  constexpr int calls = 1000;
  for (int round = 0; round < 200; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) const Trace trace(call.problem, call.plan);
    const std::chrono::duration<double, std::nano> passed = std::chrono::steady_clock::now() - start;
    least = std::min(least, passed.count() / calls);
  }
  RecordProperty("nanoseconds", std::to_string(least));
  EXPECT_LT(least, 150.0);
}

std::vector<std::string>& events() {
  static std::vector<std::string> seen;
  return seen;
}

TEST(Stats, EventsAreEveryNthCallOfAThread) {
  set_events(
      [](const Event& e) {
        events().push_back(fmt::format("{} {} {}: {}", e.operation, e.backend, e.kernel, e.subject));
        EXPECT_NE(e.plan.find("backend cpu: the tensors are on the CPU"), std::string_view::npos) << e.plan;
        EXPECT_GT(e.nanoseconds, 0U);
      },
      3);
  for (int i = 0; i < 4; ++i) call();
  std::thread([] { call(); }).join();
  const std::string one = "forward cpu forward: forward f32 b1 q4 k4 h2/2 d8/8 causal";
  EXPECT_EQ(events(), (std::vector<std::string>{one, one, one}));
  set_events(nullptr, 3);
  for (int i = 0; i < 4; ++i) call();
  EXPECT_EQ(events().size(), 3U);
}

TEST(Stats, TextIsPrometheuss) {
  count_error(Status::runtime, "a rule with \"{}\"\nand \\");
  const std::string text = stats_text();
  EXPECT_NE(text.find("# TYPE tandem_calls_total counter\n"), std::string::npos);
  EXPECT_NE(text.find(R"(tandem_errors_total{status="runtime",rule="a rule with \"{}\"\nand \\"} 1)"),
            std::string::npos)
      << text;
}

}  // namespace
}  // namespace tandem::test
