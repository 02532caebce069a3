// One function of a call as CUDA text: which of its values are kept of a row, kept of a key, and made for a
// pair. Of gpu/function_source alone.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "gpu/function_numbers.hpp"
#include "tandem/function.hpp"

namespace tandem::gpu {

/// What a value depends on.
enum class Shape : int { uniform = 0, row = 1, key = 2, pair = 3 };
constexpr Shape join(Shape a, Shape b) {
  return static_cast<Shape>(static_cast<int>(a) | static_cast<int>(b));
}

constexpr const char* type_text(FunctionType type) {
  switch (type) {
    case FunctionType::boolean: return "bool";
    case FunctionType::integer: return "i32";
    case FunctionType::wide: return "i64";
    case FunctionType::real: return "float";
  }
  return "";
}

inline std::string literal(const FunctionNode& node) {
  if (node.type == FunctionType::boolean) return node.value != 0.0 ? "true" : "false";
  if (node.type == FunctionType::integer) {
    if (node.value == std::numeric_limits<std::int32_t>::min()) return "(-0x7fffffff - 1)";
    return fmt::format("({})", static_cast<std::int64_t>(node.value));
  }
  if (node.type == FunctionType::wide) return fmt::format("i64{{{}}}", static_cast<std::int64_t>(node.value));
  if (std::isnan(node.value)) return "(ptx::infinity() - ptx::infinity())";
  if (std::isinf(node.value)) return node.value < 0.0 ? "(-ptx::infinity())" : "ptx::infinity()";
  return fmt::format("({:a}F)", static_cast<float>(node.value));
}

/// log2 of a constant that is a power of two, or -1.
inline int exponent_of(const FunctionNode& node) {
  if (node.op != FunctionOp::constant || node.value < 1.0) return -1;
  const auto value = static_cast<std::uint64_t>(node.value);
  return (value & (value - 1)) == 0 ? __builtin_ctzll(value) : -1;
}

/// Whether a tensor has strides of more than 32 bits, in bytes: the text is then another.
inline bool has_wide_strides(const ConstTensor& t) {
  return std::any_of(t.stride.begin(), t.stride.begin() + t.rank, [&](std::int64_t stride) {
    return std::abs(stride) > INT_MAX / static_cast<std::int64_t>(size_of(t.dtype));
  });
}

constexpr const char* reader_of(DType type) {
  switch (type) {
    case DType::f16: return "read_half<Element::f16>";
    case DType::bf16: return "read_half<Element::bf16>";
    case DType::i32: return "read_i32";
    case DType::i64: return "read_i64";
    case DType::s8: return "read_s8";
    default: return "read_f32";
  }
}

/// One function: which of its values are kept of a row, kept of a key, and made for a pair.
class FunctionPrinter {
 public:
  /// Values are called `prefix` and their number; captured tensors are counted from `first_tensor`.
  FunctionPrinter(const Function& f, const FunctionNumbers& numbers, char prefix, int first_tensor)
      : FunctionPrinter(f, f.nodes(), numbers, prefix, first_tensor) {}
  /// `nodes` are those that are printed: the function's own, or all.
  FunctionPrinter(const Function& f, std::span<const FunctionNode> nodes, const FunctionNumbers& numbers,
                  char prefix, int first_tensor)
      : f_(f),
        nodes_(nodes),
        numbers_(numbers),
        prefix_(prefix),
        first_tensor_(first_tensor),
        shapes_(nodes_.size()),
        positive_(nodes_.size()),
        kept_(nodes_.size()) {
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      shapes_[n] = shape_of(nodes_[n]);
      positive_[n] = is_positive(nodes_[n]);
    }
    keep(f.result());
    if (f.slope() >= 0) keep(f.slope());
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      if (shapes_[n] != Shape::pair || nodes_[n].op == FunctionOp::read) continue;
      for_each_argument(nodes_[n], [&](std::int16_t a) { keep(a); });
    }
  }

  /// The members of the structs of a row or a key, as declarations and as a list of names.
  [[nodiscard]] std::string members(Shape of) const {
    std::string text;
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      if (is_kept(n, of)) text += fmt::format("    {} {};\n", type_text(nodes_[n].type), name(n));
      if (has_address(n, of)) text += fmt::format("    i64 {};\n", address_name(n, of));
    }
    return text;
  }
  [[nodiscard]] std::string values(Shape of) const {
    std::string text;
    const auto add = [&](const std::string& value) { text += (text.empty() ? "" : ", ") + value; };
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      if (is_kept(n, of)) add(name(n));
      if (has_address(n, of)) add(address_name(n, of));
    }
    return text;
  }

  /// The statements that make what is kept of a row or a key, or what is made for a pair.
  [[nodiscard]] std::string statements(Shape of) const { return statements(of, {f_.result(), f_.slope()}); }
  [[nodiscard]] std::string statements(Shape of, const std::vector<std::int16_t>& values_of_pair) const {
    const std::vector<bool> made = needed(of, values_of_pair);
    std::string text;
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      if (made[n] && nodes_[n].op != FunctionOp::score && nodes_[n].op != FunctionOp::constant) {
        text += fmt::format("    const {} {} = {};\n", type_text(nodes_[n].type), name(n),
                            value(static_cast<std::int16_t>(n), of));
      }
      if (has_address(n, of))
        text += fmt::format("    const i64 {} = {};\n", address_name(n, of), address(nodes_[n], of, of));
    }
    return text;
  }

  [[nodiscard]] std::string result() const { return use(f_.result(), Shape::pair); }
  [[nodiscard]] std::string slope() const { return use(f_.slope(), Shape::pair); }

 protected:
  static std::size_t index(std::int16_t node) { return static_cast<std::size_t>(node); }
  [[nodiscard]] const FunctionNode& at(std::int16_t node) const { return nodes_[index(node)]; }
  [[nodiscard]] std::string name(std::size_t n) const { return fmt::format("{}{}", prefix_, n); }

  template <typename F>
  static void for_each_argument(const FunctionNode& node, F&& f) {
    for (const std::int16_t a : node.args) {
      if (a >= 0) f(a);
    }
  }

  void keep(std::int16_t node) {
    if (at(node).op != FunctionOp::constant && shapes_[index(node)] != Shape::pair) kept_[index(node)] = true;
  }
  /// What neither rows nor keys change is kept of rows, which are made least often.
  [[nodiscard]] bool is_kept(std::size_t n, Shape of) const {
    return kept_[n] && (shapes_[n] == Shape::key) == (of == Shape::key);
  }

  /// Values that are made together with a row or a key, or for a pair, of which `values_of_pair` are wanted.
  [[nodiscard]] std::vector<bool> needed(Shape of, const std::vector<std::int16_t>& values_of_pair) const {
    std::vector<bool> made(nodes_.size(), false);
    for (const std::int16_t node : values_of_pair) {
      if (of == Shape::pair && node >= 0) made[index(node)] = shapes_[index(node)] == Shape::pair;
    }
    for (std::size_t n = nodes_.size(); n-- > 0;) {
      if (of == Shape::pair) {
        if (!made[n]) continue;
        for_each_argument(nodes_[n], [&](std::int16_t a) {
          if (shapes_[index(a)] == Shape::pair) made[index(a)] = true;
        });
        continue;
      }
      made[n] = made[n] || is_kept(n, of);
      if (!made[n] && !has_address(n, of)) continue;
      for_each_argument(nodes_[n], [&](std::int16_t a) {
        if (made[n] || belongs(a, of)) made[index(a)] = true;
      });
    }
    return made;
  }

  /// Whether a value is made with a row, as one that neither rows nor keys change is, or with a key.
  [[nodiscard]] bool belongs(std::int16_t node, Shape of) const {
    const Shape shape = shapes_[index(node)];
    return of == Shape::row ? (shape == Shape::uniform || shape == Shape::row) : shape == of;
  }
  /// What is read for a pair has an address that is a row's, and bytes behind it that are a key's.
  [[nodiscard]] bool has_address(std::size_t n, Shape of) const {
    if (nodes_[n].op != FunctionOp::read || shapes_[n] != Shape::pair || of == Shape::pair) return false;
    const auto& args = nodes_[n].args;
    return std::any_of(args.begin(), args.end(), [&](std::int16_t a) { return a >= 0 && belongs(a, of); });
  }
  [[nodiscard]] std::string address_name(std::size_t n, Shape of) const {
    return name(n) + (of == Shape::row ? "_row" : "_key");
  }

  [[nodiscard]] Shape shape_of(const FunctionNode& node) const {
    switch (node.op) {
      case FunctionOp::score: return Shape::pair;
      case FunctionOp::head:
      case FunctionOp::query: return Shape::row;
      case FunctionOp::key: return Shape::key;
      default: break;
    }
    Shape shape = Shape::uniform;
    for_each_argument(node, [&](std::int16_t a) { shape = join(shape, shapes_[index(a)]); });
    return shape;
  }

  /// Whether an integer is known not to be below 0, whatever wraps.
  [[nodiscard]] bool is_positive(const FunctionNode& node) const {
    const auto argument = [&](std::size_t i) { return bool{positive_[index(node.args[i])]}; };
    if (node.type != FunctionType::integer) return false;
    switch (node.op) {
      case FunctionOp::constant: return node.value >= 0.0;
      case FunctionOp::batch:
      case FunctionOp::head:
      case FunctionOp::query:
      case FunctionOp::key:
      case FunctionOp::seqlen_q:
      case FunctionOp::seqlen_k: return true;
      case FunctionOp::to_integer: return at(node.args[0]).type == FunctionType::boolean;
      case FunctionOp::floor_divide: return argument(0) && argument(1);
      case FunctionOp::remainder: return argument(1);
      case FunctionOp::minimum: return argument(0) && argument(1);
      case FunctionOp::maximum:
      case FunctionOp::bit_and: return argument(0) || argument(1);
      case FunctionOp::select: return argument(1) && argument(2);
      default: return false;
    }
  }

  /// A constant: a parameter, or in the text.
  [[nodiscard]] std::string number(std::int16_t node) const {
    if (numbers_.place_of(index(node)) < 0) return literal(at(node));
    return fmt::format("sequence.params->numbers[{}].{}", numbers_.place_of(index(node)),
                       at(node).type == FunctionType::real ? "real" : "integer");
  }

  /// A value where it is read: in the function that makes a row, a key or a pair.
  [[nodiscard]] std::string use(std::int16_t node, Shape in) const {
    if (at(node).op == FunctionOp::constant) return number(node);
    if (at(node).op == FunctionOp::score) return "score";
    if (in != Shape::pair || shapes_[index(node)] == Shape::pair) return name(index(node));
    return (shapes_[index(node)] == Shape::key ? "key." : "row.") + name(index(node));
  }

  [[nodiscard]] const ConstTensor& captured(const FunctionNode& node) const {
    return f_.captured()[static_cast<std::size_t>(node.captured)];
  }
  /// Index d of an element as it is used.
  [[nodiscard]] std::string clamped(const FunctionNode& node, std::size_t d, Shape in) const {
    return fmt::format("clamped<{}>(sequence.params->tensors[{}], {}, {})",
                       bool{positive_[index(node.args[d])]}, first_tensor_ + node.captured, d,
                       use(node.args[d], in));
  }
  /// The part of a read element's address that the indices of `of` make; in it stands where `in` is made. The
  /// part of rows begins with the tensor's address.
  [[nodiscard]] std::string address(const FunctionNode& node, Shape of, Shape in) const {
    const std::string tensor = fmt::format("sequence.params->tensors[{}]", first_tensor_ + node.captured);
    std::string text = of == Shape::row ? fmt::format("reinterpret_cast<i64>({}.data)", tensor) : "";
    for (std::size_t d = 0; d < node.args.size() && node.args[d] >= 0; ++d) {
      const std::int16_t a = node.args[d];
      if (!belongs(a, of)) continue;
      text += fmt::format("{}bytes_to<{}>({}, {}, {})", text.empty() ? "" : " + ",
                          has_wide_strides(captured(node)), tensor, d, clamped(node, d, in));
    }
    return text;
  }
  [[nodiscard]] std::string read(std::int16_t n, Shape in) const {
    const FunctionNode& node = at(n);
    std::string text;
    for (const Shape of : {Shape::row, Shape::key, Shape::pair}) {
      const bool kept = in == Shape::pair && of != Shape::pair && has_address(index(n), of);
      const std::string part =
          kept ? (of == Shape::row ? "row." : "key.") + address_name(index(n), of) : address(node, of, in);
      if (!part.empty()) text += (text.empty() ? "" : " + ") + part;
    }
    return fmt::format("{}({})", reader_of(captured(node).dtype), text);
  }

  [[nodiscard]] std::string converted(const FunctionNode& node, const std::string& a) const {
    const FunctionType from = at(node.args[0]).type;
    if (node.type == FunctionType::boolean)
      return fmt::format("{} != {}", a, from == FunctionType::real ? "0.0F" : "0");
    if (from == FunctionType::boolean)
      return fmt::format(fmt::runtime(node.type == FunctionType::real ? "{} ? 1.0F : 0.0F" : "{} ? 1 : 0"),
                         a);
    if (node.type == FunctionType::real) return fmt::format("static_cast<float>({})", a);
    return fmt::format(fmt::runtime(node.type == FunctionType::wide ? "to_wide({})" : "to_integer({})"), a);
  }

  /// A quotient or remainder; a real one by a constant is a product.
  [[nodiscard]] std::string divided(const FunctionNode& node, const std::string& a,
                                    const std::string& b) const {
    const FunctionNode& divisor = at(node.args[1]);
    if (node.op == FunctionOp::divide) {
      if (const int place = numbers_.place_of(index(node.args[1])); place >= 0)
        return fmt::format("{} * sequence.params->reciprocals[{}]", a, place);
      const float factor = 1.0F / static_cast<float>(divisor.value);
      if (divisor.op != FunctionOp::constant || !std::isnormal(factor))
        return fmt::format("divide({}, {})", a, b);
      return fmt::format("{} * ({:a}F)", a, factor);
    }
    const int exponent = exponent_of(divisor);
    if (node.op == FunctionOp::floor_divide) {
      return fmt::format(fmt::runtime(exponent >= 0 ? "{0} >> {2}" : "floor_divide({0}, {1})"), a, b,
                         exponent);
    }
    return exponent >= 0 ? fmt::format("{} & (({}{{1}} << {}) - 1)", a, type_text(node.type), exponent)
                         : fmt::format("remainder({}, {})", a, b);
  }

  /// What reals and integers both have: reals as operators, integers such that they wrap.
  [[nodiscard]] static std::string arithmetic(const FunctionNode& node, const std::string& a,
                                              const std::string& b) {
    const bool real = node.type == FunctionType::real;
    switch (node.op) {
      case FunctionOp::add: return fmt::format(fmt::runtime(real ? "{} + {}" : "add_wrapped({}, {})"), a, b);
      case FunctionOp::subtract:
        return fmt::format(fmt::runtime(real ? "{} - {}" : "subtract_wrapped({}, {})"), a, b);
      case FunctionOp::multiply:
        return fmt::format(fmt::runtime(real ? "{} * {}" : "multiply_wrapped({}, {})"), a, b);
      case FunctionOp::negate:
        return real ? "-" + a : fmt::format("subtract_wrapped({}{{0}}, {})", type_text(node.type), a);
      case FunctionOp::absolute: return fmt::format("absolute({})", a);
      case FunctionOp::minimum: return fmt::format("least({}, {})", a, b);
      default: return fmt::format("greatest({}, {})", a, b);
    }
  }

  [[nodiscard]] static std::string leaf(FunctionOp op) {
    switch (op) {
      case FunctionOp::batch: return "sequence.batch";
      case FunctionOp::head: return "head";
      case FunctionOp::query: return "query";
      case FunctionOp::key: return "key";
      case FunctionOp::seqlen_q: return "sequence.seqlen_q";
      default: return "sequence.seqlen_k";
    }
  }

  /// A node, not a constant or the score, computed in the function that makes a row, a key or a pair.
  [[nodiscard]] std::string value(std::int16_t n, Shape in) const {
    const FunctionNode& node = at(n);
    if (node.args[0] < 0) return leaf(node.op);
    if (node.op == FunctionOp::read) return read(n, in);
    std::string a = use(node.args[0], in);
    const std::string b = node.args[1] >= 0 ? use(node.args[1], in) : std::string();
    const bool logical = node.type == FunctionType::boolean;
    switch (node.op) {
      case FunctionOp::to_real:
      case FunctionOp::to_integer:
      case FunctionOp::to_wide:
      case FunctionOp::to_boolean: return converted(node, a);
      case FunctionOp::divide:
      case FunctionOp::floor_divide:
      case FunctionOp::remainder: return divided(node, a, b);
      case FunctionOp::exp: return fmt::format("exponential({})", a);
      case FunctionOp::log: return fmt::format("logarithm({})", a);
      case FunctionOp::sqrt: return fmt::format("ptx::square_root({})", a);
      case FunctionOp::tanh: return fmt::format("tanh_of({})", a);
      case FunctionOp::sigmoid: return fmt::format("sigmoid({})", a);
      case FunctionOp::sine: return fmt::format("ptx::sine({})", a);
      case FunctionOp::cosine: return fmt::format("ptx::cosine({})", a);
      case FunctionOp::erf: return fmt::format("ptx::error_function({})", a);
      case FunctionOp::log2: return fmt::format("ptx::log2({})", a);
      case FunctionOp::log1p: return fmt::format("ptx::log1p({})", a);
      case FunctionOp::floor: return fmt::format("ptx::floor({})", a);
      case FunctionOp::round: return fmt::format("ptx::round({})", a);
      case FunctionOp::fmod: return fmt::format("ptx::fmod({}, {})", a, b);
      case FunctionOp::stop: return a;
      case FunctionOp::less: return fmt::format("{} < {}", a, b);
      case FunctionOp::less_equal: return fmt::format("{} <= {}", a, b);
      case FunctionOp::equal: return fmt::format("{} == {}", a, b);
      case FunctionOp::not_equal: return fmt::format("{} != {}", a, b);
      case FunctionOp::bit_and: return fmt::format(fmt::runtime(logical ? "{} && {}" : "{} & {}"), a, b);
      case FunctionOp::bit_or: return fmt::format(fmt::runtime(logical ? "{} || {}" : "{} | {}"), a, b);
      case FunctionOp::bit_xor: return fmt::format(fmt::runtime(logical ? "{} != {}" : "{} ^ {}"), a, b);
      case FunctionOp::bit_not: return fmt::format(fmt::runtime(logical ? "!{}" : "~{}"), a);
      case FunctionOp::select: return fmt::format("{} ? {} : {}", a, b, use(node.args[2], in));
      default: return arithmetic(node, a, b);
    }
  }

  const Function& f_;
  std::span<const FunctionNode> nodes_;
  FunctionNumbers numbers_;
  char prefix_;
  int first_tensor_;
  std::vector<Shape> shapes_;
  std::vector<bool> positive_;
  std::vector<bool> kept_;
};

}  // namespace tandem::gpu
