// The error of what a GPU's kernels cannot do.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "problem/stats.hpp"
#include "tandem/attention.hpp"

/// Dtypes and precisions are written by their names.
template <typename T>
requires requires(T value) {
  tandem::name_of(value);
}
struct fmt::formatter<T> : fmt::formatter<fmt::string_view> {
  template <typename Context>
  auto format(T value, Context& context) const {
    return fmt::formatter<fmt::string_view>::format(tandem::name_of(value), context);
  }
};

namespace tandem {

template <typename... Args>
[[noreturn]] void unsupported(fmt::format_string<Args...> format, Args&&... args) {
  fail(Status::unsupported, format, std::forward<Args>(args)...);
}

}  // namespace tandem
