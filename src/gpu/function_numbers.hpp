// Which numbers of a function are parameters of its kernel, so that a function with others of them takes the
// kernel that there is, and which stand in the kernel's text. Of gpu/function_source alone.
#pragma once

#include <array>
#include <bitset>
#include <cmath>
#include <cstdint>
#include <span>

#include "ops/functions/config.hpp"
#include "tandem/function.hpp"

namespace tandem::gpu {

/// Whether a node is a number like any other: neither 0, 1 nor -1, with which the compiler has less to
/// compute, and of a real one neither it nor its reciprocal infinite, NaN or subnormal. Integers have 32
/// bits.
inline bool is_ordinary_number(const FunctionNode& node) {
  if (node.op != FunctionOp::constant || node.value == 0.0 || std::abs(node.value) == 1.0) return false;
  if (node.type != FunctionType::real) return node.type == FunctionType::integer;
  const auto value = static_cast<float>(node.value);
  return std::isnormal(value) && std::isnormal(1.0F / value);
}

/// The places of a function's numbers among the parameters. Integers that an index or a divisor depends on
/// stand in the text, which has a shift for a power of two and counts from the end if an index may be below
/// 0. So does what finds no place.
class FunctionNumbers {
 public:
  /// From place `first` on; null for no function.
  FunctionNumbers(const Function* f, int first) : end_(first) {
    if (f != nullptr) nodes_ = f->all_nodes();
    std::bitset<Function::max_nodes> in_text;
    for (std::size_t n = nodes_.size(); n-- > 0;) {
      const FunctionNode& node = nodes_[n];
      const bool divides = node.op == FunctionOp::floor_divide || node.op == FunctionOp::remainder;
      for (std::size_t i = 0; i < node.args.size() && node.args[i] >= 0; ++i) {
        if (in_text[n] || node.op == FunctionOp::read || (divides && i == 1))
          in_text.set(static_cast<std::size_t>(node.args[i]));
      }
    }
    places_.fill(-1);
    for (std::size_t n = 0; n < nodes_.size() && end_ < most_numbers; ++n) {
      const bool literal = nodes_[n].type == FunctionType::integer && in_text[n];
      if (is_ordinary_number(nodes_[n]) && !literal) places_[n] = static_cast<std::int8_t>(end_++);
    }
  }

  /// Node n's place among the parameters; -1 where it is none.
  [[nodiscard]] int place_of(std::size_t n) const { return places_[n]; }
  [[nodiscard]] int end() const { return end_; }

  void set(FunctionParams& params) const {
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      if (places_[n] < 0) continue;
      if (nodes_[n].type == FunctionType::real) {
        params.numbers[places_[n]].real = static_cast<float>(nodes_[n].value);
        params.reciprocals[places_[n]] = 1.0F / static_cast<float>(nodes_[n].value);
      } else {
        params.numbers[places_[n]].integer = static_cast<int>(nodes_[n].value);
      }
    }
  }

 private:
  std::span<const FunctionNode> nodes_;
  std::array<std::int8_t, Function::max_nodes> places_;
  int end_;
};

}  // namespace tandem::gpu
