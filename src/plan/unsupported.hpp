// The error of what a GPU's kernels cannot do.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "tandem/error.hpp"

namespace tandem {

template <typename... Args>
[[noreturn]] void unsupported(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(Status::unsupported, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace tandem
