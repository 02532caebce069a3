// What a call throws.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "tandem/error.hpp"

namespace tandem {

/// The message of the Error that `call` ends in, which is to have this status; "" if it ends in none.
template <typename Call>
std::string error_of(Status status, const Call& call) {
  try {
    static_cast<void>(call());
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), status) << e.what();
    return e.what();
  }
  return "";
}

}  // namespace tandem
