#include "cpu/reference/function.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "cpu/reference/reference.hpp"

namespace tandem::reference {
namespace {

Dual choose(bool first, const Dual& a, const Dual& b) {
  return first ? a : b;
}
double truth(bool x) {
  return x ? -1.0 : 0.0;
}
std::int64_t integer(const Dual& x) {
  return static_cast<std::int64_t>(x.value);
}
/// Towards 0, to the nearest that 64 bits hold.
std::int64_t to_wide(double x) {
  constexpr double beyond = 0x1p63;
  if (std::isnan(x)) return 0;
  return x >= beyond ? INT64_MAX : x < -beyond ? INT64_MIN : static_cast<std::int64_t>(x);
}
/// 32 bits that wrap.
double wrapped(std::int64_t x) {
  return static_cast<double>(static_cast<std::int32_t>(static_cast<std::uint32_t>(x)));
}

double floor_quotient(std::int64_t a, std::int64_t b) {
  if (b == 0) return 0.0;
  return wrapped(a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0));
}

/// In 64 bits that wrap.
std::int64_t wide_value(FunctionOp op, std::int64_t a, std::int64_t b) {
  const auto x = static_cast<std::uint64_t>(a);
  const auto y = static_cast<std::uint64_t>(b);
  const bool overflows = b == 0 || b == -1;  // or divides by 0
  switch (op) {
    case FunctionOp::add: return static_cast<std::int64_t>(x + y);
    case FunctionOp::subtract: return static_cast<std::int64_t>(x - y);
    case FunctionOp::multiply: return static_cast<std::int64_t>(x * y);
    case FunctionOp::floor_divide:
      if (overflows) return b == 0 ? 0 : static_cast<std::int64_t>(0 - x);
      return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
    case FunctionOp::remainder:
      if (overflows) return 0;
      return a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0);
    case FunctionOp::negate: return static_cast<std::int64_t>(0 - x);
    case FunctionOp::absolute: return a < 0 ? static_cast<std::int64_t>(0 - x) : a;
    case FunctionOp::minimum: return std::min(a, b);
    case FunctionOp::maximum: return std::max(a, b);
    case FunctionOp::bit_and: return a & b;
    case FunctionOp::bit_or: return a | b;
    case FunctionOp::bit_xor: return a ^ b;
    case FunctionOp::bit_not: return ~a;
    default: throw Error(Status::internal, "the reference does not know an operation of a function");
  }
}

/// Compares integers or reals.
template <typename T>
double compared(FunctionOp op, T a, T b) {
  switch (op) {
    case FunctionOp::less: return truth(a < b);
    case FunctionOp::less_equal: return truth(a <= b);
    case FunctionOp::equal: return truth(a == b);
    default: return truth(a != b);
  }
}

Dual integer_node(const FunctionNode& node, const Dual& x, const Dual& y) {
  const std::int64_t a = integer(x);
  const std::int64_t b = integer(y);
  switch (node.op) {
    case FunctionOp::add: return {wrapped(a + b)};
    case FunctionOp::subtract: return {wrapped(a - b)};
    case FunctionOp::multiply: return {wrapped(a * b)};
    case FunctionOp::floor_divide: return {floor_quotient(a, b)};
    case FunctionOp::remainder:
      return {b == 0 ? 0.0 : static_cast<double>(a) - std::floor(x.value / y.value) * y.value};
    case FunctionOp::negate: return {wrapped(-a)};
    case FunctionOp::absolute: return {wrapped(a < 0 ? -a : a)};
    case FunctionOp::minimum: return {static_cast<double>(std::min(a, b))};
    case FunctionOp::maximum: return {static_cast<double>(std::max(a, b))};
    case FunctionOp::bit_and: return {static_cast<double>(a & b)};
    case FunctionOp::bit_or: return {static_cast<double>(a | b)};
    case FunctionOp::bit_xor: return {static_cast<double>(a ^ b)};
    case FunctionOp::bit_not: return {static_cast<double>(~a)};
    default: throw Error(Status::internal, "the reference does not know an operation of a function");
  }
}

Dual real_node(const FunctionNode& node, const Dual& a, const Dual& b) {
  switch (node.op) {
    case FunctionOp::add: return {a.value + b.value, a.slope + b.slope};
    case FunctionOp::subtract: return {a.value - b.value, a.slope - b.slope};
    case FunctionOp::multiply: return {a.value * b.value, a.slope * b.value + a.value * b.slope};
    case FunctionOp::divide: {
      const double y = a.value / b.value;
      return {y, (a.slope - y * b.slope) / b.value};
    }
    case FunctionOp::negate: return {-a.value, -a.slope};
    case FunctionOp::absolute: return {std::abs(a.value), a.value < 0.0 ? -a.slope : a.slope};
    case FunctionOp::minimum:
    case FunctionOp::maximum: {
      if (std::isnan(a.value) || std::isnan(b.value)) return {a.value + b.value, a.slope};
      return choose(node.op == FunctionOp::minimum ? !(b.value < a.value) : !(a.value < b.value), a, b);
    }
    case FunctionOp::exp: return {std::exp(a.value), std::exp(a.value) * a.slope};
    case FunctionOp::log: return {std::log(a.value), a.slope / a.value};
    case FunctionOp::sqrt: return {std::sqrt(a.value), 0.5 * a.slope / std::sqrt(a.value)};
    case FunctionOp::tanh: {
      const double y = std::tanh(a.value);
      return {y, (1.0 - y * y) * a.slope};
    }
    case FunctionOp::sigmoid: {
      const double y = 1.0 / (1.0 + std::exp(-a.value));
      return {y, y * (1.0 - y) * a.slope};
    }
    case FunctionOp::sine: return {std::sin(a.value), std::cos(a.value) * a.slope};
    case FunctionOp::cosine: return {std::cos(a.value), -std::sin(a.value) * a.slope};
    case FunctionOp::erf:
      return {std::erf(a.value), 2.0 * std::numbers::inv_sqrtpi * std::exp(-a.value * a.value) * a.slope};
    case FunctionOp::log2: return {std::log2(a.value), a.slope / (a.value * std::numbers::ln2)};
    case FunctionOp::log1p: return {std::log1p(a.value), a.slope / (1.0 + a.value)};
    case FunctionOp::floor: return {std::floor(a.value)};
    case FunctionOp::round: return {std::nearbyint(a.value)};
    case FunctionOp::fmod:
      return {std::fmod(a.value, b.value), a.slope - std::trunc(a.value / b.value) * b.slope};
    case FunctionOp::stop: return {a.value};
    default: throw Error(Status::internal, "the reference does not know an operation of a function");
  }
}

}  // namespace

FunctionValue::FunctionValue(const Function& f, std::int16_t wanted)
    : f_(f), wanted_(static_cast<std::size_t>(wanted)), last_{.batch = -1}, values_(f.nodes().size()) {
  for (const FunctionNode& node : f.nodes()) {
    bool of_key = node.op == FunctionOp::key || node.op == FunctionOp::score;
    for (const std::int16_t argument : node.args) {
      of_key = of_key || (argument >= 0 && of_key_[static_cast<std::size_t>(argument)]);
    }
    of_key_.push_back(of_key);
  }
}

Dual FunctionValue::read(const FunctionNode& node) const {
  const ConstTensor& t = f_.captured()[static_cast<std::size_t>(node.captured)];
  std::int64_t offset = 0;
  for (std::size_t d = 0; d < static_cast<std::size_t>(t.rank); ++d) offset += index(node, d) * t.stride[d];
  if (t.dtype == DType::i64) return {.wide = static_cast<const std::int64_t*>(t.data)[offset]};
  return {stored_value(t.data, t.dtype, offset)};
}

std::int64_t FunctionValue::index(const FunctionNode& node, std::size_t dim) const {
  const std::int64_t size = f_.captured()[static_cast<std::size_t>(node.captured)].shape[dim];
  const std::int64_t i = integer(values_[static_cast<std::size_t>(node.args[dim])]);
  return std::clamp<std::int64_t>(i < 0 ? i + size : i, 0, size - 1);
}

std::int64_t FunctionValue::element(std::int16_t read) const {
  const FunctionNode& node = f_.nodes()[static_cast<std::size_t>(read)];
  const ConstTensor& t = f_.captured()[static_cast<std::size_t>(node.captured)];
  std::int64_t element = 0;
  for (std::size_t d = 0; d < static_cast<std::size_t>(t.rank); ++d) {
    element = element * t.shape[d] + index(node, d);
  }
  return element;
}

Dual FunctionValue::node(const FunctionNode& node, const Pair& pair) const {
  const auto argument = [&](std::size_t n) {
    return node.args[n] >= 0 ? values_[static_cast<std::size_t>(node.args[n])] : Dual{};
  };
  const auto index = [](std::int64_t i) { return Dual{static_cast<double>(i)}; };
  const Dual a = argument(0);
  const Dual b = argument(1);
  const FunctionType from =
      node.args[0] >= 0 ? f_.nodes()[static_cast<std::size_t>(node.args[0])].type : node.type;
  const bool of_wide = from == FunctionType::wide;
  switch (node.op) {
    case FunctionOp::constant:
      return {node.value, 0.0, node.type == FunctionType::wide ? static_cast<std::int64_t>(node.value) : 0};
    case FunctionOp::score: return {pair.score, by_ < 0 ? 1.0 : 0.0};
    case FunctionOp::batch: return index(pair.batch);
    case FunctionOp::head: return index(pair.head);
    case FunctionOp::query: return index(pair.query);
    case FunctionOp::key: return index(pair.key);
    case FunctionOp::seqlen_q: return index(pair.seqlen_q);
    case FunctionOp::seqlen_k: return index(pair.seqlen_k);
    case FunctionOp::read: return read(node);
    case FunctionOp::to_real:
      if (of_wide) return {static_cast<double>(a.wide)};
      return {from == FunctionType::boolean ? -a.value : a.value};
    case FunctionOp::to_integer:
      if (of_wide) return {wrapped(a.wide)};
      return {from == FunctionType::boolean ? -a.value : std::trunc(a.value)};
    case FunctionOp::to_wide: return {.wide = from == FunctionType::boolean ? -integer(a) : to_wide(a.value)};
    case FunctionOp::to_boolean: return {truth(of_wide ? a.wide != 0 : a.value != 0.0)};
    case FunctionOp::less:
    case FunctionOp::less_equal:
    case FunctionOp::equal:
    case FunctionOp::not_equal:
      return {of_wide ? compared(node.op, a.wide, b.wide) : compared(node.op, a.value, b.value)};
    case FunctionOp::select: return choose(a.value != 0.0, b, argument(2));
    default:
      if (node.type == FunctionType::wide) return {.wide = wide_value(node.op, a.wide, b.wide)};
      return node.type == FunctionType::real ? real_node(node, a, b) : integer_node(node, a, b);
  }
}

Dual FunctionValue::at(const Pair& pair) {
  // From key to key of a row, what depends on neither key nor score stays.
  const bool same_row = by_ == last_by_ && pair.batch == last_.batch && pair.head == last_.head &&
                        pair.query == last_.query && pair.seqlen_q == last_.seqlen_q &&
                        pair.seqlen_k == last_.seqlen_k;
  for (std::size_t n = 0; n <= wanted_; ++n) {
    if (same_row && !of_key_[n]) continue;
    values_[n] = node(f_.nodes()[n], pair);
    if (by_ >= 0 && n == static_cast<std::size_t>(by_)) values_[n].slope = 1.0;
  }
  last_ = pair;
  last_by_ = by_;
  return values_[wanted_];
}

Dual FunctionValue::at(const Pair& pair, std::int16_t read) {
  by_ = read;
  const Dual value = at(pair);
  by_ = -1;
  return value;
}

}  // namespace tandem::reference
