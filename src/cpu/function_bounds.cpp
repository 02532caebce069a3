#include "cpu/function_bounds.hpp"

#include <algorithm>
#include <limits>

namespace tandem::cpu {
namespace {

constexpr Interval anything{.low = std::numeric_limits<std::int32_t>::min(),
                            .high = std::numeric_limits<std::int32_t>::max()};
// Booleans are 0 or -1.
constexpr Interval yes{.low = -1, .high = -1};
constexpr Interval no{.low = 0, .high = 0};
constexpr Interval maybe{.low = -1, .high = 0};

constexpr bool single(const Interval& x) {
  return x.low == x.high;
}

/// Integers have 32 bits: beyond them they wrap, to anything.
constexpr Interval fitted(std::int64_t low, std::int64_t high) {
  return low < anything.low || high > anything.high ? anything : Interval{.low = low, .high = high};
}

constexpr Interval known(bool is_true, bool is_false) {
  return is_true ? yes : (is_false ? no : maybe);
}

constexpr std::int64_t floor_quotient(std::int64_t a, std::int64_t b) {
  return a / b - (a % b != 0 && a < 0 ? 1 : 0);
}

Interval product(const Interval& a, const Interval& b) {
  const auto [low, high] = std::minmax({a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high});
  return fitted(low, high);
}

/// By a positive constant; anything else is not known.
Interval quotient(const Interval& a, const Interval& b) {
  if (!single(b) || b.low <= 0) return anything;
  return {.low = floor_quotient(a.low, b.low), .high = floor_quotient(a.high, b.low)};
}
Interval remainder(const Interval& a, const Interval& b) {
  if (!single(b) || b.low <= 0) return anything;
  const std::int64_t first = floor_quotient(a.low, b.low);
  if (first != floor_quotient(a.high, b.low)) return {.low = 0, .high = b.low - 1};
  return {.low = a.low - first * b.low, .high = a.high - first * b.low};
}

Interval magnitude(const Interval& a) {
  const std::int64_t low = std::max({std::int64_t{0}, a.low, -a.high});
  return fitted(low, std::max(-a.low, a.high));
}

/// Of booleans; the bits of other integers are not followed.
Interval logic(FunctionOp op, FunctionType type, const Interval& a, const Interval& b) {
  if (type != FunctionType::boolean) return anything;
  if (op == FunctionOp::bit_not) return {.low = -1 - a.high, .high = -1 - a.low};
  // True is the lower one.
  if (op == FunctionOp::bit_and) return {.low = std::max(a.low, b.low), .high = std::max(a.high, b.high)};
  if (op == FunctionOp::bit_or) return {.low = std::min(a.low, b.low), .high = std::min(a.high, b.high)};
  return single(a) && single(b) ? known(a.low != b.low, a.low == b.low) : maybe;
}

Interval compared(FunctionOp op, const Interval& a, const Interval& b) {
  switch (op) {
    case FunctionOp::less: return known(a.high < b.low, a.low >= b.high);
    case FunctionOp::less_equal: return known(a.high <= b.low, a.low > b.high);
    case FunctionOp::equal:
      return known(single(a) && single(b) && a.low == b.low, a.high < b.low || b.high < a.low);
    default: return known(a.high < b.low || b.high < a.low, single(a) && single(b) && a.low == b.low);
  }
}

Interval chosen(const Interval& condition, const Interval& a, const Interval& b) {
  if (single(condition)) return condition.low != 0 ? a : b;
  return {.low = std::min(a.low, b.low), .high = std::max(a.high, b.high)};
}

Interval leaf(const ProgramStep& step, const PairRange& range) {
  const auto one = [](std::int64_t x) { return Interval{.low = x, .high = x}; };
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
    case FunctionOp::add: return fitted(a.low + b.low, a.high + b.high);
    case FunctionOp::subtract: return fitted(a.low - b.high, a.high - b.low);
    case FunctionOp::multiply: return product(a, b);
    case FunctionOp::floor_divide: return quotient(a, b);
    case FunctionOp::remainder: return remainder(a, b);
    case FunctionOp::negate: return fitted(-a.high, -a.low);
    case FunctionOp::absolute: return magnitude(a);
    case FunctionOp::minimum: return {.low = std::min(a.low, b.low), .high = std::min(a.high, b.high)};
    case FunctionOp::maximum: return {.low = std::max(a.low, b.low), .high = std::max(a.high, b.high)};
    case FunctionOp::to_integer: return {.low = -a.high, .high = -a.low};  // of a boolean
    case FunctionOp::to_boolean: return known(a.low > 0 || a.high < 0, a.low == 0 && a.high == 0);
    case FunctionOp::less:
    case FunctionOp::less_equal:
    case FunctionOp::equal:
    case FunctionOp::not_equal: return compared(step.op, a, b);
    case FunctionOp::bit_and:
    case FunctionOp::bit_or:
    case FunctionOp::bit_xor:
    case FunctionOp::bit_not: return logic(step.op, step.type, a, b);
    case FunctionOp::select: return chosen(a, b, c);
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
  return !single(result) ? Visible::some : (result.low != 0 ? Visible::all : Visible::none);
}

}  // namespace tandem::cpu
