// make_problem with a choice: is the tensors' memory there to be read?
#pragma once

#include "api/problem.hpp"

namespace tandem {

/// `described`: tensors may have shapes without data (explain, workspace_bytes), whose addresses in the
/// Problem must not be read.
enum class Memory { present, described };

Problem make_problem(const ForwardArgs& args, Memory memory);
Problem make_problem(const BackwardArgs& args, Memory memory);

}  // namespace tandem
