// What the recipe of gradients in 8 bits (docs/results/gradients-in-8-bits.md) makes of rows before they meet
// in pairs, in fp64: 8-bit operands, statistics and factors of rows.
#pragma once

#include <vector>

#include "call.hpp"
#include "recipe_operands.hpp"

namespace tandem::harness {

/// What a number in e4m3 is, and how far from that a backend's may be that had it in f32.
struct Rounded {
  double value = 0.0;
  double error = 0.0;
};
/// Of x, which may be wrong by `unsure`.
Rounded to_e4m3(double x, double unsure);

/// Rows in e4m3, [row][dim].
struct RoundedRows {
  std::vector<double> values, errors;
};

/// What f32 may change of r, as a share of it: it is an exponential of numbers of up to 44.
constexpr double root_error = 0x1p-18;

/// A query head of a sequence, and its KV head.
struct GradientHead {
  std::int64_t nq = 0;
  std::int64_t nk = 0;
  QuantizedHead q = {}, k = {}, v = {}, dout = {};
  std::vector<double> lse = {};  ///< without K's mean; NaN of rows whose pairs are NaN
  std::vector<double> delta = {}, delta_error = {};
  std::vector<double> root = {};      ///< r: P is rounded over it; 0 of a row that sees no key
  std::vector<double> ds_scale = {};  ///< E, over which dS is rounded, too
  RoundedRows dout_e4m3 = {}, q_e4m3 = {}, k_e4m3 = {};
};

/// The query heads of a KV head of a sequence, and the powers of two that their operands were divided by.
struct GradientGroup {
  std::vector<GradientHead> heads;
  double dout_unit = 1.0;  ///< T
  double q_unit = 1.0;     ///< T'
};
GradientGroup gradient_group(const Call& call, const Problem& problem, const Recipe& recipe,
                             std::int64_t batch, std::int64_t kv_head);

}  // namespace tandem::harness
