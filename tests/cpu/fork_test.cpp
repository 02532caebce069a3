// What a forked process computes.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <iterator>
#include <vector>

#include "cpu/common/config.hpp"
#include "harness/changes.hpp"
#include "harness/runner.hpp"

namespace tandem::cpu {
namespace {

using harness::Call;
using harness::Case;

/// The exit status of a child that calls `f`; it has ten seconds.
int status_of_child(const std::function<bool()>& f) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    _exit(f() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

/// libgomp's threads stay with the parent: a child that waited for them would do so for ever.
TEST(Fork, AChildOfAProcessWithThreadsComputes) {
  Call call(harness::with({}, {.seqlen = 300}));
  const auto run = [&call] {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      call.prepare(pass);
      if (pass == Pass::forward) forward(call.forward_args(), Execution{.threads = 3});
      if (pass == Pass::backward) backward(call.backward_args(), Execution{.threads = 3});
    }
    return call.dk.raw();
  };
  const std::vector<std::byte> here = run();
  EXPECT_EQ(status_of_child([&] { return run() == here; }), 0);
  EXPECT_EQ(run(), here);
}

/// The region is another library's, as PyTorch's is, before Tandem has run any.
TEST(Fork, AChildOfAProcessWithAnotherLibrarysThreadsComputes) {
  std::atomic<int> threads{0};
#pragma omp parallel num_threads(3)
  ++threads;
  ASSERT_EQ(threads, 3);
  Call call{Case{}};
  call.prepare(Pass::forward);
  const auto run = [&call] {
    forward(call.forward_args(), Execution{.threads = 2});
    return call.out.raw();
  };
  EXPECT_EQ(status_of_child([&] { return usable_threads(2) == 1 && !run().empty(); }), 0);
  EXPECT_FALSE(run().empty());
  EXPECT_EQ(usable_threads(2), 2);
}

TEST(Fork, AChildOfAProcessWithoutThreadsHasSeveral) {
  const auto threads = std::filesystem::directory_iterator("/proc/self/task");
  if (std::distance(begin(threads), end(threads)) > 1)
    GTEST_SKIP() << "a test before this one has made threads";
  EXPECT_EQ(status_of_child([&] { return usable_threads(3) == 3; }), 0);
}

}  // namespace
}  // namespace tandem::cpu
