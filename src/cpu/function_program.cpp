#include "cpu/function_program.hpp"

#include <algorithm>
#include <array>

namespace tandem::cpu {
namespace {

constexpr std::int32_t words_of(ValueShape shape) {
  switch (shape) {
    case ValueShape::uniform:
    case ValueShape::rows: return function_lanes;
    case ValueShape::keys: return function_keys;
    case ValueShape::pairs: return function_keys * function_lanes;
  }
  return 0;
}

constexpr ValueShape shape_of_leaf(FunctionOp op) {
  switch (op) {
    case FunctionOp::head:
    case FunctionOp::query: return ValueShape::rows;
    case FunctionOp::key: return ValueShape::keys;
    default: return ValueShape::uniform;
  }
}

constexpr ValueShape join(ValueShape a, ValueShape b) {
  return static_cast<ValueShape>(static_cast<int>(a) | static_cast<int>(b));
}

/// Gives values memory. That of pairs is used again once the last step that reads it is done.
class Compiler {
 public:
  Compiler(const Function& f, FunctionProgram& program) : f_(f), nodes_(f.all_nodes()), program_(program) {}

  void compile(ProgramOf wanted) {
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
    program_.words = 0;
    for (std::size_t n = 0; n < f_.captured().size(); ++n) program_.tensors[n] = described(f_.captured()[n]);
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      if (last_use_[n] >= 0) add(n);
    }
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
    ValueShape shape = shape_of_leaf(node.op);
    for (std::size_t a = 0; a < node.args.size() && node.args[a] >= 0; ++a) {
      step.args[a] = places_[at(node.args[a])];
      shape = join(shape, step.args[a].shape);
      ++step.arguments;
    }
    if (step.arguments > 0) step.from = nodes_[at(node.args[0])].type;
    if (node.op == FunctionOp::constant) {
      if (node.type == FunctionType::real) {
        step.real = static_cast<float>(node.value);
      } else {
        step.integer = static_cast<std::int32_t>(node.value);
      }
    }
    if (node.op == FunctionOp::floor_divide || node.op == FunctionOp::remainder) {
      step.integer = power_of_two(nodes_[at(node.args[1])]);
    }
    if (node.op == FunctionOp::read) step.tensor = &program_.tensors[node.captured];
    // Before the result has its place: a step reads its arguments of a key before it writes that key.
    for (const std::int16_t a : node.args) release(a, n);
    step.result = {
        .shape = shape, .offset = place(shape), .step = static_cast<std::int16_t>(program_.count - 1)};
    places_[n] = step.result;
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
  }

  std::int32_t place(ValueShape shape) {
    if (shape == ValueShape::pairs && free_count_ > 0) return free_[--free_count_];
    const std::int32_t at = program_.words;
    program_.words += words_of(shape);
    return at;
  }

  const Function& f_;
  std::span<const FunctionNode> nodes_;
  FunctionProgram& program_;
  std::array<int, Function::max_nodes> last_use_{};  ///< -1: not needed
  std::array<ProgramValue, Function::max_nodes> places_{};
  std::array<std::int32_t, Function::max_nodes> free_{};
  std::size_t free_count_ = 0;
};

}  // namespace

void compile(const Function& function, ProgramOf wanted, FunctionProgram& program) {
  Compiler(function, program).compile(wanted);
}

}  // namespace tandem::cpu
