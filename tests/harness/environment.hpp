// An environment variable for a scope.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>

namespace tandem::harness {

/// Sets a variable, and at the end of the scope what it was before.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value, 1);
  }
  ~Environment() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

}  // namespace tandem::harness
