#include "supervise.hpp"

#include <fmt/core.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tandem/error.hpp"

namespace tandem::cli {
namespace {

using Json = nlohmann::ordered_json;
constexpr std::size_t no_item = static_cast<std::size_t>(-1);
constexpr int all_done = 0;
constexpr int some_left = 10;

/// How one worker ended.
struct End {
  bool done = false;
  std::size_t busy_with = no_item;
  std::string reason;  ///< where it did not end by itself
  std::string error;   ///< what it threw
  Status status = Status::runtime;
};

/// The supervisor's side of one worker.
class Watch {
 public:
  Watch(pid_t child, int descriptor, std::vector<ItemReport>& reports,
        const std::function<void(std::size_t)>& show)
      : child_(child), descriptor_(descriptor), reports_(reports), show_(show) {}

  End until_the_end(std::chrono::milliseconds patience) {
    while (true) {
      pollfd waiting{.fd = descriptor_, .events = POLLIN, .revents = 0};
      const int ready =
          ::poll(&waiting, 1, end_.busy_with == no_item ? -1 : static_cast<int>(patience.count()));
      if (ready < 0 && errno == EINTR) continue;
      if (ready == 0) {
        ::kill(child_, SIGKILL);
        end_.reason = fmt::format("hung: no end after {} ms", patience.count());
        break;
      }
      char bytes[4096];
      const ssize_t count = ::read(descriptor_, bytes, sizeof(bytes));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) break;
      take({bytes, static_cast<std::size_t>(count)});
    }
    int status = 0;
    while (::waitpid(child_, &status, 0) < 0 && errno == EINTR) {
    }
    if (!end_.reason.empty()) return end_;
    if (WIFSIGNALED(status)) {
      end_.reason = fmt::format("ended its process: {}", ::strsignal(WTERMSIG(status)));
    } else if (WEXITSTATUS(status) != all_done && WEXITSTATUS(status) != some_left) {
      end_.reason = fmt::format("ended its process with exit code {}", WEXITSTATUS(status));
    }
    end_.done = end_.reason.empty() && WEXITSTATUS(status) == all_done;
    return end_;
  }

 private:
  void take(std::string_view bytes) {
    pending_ += bytes;
    for (std::size_t line = pending_.find('\n'); line != std::string::npos; line = pending_.find('\n')) {
      const Json message = Json::parse(pending_.substr(0, line));
      pending_.erase(0, line + 1);
      if (message.contains("error")) {
        end_.error = message["error"];
        end_.status = static_cast<Status>(message["status"].get<int>());
        continue;
      }
      const std::size_t item = message["item"];
      if (message.contains("facts")) reports_.at(item).facts.update(message["facts"]);
      if (message.contains("failure")) reports_.at(item).failure = message["failure"];
      if (message.contains("begin")) {
        end_.busy_with = item;
        show_(item);
      }
    }
  }

  pid_t child_;
  int descriptor_;
  std::vector<ItemReport>& reports_;
  const std::function<void(std::size_t)>& show_;
  std::string pending_;
  End end_;
};

[[noreturn]] void no_worker(const char* call) {
  throw Error(Status::runtime,
              fmt::format("the process that drives the GPU cannot be started: {}: {}; end other "
                          "processes, or raise this one's limits (ulimit -a)",
                          call, std::strerror(errno)));
}

[[noreturn]] void work(int descriptor, const std::vector<ItemReport>& reports,
                       const std::function<bool(const std::vector<ItemReport>&, const Reporter&)>& worker) {
  const Reporter reporter(descriptor);
  int code = some_left;
  try {
    if (worker(reports, reporter)) code = all_done;
  } catch (const Error& e) {
    reporter.error(e.what(), static_cast<int>(e.status()));
  } catch (const std::exception& e) {
    reporter.error(e.what(), static_cast<int>(Status::runtime));
  }
  // Without destructors: those of a damaged GPU context may wait for ever.
  std::_Exit(code);
}

}  // namespace

void Reporter::send(const Json& message) const {
  const std::string line = message.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  for (std::size_t at = 0; at < line.size();) {
    const ssize_t count = ::write(descriptor_, line.data() + at, line.size() - at);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0)
      throw Error(Status::runtime, fmt::format("the supervisor is gone: {}", std::strerror(errno)));
    at += static_cast<std::size_t>(count);
  }
}

void Reporter::begin(std::size_t item) const {
  send({{"item", item}, {"begin", true}});
}

void Reporter::facts(std::size_t item, const Json& facts) const {
  send({{"item", item}, {"facts", facts}});
}

void Reporter::failure(std::size_t item, const std::string& why) const {
  send({{"item", item}, {"failure", why}});
}

void Reporter::error(const std::string& text, int status) const {
  send({{"error", text}, {"status", status}});
}

std::vector<ItemReport> supervise(
    std::size_t items, std::chrono::milliseconds patience,
    const std::function<bool(const std::vector<ItemReport>&, const Reporter&)>& worker,
    const std::function<void(std::size_t)>& show) {
  std::vector<ItemReport> reports(items);
  const auto failures = [&] {
    return std::ranges::count_if(reports, [](const ItemReport& r) { return !r.failure.empty(); });
  };
  while (true) {
    const auto failed_before = failures();
    int ends[2] = {};
    if (::pipe(ends) != 0) no_worker("pipe");
    std::fflush(nullptr);  // what is buffered must not be printed twice
    const pid_t child = ::fork();
    if (child < 0) no_worker("fork");
    if (child == 0) {
      ::close(ends[0]);
      work(ends[1], reports, worker);
    }
    ::close(ends[1]);
    const End end = Watch(child, ends[0], reports, show).until_the_end(patience);
    ::close(ends[0]);
    if (end.done) return reports;
    if (!end.reason.empty() && end.busy_with != no_item) reports[end.busy_with].failure = end.reason;
    if (!end.error.empty() && end.busy_with != no_item) reports[end.busy_with].failure = end.error;
    if (failures() == failed_before) {
      throw Error(end.status, !end.error.empty()    ? end.error
                              : !end.reason.empty() ? "a worker " + end.reason
                                                    : "two workers came no further");
    }
  }
}

}  // namespace tandem::cli
