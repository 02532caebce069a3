// From the arguments of a call to the Problem that everything below works on.
#pragma once

#include "problem/problem.hpp"

namespace tandem {

/// `described`: tensors may have shapes without data (explain, workspace_bytes), whose addresses in the
/// Problem must not be read.
enum class Memory { present, described };

/// Checks every argument against the contract and throws Error for the first rule broken.
Problem make_problem(const ForwardArgs& args, Memory memory = Memory::present);
Problem make_problem(const BackwardArgs& args, Memory memory = Memory::present);

}  // namespace tandem
