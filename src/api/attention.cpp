// The public functions: arguments -> Problem -> Plan -> backend.
#include "tandem/attention.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>

#include "api/call.hpp"
#include "api/check.hpp"
#include "api/explain.hpp"
#include "api/trace.hpp"
#include "cpu/cpu.hpp"
#include "gpu/backward.hpp"
#include "gpu/eight_bit_forward.hpp"
#include "gpu/forward.hpp"
#include "gpu/mixed_forward.hpp"
#include "plan/plan.hpp"
#include "problem/effective.hpp"

namespace tandem {
namespace {

constexpr std::size_t workspace_alignment = 256;

struct Free {
  void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{workspace_alignment}); }
};

/// Throws where the memory passed as workspace cannot serve.
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

/// The caller's scratch memory in host memory, or, where none was passed, memory of its own.
class Workspace {
 public:
  Workspace(const Execution& execution, std::size_t needed) {
    if (execution.workspace != nullptr) {
      check_workspace(execution, needed);
      memory_ = {static_cast<std::byte*>(execution.workspace), execution.workspace_bytes};
      return;
    }
    if (needed == 0) return;
    owned_.reset(new (std::align_val_t{workspace_alignment}, std::nothrow) std::byte[needed]);
    if (owned_ == nullptr) {
      throw Error(Status::out_of_memory,
                  fmt::format("cannot allocate {} bytes of workspace; use fewer threads, or pass a workspace",
                              needed));
    }
    memory_ = {owned_.get(), needed};
  }
  [[nodiscard]] std::span<std::byte> memory() const { return memory_; }

 private:
  std::unique_ptr<std::byte[], Free> owned_;
  std::span<std::byte> memory_;
};

template <typename Args>
Call prepared(const Args& args, const Execution& execution, Memory memory) {
  Call call;
  call.problem = make_problem(args, memory);
  check::threads(execution.threads);
  if (execution.workspace == nullptr && execution.workspace_bytes > 0) {
    check::invalid("workspace is NULL but workspace_bytes is {}; pass the memory too, or 0 bytes",
                   execution.workspace_bytes);
  }
  call.plan = make_plan(call.problem, execution);
  return call;
}

void run_on_gpu(const Problem& problem, const Plan& plan, const Execution& execution) {
  if (execution.workspace != nullptr) check_workspace(execution, plan.workspace_bytes);
  if (problem.pass == Pass::backward) {
    gpu::backward(problem, plan.backward, execution.stream, execution.workspace);
  } else if (problem.mixed()) {
    gpu::mixed_forward(problem, plan.quantize, plan.forward, execution.stream, execution.workspace);
  } else if (problem.precision == Precision::exact) {
    gpu::forward(heads_as_rows(problem), plan.forward, execution.stream, execution.workspace);
  } else {
    gpu::eight_bit_forward(problem, plan.recipe, plan.quantize, plan.eight_bit, execution.stream,
                           execution.workspace);
  }
}

}  // namespace

Call prepare(const ForwardArgs& args, const Execution& execution, Memory memory) {
  return prepared(args, execution, memory);
}

Call prepare(const BackwardArgs& args, const Execution& execution, Memory memory) {
  return prepared(args, execution, memory);
}

void run(const Call& call, const Execution& execution) {
  const auto& [problem, plan] = call;
  const Trace trace(problem);
  if (plan.backend == Device::Kind::cuda) {
    run_on_gpu(problem, plan, execution);
    return;
  }
  const Workspace workspace(execution, plan.workspace_bytes);
  cpu::Stop stop(execution.interrupted, execution.interrupted_context);
  if (problem.pass == Pass::backward) {
    cpu::backward(problem, plan.cpu, workspace.memory(), &stop);
  } else {
    cpu::forward(problem, plan.cpu, workspace.memory(), &stop);
  }
  if (stop.heard()) {
    throw Error(Status::interrupted,
                "the call was interrupted; its outputs are incomplete: compute them again");
  }
}

void forward(const ForwardArgs& args, const Execution& execution) {
  run(prepare(args, execution, Memory::present), execution);
}

void backward(const BackwardArgs& args, const Execution& execution) {
  run(prepare(args, execution, Memory::present), execution);
}

std::size_t workspace_bytes(const ForwardArgs& args, const Execution& execution) {
  return prepare(args, execution, Memory::described).plan.workspace_bytes;
}

std::size_t workspace_bytes(const BackwardArgs& args, const Execution& execution) {
  return prepare(args, execution, Memory::described).plan.workspace_bytes;
}

std::string explain(const ForwardArgs& args, const Execution& execution) {
  const Call call = prepare(args, execution, Memory::described);
  return explain(call.problem, call.plan, execution);
}

std::string explain(const BackwardArgs& args, const Execution& execution) {
  const Call call = prepare(args, execution, Memory::described);
  return explain(call.problem, call.plan, execution);
}

const char* version() noexcept {
  return TANDEM_VERSION;
}

}  // namespace tandem
