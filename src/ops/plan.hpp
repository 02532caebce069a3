// Problem + device -> Plan: which backend, which kernels and Configs, on what grids, how much workspace, and
// why.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "cpu/cpu.hpp"
#include "gpu/steps.hpp"
#include "plan/facts.hpp"
#include "problem/problem.hpp"

namespace tandem {

/// A call, decided. Nothing below looks at the problem to choose again.
struct Plan {
  /// Not in the header, where the compiler would clear all memory of functions, 200 KB: 3 us.
  Plan();

  Device::Kind backend = Device::Kind::cpu;
  std::optional<cpu::Plan> cpu;    ///< given if backend is cpu
  std::optional<gpu::Steps> gpu;   ///< given if it is cuda, and so are
  std::optional<CallFacts> facts;  ///< those that it was made from
  std::size_t workspace_bytes = 0;
};

/// Throws Error (unsupported) where no backend can run the problem, naming the wish and what to do.
/// Allocates nothing.
Plan make_plan(const Problem& problem, const Execution& execution);

/// Why a plan is as it is, for explain: one sentence a choice, "block_q 64: ...".
std::vector<std::string> reasons(const Problem& problem, const Plan& plan, const Execution& execution);

}  // namespace tandem
