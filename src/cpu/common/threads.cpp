#include "cpu/common/threads.hpp"

#include <omp.h>
#include <pthread.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>

#include "problem/log.hpp"

namespace tandem::cpu {
namespace {

/// libgomp's threads stay with the parent where a process forks, whoever used them: Tandem or PyTorch. A
/// region in the child would wait for them for ever.
std::atomic<bool> pool_is_lost{false};
std::atomic<bool> forks_threads{true};

/// /proc/self/task has a link for each thread, "." and "..".
void look_for_threads() {
  struct stat task {};
  forks_threads = stat("/proc/self/task", &task) != 0 || task.st_nlink != 3;
}
void note_lost_threads() {
  if (forks_threads) pool_is_lost = true;
}

/// As the library is loaded, since the threads need not be Tandem's.
const bool registered = pthread_atfork(look_for_threads, nullptr, note_lost_threads) == 0;

}  // namespace

int usable_threads(int wanted) {
  // libgomp ends the process where it cannot start a thread, and more than there are processors gain nothing.
  // A few more are started even so: how many share the work must not change a bit of it.
  constexpr int always = 16;
  const int most = std::max(always, omp_get_num_procs());
  int threads = wanted > 0 ? wanted : omp_get_max_threads();
  if (threads > most) {
    log(LogLevel::debug, "cpu: {} threads instead of {}, which {} processors could not run", most, threads,
        omp_get_num_procs());
    threads = most;
  }
  if (threads == 1) return 1;
  if (pool_is_lost || !registered) {
    log(LogLevel::debug, "cpu: 1 thread instead of {}: OpenMP's did not come along as the process forked",
        threads);
    return 1;
  }
  return threads;
}

}  // namespace tandem::cpu
