// One way in which arguments can be wrong, and the whole message that says so.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <iterator>
#include <ostream>
#include <string>

#include "api/make_problem.hpp"
#include "arguments.hpp"
#include "harness/error_of.hpp"
#include "problem/problem.hpp"

namespace tandem::test {

template <typename Args>
struct Case {
  const char* name;
  Args (*legal)();
  std::function<void(Args&)> break_it;
  const char* message;

  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};

/// Breaks arguments by another value of one of them.
template <typename Owner, typename Member, typename Value>
auto set(Member Owner::*member, const Value& value) {
  return [member, value](Owner& args) { args.*member = value; };
}

/// Integers that live as long as the program; 64 bits wide if the first is.
template <auto first, auto... rest>
ConstTensor integers() {
  static const std::array<decltype(first), 1 + sizeof...(rest)> kept{first, rest...};
  return {kept.data(), sizeof(first) == 8 ? DType::i64 : DType::i32, {std::ssize(kept)}};
}

template <typename Args, typename Call>
void expect_message(const Case<Args>& c, const Call& call) {
  Args args = c.legal();
  ASSERT_NO_THROW(call(args)) << "the arguments are wrong before they are broken";
  c.break_it(args);
  EXPECT_EQ(error_of(Status::invalid_argument, [&] { call(args); }), c.message);
}
template <typename Args>
void expect_message(const Case<Args>& c) {
  expect_message(c, [](const Args& args) { make_problem(args); });
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
