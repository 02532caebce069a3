// A function of the user's own for one pair of query and key, node by node in fp64, as the oracle has it. Its
// derivative is carried along as a dual number: an oracle shares no code with what it tests, and the
// function's own derivative nodes are not looked at.
#pragma once

#include <cstdint>
#include <vector>

#include "tandem/function.hpp"

namespace tandem::reference {

/// What a function sees.
struct Pair {
  double score = 0.0;
  std::int64_t batch = 0, head = 0, query = 0, key = 0, seqlen_q = 0, seqlen_k = 0;
};

struct Dual {
  double value = 0.0;
  double slope = 0.0;     ///< d / d(score)
  std::int64_t wide = 0;  ///< an integer of 64 bits, in place of `value`
};

class FunctionValue {
 public:
  explicit FunctionValue(const Function& f) : FunctionValue(f, f.result()) {}
  /// Computes another node than the result.
  FunctionValue(const Function& f, std::int16_t wanted);
  Dual at(const Pair& pair);
  /// Has the derivative by the element that node `read` reads in place of the score.
  Dual at(const Pair& pair, std::int16_t read);
  /// Which element of its tensor node `read` has read for the last pair, in logical order.
  [[nodiscard]] std::int64_t element(std::int16_t read) const;

 private:
  [[nodiscard]] std::int64_t index(const FunctionNode& node, std::size_t dim) const;
  [[nodiscard]] Dual node(const FunctionNode& node, const Pair& pair) const;
  [[nodiscard]] Dual read(const FunctionNode& node) const;

  const Function& f_;
  std::size_t wanted_;
  std::int16_t by_ = -1;       ///< a node whose derivative by itself is 1; -1: the score's is
  std::vector<bool> of_key_;   ///< by node: whether it depends on the key or the score
  Pair last_;                  ///< whose values are in values_,
  std::int16_t last_by_ = -1;  ///< with derivatives by this node
  std::vector<Dual> values_;
};

}  // namespace tandem::reference
