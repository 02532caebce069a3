// Problem + device -> Plan: which backend, which kernel, which Config, how much workspace, and why.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cpu/cpu.hpp"
#include "kernels/config/backward.hpp"
#include "kernels/config/eight_bit.hpp"
#include "kernels/config/forward.hpp"
#include "kernels/config/quantize.hpp"
#include "problem/problem.hpp"

namespace tandem {

struct Plan {
  Device::Kind backend = Device::Kind::cpu;
  cpu::Config cpu;           ///< read if backend is cpu
  ForwardConfig forward;     ///< read if backend is cuda, of a forward problem
  EightBitConfig eight_bit;  ///< in its place where the problem has a precision, and the recipe
  QuantizeConfig quantize;   ///< what makes its codes, or the 16-bit k and v of a mixed problem
  Recipe recipe;
  BackwardConfig backward;  ///< and of a backward one
  std::size_t workspace_bytes = 0;
};

/// Throws Error (unsupported) where no backend can run the problem, naming the wish and what to do.
/// Allocates nothing.
Plan make_plan(const Problem& problem, const Execution& execution);

/// Why a plan is as it is, for explain: one sentence a choice, "block_q 64: ...".
std::vector<std::string> reasons(const Problem& problem, const Plan& plan, const Execution& execution);

}  // namespace tandem
