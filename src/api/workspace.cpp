#include "api/workspace.hpp"

#include <cstdint>

#include "api/check.hpp"

namespace tandem {

void check_workspace(const Execution& execution, std::size_t needed) {
  const auto address = reinterpret_cast<std::uintptr_t>(execution.workspace);
  if (address % workspace_alignment != 0) {
    check::invalid("workspace is at address {:#x}; it must be a multiple of {}", address,
                   workspace_alignment);
  }
  if (execution.workspace_bytes < needed) {
    check::invalid(
        "workspace has {} bytes but this call needs {}; ask workspace_bytes() with the same arguments",
        execution.workspace_bytes, needed);
  }
}

Workspace::Workspace(const Execution& execution, std::size_t needed) {
  if (execution.workspace != nullptr) {
    check_workspace(execution, needed);
    memory_ = {static_cast<std::byte*>(execution.workspace), execution.workspace_bytes};
    return;
  }
  if (needed == 0) return;
  owned_.reset(new (std::align_val_t{workspace_alignment}, std::nothrow) std::byte[needed]);
  if (owned_ == nullptr) {
    fail(Status::out_of_memory,
         "cannot allocate {} bytes of workspace; use fewer threads, or pass a workspace", needed);
  }
  memory_ = {owned_.get(), needed};
}

}  // namespace tandem
