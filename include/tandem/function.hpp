// Functions of the user's own on scores, and masks: small expressions of (score, batch, head, query, key) and
// of tensors that they read, which a kernel evaluates for every pair of query and key.
//
//   FunctionBuilder f;                                   // ALiBi: score + slope[head] * (key - query)
//   const Expression slope = f.read(f.capture(slopes), {f.head()});
//   const Function alibi = f.score_function(f.score() + slope * (f.key() - f.query()));
//
// A score function takes the scaled score, after softcap, to the logit; a mask function says which pairs are
// visible, besides causal and window. Positions count from 0 in each sequence, as FlexAttention's q_idx and
// kv_idx (He et al. 2024, arXiv:2412.05496); docs/functions.md has the rules.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "tandem/error.hpp"
#include "tandem/export.h"
#include "tandem/tensor.hpp"

namespace tandem {

/// What a node computes. Booleans are integers that are 0 or -1 (all bits), so that `bit_and` and its like
/// serve both.
enum class FunctionOp : std::int16_t {
  constant,  ///< FunctionNode::value
  score,
  batch,
  head,      ///< query head
  query,     ///< position in its sequence
  key,       ///< position in its sequence, from the first that takes part
  seqlen_q,  ///< queries of the sequence that take part
  seqlen_k,
  read,  ///< an element of a captured tensor; one argument a dimension
  to_real,
  to_integer,  ///< towards 0; of 64 bits the lowest 32
  to_wide,     ///< likewise, of 64 bits
  to_boolean,  ///< not 0
  add,
  subtract,
  multiply,
  divide,        ///< takes reals
  floor_divide,  ///< takes integers, rounds towards -infinity; by 0 it is 0
  remainder,     ///< takes integers, has the sign of the divisor; by 0 it is 0
  negate,
  absolute,
  minimum,
  maximum,
  exp,
  log,
  sqrt,
  tanh,
  sigmoid,
  sine,
  cosine,
  erf,
  log2,
  log1p,  ///< log(1 + x)
  floor,  ///< takes reals
  round,  ///< takes reals, rounds halves to even
  fmod,   ///< the remainder of reals, with the sign of the dividend; by 0 it is NaN
  stop,   ///< the argument, whose derivative counts as 0
  less,
  less_equal,
  equal,
  not_equal,
  bit_and,
  bit_or,
  bit_xor,
  bit_not,
  select,  ///< where(first, second, third)
};

/// Integers have 32 bits, wide ones 64, and both wrap; reals are f32 in kernels and fp64 in the reference.
enum class FunctionType : std::int16_t { boolean, integer, wide, real };

/// One operation. Arguments are indices of earlier nodes; those that it has not are -1.
struct FunctionNode {
  FunctionOp op = FunctionOp::constant;
  FunctionType type = FunctionType::real;
  std::array<std::int16_t, 4> args{-1, -1, -1, -1};
  std::int16_t captured = -1;  ///< for `read`: which tensor
  double value = 0.0;          ///< for `constant`; integers (of at most 2^53) and booleans too

  friend bool operator==(const FunctionNode&, const FunctionNode&) = default;
};

/// What a score function owes to an element that it reads: node `read`, and the node whose value is
/// d(logit) / d(that element).
struct FunctionGradient {
  std::int16_t read = -1;
  std::int16_t slope = -1;
};

/// A finished function: a list of nodes in the order of evaluation. It holds views of captured tensors, whose
/// memory must stay for as long as calls use it.
class TANDEM_API Function {
 public:
  enum class Kind { score, mask };

  /// The most nodes of a function, its derivative included, and the most tensors that it may capture.
  static constexpr std::size_t max_nodes = 512;
  static constexpr std::size_t max_captured = 16;
  /// The most elements whose gradients a function can give: what is read several times counts once.
  static constexpr std::size_t max_gradients = 32;

  /// The function that `text` says (docs/functions.md has the grammar), where t0, t1, ... are `captured`.
  /// `differentiated`: as of FunctionBuilder::score_function. Throws Error (invalid_argument) with the place
  /// in the text.
  static Function parse(std::string_view text, Kind kind, std::span<const ConstTensor> captured = {},
                        std::span<const int> differentiated = {});
  /// This function as text: parse() of it gives the same nodes.
  [[nodiscard]] std::string text() const;

  [[nodiscard]] Kind kind() const { return kind_; }
  /// What value and slope need.
  [[nodiscard]] std::span<const FunctionNode> nodes() const { return {nodes_.data(), own_nodes_}; }
  /// These, then what the gradients of captured tensors need besides.
  [[nodiscard]] std::span<const FunctionNode> all_nodes() const { return nodes_; }
  /// The elements of differentiated tensors on which the logit depends; nodes of all_nodes().
  [[nodiscard]] std::span<const FunctionGradient> gradients() const { return gradients_; }
  /// Whether a backward call may ask for the gradient of captured tensor `number`.
  [[nodiscard]] bool is_differentiated(std::size_t number) const {
    return (differentiated_ >> number & 1U) != 0;
  }
  [[nodiscard]] std::span<const ConstTensor> captured() const { return captured_; }
  /// The node whose value is the logit, or whether a pair is visible.
  [[nodiscard]] std::int16_t result() const { return result_; }
  /// The node whose value is d(logit) / d(score), in a score function.
  [[nodiscard]] std::int16_t slope() const { return slope_; }
  /// The part of a mask function that is a causal mask or a window, which kernels know without a function;
  /// null if there is none.
  [[nodiscard]] const struct MaskWindow* window() const { return window_.get(); }

 private:
  friend class FunctionBuilder;
  Kind kind_ = Kind::score;
  std::vector<FunctionNode> nodes_;
  std::size_t own_nodes_ = 0;
  std::vector<FunctionGradient> gradients_;
  std::uint32_t differentiated_ = 0;  ///< a bit for each captured tensor
  std::vector<ConstTensor> captured_;
  std::int16_t result_ = -1;
  std::int16_t slope_ = -1;
  std::shared_ptr<const struct MaskWindow> window_;
};

/// A value of a function that is being built: operators on it add nodes. Belongs to its builder, which must
/// outlive it.
class TANDEM_API Expression {
 public:
  [[nodiscard]] FunctionType type() const;
  [[nodiscard]] std::int16_t node() const { return node_; }
  [[nodiscard]] class FunctionBuilder& builder() const { return *builder_; }

 private:
  friend class FunctionBuilder;
  friend class FunctionDerivative;
  friend class MaskWindowReader;
  Expression(FunctionBuilder& builder, std::int16_t node) : builder_(&builder), node_(node) {}
  FunctionBuilder* builder_;
  std::int16_t node_;
};

/// Makes functions. Every method throws Error (invalid_argument) where types do not fit or the function has
/// become too large.
class TANDEM_API FunctionBuilder {
 public:
  /// A boolean, an integer (wide where 32 bits do not hold it), or a real.
  template <typename T>
  requires std::is_arithmetic_v<T> Expression constant(T value) {
    if constexpr (std::is_same_v<T, bool>) {
      return constant(FunctionType::boolean, value ? -1.0 : 0.0);
    } else if constexpr (std::is_integral_v<T>) {
      return integer(static_cast<std::int64_t>(value));
    } else {
      return constant(FunctionType::real, static_cast<double>(value));
    }
  }
  Expression integer(std::int64_t value);
  Expression leaf(FunctionOp op);  ///< score to seqlen_k
  Expression score() { return leaf(FunctionOp::score); }
  Expression batch() { return leaf(FunctionOp::batch); }
  Expression head() { return leaf(FunctionOp::head); }
  Expression query() { return leaf(FunctionOp::query); }
  Expression key() { return leaf(FunctionOp::key); }
  Expression seqlen_q() { return leaf(FunctionOp::seqlen_q); }
  Expression seqlen_k() { return leaf(FunctionOp::seqlen_k); }

  /// Makes a tensor one that the function reads: f32, f16, bf16 (real), i32, s8 (integer) or i64 (wide), of
  /// any strides, without an empty dimension. Returns its number.
  int capture(const ConstTensor& tensor);
  /// Element [indices] of captured tensor `number`. An index below 0 counts from the end; one that is out of
  /// range all the same is clamped, but a constant one is an error.
  Expression read(int number, std::span<const Expression> indices);
  Expression read(int number, std::initializer_list<Expression> indices) {
    return read(number, std::span(indices.begin(), indices.size()));
  }

  /// Any operation with arguments. Types are those of PyTorch: booleans become integers, integers wide and
  /// these reals where the others are.
  Expression apply(FunctionOp op, std::span<const Expression> arguments);
  Expression apply(FunctionOp op, std::initializer_list<Expression> arguments) {
    return apply(op, std::span(arguments.begin(), arguments.size()));
  }
  Expression convert(Expression x, FunctionType type);

  /// The finished functions. A builder may go on after one. `differentiated`: the numbers of captured
  /// tensors, of reals, whose gradients backward calls may ask for: BackwardArgs::captured_gradients.
  Function score_function(Expression logit, std::span<const int> differentiated = {});
  Function mask_function(Expression visible);

 private:
  friend class Expression;
  friend class FunctionDerivative;
  friend class MaskWindowReader;
  void expect_own(const Expression& x, const char* what) const;
  Expression constant(FunctionType type, double value);
  Expression add(const FunctionNode& node);
  [[nodiscard]] std::uint32_t validated(std::span<const int> differentiated) const;
  [[nodiscard]] Function finish(Function::Kind kind, Expression result, std::int16_t slope,
                                std::span<const FunctionGradient> gradients = {}) const;
  std::shared_ptr<const MaskWindow> window_of(Expression visible);

  std::vector<FunctionNode> nodes_;
  std::vector<ConstTensor> captured_;
};

/// For operators that take numbers, too.
namespace detail {

template <typename T>
concept FunctionNumber = std::is_arithmetic_v<T>;
template <typename A, typename B>
concept FunctionOperands = (std::is_same_v<A, Expression> && std::is_same_v<B, Expression>) ||
                           (std::is_same_v<A, Expression> && FunctionNumber<B>) ||
                           (FunctionNumber<A> && std::is_same_v<B, Expression>);

/// op(a, b), one of which may be a number.
template <typename A, typename B>
Expression combine(FunctionOp op, A a, B b) {
  if constexpr (FunctionNumber<B>) {
    return combine(op, a, a.builder().constant(b));
  } else if constexpr (FunctionNumber<A>) {
    return combine(op, b.builder().constant(a), b);
  } else {
    return a.builder().apply(op, {a, b});
  }
}

}  // namespace detail

/// Operators on expressions, of which one may be a number. `%` has the sign of the divisor.
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression operator+(A a, B b) {
  return detail::combine(FunctionOp::add, a, b);
}
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression operator-(A a, B b) {
  return detail::combine(FunctionOp::subtract, a, b);
}
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression operator*(A a, B b) {
  return detail::combine(FunctionOp::multiply, a, b);
}
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression operator/(A a, B b) {
  return detail::combine(FunctionOp::divide, a, b);
}
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression operator%(A a, B b) {
  return detail::combine(FunctionOp::remainder, a, b);
}
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression operator<(A a, B b) {
  return detail::combine(FunctionOp::less, a, b);
}
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression operator<=(A a, B b) {
  return detail::combine(FunctionOp::less_equal, a, b);
}
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression operator==(A a, B b) {
  return detail::combine(FunctionOp::equal, a, b);
}
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression operator!=(A a, B b) {
  return detail::combine(FunctionOp::not_equal, a, b);
}
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression operator&(A a, B b) {
  return detail::combine(FunctionOp::bit_and, a, b);
}
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression operator|(A a, B b) {
  return detail::combine(FunctionOp::bit_or, a, b);
}
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression operator^(A a, B b) {
  return detail::combine(FunctionOp::bit_xor, a, b);
}
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression operator>(A a, B b) {
  return detail::combine(FunctionOp::less, b, a);
}
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression operator>=(A a, B b) {
  return detail::combine(FunctionOp::less_equal, b, a);
}
/// Integers, towards -infinity.
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression floor_divide(A a, B b) {
  return detail::combine(FunctionOp::floor_divide, a, b);
}
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression minimum(A a, B b) {
  return detail::combine(FunctionOp::minimum, a, b);
}
template <typename A, typename B>
requires detail::FunctionOperands<A, B> Expression maximum(A a, B b) {
  return detail::combine(FunctionOp::maximum, a, b);
}
inline Expression operator-(Expression a) {
  return a.builder().apply(FunctionOp::negate, {a});
}
/// Not; of an integer its complement.
inline Expression operator~(Expression a) {
  return a.builder().apply(FunctionOp::bit_not, {a});
}
inline Expression abs(Expression a) {
  return a.builder().apply(FunctionOp::absolute, {a});
}
inline Expression exp(Expression a) {
  return a.builder().apply(FunctionOp::exp, {a});
}
inline Expression log(Expression a) {
  return a.builder().apply(FunctionOp::log, {a});
}
inline Expression sqrt(Expression a) {
  return a.builder().apply(FunctionOp::sqrt, {a});
}
inline Expression tanh(Expression a) {
  return a.builder().apply(FunctionOp::tanh, {a});
}
inline Expression sigmoid(Expression a) {
  return a.builder().apply(FunctionOp::sigmoid, {a});
}
/// x, whose derivative counts as 0.
inline Expression stop_gradient(Expression a) {
  return a.builder().apply(FunctionOp::stop, {a});
}
/// `yes` where `condition`, else `no`.
inline Expression where(Expression condition, Expression yes, Expression no) {
  return condition.builder().apply(FunctionOp::select, {condition, yes, no});
}

}  // namespace tandem
