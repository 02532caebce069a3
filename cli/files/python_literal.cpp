#include "files/python_literal.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "files/source.hpp"

namespace tandem::files {
namespace {

// NumPy's own limit on dimensions.
constexpr std::size_t most_dimensions = 64;

/// Recursive descent without the recursion: nothing in this literal nests deeper than the shape's tuple.
class LiteralParser {
 public:
  LiteralParser(const std::string& file, std::string_view text) : file_(file), text_(text) {}

  ArrayDescription parse() {
    ArrayDescription result;
    std::array<bool, 3> has{};
    expect('{');
    while (!accept('}')) {
      const std::string key = string();
      expect(':');
      std::size_t field = 0;
      if (key == "descr") {
        if (next() == '[') refuse(file_, "holds records; save one plain array a file");
        result.descr = string();
      } else if (key == "fortran_order") {
        field = 1;
        result.fortran_order = boolean();
      } else if (key == "shape") {
        field = 2;
        result.shape = shape();
      } else {
        refuse(file_,
               "the header has a key {}, allowed are descr, fortran_order and shape; save the array again",
               in_quotes(key));
      }
      if (std::exchange(has[field], true))
        refuse(file_, "the header has {} twice; save the array again", key);
      if (!accept(',') && next() != '}') damaged();
    }
    if (next()) damaged();
    if (!has[0] || !has[1] || !has[2]) {
      refuse(file_, "the header lacks descr, fortran_order or shape; save the array again");
    }
    return result;
  }

 private:
  /// The next character that is not a space; unset at the end.
  std::optional<char> next() {
    at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size());
    return at_ < text_.size() ? std::optional(text_[at_]) : std::nullopt;
  }
  bool accept(char c) {
    const bool found = next() == c;
    at_ += found ? 1 : 0;
    return found;
  }
  void expect(char c) {
    if (!accept(c)) damaged();
  }
  bool accept_word(std::string_view word) {
    next();
    const bool found = text_.substr(at_).starts_with(word);
    at_ += found ? word.size() : 0;
    return found;
  }

  std::string string() {
    const std::optional<char> quote = next();
    if (!quote || (*quote != '\'' && *quote != '"')) damaged();
    const std::size_t close = text_.find(*quote, at_ + 1);
    const std::string_view content = text_.substr(at_ + 1, close - at_ - 1);
    // No dtype name or key has an escape in it.
    if (close == std::string_view::npos || content.find('\\') != std::string_view::npos) damaged();
    at_ = close + 1;
    return std::string(content);
  }

  bool boolean() {
    if (accept_word("True")) return true;
    if (accept_word("False")) return false;
    damaged();
  }

  std::vector<std::int64_t> shape() {
    std::vector<std::int64_t> result;
    expect('(');
    bool separated = true;
    while (!accept(')')) {
      if (!separated) damaged();
      if (result.size() == most_dimensions) {
        refuse(file_, "has more than {} dimensions; reshape the array", most_dimensions);
      }
      next();
      std::int64_t n = 0;
      const auto [stop, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), n);
      if (error == std::errc::result_out_of_range)
        refuse(file_, "has a dimension beyond 2^63; save the array again");
      if (error != std::errc() || n < 0) damaged();
      at_ = static_cast<std::size_t>(stop - text_.data());
      // Python 2 wrote long integers as 3L.
      accept('L');
      result.push_back(n);
      separated = accept(',');
    }
    return result;
  }

  [[noreturn]] void damaged() {
    refuse(file_, "the header is not the dictionary numpy.save writes (at its byte {}); save the array again",
           at_);
  }

  const std::string& file_;
  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

ArrayDescription parse_array_description(const std::string& file, std::string_view text) {
  return LiteralParser(file, text).parse();
}

}  // namespace tandem::files
