// That the contract's tests can fail: each is run on the fp64 oracle, which it has to accept, and on the same
// with a fault, which it has to notice. The program runs itself, with the runner's name in the environment.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "contract/faulty_oracle.hpp"

namespace tandem::harness {
namespace {

constexpr const char* variable = "TANDEM_FAULTY_ORACLE";
constexpr Fault none{.name = "none", .caught_by = ""};

const std::vector<Fault>& all_faults() {
  static const std::vector<Fault> all = [] {
    std::vector<Fault> found(faults().begin(), faults().end());
    for (const std::span<const Fault> more : {faults_in_8_bits(), faults_of_gates()})
      found.insert(found.end(), more.begin(), more.end());
    return found;
  }();
  return all;
}

/// The exit status of these tests (a filter of GoogleTest) on the oracle with a fault: 0 if they pass, 1 if
/// some failed. Anything else is neither.
int status_of(const Fault& fault, const std::string& tests) {
  const pid_t child = fork();
  if (child == 0) {
    const int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDOUT_FILENO);
    dup2(nowhere, STDERR_FILENO);
    setenv(variable, fault.name, 1);
    for (const char* name : {"GTEST_OUTPUT", "GTEST_TOTAL_SHARDS"}) unsetenv(name);
    const std::string filter = "--gtest_filter=" + tests;
    execl("/proc/self/exe", "contract_faults_tests", filter.c_str(), nullptr);
    _exit(127);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class SuiteCanFail : public testing::TestWithParam<Fault> {};

TEST_P(SuiteCanFail, NoticesTheFault) {
  EXPECT_EQ(status_of(GetParam(), GetParam().caught_by), 1) << GetParam().caught_by << " passes";
}

INSTANTIATE_TEST_SUITE_P(Of, SuiteCanFail, testing::ValuesIn(all_faults()),
                         [](const auto& at) { return std::string(at.param.name); });

/// And every test that has to notice one is there, and passes without.
TEST(SuiteCanPass, OnTheOracle) {
  std::set<std::string> tests;
  for (const Fault& fault : all_faults()) tests.insert(fault.caught_by);
  for (const std::string& test : tests) {
    const testing::UnitTest& all = *testing::UnitTest::GetInstance();
    bool known = false;
    for (int suite = 0; suite < all.total_test_suite_count(); ++suite) {
      const testing::TestSuite& tests_of = *all.GetTestSuite(suite);
      for (int n = 0; n < tests_of.total_test_count(); ++n) {
        known = known || test == std::string(tests_of.name()) + "." + tests_of.GetTestInfo(n)->name();
      }
    }
    EXPECT_TRUE(known) << test << " is no test";
    EXPECT_EQ(status_of(none, test), 0) << test;
  }
}

}  // namespace
}  // namespace tandem::harness

int main(int argc, char** argv) {
  using namespace tandem::harness;
  testing::InitGoogleTest(&argc, argv);
  std::unique_ptr<FaultyOracle> oracle;
  if (const char* name = std::getenv(variable)) {
    const auto fault = std::ranges::find(all_faults(), std::string(name), &Fault::name);
    oracle = std::make_unique<FaultyOracle>(fault != all_faults().end() ? *fault : none);
    use_only(*oracle);
  } else if (testing::GTEST_FLAG(filter) == "*") {
    testing::GTEST_FLAG(filter) = "*SuiteCan*";
  }
  return RUN_ALL_TESTS();
}
