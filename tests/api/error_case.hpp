// One way in which arguments can be wrong, and the whole message that says so.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "api/make_problem.hpp"
#include "arguments.hpp"
#include "problem/problem.hpp"

namespace tandem::test {

template <typename Args>
struct Case {
  const char* name;
  Args (*legal)();
  void (*break_it)(Args&);
  const char* message;

  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};

template <typename Args>
void expect_message(const Case<Args>& c) {
  Args args = c.legal();
  ASSERT_NO_THROW(make_problem(args)) << "the arguments are wrong before they are broken";
  c.break_it(args);
  try {
    make_problem(args);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::invalid_argument);
    EXPECT_STREQ(e.what(), c.message);
  }
}

template <typename Args>
std::string case_name(const testing::TestParamInfo<Case<Args>>& info) {
  return info.param.name;
}

inline Tensor on_gpu(Tensor t, int index) {
  t.device = {.kind = Device::Kind::cuda, .index = index};
  return t;
}
inline ConstTensor on_gpu(ConstTensor t, int index) {
  t.device = {.kind = Device::Kind::cuda, .index = index};
  return t;
}

}  // namespace tandem::test
