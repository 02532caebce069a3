// A mask function as CUDA text over ranges of pairs: what it gives for a whole block, by interval arithmetic,
// from the least and the largest of the values that are kept of rows and keys. Of gpu/function_source alone.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "gpu/function_printer.hpp"

namespace tandem::gpu {

class BoundsPrinter : FunctionPrinter {
 public:
  BoundsPrinter(const Function& f, const FunctionNumbers& numbers, char prefix, int first_tensor)
      : FunctionPrinter(f, numbers, prefix, first_tensor) {}

  /// The members row_values and key_values, which are integers or booleans, and `bounds`.
  [[nodiscard]] std::string text() const { return values_of(Shape::row) + values_of(Shape::key) + bounds(); }

 private:
  static const char* side(Shape of) { return of == Shape::row ? "row" : "key"; }

  /// Values that have ranges, of a row or a key.
  [[nodiscard]] std::vector<std::size_t> ranged(Shape of) const {
    std::vector<std::size_t> found;
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      if (is_kept(n, of) && nodes_[n].type != FunctionType::real) found.push_back(n);
    }
    return found;
  }

  [[nodiscard]] std::string values_of(Shape of) const {
    const std::vector<std::size_t> found = ranged(of);
    const char* const name_of_side = side(of);
    std::string text = fmt::format("  static constexpr int {}_values = {};\n", name_of_side, found.size());
    text +=
        fmt::format("  static TANDEM_DEVICE void write_{0}([[maybe_unused]] const {1}& {0}, i32*{2}) {{\n",
                    name_of_side, of == Shape::row ? "Row" : "Key", found.empty() ? "" : " values");
    for (std::size_t i = 0; i < found.size(); ++i) {
      const FunctionType type = nodes_[found[i]].type;
      const char* const taken = type == FunctionType::boolean ? "-"
                                : type == FunctionType::wide  ? "saturated"
                                                              : "";
      text += fmt::format("    values[{}] = {}({}.{});\n", i, taken, name_of_side, name(found[i]));
    }
    return text + "  }\n";
  }

  [[nodiscard]] static std::string unknown(FunctionType type) {
    return type == FunctionType::boolean ? "interval::maybe"
           : type == FunctionType::wide  ? "interval::everything"
                                         : "interval::anything";
  }

  /// The range of a value where another one reads it.
  [[nodiscard]] std::string range(std::int16_t node) const {
    const FunctionNode& of = at(node);
    if (of.type == FunctionType::real) return unknown(of.type);
    if (of.op == FunctionOp::constant) {
      if (numbers_.place_of(index(node)) >= 0) return fmt::format("interval::one({})", number(node));
      const auto value = static_cast<std::int64_t>(of.value);
      return fmt::format("interval::one({}LL)", of.type == FunctionType::boolean ? -value : value);
    }
    if (shapes_[index(node)] == Shape::pair) return name(index(node));
    const Shape kept = shapes_[index(node)] == Shape::key ? Shape::key : Shape::row;
    const std::vector<std::size_t> found = ranged(kept);
    const auto place = std::find(found.begin(), found.end(), index(node)) - found.begin();
    return fmt::format(
        fmt::runtime(of.type == FunctionType::wide ? "interval::unsaturated({}[{}])" : "{}[{}]"), side(kept),
        place);
  }

  /// The operation on ranges; null for one of which nothing is known.
  [[nodiscard]] const char* operation(const FunctionNode& node) const {
    const bool logical = node.type == FunctionType::boolean;
    const bool of_boolean = node.args[0] >= 0 && at(node.args[0]).type == FunctionType::boolean;
    switch (node.op) {
      case FunctionOp::add: return "sum";
      case FunctionOp::subtract: return "difference";
      case FunctionOp::multiply: return "product";
      case FunctionOp::floor_divide: return "quotient";
      case FunctionOp::remainder: return "remainder";
      case FunctionOp::negate: return "negative";
      case FunctionOp::absolute: return "magnitude";
      case FunctionOp::minimum: return "minimum";
      case FunctionOp::maximum: return "maximum";
      case FunctionOp::to_integer:
      case FunctionOp::to_wide: return of_boolean ? "from_boolean" : "narrowed";
      case FunctionOp::to_boolean: return "to_boolean";
      case FunctionOp::less: return "less";
      case FunctionOp::less_equal: return "less_equal";
      case FunctionOp::equal: return "equal";
      case FunctionOp::not_equal: return "not_equal";
      case FunctionOp::bit_and: return logical ? "both" : nullptr;
      case FunctionOp::bit_or: return logical ? "either" : nullptr;
      case FunctionOp::bit_xor: return logical ? "differs" : nullptr;
      case FunctionOp::bit_not: return logical ? "opposite" : nullptr;
      case FunctionOp::select: return "chosen";
      default: return nullptr;
    }
  }

  [[nodiscard]] std::string operation_text(const FunctionNode& node, const char* made) const {
    const bool arithmetic =
        node.type == FunctionType::wide && node.op >= FunctionOp::add && node.op <= FunctionOp::absolute;
    std::string arguments;
    std::string whole;
    for_each_argument(node, [&](std::int16_t a) {
      const std::string x = range(a);
      arguments +=
          (arguments.empty() ? "" : ", ") + (arithmetic ? fmt::format("interval::narrowed({})", x) : x);
      whole += ", " + x;
    });
    std::string text = fmt::format("interval::{}({})", made, arguments);
    if (!arithmetic) return text;
    return fmt::format("interval::of_wide({}{})", text, node.args[1] >= 0 ? whole : whole + whole);
  }

  [[nodiscard]] std::string bounds() const {
    std::string text =
        "  static TANDEM_DEVICE Interval bounds([[maybe_unused]] const FunctionSequence& sequence,\n"
        "                                       [[maybe_unused]] const Interval* row,\n"
        "                                       [[maybe_unused]] const Interval* key) {\n";
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      const FunctionNode& node = nodes_[n];
      if (shapes_[n] != Shape::pair || node.type == FunctionType::real) continue;
      bool reals = node.op == FunctionOp::read;
      for_each_argument(node, [&](std::int16_t a) { reals = reals || at(a).type == FunctionType::real; });
      const char* const made = reals ? nullptr : operation(node);
      text += fmt::format("    [[maybe_unused]] const Interval {} = {};\n", name(n),
                          made == nullptr ? unknown(node.type) : operation_text(node, made));
    }
    return text + fmt::format("    return {};\n  }}\n", range(f_.result()));
  }
};

}  // namespace tandem::gpu
