// One way in which the arguments of a function that plans nothing can be wrong, and the whole message.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>

namespace tandem::test {

template <typename Args>
struct CallCase {
  const char* name;
  Args (*legal)();
  void (*break_it)(Args&);
  const char* message;

  friend void PrintTo(const CallCase& c, std::ostream* out) { *out << c.name; }
};

template <typename Args>
std::string name_of_case(const testing::TestParamInfo<CallCase<Args>>& info) {
  return info.param.name;
}

}  // namespace tandem::test
