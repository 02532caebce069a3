// The scratch memory of a call in host memory.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <span>

#include "tandem/attention.hpp"

namespace tandem {

constexpr std::size_t workspace_alignment = 256;

/// Throws where the memory passed as workspace cannot serve.
void check_workspace(const Execution& execution, std::size_t needed);

/// The caller's scratch memory, or, where none was passed, memory of its own. None at all by default.
class Workspace {
 public:
  Workspace() = default;
  Workspace(const Execution& execution, std::size_t needed);
  [[nodiscard]] std::span<std::byte> memory() const { return memory_; }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{workspace_alignment}); }
  };
  std::unique_ptr<std::byte[], Free> owned_;
  std::span<std::byte> memory_;
};

}  // namespace tandem
