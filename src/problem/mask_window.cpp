#include "problem/mask_window.hpp"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "problem/effective.hpp"

namespace tandem {

/// Reads a mask function's nodes: a conjunction, some of whose terms compare sums of positions.
class MaskWindowReader {
 public:
  explicit MaskWindowReader(FunctionBuilder& builder) : builder_(builder) {}

  /// Null if no term is a bound.
  std::shared_ptr<const MaskWindow> read(Expression visible) {
    term(visible.node(), false);
    if (found_ == 0) return nullptr;
    if (!rest_.empty()) {
      if (builder_.nodes_.size() + rest_.size() > Function::max_nodes) return nullptr;
      std::optional<Expression> all;
      for (const auto& [node, negated] : rest_) {
        Expression one(builder_, node);
        if (negated) one = ~one;
        all = all ? *all & one : one;
      }
      window_.rest = builder_.finish(Function::Kind::mask, *all, -1);
    }
    return std::make_shared<const MaskWindow>(std::move(window_));
  }

 private:
  /// constant + query * its factor + ...
  struct Sum {
    std::int64_t constant = 0;
    int query = 0, key = 0, seqlen_q = 0, seqlen_k = 0;
    std::int64_t reach = 0;  ///< the sum of the constants' sizes

    [[nodiscard]] Sum negative() const { return {-constant, -query, -key, -seqlen_q, -seqlen_k, reach}; }
    /// Nothing if a factor is not -1, 0 or 1: such a sum might not fit an integer.
    [[nodiscard]] std::optional<Sum> plus(const Sum& b) const {
      const Sum s{constant + b.constant, query + b.query,       key + b.key,
                  seqlen_q + b.seqlen_q, seqlen_k + b.seqlen_k, reach + b.reach};
      for (const int factor : {s.query, s.key, s.seqlen_q, s.seqlen_k}) {
        if (std::abs(factor) > 1) return std::nullopt;
      }
      return s.reach > INT_MAX ? std::nullopt : std::optional(s);
    }
  };

  [[nodiscard]] const FunctionNode& at(std::int16_t node) const {
    return builder_.nodes_[static_cast<std::size_t>(node)];
  }

  [[nodiscard]] std::optional<Sum> sum(std::int16_t number) const {
    const FunctionNode& node = at(number);
    if (node.type != FunctionType::integer) return std::nullopt;
    switch (node.op) {
      case FunctionOp::constant: {
        const auto value = static_cast<std::int64_t>(node.value);
        return Sum{.constant = value, .reach = std::abs(value)};
      }
      case FunctionOp::query: return Sum{.query = 1};
      case FunctionOp::key: return Sum{.key = 1};
      case FunctionOp::seqlen_q: return Sum{.seqlen_q = 1};
      case FunctionOp::seqlen_k: return Sum{.seqlen_k = 1};
      case FunctionOp::negate: {
        const auto a = sum(node.args[0]);
        return a ? std::optional(a->negative()) : a;
      }
      case FunctionOp::add:
      case FunctionOp::subtract: {
        const auto a = sum(node.args[0]);
        const auto b = a ? sum(node.args[1]) : a;
        if (!b) return b;
        return a->plus(node.op == FunctionOp::add ? *b : b->negative());
      }
      default: return std::nullopt;
    }
  }

  /// A term of the conjunction, or the negation of one.
  void term(std::int16_t number, bool negated) {
    const FunctionNode node = at(number);
    const bool boolean = node.type == FunctionType::boolean;
    if (boolean && node.op == (negated ? FunctionOp::bit_or : FunctionOp::bit_and)) {
      term(node.args[0], negated);
      term(node.args[1], negated);
    } else if (boolean && node.op == FunctionOp::bit_not) {
      term(node.args[0], !negated);
    } else if (!bound(node, negated)) {
      rest_.emplace_back(number, negated);
    }
  }

  bool bound(const FunctionNode& node, bool negated) {
    if (node.op != FunctionOp::less && node.op != FunctionOp::less_equal) return false;
    // a < b is a - b <= -1, and its negation b - a <= 0.
    const bool strict = (node.op == FunctionOp::less) != negated;
    const std::int16_t low = node.args[negated ? 1 : 0];
    const std::int16_t high = node.args[negated ? 0 : 1];
    if (at(low).op == FunctionOp::absolute) {  // |a| <= b is a <= b and -a <= b
      const auto a = sum(at(low).args[0]);
      const auto b = sum(high);
      return a && b && at_most({a->plus(b->negative()), a->negative().plus(b->negative())}, strict);
    }
    const auto a = sum(low);
    const auto b = sum(high);
    return a && b && at_most({a->plus(b->negative())}, strict);
  }

  /// Takes differences that are to be 0 or less, below 0 if `strict`: all of them, or none.
  bool at_most(std::initializer_list<std::optional<Sum>> differences, bool strict) {
    for (const auto& d : differences) {
      if (!d || d->query * d->key != -1) return false;
      const bool from_start = d->seqlen_q == 0 && d->seqlen_k == 0;
      const bool from_end = d->seqlen_q == -d->query && d->seqlen_k == -d->key;
      if (!from_start && !from_end) return false;
    }
    for (const auto& d : differences) {
      MaskWindow::Bounds& bounds = d->seqlen_q == 0 ? window_.from_start : window_.from_end;
      std::optional<std::int64_t>& side = d->key > 0 ? bounds.right : bounds.left;
      const std::int64_t most = -d->constant - (strict ? 1 : 0);
      side = side ? std::min(*side, most) : most;
      window_.reach = std::max(window_.reach, d->reach);
      ++found_;
    }
    return true;
  }

  FunctionBuilder& builder_;
  MaskWindow window_;
  int found_ = 0;
  std::vector<std::pair<std::int16_t, bool>> rest_;  ///< nodes, and whether they are negated
};

std::shared_ptr<const MaskWindow> FunctionBuilder::window_of(Expression visible) {
  return MaskWindowReader(*this).read(visible);
}

namespace {

bool same(const Lengths& a, const Lengths& b) {
  return same_address(a.data, b.data) && (!a.given() || (a.wide == b.wide && a.stride == b.stride));
}

/// seqlen_k - seqlen_q, if it is known to be the same in all sequences.
std::optional<std::int64_t> shift_of(const Problem& p) {
  if (p.of_cache() || !same(p.cu_seqlens_q, p.cu_seqlens_k) || !same(p.seqused_q, p.seqused_k))
    return std::nullopt;
  if ((p.packed_q || p.seqused_q.given()) && p.rows_q != p.rows_k) return std::nullopt;
  return p.rows_k - p.rows_q;
}

}  // namespace

void fold_mask_window(Problem& p) {
  const MaskWindow* const mask = p.mask_function != nullptr ? p.mask_function->window() : nullptr;
  // With a split size bits depend on the sequence alone: not on what the lengths of the others are known to
  // be.
  if (mask == nullptr || p.causal_by_sequence.given() || p.split_size != 0) return;
  if (2 * (p.rows_q + p.rows_k) + mask->reach > INT_MAX) return;
  const MaskWindow::Bounds& start = mask->from_start;
  const auto shift = shift_of(p);
  if (!shift && (start.left || start.right)) return;
  std::int64_t left = p.window_left;
  std::int64_t right = p.window_right;
  bool is_window = true;
  const auto tighten = [&](std::int64_t& bound, std::optional<std::int64_t> by) {
    if (!by) return;
    is_window = is_window && *by >= 0;
    bound = bound < 0 ? *by : std::min(bound, *by);
  };
  tighten(left, mask->from_end.left);
  tighten(right, mask->from_end.right);
  if (start.left) tighten(left, *start.left + *shift);
  if (start.right) tighten(right, *start.right - *shift);
  if (!is_window) return;
  p.window_left = left;
  p.window_right = right;
  p.window_of_mask = true;
  p.mask_function = mask->rest ? &*mask->rest : nullptr;
}

}  // namespace tandem
