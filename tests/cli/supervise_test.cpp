// A worker that dies, hangs or throws loses the item it was busy with, and no other.
#include "supervise.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>

#include "tandem/error.hpp"

namespace tandem::cli {
namespace {

using std::chrono::milliseconds;
using Worker = std::function<bool(const std::vector<ItemReport>&, const Reporter&)>;

std::vector<ItemReport> supervised(std::size_t items, const Worker& worker) {
  return supervise(items, milliseconds(300), worker, [](std::size_t) {});
}

TEST(Supervise, GivesUpWhatDiesHangsOrThrowsAndGoesOnWithTheRest) {
  const auto worker = [](const std::vector<ItemReport>& reports, const Reporter& reporter) {
    for (std::size_t i = 0; i < reports.size(); ++i) {
      if (!reports[i].failure.empty() || reports[i].facts.contains("square")) continue;
      reporter.begin(i);
      if (i == 1) ::raise(SIGKILL);
      if (i == 2) ::pause();
      if (i == 3) throw Error(Status::unsupported, "three is not to be had");
      if (i == 4) ::_exit(7);
      if (i == 5) {
        reporter.failure(i, "five is odd");
        return false;
      }
      reporter.facts(i, {{"square", i * i}});
    }
    return true;
  };
  const auto reports = supervised(7, worker);
  EXPECT_EQ(reports[0].facts["square"], 0);
  EXPECT_EQ(reports[0].failure, "");
  EXPECT_EQ(reports[1].failure, "ended its process: Killed");
  EXPECT_EQ(reports[2].failure, "hung: no end after 300 ms");
  EXPECT_EQ(reports[3].failure, "three is not to be had");
  EXPECT_EQ(reports[4].failure, "ended its process with exit code 7");
  EXPECT_EQ(reports[5].failure, "five is odd");
  EXPECT_EQ(reports[6].facts["square"], 36);
}

TEST(Supervise, HandsOnWhatIsThrownBeforeAnyItem) {
  try {
    supervised(1, [](const auto&, const Reporter&) -> bool { throw Error(Status::unsupported, "no GPU"); });
    FAIL() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "no GPU");
    EXPECT_EQ(e.status(), Status::unsupported);
  }
}

TEST(Supervise, DoesNotTryForEverWithoutProgress) {
  EXPECT_THROW(supervised(1, [](const auto&, const Reporter&) { return false; }), Error);
  EXPECT_THROW(supervised(1, [](const auto&, const Reporter&) -> bool { ::_exit(9); }), Error);
}

}  // namespace
}  // namespace tandem::cli
