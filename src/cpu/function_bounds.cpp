#include "cpu/function_bounds.hpp"

namespace tandem::cpu {
namespace {

using interval::anything;
using interval::maybe;
using interval::one;

/// Of booleans; the bits of other integers are not followed.
Interval logic(FunctionOp op, FunctionType type, const Interval& a, const Interval& b) {
  if (type != FunctionType::boolean) return anything;
  switch (op) {
    case FunctionOp::bit_not: return interval::opposite(a);
    case FunctionOp::bit_and: return interval::both(a, b);
    case FunctionOp::bit_or: return interval::either(a, b);
    default: return interval::differs(a, b);
  }
}

Interval leaf(const ProgramStep& step, const PairRange& range) {
  switch (step.op) {
    case FunctionOp::constant: return step.type == FunctionType::real ? anything : one(step.integer);
    case FunctionOp::batch: return one(range.batch);
    case FunctionOp::seqlen_q: return one(range.seqlen_q);
    case FunctionOp::seqlen_k: return one(range.seqlen_k);
    case FunctionOp::head: return range.head;
    case FunctionOp::query: return range.query;
    default: return range.key;
  }
}

/// What nothing is known of: real numbers, and what is read.
Interval unknown(FunctionType type) {
  return type == FunctionType::boolean ? maybe : anything;
}

Interval operation(const ProgramStep& step, const Interval& a, const Interval& b, const Interval& c) {
  switch (step.op) {
    case FunctionOp::add: return interval::sum(a, b);
    case FunctionOp::subtract: return interval::difference(a, b);
    case FunctionOp::multiply: return interval::product(a, b);
    case FunctionOp::floor_divide: return interval::quotient(a, b);
    case FunctionOp::remainder: return interval::remainder(a, b);
    case FunctionOp::negate: return interval::negative(a);
    case FunctionOp::absolute: return interval::magnitude(a);
    case FunctionOp::minimum: return interval::minimum(a, b);
    case FunctionOp::maximum: return interval::maximum(a, b);
    case FunctionOp::to_integer: return interval::from_boolean(a);
    case FunctionOp::to_boolean: return interval::to_boolean(a);
    case FunctionOp::less: return interval::less(a, b);
    case FunctionOp::less_equal: return interval::less_equal(a, b);
    case FunctionOp::equal: return interval::equal(a, b);
    case FunctionOp::not_equal: return interval::not_equal(a, b);
    case FunctionOp::bit_and:
    case FunctionOp::bit_or:
    case FunctionOp::bit_xor:
    case FunctionOp::bit_not: return logic(step.op, step.type, a, b);
    case FunctionOp::select: return interval::chosen(a, b, c);
    default: return unknown(step.type);
  }
}

}  // namespace

Visible visible_of(const FunctionProgram& mask, const PairRange& range) {
  Interval values[Function::max_nodes];
  for (int n = 0; n < mask.count; ++n) {
    const ProgramStep& step = mask.steps[n];
    if (step.arguments == 0) {
      values[n] = leaf(step, range);
      continue;
    }
    const auto argument = [&](int i) { return i < step.arguments ? values[step.args[i].step] : Interval{}; };
    const bool real = step.type == FunctionType::real || step.from == FunctionType::real;
    values[n] = real ? unknown(step.type) : operation(step, argument(0), argument(1), argument(2));
  }
  const Interval result = values[mask.value.step];
  return !result.single() ? Visible::some : (result.low != 0 ? Visible::all : Visible::none);
}

}  // namespace tandem::cpu
