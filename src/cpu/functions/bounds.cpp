#include "cpu/functions/bounds.hpp"

#include <algorithm>
#include <cstddef>
#include <memory>

namespace tandem::cpu {
namespace {

using interval::anything;
using interval::everything;
using interval::maybe;
using interval::one;

/// What nothing is known of: real numbers, and most that is read.
Interval unknown(FunctionType type) {
  switch (type) {
    case FunctionType::boolean: return maybe;
    case FunctionType::wide: return everything;
    default: return anything;
  }
}

/// Operations on booleans; the bits of other integers are not followed.
Interval logic(FunctionOp op, FunctionType type, const Interval& a, const Interval& b) {
  if (type != FunctionType::boolean) return unknown(type);
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

/// The elements of integers that an index in this range reads, as the kernels clamp it: those from the end
/// count from -1. False where it has both signs.
bool clamp(Interval& index, std::int64_t size) {
  if (size < 1 || (index.low < 0 && index.high >= 0)) return false;
  const long long shift = index.low < 0 ? size : 0;
  const auto inside = [&](long long at) { return std::clamp<long long>(at + shift, 0, size - 1); };
  index = {.low = inside(index.low), .high = inside(index.high)};
  return true;
}

template <typename T>
Interval range_of(const T* data, std::int64_t count, std::int64_t stride) {
  T low = data[0];
  T high = data[0];
  for (std::int64_t i = 1; i < count; ++i) {
    low = std::min(low, data[i * stride]);
    high = std::max(high, data[i * stride]);
  }
  return {.low = low, .high = high};
}

/// Integers that are read by one index that varies, as numbers of documents are: the least and the largest of
/// them. Nothing is known of other reads, which would take as long as evaluating the mask.
Interval elements(const ProgramTensor& t, const ProgramStep& step, const Interval* values) {
  constexpr long long most = 512;
  std::int64_t offset = 0;
  std::int64_t count = 1;
  std::int64_t stride = 0;
  for (int d = 0; d < t.rank; ++d) {
    Interval index = values[step.args[d].step];
    if (!clamp(index, t.shape[d])) return unknown(step.type);
    offset += index.low * t.stride[d];
    if (index.single()) continue;
    if (count > 1 || index.high - index.low >= most) return unknown(step.type);
    count = index.high - index.low + 1;
    stride = t.stride[d];
  }
  switch (t.dtype) {
    case DType::i32: return range_of(static_cast<const std::int32_t*>(t.data) + offset, count, stride);
    case DType::i64: return range_of(static_cast<const std::int64_t*>(t.data) + offset, count, stride);
    case DType::s8: return range_of(static_cast<const std::int8_t*>(t.data) + offset, count, stride);
    default: return anything;
  }
}

/// Arithmetic on integers of 32 bits.
Interval arithmetic(const ProgramStep& step, const Interval& a, const Interval& b) {
  switch (step.op) {
    case FunctionOp::add: return interval::sum(a, b);
    case FunctionOp::subtract: return interval::difference(a, b);
    case FunctionOp::multiply: return interval::product(a, b);
    case FunctionOp::floor_divide: return interval::quotient(a, b);
    case FunctionOp::remainder: return interval::remainder(a, b);
    case FunctionOp::negate: return interval::negative(a);
    case FunctionOp::absolute: return interval::magnitude(a);
    default: return unknown(step.type);
  }
}

Interval operation(const ProgramStep& step, const Interval& a, const Interval& b, const Interval& c) {
  switch (step.op) {
    case FunctionOp::minimum: return interval::minimum(a, b);
    case FunctionOp::maximum: return interval::maximum(a, b);
    case FunctionOp::to_integer:
    case FunctionOp::to_wide:
      if (step.from == FunctionType::boolean) return interval::from_boolean(a);
      return step.op == FunctionOp::to_wide ? a : interval::narrowed(a);
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
    default:
      if (step.type != FunctionType::wide) return arithmetic(step, a, b);
      return interval::of_wide(arithmetic(step, interval::narrowed(a), interval::narrowed(b)), a, b);
  }
}

/// What a step may be, out of those before it.
Interval value_of(const FunctionProgram& mask, const ProgramStep& step, const PairRange& range,
                  const Interval* values) {
  if (step.arguments == 0) return leaf(step, range);
  if (step.op == FunctionOp::read) return elements(mask.tensors[step.captured], step, values);
  if (step.type == FunctionType::real || step.from == FunctionType::real) return unknown(step.type);
  const auto argument = [&](int i) { return i < step.arguments ? values[step.args[i].step] : Interval{}; };
  return operation(step, argument(0), argument(1), argument(2));
}

}  // namespace

Visible visible_of(const FunctionProgram& mask, const PairRange& range) {
  // An array of Interval would be cleared first, all 8 KiB of it, which takes longer than most masks.
  alignas(Interval) std::byte memory[Function::max_nodes * sizeof(Interval)];
  auto* const values = reinterpret_cast<Interval*>(memory);
  for (int n = 0; n < mask.count; ++n) {
    std::construct_at(values + n, value_of(mask, mask.steps[n], range, values));
  }
  const Interval result = values[mask.value.step];
  return !result.single() ? Visible::some : (result.low != 0 ? Visible::all : Visible::none);
}

}  // namespace tandem::cpu
