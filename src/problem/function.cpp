// Builds functions: types, promotion, and one node for every distinct value.
#include "problem/function.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <cmath>

#include "problem/stats.hpp"

namespace tandem {
namespace {

template <typename... Values>
[[noreturn]] void invalid(fmt::format_string<Values...> format, Values&&... values) {
  fail(Status::invalid_argument, format, std::forward<Values>(values)...);
}

using Takes = FunctionOpInfo::Takes;

constexpr FunctionOpInfo op_table[] = {
    {FunctionOp::constant, "", 0, Takes::special},
    {FunctionOp::score, "s", 0, Takes::nothing, FunctionType::real},
    {FunctionOp::batch, "b", 0, Takes::nothing},
    {FunctionOp::head, "h", 0, Takes::nothing},
    {FunctionOp::query, "q", 0, Takes::nothing},
    {FunctionOp::key, "k", 0, Takes::nothing},
    {FunctionOp::seqlen_q, "nq", 0, Takes::nothing},
    {FunctionOp::seqlen_k, "nk", 0, Takes::nothing},
    {FunctionOp::read, "", 0, Takes::special},
    {FunctionOp::to_real, "real", 1, Takes::special},
    {FunctionOp::to_integer, "int", 1, Takes::special},
    {FunctionOp::to_wide, "wide", 1, Takes::special},
    {FunctionOp::to_boolean, "bool", 1, Takes::special},
    {FunctionOp::add, "add", 2, Takes::any},
    {FunctionOp::subtract, "sub", 2, Takes::any},
    {FunctionOp::multiply, "mul", 2, Takes::any},
    {FunctionOp::divide, "div", 2, Takes::real},
    {FunctionOp::floor_divide, "floordiv", 2, Takes::integer},
    {FunctionOp::remainder, "mod", 2, Takes::integer},
    {FunctionOp::negate, "neg", 1, Takes::any},
    {FunctionOp::absolute, "abs", 1, Takes::any},
    {FunctionOp::minimum, "min", 2, Takes::any},
    {FunctionOp::maximum, "max", 2, Takes::any},
    {FunctionOp::exp, "exp", 1, Takes::real},
    {FunctionOp::log, "log", 1, Takes::real},
    {FunctionOp::sqrt, "sqrt", 1, Takes::real},
    {FunctionOp::tanh, "tanh", 1, Takes::real},
    {FunctionOp::sigmoid, "sigmoid", 1, Takes::real},
    {FunctionOp::sine, "sin", 1, Takes::real},
    {FunctionOp::cosine, "cos", 1, Takes::real},
    {FunctionOp::erf, "erf", 1, Takes::real},
    {FunctionOp::log2, "log2", 1, Takes::real},
    {FunctionOp::log1p, "log1p", 1, Takes::real},
    {FunctionOp::floor, "floor", 1, Takes::real},
    {FunctionOp::round, "round", 1, Takes::real},
    {FunctionOp::fmod, "fmod", 2, Takes::real},
    {FunctionOp::stop, "stop", 1, Takes::special},
    {FunctionOp::less, "lt", 2, Takes::compare},
    {FunctionOp::less_equal, "le", 2, Takes::compare},
    {FunctionOp::equal, "eq", 2, Takes::compare},
    {FunctionOp::not_equal, "ne", 2, Takes::compare},
    {FunctionOp::bit_and, "and", 2, Takes::logic},
    {FunctionOp::bit_or, "or", 2, Takes::logic},
    {FunctionOp::bit_xor, "xor", 2, Takes::logic},
    {FunctionOp::bit_not, "not", 1, Takes::logic},
    {FunctionOp::select, "where", 3, Takes::special},
};

/// The type that arguments of an operation become.
FunctionType common_type(const FunctionOpInfo& info, std::span<const Expression> arguments) {
  FunctionType widest = FunctionType::boolean;
  for (const Expression& a : arguments) widest = std::max(widest, a.type());
  switch (info.takes) {
    case Takes::real: return FunctionType::real;
    case Takes::logic:
    case Takes::integer:
      if (widest == FunctionType::real) {
        invalid("function: {} takes {}, but an argument is real; use int() first", info.name,
                info.takes == Takes::logic ? "booleans or integers" : "integers");
      }
      return info.takes == Takes::logic ? widest : std::max(widest, FunctionType::integer);
    default: return std::max(widest, FunctionType::integer);
  }
}

}  // namespace

const FunctionOpInfo& info_of(FunctionOp op) {
  return op_table[static_cast<std::size_t>(op)];
}

const FunctionOpInfo* op_named(std::string_view name) {
  const auto* const found = std::find_if(std::begin(op_table), std::end(op_table), [&](const auto& info) {
    return !info.name.empty() && info.name == name;
  });
  return found == std::end(op_table) ? nullptr : found;
}

const char* name_of(FunctionType type) {
  switch (type) {
    case FunctionType::boolean: return "boolean";
    case FunctionType::integer: return "integer";
    case FunctionType::wide: return "wide integer";
    case FunctionType::real: return "real";
  }
  return "unknown";
}

FunctionType Expression::type() const {
  return builder_->nodes_[static_cast<std::size_t>(node_)].type;
}

Expression FunctionBuilder::add(const FunctionNode& node) {
  for (std::size_t n = 0; n < nodes_.size(); ++n) {
    const bool same_value =
        nodes_[n].value == node.value || (std::isnan(nodes_[n].value) && std::isnan(node.value));
    FunctionNode other = nodes_[n];
    other.value = node.value;
    const bool same_sign = std::signbit(nodes_[n].value) == std::signbit(node.value);
    if (other == node && same_value && same_sign) return {*this, static_cast<std::int16_t>(n)};
  }
  if (nodes_.size() >= Function::max_nodes) {
    invalid(
        "function: it has more than {} operations, its derivative included; make it simpler, or put "
        "parts of it into captured tensors",
        Function::max_nodes);
  }
  nodes_.push_back(node);
  return {*this, static_cast<std::int16_t>(nodes_.size() - 1)};
}

Expression FunctionBuilder::integer(std::int64_t value) {
  const bool fits = value == static_cast<std::int32_t>(value);
  constexpr std::int64_t exact = std::int64_t{1} << 53;  // as a double
  if (fits || (value >= -exact && value <= exact)) {
    return constant(fits ? FunctionType::integer : FunctionType::wide, static_cast<double>(value));
  }
  constexpr std::int64_t low_bits = 0xFFFFFFFF;
  const Expression high = convert(integer(value >> 32), FunctionType::wide);
  return high * integer(low_bits + 1) + integer(value & low_bits);
}

Expression FunctionBuilder::constant(FunctionType type, double value) {
  // Kernels have reals in f32, and the reference is to compute the same function.
  if (type == FunctionType::real) value = static_cast<double>(static_cast<float>(value));
  return add({.op = FunctionOp::constant, .type = type, .value = value});
}

Expression FunctionBuilder::leaf(FunctionOp op) {
  if (op < FunctionOp::score || op > FunctionOp::seqlen_k) {
    invalid("function: operation {} is no leaf; use apply()", static_cast<int>(op));
  }
  return add({.op = op, .type = info_of(op).leaf});
}

int FunctionBuilder::capture(const ConstTensor& t) {
  const auto number = captured_.size();
  if (number >= Function::max_captured) {
    invalid("function: it captures more than {} tensors; join some of them", Function::max_captured);
  }
  if (t.rank < 1 || t.rank > ConstTensor::max_rank) {
    invalid("function: captured tensor t{} has {} dimensions; it must have 1 to {}", number, t.rank,
            ConstTensor::max_rank);
  }
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[static_cast<std::size_t>(d)] >= 1) continue;
    invalid("function: dimension {} of captured tensor t{} has size {}; it must be at least 1", d, number,
            t.shape[static_cast<std::size_t>(d)]);
  }
  if (t.dtype == DType::e4m3) {
    invalid("function: captured tensor t{} is e4m3; it must be f32, f16, bf16, i32, i64 or s8", number);
  }
  captured_.push_back(t);
  return static_cast<int>(number);
}

void FunctionBuilder::expect_own(const Expression& x, const char* what) const {
  if (x.builder_ != this) invalid("function: {} is of another function", what);
}

Expression FunctionBuilder::read(int number, std::span<const Expression> indices) {
  for (const Expression& index : indices) expect_own(index, "an index");
  if (number < 0 || static_cast<std::size_t>(number) >= captured_.size()) {
    invalid("function: t{} is not captured; there are {} captured tensors", number, captured_.size());
  }
  const ConstTensor& t = captured_[static_cast<std::size_t>(number)];
  if (indices.size() != static_cast<std::size_t>(t.rank)) {
    invalid("function: t{} has {} dimensions but {} indices; give one for each", number, t.rank,
            indices.size());
  }
  const bool narrow = t.dtype == DType::i32 || t.dtype == DType::s8;
  FunctionNode node{.op = FunctionOp::read,
                    .type = narrow                  ? FunctionType::integer
                            : t.dtype == DType::i64 ? FunctionType::wide
                                                    : FunctionType::real,
                    .captured = static_cast<std::int16_t>(number)};
  for (std::size_t d = 0; d < indices.size(); ++d) {
    if (indices[d].type() == FunctionType::real) {
      invalid("function: index {} of t{} is real; indices are integers: use int()", d, number);
    }
    // A wide one is clamped to 32 bits, beyond which no index is in range.
    const Expression index = convert(
        indices[d].type() == FunctionType::wide ? maximum(minimum(indices[d], INT_MAX), INT_MIN) : indices[d],
        FunctionType::integer);
    const FunctionNode& known = nodes_[static_cast<std::size_t>(index.node())];
    const auto size = static_cast<double>(t.shape[d]);
    if (known.op == FunctionOp::constant && (known.value < -size || known.value >= size)) {
      invalid("function: index {} of t{} is {}, but that dimension has size {}", d, number, known.value,
              t.shape[d]);
    }
    node.args[d] = index.node();
  }
  return add(node);
}

Expression FunctionBuilder::convert(Expression x, FunctionType type) {
  expect_own(x, "what is converted");
  const FunctionType from = x.type();
  if (from == type) return x;
  const FunctionNode known = nodes_[static_cast<std::size_t>(x.node())];
  if (known.op == FunctionOp::constant) {
    if (type == FunctionType::boolean) return constant(type, known.value != 0.0 ? -1.0 : 0.0);
    const double value = from == FunctionType::boolean ? -known.value : known.value;
    const bool widens = from == FunctionType::integer && type == FunctionType::wide;
    if (type == FunctionType::real || from == FunctionType::boolean || widens) return constant(type, value);
  }
  const FunctionOp op = type == FunctionType::boolean   ? FunctionOp::to_boolean
                        : type == FunctionType::integer ? FunctionOp::to_integer
                        : type == FunctionType::wide    ? FunctionOp::to_wide
                                                        : FunctionOp::to_real;
  return add({.op = op, .type = type, .args = {x.node(), -1, -1, -1}});
}

Expression FunctionBuilder::apply(FunctionOp op, std::span<const Expression> arguments) {
  const FunctionOpInfo& info = info_of(op);
  if (info.arguments == 0 || arguments.size() != static_cast<std::size_t>(info.arguments)) {
    invalid("function: {} takes {} arguments, not {}", info.name, info.arguments, arguments.size());
  }
  for (const Expression& a : arguments) {
    if (&a.builder() != this) invalid("function: an argument of {} is of another function", info.name);
  }
  FunctionNode node{.op = op};
  if (info.takes == Takes::special) {
    if (op == FunctionOp::to_real) return convert(arguments[0], FunctionType::real);
    if (op == FunctionOp::to_integer) return convert(arguments[0], FunctionType::integer);
    if (op == FunctionOp::to_wide) return convert(arguments[0], FunctionType::wide);
    if (op == FunctionOp::to_boolean) return convert(arguments[0], FunctionType::boolean);
    if (op == FunctionOp::stop) {  // only reals have derivatives
      if (arguments[0].type() != FunctionType::real) return arguments[0];
      return add({.op = op, .type = FunctionType::real, .args = {arguments[0].node(), -1, -1, -1}});
    }
    node.type = std::max(arguments[1].type(), arguments[2].type());  // select
    node.args = {convert(arguments[0], FunctionType::boolean).node(), convert(arguments[1], node.type).node(),
                 convert(arguments[2], node.type).node(), -1};
    return add(node);
  }
  const FunctionType type = common_type(info, arguments);
  if (op == FunctionOp::negate) {
    const FunctionNode known = nodes_[static_cast<std::size_t>(convert(arguments[0], type).node())];
    // -2^31 stays itself in 32 bits.
    if (known.op == FunctionOp::constant && known.value != INT_MIN) return constant(type, -known.value);
  }
  node.type = info.takes == Takes::compare ? FunctionType::boolean : type;
  for (std::size_t n = 0; n < arguments.size(); ++n) node.args[n] = convert(arguments[n], type).node();
  return add(node);
}

std::uint32_t FunctionBuilder::validated(std::span<const int> differentiated) const {
  std::uint32_t wanted = 0;
  for (const int number : differentiated) {
    if (number < 0 || static_cast<std::size_t>(number) >= captured_.size()) {
      invalid("function: t{} is to be differentiated, but there are {} captured tensors", number,
              captured_.size());
    }
    const DType dtype = captured_[static_cast<std::size_t>(number)].dtype;
    if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16) {
      invalid("function: t{} is to be differentiated, but is {}; gradients are of f32, f16 and bf16", number,
              tandem::name_of(dtype));
    }
    wanted |= 1U << number;
  }
  return wanted;
}

Function FunctionBuilder::score_function(Expression logit, std::span<const int> differentiated) {
  expect_own(logit, "the logit");
  const std::uint32_t wanted = validated(differentiated);
  const Expression result = convert(logit, FunctionType::real);
  const std::int16_t slope = derivative_by_score(result).node();
  std::vector<FunctionGradient> gradients;
  for (std::int16_t n = 0; n <= result.node() && wanted != 0; ++n) {
    const FunctionNode node = nodes_[static_cast<std::size_t>(n)];
    if (node.op != FunctionOp::read || (wanted >> node.captured & 1U) == 0) continue;
    const std::int16_t by_element = derivative_by_node(result, n);
    if (by_element < 0) continue;
    if (gradients.size() == Function::max_gradients) {
      invalid(
          "function: it reads more than {} elements of tensors that are to be differentiated; put some of "
          "them together",
          Function::max_gradients);
    }
    gradients.push_back({.read = n, .slope = by_element});
  }
  Function f = finish(Function::Kind::score, result, slope, gradients);
  f.differentiated_ = wanted;
  return f;
}

Function FunctionBuilder::mask_function(Expression visible) {
  expect_own(visible, "the mask");
  const Expression result = convert(visible, FunctionType::boolean);
  Function f = finish(Function::Kind::mask, result, -1);
  for (const FunctionNode& node : f.nodes()) {
    if (node.op == FunctionOp::score) {
      invalid(
          "function: a mask function has no score; which pairs are visible may not depend on it: use a "
          "score function that gives -inf");
    }
  }
  f.window_ = window_of(result);
  return f;
}

/// Only what the results need is kept, in its order; what gradients alone need comes last.
Function FunctionBuilder::finish(Function::Kind kind, Expression result, std::int16_t slope,
                                 std::span<const FunctionGradient> gradients) const {
  std::vector<bool> needed(nodes_.size(), false);
  const auto need = [&](std::int16_t node) {
    if (node >= 0) needed[static_cast<std::size_t>(node)] = true;
  };
  const auto need_arguments = [&] {
    for (std::size_t n = nodes_.size(); n-- > 0;) {
      if (needed[n]) std::for_each(nodes_[n].args.begin(), nodes_[n].args.end(), need);
    }
  };
  need(result.node());
  need(slope);
  need_arguments();
  Function f;
  f.kind_ = kind;
  f.captured_ = captured_;
  std::vector<std::int16_t> place(nodes_.size(), -1);
  const auto copy_needed = [&] {
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      if (!needed[n] || place[n] >= 0) continue;
      FunctionNode node = nodes_[n];
      for (std::int16_t& a : node.args) a = a >= 0 ? place[static_cast<std::size_t>(a)] : a;
      place[n] = static_cast<std::int16_t>(f.nodes_.size());
      f.nodes_.push_back(node);
    }
  };
  copy_needed();
  f.own_nodes_ = f.nodes_.size();
  for (const FunctionGradient& g : gradients) {
    need(g.read);
    need(g.slope);
  }
  need_arguments();
  copy_needed();
  for (const FunctionGradient& g : gradients) {
    f.gradients_.push_back(
        {.read = place[static_cast<std::size_t>(g.read)], .slope = place[static_cast<std::size_t>(g.slope)]});
  }
  f.result_ = place[static_cast<std::size_t>(result.node())];
  f.slope_ = slope >= 0 ? place[static_cast<std::size_t>(slope)] : slope;
  return f;
}

}  // namespace tandem
