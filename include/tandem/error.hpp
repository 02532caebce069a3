// Errors. Every failure of the library is one of these exceptions, raised before anything is written; an
// interruption alone comes later.
#pragma once

#include <stdexcept>
#include <string>

#include "tandem/export.h"

namespace tandem {

/// What kind of failure an Error is. The values are the status codes of the C interface.
enum class Status : int {
  ok = 0,
  invalid_argument = 1,  ///< an argument breaks a rule; the message names rule, value and remedy
  unsupported = 2,       ///< a legal wish that no backend here can meet; never a silent fallback
  out_of_memory = 3,     ///< host or device memory is exhausted
  runtime = 4,           ///< the driver, the compiler or the operating system failed
  internal = 5,          ///< a bug in Tandem
  interrupted = 6,       ///< Execution::interrupted ended the call; its outputs hold anything
};

/// An error with its status. `what()` states the rule, the value that broke it and what to do.
class TANDEM_API Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  [[nodiscard]] Status status() const noexcept { return status_; }

 private:
  Status status_;
};

}  // namespace tandem
