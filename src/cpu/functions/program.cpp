#include "cpu/functions/program.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace tandem::cpu {
namespace {

constexpr std::int32_t words_of(ValueShape shape) {
  switch (shape) {
    case ValueShape::uniform:
    case ValueShape::rows: return function_lanes;
    case ValueShape::keys: return function_keys;
    case ValueShape::pairs: return function_keys * function_lanes;
    case ValueShape::distances: return function_keys + function_lanes;
  }
  return 0;
}

constexpr ValueShape shape_of_leaf(FunctionOp op, LanesOf lanes) {
  switch (op) {
    case FunctionOp::head: return lanes == LanesOf::any_rows ? ValueShape::rows : ValueShape::uniform;
    case FunctionOp::query: return ValueShape::rows;
    case FunctionOp::key: return ValueShape::keys;
    default: return ValueShape::uniform;
  }
}

constexpr ValueShape join(ValueShape a, ValueShape b) {
  if (a == b || b == ValueShape::uniform) return a;
  return a == ValueShape::uniform ? b : ValueShape::pairs;
}

/// An integer as by_query * query + by_key * key + something that no pair changes.
struct Linear {
  bool known = false;
  std::int32_t by_query = 0;
  std::int32_t by_key = 0;
  double most = 0.0;  ///< the largest magnitude that it may have

  [[nodiscard]] bool of_distance() const { return known && by_key != 0 && by_query + by_key == 0; }
};

Linear combined(const Linear& a, const Linear& b, std::int32_t sign) {
  constexpr double room = 1 << 30;
  return {.known = a.known && b.known && a.most + b.most < room,
          .by_query = a.by_query + sign * b.by_query,
          .by_key = a.by_key + sign * b.by_key,
          .most = a.most + b.most};
}

constexpr bool is_comparison(FunctionOp op) {
  return op == FunctionOp::less || op == FunctionOp::less_equal || op == FunctionOp::equal ||
         op == FunctionOp::not_equal;
}

/// Gives values memory. That of pairs is used again once the last step that reads it is done.
class Compiler {
 public:
  Compiler(const Function& f, LanesOf lanes, FunctionProgram& program)
      : f_(f), nodes_(f.all_nodes()), lanes_(lanes), program_(program) {}

  void compile(ProgramOf wanted, std::int32_t first_word) {
    const bool with_slope = wanted == ProgramOf::value_and_slope;
    const auto gradients =
        wanted == ProgramOf::value_and_gradients ? f_.gradients() : std::span<const FunctionGradient>();
    last_use_.fill(-1);
    keep(f_.result());
    if (with_slope) keep(f_.slope());
    for (const FunctionGradient& g : gradients) {
      keep(g.slope);
      for (const std::int16_t index : nodes_[at(g.read)].args) keep(index);
    }
    for (std::size_t n = nodes_.size(); n-- > 0;) {
      if (last_use_[n] < 0) continue;
      for (const std::int16_t a : nodes_[n].args) {
        if (a >= 0) last_use_[at(a)] = std::max(last_use_[at(a)], static_cast<int>(n));
      }
    }
    program_.count = 0;
    program_.words = first_word;
    program_.by_range = true;
    for (std::size_t n = 0; n < f_.captured().size(); ++n) program_.tensors[n] = described(f_.captured()[n]);
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      if (last_use_[n] >= 0) add(n);
    }
    if (wanted == ProgramOf::value) write_to_scores();
    program_.value = places_[at(f_.result())];
    if (with_slope) program_.slope = places_[at(f_.slope())];
    program_.gradient_count = 0;
    for (const FunctionGradient& g : gradients) {
      const FunctionNode& read = nodes_[at(g.read)];
      ProgramGradient& gradient = program_.gradients[program_.gradient_count++];
      gradient = {};
      gradient.slope = places_[at(g.slope)];
      gradient.captured = read.captured;
      for (std::size_t d = 0; d < read.args.size() && read.args[d] >= 0; ++d) {
        gradient.index[d] = places_[at(read.args[d])];
      }
    }
  }

 private:
  static std::size_t at(std::int16_t node) { return static_cast<std::size_t>(node); }
  void keep(std::int16_t node) {
    if (node >= 0) last_use_[at(node)] = static_cast<int>(Function::max_nodes);
  }

  void add(std::size_t n) {
    const FunctionNode& node = nodes_[n];
    if (node.op == FunctionOp::score) {
      places_[n] = {.shape = ValueShape::pairs, .offset = 0, .step = -1, .is_score = true};
      return;
    }
    ProgramStep& step = program_.steps[program_.count++];
    step = {};
    step.op = node.op;
    step.type = step.from = node.type;
    ValueShape shape = shape_of_leaf(node.op, lanes_);
    for (std::size_t a = 0; a < node.args.size() && node.args[a] >= 0; ++a) {
      step.args[a] = places_[at(node.args[a])];
      shape = join(shape, step.args[a].shape);
      ++step.arguments;
    }
    if (step.arguments > 0) step.from = nodes_[at(node.args[0])].type;
    if (lanes_ == LanesOf::consecutive_queries && is_of_distance(n, step)) shape = ValueShape::distances;
    if (node.op == FunctionOp::constant) {
      if (node.type == FunctionType::real) {
        step.real = static_cast<float>(node.value);
      } else {
        step.integer = static_cast<std::int64_t>(node.value);
      }
    }
    const bool divides = node.op == FunctionOp::floor_divide || node.op == FunctionOp::remainder;
    if (divides && node.type == FunctionType::integer) {
      step.integer = power_of_two(nodes_[at(node.args[1])]);
    }
    if (node.op == FunctionOp::read) {
      step.captured = node.captured;
      const bool of_pairs = shape == ValueShape::pairs || shape == ValueShape::distances;
      if (of_pairs || node.type == FunctionType::real) program_.by_range = false;
    }
    // Before the result has its place: a step reads its arguments of a key before it writes that key.
    for (const std::int16_t a : node.args) release(a, n);
    step.result = {.shape = shape,
                   .offset = place(shape),
                   .high = node.type == FunctionType::wide ? place(shape) : 0,
                   .step = static_cast<std::int16_t>(program_.count - 1)};
    places_[n] = step.result;
  }

  /// Whether node n, which has its arguments, depends on the distance alone; notes what it is made of.
  bool is_of_distance(std::size_t n, ProgramStep& step) {
    const FunctionNode& node = nodes_[n];
    constexpr auto most = static_cast<double>(most_consecutive);
    if (step.arguments == 0) {
      const bool constant = node.op == FunctionOp::constant;
      const bool counted = node.op != FunctionOp::batch && node.op != FunctionOp::head;
      linear_[n] = {.known = node.type == FunctionType::integer && counted,
                    .by_query = node.op == FunctionOp::query ? 1 : 0,
                    .by_key = node.op == FunctionOp::key ? 1 : 0,
                    .most = constant ? std::abs(node.value) : most};
      return false;
    }
    const bool sums = node.op == FunctionOp::add || node.op == FunctionOp::subtract;
    if (step.from != FunctionType::integer || (!sums && !is_comparison(node.op))) return false;
    const Linear& a = linear_[at(node.args[0])];
    const Linear& b = linear_[at(node.args[1])];
    const Linear both = combined(a, b, node.op == FunctionOp::add ? 1 : -1);
    if (sums) linear_[n] = both;
    step.by_key[0] = a.by_key;
    step.by_key[1] = b.by_key;
    return both.of_distance();
  }

  /// Spares the caller a copy.
  void write_to_scores() {
    if (program_.count == 0 || f_.kind() != Function::Kind::score) return;
    ProgramStep& last = program_.steps[program_.count - 1];
    ProgramValue& value = places_[at(f_.result())];
    const bool is_last = !value.is_score && value.step == program_.count - 1;
    if (is_last && value.shape == ValueShape::pairs && last.op != FunctionOp::read) {
      value.is_score = last.result.is_score = true;
    }
  }

  static ProgramTensor described(const ConstTensor& t) {
    ProgramTensor tensor{.data = t.data, .dtype = t.dtype, .rank = t.rank};
    std::copy(t.shape.begin(), t.shape.end(), tensor.shape);
    std::copy(t.stride.begin(), t.stride.end(), tensor.stride);
    return tensor;
  }

  static std::int32_t power_of_two(const FunctionNode& divisor) {
    if (divisor.op != FunctionOp::constant || divisor.value < 1.0) return 0;
    const auto value = static_cast<std::int32_t>(divisor.value);
    return (value & (value - 1)) == 0 ? value : 0;
  }

  void release(std::int16_t node, std::size_t step) {
    if (node < 0 || last_use_[at(node)] != static_cast<int>(step)) return;
    const ProgramValue& value = places_[at(node)];
    if (value.shape != ValueShape::pairs || value.is_score) return;
    last_use_[at(node)] = -1;  // an argument may come twice
    free_[free_count_++] = value.offset;
    if (nodes_[at(node)].type == FunctionType::wide) free_[free_count_++] = value.high;
  }

  std::int32_t place(ValueShape shape) {
    if (shape == ValueShape::pairs && free_count_ > 0) return free_[--free_count_];
    const std::int32_t at = program_.words;
    program_.words += words_of(shape);
    return at;
  }

  const Function& f_;
  std::span<const FunctionNode> nodes_;
  LanesOf lanes_;
  FunctionProgram& program_;
  std::array<Linear, Function::max_nodes> linear_{};
  std::array<int, Function::max_nodes> last_use_{};  ///< -1: not needed
  std::array<ProgramValue, Function::max_nodes> places_{};
  std::array<std::int32_t, 2 * Function::max_nodes> free_{};
  std::size_t free_count_ = 0;
};

}  // namespace

void compile(const Function& function, ProgramOf wanted, LanesOf lanes, FunctionProgram& program,
             std::int32_t first_word) {
  Compiler(function, lanes, program).compile(wanted, first_word);
}

}  // namespace tandem::cpu
