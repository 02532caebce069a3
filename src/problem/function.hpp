// Functions of the user's own, between the builder (function.cpp), their derivative and their text.
#pragma once

#include <string_view>

#include "tandem/function.hpp"

namespace tandem {

/// What is known of an operation: its name in text, its arguments, and which types it takes.
struct FunctionOpInfo {
  FunctionOp op;
  std::string_view name;
  int arguments;
  /// any: booleans become integers; real: all become reals; integer: reals are an error; logic: two booleans
  /// stay booleans, else as integer; compare: any, and the result is a boolean.
  enum class Takes { nothing, any, real, integer, logic, compare, special } takes;
  FunctionType leaf = FunctionType::integer;  ///< the type of a leaf
};

const FunctionOpInfo& info_of(FunctionOp op);
/// Null if there is none of that name.
const FunctionOpInfo* op_named(std::string_view name);

/// "boolean", "integer", "real".
const char* name_of(FunctionType type);

/// Adds the nodes of d(y) / d(score) to y's builder.
Expression derivative_by_score(Expression y);
/// Likewise of d(y) / d(node): its number, or -1 where y does not depend on that node.
std::int16_t derivative_by_node(Expression y, std::int16_t node);

}  // namespace tandem
