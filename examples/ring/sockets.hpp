// A ring of processes of one machine, forked here and joined by Unix sockets.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <functional>
#include <future>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "transport.hpp"

class Sockets : public Transport {
 public:
  /// `next` leads to the next rank, `before` comes from the one before.
  Sockets(int rank, int ranks, int next, int before) : Transport(rank, ranks), next_(next), before_(before) {}
  ~Sockets() override {
    close(next_);
    close(before_);
  }

  void start(std::span<const std::byte> from, std::span<std::byte> to) override {
    under_way_ = std::async(std::launch::async, [this, from, to] { exchange(from, to); });
  }
  void wait() override { under_way_.get(); }

 private:
  /// Sends and receives at once, whichever is ready: a ring that only sends first would fill all sockets.
  void exchange(std::span<const std::byte> from, std::span<std::byte> to) const {
    while (!from.empty() || !to.empty()) {
      pollfd ready[2] = {{from.empty() ? -1 : next_, POLLOUT, 0}, {to.empty() ? -1 : before_, POLLIN, 0}};
      if (poll(ready, 2, -1) < 0 && errno != EINTR)
        throw std::system_error(errno, std::generic_category(), "poll");
      if (ready[0].revents != 0) {
        from = from.subspan(moved(send(next_, from.data(), from.size(), MSG_DONTWAIT | MSG_NOSIGNAL)));
      }
      if (ready[1].revents != 0) {
        const ssize_t count = recv(before_, to.data(), to.size(), MSG_DONTWAIT);
        if (count == 0) throw std::runtime_error("the process before this one in the ring has ended");
        to = to.subspan(moved(count));
      }
    }
  }
  static std::size_t moved(ssize_t count) {
    if (count >= 0) return static_cast<std::size_t>(count);
    if (errno == EAGAIN || errno == EINTR) return 0;
    throw std::system_error(errno, std::generic_category(), "a neighbour in the ring");
  }

  int next_;
  int before_;
  std::future<void> under_way_;
};

/// Runs `work` in so many processes, and returns the number of those that did not return 0. Call it before
/// Tandem computes in this process: threads do not survive a fork.
inline int in_processes(int ranks, const std::function<int(Transport&)>& work) {
  std::vector<int> sends(ranks), receives(ranks);  // the two ends of the socket that rank r sends to
  for (int r = 0; r < ranks; ++r) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) {
      throw std::system_error(errno, std::generic_category(), "socketpair");
    }
    sends[r] = ends[0];
    receives[r] = ends[1];
  }
  const auto close_all_but = [&](int next, int before) {
    for (const auto& ends : {sends, receives}) {
      for (const int end : ends) {
        if (end != next && end != before) close(end);
      }
    }
  };
  std::vector<pid_t> started;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
    if (child > 0) {
      started.push_back(child);
      continue;
    }
    int result = 1;
    try {
      const int before = (rank + ranks - 1) % ranks;
      close_all_but(sends[rank], receives[before]);  // so that a neighbour's end is noticed
      Sockets sockets(rank, ranks, sends[rank], receives[before]);
      result = work(sockets);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
    }
    std::fflush(nullptr);
    _exit(result);
  }
  close_all_but(-1, -1);
  int failed = 0;
  for (const pid_t child : started) {
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    failed += WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1;
  }
  return failed;
}
