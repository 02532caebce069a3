// Functions as text: what a value is called that several use comes first.
//
//   function := { "$" digits "=" value ";" } value
//   value    := number | leaf | "$" digits | "t" digits "[" value { "," value } "]" | name "(" values ")"
//
// Numbers with a point, an exponent, inf or nan are real, others integers; true and false are booleans.
#include <fmt/format.h>

#include <cctype>
#include <charconv>
#include <cmath>
#include <map>

#include "problem/function.hpp"
#include "problem/stats.hpp"

namespace tandem {
namespace {

std::string number_text(const FunctionNode& node) {
  if (node.type == FunctionType::boolean) return node.value != 0.0 ? "true" : "false";
  if (node.type == FunctionType::integer) return fmt::format("{}", static_cast<std::int64_t>(node.value));
  if (node.type == FunctionType::wide) return fmt::format("wide({})", static_cast<std::int64_t>(node.value));
  if (std::isnan(node.value)) return "nan";
  if (std::isinf(node.value)) return node.value < 0.0 ? "-inf" : "inf";
  std::string text = fmt::format("{}", static_cast<float>(node.value));
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

/// Writes one node after the other; those that several use have names.
class Printer {
 public:
  explicit Printer(const Function& f) : f_(f), uses_(f.nodes().size(), 0), names_(f.nodes().size()) {
    mark(f.result());
  }

  std::string print() {
    std::string text;
    int count = 0;
    for (std::size_t n = 0; n < names_.size(); ++n) {
      const FunctionNode& node = f_.nodes()[n];
      if (uses_[n] < 2 || node.args[0] < 0) continue;  // leaves are short enough
      const std::string value = value_text(static_cast<std::int16_t>(n));
      names_[n] = fmt::format("${}", count++);
      text += fmt::format("{}={}; ", names_[n], value);
    }
    return text + value_text(f_.result());
  }

 private:
  void mark(std::int16_t n) {
    if (uses_[static_cast<std::size_t>(n)]++ > 0) return;
    for (const std::int16_t a : f_.nodes()[static_cast<std::size_t>(n)].args) {
      if (a >= 0) mark(a);
    }
  }

  [[nodiscard]] std::string value_text(std::int16_t n) const {
    const auto index = static_cast<std::size_t>(n);
    if (!names_[index].empty()) return names_[index];
    const FunctionNode& node = f_.nodes()[index];
    if (node.op == FunctionOp::constant) return number_text(node);
    std::string list;
    for (const std::int16_t a : node.args) {
      if (a < 0) break;
      list += (list.empty() ? "" : ", ") + value_text(a);
    }
    if (node.op == FunctionOp::read) return fmt::format("t{}[{}]", node.captured, list);
    const std::string_view name = info_of(node.op).name;
    return list.empty() ? std::string(name) : fmt::format("{}({})", name, list);
  }

  const Function& f_;
  std::vector<int> uses_;
  std::vector<std::string> names_;
};

class Parser {
 public:
  Parser(std::string_view text, FunctionBuilder& builder) : text_(text), builder_(builder) {}

  Expression parse() {
    while (next() == '$') {
      const std::size_t start = at_;
      const std::string name = word();
      if (next() != '=') {  // the result is a name
        at_ = start;
        break;
      }
      expect('=');
      const Expression named = value();
      expect(';');
      named_.insert_or_assign(name, named);
    }
    const Expression result = value();
    if (next() != '\0') fail("the end");
    return result;
  }

 private:
  [[noreturn]] void fail(std::string_view wanted) const {
    constexpr std::size_t shown = 40;  // of a text that may be long
    const std::size_t start = at_ > shown ? at_ - shown : 0;
    tandem::fail(Status::invalid_argument, "function text: at character {}, in \"{}\", there must be {}",
                 at_ + 1, text_.substr(start, 2 * shown), wanted);
  }
  char next() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  void expect(char c) {
    if (next() != c) fail(fmt::format("'{}'", c));
    ++at_;
  }
  std::string word() {
    next();
    const std::size_t start = at_;
    const auto in_word = [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$';
    };
    while (at_ < text_.size() && in_word(text_[at_])) ++at_;
    return std::string(text_.substr(start, at_ - start));
  }
  std::vector<Expression> list(char close) {
    ++at_;
    std::vector<Expression> values{nested()};
    while (next() == ',') {
      ++at_;
      values.push_back(nested());
    }
    expect(close);
    return values;
  }
  /// A value inside another: no deeper than any function can be.
  Expression nested() {
    if (++depth_ > static_cast<int>(Function::max_nodes)) fail("fewer values inside one another");
    const Expression inside = value();
    --depth_;
    return inside;
  }

  Expression value() {
    const char c = next();
    if (std::isdigit(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '+' || c == '.') return number();
    const std::size_t start = at_;
    const std::string name = word();
    if (name == "true" || name == "false") return builder_.constant(name == "true");
    if (name == "inf" || name == "nan") return builder_.constant(name == "inf" ? HUGE_VAL : std::nan(""));
    if (const auto found = named_.find(name); found != named_.end()) return found->second;
    int tensor = 0;
    const char* const last = name.data() + name.size();
    if (name.size() > 1 && name[0] == 't' && next() == '[' &&
        std::from_chars(name.data() + 1, last, tensor).ptr == last) {
      return builder_.read(tensor, list(']'));
    }
    const FunctionOpInfo* const info = op_named(name);
    if (info == nullptr) {
      at_ = start;
      fail("a number, a leaf (s b h q k nq nk), a tensor's element (t0[...]) or an operation");
    }
    if (info->arguments == 0) return builder_.leaf(info->op);
    if (next() != '(') fail("'('");
    return builder_.apply(info->op, list(')'));
  }

  Expression number() {
    const std::size_t start = at_;
    if (text_[at_] == '-' || text_[at_] == '+') ++at_;
    if (text_.substr(at_, 3) == "inf") {
      at_ += 3;
      return builder_.constant(text_[start] == '-' ? -HUGE_VAL : HUGE_VAL);
    }
    bool real = false;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      const bool sign = (c == '-' || c == '+') && (text_[at_ - 1] == 'e' || text_[at_ - 1] == 'E');
      if (std::isdigit(static_cast<unsigned char>(c)) == 0 && c != '.' && c != 'e' && c != 'E' && !sign)
        break;
      real = real || c == '.' || c == 'e' || c == 'E';
      ++at_;
    }
    const std::size_t first = text_[start] == '+' ? start + 1 : start;
    const char* const end = text_.data() + at_;
    double value = 0.0;
    std::int64_t whole = 0;
    const auto [stopped, error] = real ? std::from_chars(text_.data() + first, end, value)
                                       : std::from_chars(text_.data() + first, end, whole);
    if (error != std::errc{} || stopped != end) {
      at_ = start;
      fail(real ? "a number" : "a number, if whole of 64 bits at most");
    }
    return real ? builder_.constant(value) : builder_.integer(whole);
  }

  std::string_view text_;
  FunctionBuilder& builder_;
  std::size_t at_ = 0;
  int depth_ = 0;
  std::map<std::string, Expression> named_;
};

}  // namespace

std::string Function::text() const {
  return Printer(*this).print();
}

Function Function::parse(std::string_view text, Kind kind, std::span<const ConstTensor> captured,
                         std::span<const int> differentiated) {
  FunctionBuilder builder;
  for (const ConstTensor& t : captured) builder.capture(t);
  const Expression result = Parser(text, builder).parse();
  if (kind == Kind::score) return builder.score_function(result, differentiated);
  if (!differentiated.empty()) {
    fail(Status::invalid_argument,
         "function: a mask function has no gradients; differentiate tensors of the score function");
  }
  return builder.mask_function(result);
}

}  // namespace tandem
