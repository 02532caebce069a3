// The gradients of what a score function reads as CUDA text: where a pair's elements are, and the derivatives
// of the logit by them. Of gpu/function_source alone.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "gpu/function_printer.hpp"

namespace tandem::gpu {

/// Whether a gradient is of a captured tensor that has a bit in `wanted`.
inline bool is_wanted(const Function& f, const FunctionGradient& g, std::uint32_t wanted) {
  return (wanted >> f.all_nodes()[static_cast<std::size_t>(g.read)].captured & 1U) != 0;
}
/// Whether any of a function's is.
inline bool any_wanted(const Function& f, std::uint32_t wanted) {
  return std::any_of(f.gradients().begin(), f.gradients().end(),
                     [&](const FunctionGradient& g) { return is_wanted(f, g, wanted); });
}

class GradientPrinter : public FunctionPrinter {
 public:
  GradientPrinter(const Function& f, const FunctionNumbers& numbers, char prefix, int first_tensor,
                  std::uint32_t wanted)
      : FunctionPrinter(f, f.all_nodes(), numbers, prefix, first_tensor), leaves_(nodes_.size()) {
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      const FunctionOp op = nodes_[n].op;
      leaves_[n] = {op == FunctionOp::query, op == FunctionOp::key, op == FunctionOp::score};
      for_each_argument(nodes_[n], [&](std::int16_t a) { leaves_[n].add(leaves_[index(a)]); });
    }
    for (const FunctionGradient& g : f.gradients()) {
      if (!is_wanted(f, g, wanted)) continue;
      gradients_.push_back(g);
      keep(g.slope);
      for_each_argument(at(g.read), [&](std::int16_t a) { keep(a); });
    }
  }

  /// The members gradient_count, gradients_read_score, gradient_pattern and gradient.
  [[nodiscard]] std::string text() const {
    bool reads_score = false;
    std::vector<std::int16_t> values;
    std::string patterns;
    std::string slopes;
    for (std::size_t g = 0; g < gradients_.size(); ++g) {
      const FunctionNode& read = at(gradients_[g].read);
      const Leaves& leaves = leaves_[index(gradients_[g].read)];
      reads_score = reads_score || leaves.score || leaves_[index(gradients_[g].slope)].score;
      patterns += fmt::format("      case {}: return {{{}, {}, {}}};\n", g, leaves.query || leaves.score,
                              leaves.key || leaves.score, has_query_as_index(read));
      values.push_back(gradients_[g].slope);
      for_each_argument(read, [&](std::int16_t a) { values.push_back(a); });
      slopes += fmt::format("      case {}: return {{{}, {}}};\n", g, gradient_address(read),
                            use(gradients_[g].slope, Shape::pair));
    }
    return fmt::format(
        "  static TANDEM_DEVICE constexpr int gradient_count() {{ return {}; }}\n"
        "  static TANDEM_DEVICE constexpr bool gradients_read_score() {{ return {}; }}\n"
        "  static TANDEM_DEVICE constexpr ElementPattern gradient_pattern(int g) {{\n"
        "    switch (g) {{\n{}      default: return {{}};\n    }}\n  }}\n"
        "  static TANDEM_DEVICE ElementSlope gradient([[maybe_unused]] const FunctionSequence& sequence,\n"
        "      const CapturedGradient (&gradients)[most_captured], [[maybe_unused]] const Row& row,\n"
        "      [[maybe_unused]] const Key& key, [[maybe_unused]] float score, int g) {{\n{}"
        "    switch (g) {{\n{}      default: return {{}};\n    }}\n  }}\n",
        gradients_.size(), reads_score, patterns, statements(Shape::pair, values), slopes);
  }

 private:
  /// What of a pair a value depends on.
  struct Leaves {
    bool query = false, key = false, score = false;
    void add(const Leaves& other) {
      query = query || other.query;
      key = key || other.key;
      score = score || other.score;
    }
  };
  [[nodiscard]] bool has_query_as_index(const FunctionNode& read) const {
    bool found = false;
    for_each_argument(read, [&](std::int16_t a) { found = found || at(a).op == FunctionOp::query; });
    return found;
  }

  [[nodiscard]] std::string gradient_address(const FunctionNode& read) const {
    std::string text = fmt::format("reinterpret_cast<i64>(gradients[{}].data)", read.captured);
    for (std::size_t d = 0; d < read.args.size() && read.args[d] >= 0; ++d) {
      text +=
          fmt::format(" + {} * gradients[{}].strides[{}]", clamped(read, d, Shape::pair), read.captured, d);
    }
    return text;
  }

  std::vector<Leaves> leaves_;
  std::vector<FunctionGradient> gradients_;
};

}  // namespace tandem::gpu
