// The derivative of a score function by the score, or by an element that it reads, as nodes of the same
// function.
#include <numbers>
#include <vector>

#include "problem/function.hpp"

namespace tandem {

/// Goes through the nodes in their order; of each it keeps the derivative, or -1 where that is 0 everywhere:
/// no product with it is then made, in which an infinity would become NaN.
class FunctionDerivative {
 public:
  /// By the score, or by the node `by`.
  explicit FunctionDerivative(FunctionBuilder& builder, std::int16_t by = none)
      : builder_(builder), by_(by) {}

  /// The derivative of y as an expression, the constant 0 where y does not depend on the variable.
  Expression value_of(Expression y) {
    const std::int16_t slope = of(y);
    return slope >= 0 ? at(slope) : builder_.constant(0.0);
  }

  /// The node of y's derivative; -1 where that is 0.
  std::int16_t of(Expression y) {
    const auto last = static_cast<std::size_t>(y.node());
    known_.assign(last + 1, -1);
    for (std::size_t n = 0; n <= last; ++n) {
      const FunctionNode node = builder_.nodes_[n];  // a copy: nodes are added on the way
      known_[n] = node.type == FunctionType::real ? step(node, static_cast<std::int16_t>(n)) : none;
    }
    return known_[last];
  }

 private:
  static constexpr std::int16_t none = -1;

  [[nodiscard]] Expression at(std::int16_t node) const { return {builder_, node}; }
  [[nodiscard]] std::int16_t known(std::int16_t node) const {
    return node >= 0 ? known_[static_cast<std::size_t>(node)] : none;
  }
  [[nodiscard]] bool is_one(std::int16_t node) const {
    const FunctionNode& n = builder_.nodes_[static_cast<std::size_t>(node)];
    return n.op == FunctionOp::constant && n.value == 1.0;
  }
  /// factor * derivative of an argument, if that has one.
  std::int16_t times(Expression factor, std::int16_t derivative) {
    return is_one(derivative) ? factor.node() : (factor * at(derivative)).node();
  }
  Expression or_zero(std::int16_t derivative) {
    return derivative >= 0 ? at(derivative) : builder_.constant(0.0);
  }
  std::int16_t chosen(Expression condition, std::int16_t yes, std::int16_t no) {
    if (yes == no) return yes;
    return where(condition, or_zero(yes), or_zero(no)).node();
  }
  std::int16_t negated(std::int16_t derivative) { return derivative >= 0 ? (-at(derivative)).node() : none; }
  std::int16_t sum(std::int16_t a, std::int16_t b) {
    if (a < 0 || b < 0) return a < 0 ? b : a;
    return (at(a) + at(b)).node();
  }

  /// The node of the derivative of node `self`; -1 where that is 0.
  std::int16_t step(const FunctionNode& node, std::int16_t self) {
    if (by_ >= 0 ? self == by_ : node.op == FunctionOp::score) return builder_.constant(1.0).node();
    if (node.op == FunctionOp::select) {
      return chosen(at(node.args[0]), known(node.args[1]), known(node.args[2]));
    }
    if (node.op == FunctionOp::read || node.args[0] < 0) return none;
    const std::int16_t da = known(node.args[0]);
    const std::int16_t db = known(node.args[1]);
    if (da < 0 && db < 0) return none;
    const Expression y = at(self);
    const Expression a = at(node.args[0]);
    switch (node.op) {
      case FunctionOp::add: return sum(da, db);
      case FunctionOp::subtract: return sum(da, negated(db));
      case FunctionOp::multiply:
        return sum(da >= 0 ? times(at(node.args[1]), da) : none, db >= 0 ? times(a, db) : none);
      case FunctionOp::divide: {
        const Expression b = at(node.args[1]);
        const std::int16_t change = sum(da, db >= 0 ? negated(times(y, db)) : none);
        return (at(change) / b).node();
      }
      case FunctionOp::negate: return negated(da);
      case FunctionOp::absolute: return chosen(a < 0.0, negated(da), da);
      case FunctionOp::minimum: return chosen(at(node.args[1]) < a, db, da);
      case FunctionOp::maximum: return chosen(a < at(node.args[1]), db, da);
      case FunctionOp::exp: return times(y, da);
      case FunctionOp::log: return (at(da) / a).node();
      case FunctionOp::sqrt: return (0.5 * at(da) / y).node();
      case FunctionOp::tanh: return times(1.0 - y * y, da);
      case FunctionOp::sigmoid: return times(y * (1.0 - y), da);
      case FunctionOp::sine: return times(builder_.apply(FunctionOp::cosine, {a}), da);
      case FunctionOp::cosine: return times(-builder_.apply(FunctionOp::sine, {a}), da);
      case FunctionOp::erf: return times(std::numbers::inv_sqrtpi * 2.0 * exp(-(a * a)), da);
      case FunctionOp::log2: return (std::numbers::log2e * at(da) / a).node();
      case FunctionOp::log1p: return (at(da) / (1.0 + a)).node();
      case FunctionOp::fmod: {  // a less a whole number of b
        const Expression b = at(node.args[1]);
        return sum(da, db >= 0 ? times((y - a) / b, db) : none);
      }
      default: return none;
    }
  }

  FunctionBuilder& builder_;
  std::int16_t by_;
  std::vector<std::int16_t> known_;
};

Expression derivative_by_score(Expression y) {
  return FunctionDerivative(y.builder()).value_of(y);
}

std::int16_t derivative_by_node(Expression y, std::int16_t node) {
  return FunctionDerivative(y.builder(), node).of(y);
}

}  // namespace tandem
