// Numbers of threads that the system cannot give: libgomp would end the process.
#include <gtest/gtest.h>
#include <omp.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "harness/runner.hpp"

namespace tandem::cpu {
namespace {

/// The exit status of a child that calls `f`; it has a minute.
int status_of_child(const std::function<void()>& f) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    f();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

void forward_with(int threads) {
  harness::Case c;
  c.seqlen_q = c.seqlen_k = 3000;
  harness::Call call(c);
  forward(call.forward_args(), Execution{.threads = threads});
}

/// What OMP_NUM_THREADS=70000 leaves.
TEST(Threads, AWildDefaultDoesNotEndTheProcess) {
  EXPECT_EQ(status_of_child([] {
              omp_set_num_threads(70000);
              forward_with(0);
            }),
            0);
}

#if !defined(__SANITIZE_ADDRESS__)  // which needs terabytes of addresses
TEST(Threads, ManyThreadsInLittleAddressSpaceDoNotEndTheProcess) {
  EXPECT_EQ(status_of_child([] {
              const rlimit little{.rlim_cur = 2UL << 30, .rlim_max = 2UL << 30};
              setrlimit(RLIMIT_AS, &little);
              forward_with(4096);
            }),
            0);
}
#endif

}  // namespace
}  // namespace tandem::cpu
