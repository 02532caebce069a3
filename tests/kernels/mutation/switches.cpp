// Sets the switch that the environment names, and writes which switches each test comes to.
#include "switches.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string>

namespace tandem::mutation {

unsigned char reached[most_mutants] = {};
int active = 0;

namespace {

/// Before other static objects, which may run device code.
[[gnu::constructor(101)]] void choose() {
  if (const char* const number = std::getenv("TANDEM_MUTANT")) active = std::atoi(number);
}

/// A line for each test: its name, the seconds of the processor that it took, and the switches.
class Reached : public testing::EmptyTestEventListener {
 public:
  explicit Reached(const char* path) : file_(path) {}
  void OnTestStart(const testing::TestInfo& /*info*/) override {
    std::fill_n(reached, most_mutants, 0);
    started_ = std::clock();
  }
  void OnTestEnd(const testing::TestInfo& info) override {
    file_ << info.test_suite_name() << '.' << info.name() << ' '
          << static_cast<double>(std::clock() - started_) / CLOCKS_PER_SEC;
    for (int i = 0; i < most_mutants; ++i) {
      if (reached[i] != 0) file_ << ' ' << i;
    }
    file_ << std::endl;
  }

 private:
  std::ofstream file_;
  std::clock_t started_ = 0;
};

const bool listens = [] {
  if (const char* const path = std::getenv("TANDEM_MUTANTS_REACHED"))
    testing::UnitTest::GetInstance()->listeners().Append(new Reached(path));
  return true;
}();

}  // namespace
}  // namespace tandem::mutation
