#include "gradient_recipe.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "element.hpp"
#include "problem/recipe_of.hpp"
#include "recipe_operands.hpp"

namespace tandem::harness {
namespace {

constexpr std::int64_t tile = quant_block;

/// A gradient of one head, rotated, row by row.
struct Sums {
  std::int64_t dim;
  std::vector<double> values, bounds, unrounded;

  Sums(std::int64_t rows, std::int64_t dim_)
      : dim(dim_), values(static_cast<std::size_t>(rows * dim_), 0.0), bounds(values), unrounded(values) {}
  /// Row `to` gains x, which was `exact`, times a row of an operand; x may be wrong by `error`.
  void add(std::int64_t to, double exact, double x, double error, const double* row) {
    for (std::int64_t c = 0; c < dim; ++c) {
      const auto at = static_cast<std::size_t>(to * dim + c);
      values[at] += x * row[c];
      unrounded[at] += exact * row[c];
      bounds[at] += (error + 0x1p-20 * std::abs(x)) * std::abs(row[c]);
    }
  }
};

/// A pair of query and key.
struct Pair {
  double p = 0.0, p_error = 0.0;
  double ds = 0.0, ds_error = 0.0;
};

struct Head {
  const Problem& p;
  std::int64_t nq, nk;
  QuantizedHead q, k, v, dout;
  std::vector<double> lse, delta, delta_error;
};

const double* row_of(const std::vector<double>& x, std::int64_t row, std::int64_t dim) {
  return x.data() + row * dim;
}

double product(const double* a, const double* b, std::int64_t dim) {
  double sum = 0.0;
  for (std::int64_t c = 0; c < dim; ++c) sum += a[c] * b[c];
  return sum;
}

Pair pair_of(const Head& h, std::int64_t i, std::int64_t j) {
  const KeyRange seen = visible_keys({h.p.window_left, h.p.window_right}, i, h.nq, h.nk);
  const double lse = h.lse[static_cast<std::size_t>(i)];
  if (j < seen.first || j >= seen.last || std::isinf(lse)) return {};
  const double logit =
      static_cast<double>(h.p.scale) * product(row_of(h.q.values, i, h.p.head_dim_qk),
                                               row_of(h.k.values, j, h.p.head_dim_qk), h.p.head_dim_qk);
  const double dp = product(row_of(h.dout.values, i, h.p.head_dim_v), row_of(h.v.values, j, h.p.head_dim_v),
                            h.p.head_dim_v);
  const double delta = h.delta[static_cast<std::size_t>(i)];
  Pair r;
  r.p = std::exp(logit - lse);
  r.p_error = r.p * 0x1p-21 * (4.0 + std::abs(logit) + std::abs(lse));
  r.ds = r.p * (dp - delta);
  r.ds_error = r.p_error * std::abs(dp - delta) + r.p * (0x1p-21 * (std::abs(dp) + std::abs(delta)) +
                                                         h.delta_error[static_cast<std::size_t>(i)]);
  return r;
}

/// Rounds entries x * factor of a tile to whole numbers over one scale. Calls f(n, x, value, error) with what
/// each entry is then, over its factor.
template <typename F>
void round_line(const std::vector<double>& x, const std::vector<double>& errors, const double* factors,
                double limit, F&& f) {
  double largest = 0.0;
  double error_of_largest = 0.0;
  for (std::size_t n = 0; n < x.size(); ++n) {
    const double scaled = std::abs(x[n] * factors[n]);
    if (std::isnan(scaled)) largest = scaled;
    if (scaled <= largest || std::isnan(largest)) continue;
    largest = scaled;
    error_of_largest = errors[n] * factors[n] / scaled;
  }
  if (largest < 0x1p-100) return;
  const double scale = largest / limit;
  for (std::size_t n = 0; n < x.size(); ++n) {
    if (x[n] == 0.0 || factors[n] == 0.0) continue;
    const double quotient = x[n] * factors[n] / scale;
    const double whole = std::nearbyint(quotient);
    const double unsure = errors[n] * factors[n] / scale + std::abs(quotient) * (error_of_largest + 0x1p-21);
    const bool between = 0.5 - std::abs(quotient - whole) <= unsure;
    const double unit = scale / factors[n];
    f(n, x[n], whole * unit, unit * (std::abs(whole) * error_of_largest + (between ? 1.0 : 0.0)));
  }
}

void add_tile(const Head& h, std::int64_t first_query, std::int64_t first_key, Sums& dq, Sums& dk, Sums& dv) {
  const std::int64_t queries = std::min(tile, h.nq - first_query);
  const std::int64_t keys = std::min(tile, h.nk - first_key);
  std::vector<Pair> pairs;
  for (std::int64_t i = 0; i < queries; ++i) {
    for (std::int64_t j = 0; j < keys; ++j) pairs.push_back(pair_of(h, first_query + i, first_key + j));
  }
  const auto line = [&](std::int64_t begin, std::int64_t step, std::int64_t count, double Pair::*member) {
    std::vector<double> values;
    for (std::int64_t n = 0; n < count; ++n)
      values.push_back(pairs[static_cast<std::size_t>(begin + n * step)].*member);
    return values;
  };
  const double* const q_scales = h.q.scales.data() + first_query;
  const double* const dout_scales = h.dout.scales.data() + first_query;
  for (std::int64_t j = 0; j < keys; ++j) {
    round_line(line(j, keys, queries, &Pair::p), line(j, keys, queries, &Pair::p_error), dout_scales, 255.0,
               [&](std::size_t n, double exact, double x, double error) {
                 dv.add(first_key + j, exact, x, error,
                        row_of(h.dout.values, first_query + static_cast<std::int64_t>(n), h.p.head_dim_v));
               });
    round_line(line(j, keys, queries, &Pair::ds), line(j, keys, queries, &Pair::ds_error), q_scales, 127.0,
               [&](std::size_t n, double exact, double x, double error) {
                 dk.add(first_key + j, exact, x, error,
                        row_of(h.q.values, first_query + static_cast<std::int64_t>(n), h.p.head_dim_qk));
               });
  }
  for (std::int64_t i = 0; i < queries; ++i) {
    round_line(line(i * keys, 1, keys, &Pair::ds), line(i * keys, 1, keys, &Pair::ds_error),
               h.k.scales.data() + first_key, 127.0,
               [&](std::size_t n, double exact, double x, double error) {
                 dq.add(first_query + i, exact, x, error,
                        row_of(h.k.values, first_key + static_cast<std::int64_t>(n), h.p.head_dim_qk));
               });
  }
}

Head load_head(const Call& call, const Problem& p, const Recipe& recipe, std::int64_t batch,
               std::int64_t head) {
  Problem of_dout = p;
  of_dout.q = p.dout;
  of_dout.head_dim_qk = p.head_dim_v;
  Recipe rounds_dout = recipe;
  rounds_dout.qk_scales = recipe.v_scales;
  rounds_dout.rotate_qk = recipe.rotate_v;
  const Rows rows = query_rows(p, batch);
  Head h{.p = p,
         .nq = rows.used,
         .nk = key_rows(p, batch).used,
         .q = quantized_head(p, recipe, Tensor8::q, batch, head),
         .k = quantized_head(p, recipe, Tensor8::k, batch, head / p.group()),
         .v = quantized_head(p, recipe, Tensor8::v, batch, head / p.group()),
         .dout = quantized_head(of_dout, rounds_dout, Tensor8::q, batch, head),
         .lse = {},
         .delta = {},
         .delta_error = {}};
  const std::int64_t entry = p.packed_q ? 0 : batch;
  for (std::int64_t i = 0; i < h.nq; ++i) {
    const std::int64_t row = rows.begin + i;
    const std::int64_t at = (entry * p.heads_q + head) * p.rows_q + row;
    double shift = 0.0;
    for (std::size_t c = 0; c < h.k.mean.size(); ++c) {
      shift += static_cast<double>(p.scale) * static_cast<double>(h.k.mean[c]) *
               decode(p.q.dtype, p.q.data, p.q.offset(batch, row, head) + static_cast<std::int64_t>(c));
    }
    h.lse.push_back(call.lse.get(at) - shift);
    std::vector<double> dout(row_of(h.dout.values, i, p.head_dim_v),
                             row_of(h.dout.values, i, p.head_dim_v) + p.head_dim_v);
    rotate_back(dout.data(), p.head_dim_v);
    double delta = 0.0;
    double size = 0.0;
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
      const double term = dout[static_cast<std::size_t>(c)] *
                          call.out.get(((entry * p.rows_q + row) * p.heads_q + head) * p.head_dim_v + c);
      delta += term;
      size += std::abs(term);
    }
    h.delta.push_back(call.dlse.given() ? delta - call.dlse.get(at) : delta);
    // out is rotated in f32.
    h.delta_error.push_back(0x1p-20 * size * std::sqrt(static_cast<double>(p.head_dim_v)));
  }
  return h;
}

/// Rows of a head, rotated back and times `factor`, to where a box has them. f32 has the row's whole size in
/// each channel on the way.
void write(const Sums& sums, std::int64_t rows, double factor, const Box& box, std::int64_t first_row,
           std::int64_t heads, std::int64_t head, GradientExpected& to) {
  if (!box.given()) return;
  const double unit = box.dtype() == DType::bf16 ? 0x1p-8 : box.dtype() == DType::f16 ? 0x1p-11 : 0x1p-24;
  for (std::int64_t i = 0; i < rows; ++i) {
    std::vector<double> row(row_of(sums.values, i, sums.dim), row_of(sums.values, i, sums.dim) + sums.dim);
    double squares = 0.0;
    for (const double x : row) squares += x * x;
    rotate_back(row.data(), sums.dim);
    std::vector<double> unrounded(row_of(sums.unrounded, i, sums.dim),
                                  row_of(sums.unrounded, i, sums.dim) + sums.dim);
    rotate_back(unrounded.data(), sums.dim);
    // Each channel is a sum of all, over the root of the matrix's size: of 64 or more of head_dim 96.
    double bound = 0.0;
    for (std::int64_t c = 0; c < sums.dim; ++c)
      bound += sums.bounds[static_cast<std::size_t>(i * sums.dim + c)];
    std::int64_t smallest = 1;
    for (std::int64_t left = sums.dim; left > 0; left -= smallest) {
      for (smallest = 1; 2 * smallest <= left;) smallest *= 2;
    }
    bound = bound / std::sqrt(static_cast<double>(smallest)) + 0x1p-20 * std::sqrt(squares);
    for (std::int64_t c = 0; c < sums.dim; ++c) {
      const auto at = static_cast<std::size_t>(((first_row + i) * heads + head) * sums.dim + c);
      const double value = factor * row[static_cast<std::size_t>(c)];
      to.values[at] += value;
      to.unrounded[at] += factor * unrounded[static_cast<std::size_t>(c)];
      to.bounds[at] =
          std::abs(factor) * bound + unit * (std::abs(to.values[at]) + std::abs(factor) * bound) + 1e-7;
    }
  }
}

/// K's mean, which rows of dS miss by the gradient of the LSE alone.
void add_mean(const Call& call, const Head& h, std::int64_t batch, std::int64_t head, GradientExpected& dq) {
  if (!call.dlse.given() || !call.dq.given()) return;
  const std::int64_t entry = h.p.packed_q ? 0 : batch;
  for (std::int64_t i = 0; i < h.nq; ++i) {
    const std::int64_t row = query_rows(h.p, batch).begin + i;
    const KeyRange seen = visible_keys({h.p.window_left, h.p.window_right}, i, h.nq, h.nk);
    if (seen.first >= seen.last) continue;
    const double more =
        static_cast<double>(h.p.scale) * call.dlse.get((entry * h.p.heads_q + head) * h.p.rows_q + row);
    for (std::size_t c = 0; c < h.k.mean.size(); ++c) {
      const std::size_t first = static_cast<std::size_t>((entry * h.p.rows_q + row) * h.p.heads_q + head);
      for (std::vector<double>* to : {&dq.values, &dq.unrounded})
        (*to)[first * h.k.mean.size() + c] += more * static_cast<double>(h.k.mean[c]);
    }
  }
}

GradientExpected zeros(const Box& box) {
  const std::vector<double> values(box.given() ? static_cast<std::size_t>(box.numel()) : 0, 0.0);
  return {.values = values, .bounds = values, .unrounded = values};
}

}  // namespace

GradientsExpected expect_gradients_in_8_bits(const Call& call) {
  const Problem p = call.problem();
  const Recipe recipe = recipe_of(call.spec.options.backward_precision, call.spec.options.strict);
  GradientsExpected e{.dq = zeros(call.dq), .dk = zeros(call.dk), .dv = zeros(call.dv)};
#pragma omp parallel for schedule(dynamic, 1)
  for (std::int64_t n = 0; n < p.batch * p.heads_kv; ++n) {
    const std::int64_t batch = n / p.heads_kv;
    const std::int64_t kv_head = n % p.heads_kv;
    const Rows keys = key_rows(p, batch);
    Sums dk(keys.used, p.head_dim_qk);
    Sums dv(keys.used, p.head_dim_v);
    for (std::int64_t head = kv_head * p.group(); head < (kv_head + 1) * p.group(); ++head) {
      const Head h = load_head(call, p, recipe, batch, head);
      Sums dq(h.nq, p.head_dim_qk);
      for (std::int64_t i = 0; i < h.nq; i += tile) {
        for (std::int64_t j = 0; j < h.nk; j += tile) add_tile(h, i, j, dq, dk, dv);
      }
      add_mean(call, h, batch, head, e.dq);
      const std::int64_t entry = p.packed_q ? 0 : batch;
      write(dq, h.nq, static_cast<double>(p.scale), call.dq, entry * p.rows_q + query_rows(p, batch).begin,
            p.heads_q, head, e.dq);
    }
    const std::int64_t first = (p.packed_k ? 0 : batch) * p.rows_k + keys.begin;
    write(dk, keys.used, static_cast<double>(p.scale), call.dk, first, p.heads_kv, kv_head, e.dk);
    write(dv, keys.used, 1.0, call.dv, first, p.heads_kv, kv_head, e.dv);
  }
  return e;
}

testing::AssertionResult follows_recipe(const Call& call, const GradientsExpected& expected) {
  const auto within = [](const char* name, const Box& box, const GradientExpected& of) {
    for (std::int64_t n = 0; box.given() && n < box.numel(); ++n) {
      const double want = of.values[static_cast<std::size_t>(n)];
      const double bound = of.bounds[static_cast<std::size_t>(n)];
      const double got = box.get(n);
      if (got == want || (std::isnan(got) && std::isnan(want)) || std::abs(got - want) <= bound) continue;
      return testing::AssertionFailure()
             << fmt::format("{}[{}] is {}, by the recipe {} within {}", name, n, got, want, bound);
    }
    return testing::AssertionSuccess();
  };
  if (auto dq = within("dq", call.dq, expected.dq); !dq) return dq;
  if (auto dk = within("dk", call.dk, expected.dk); !dk) return dk;
  return within("dv", call.dv, expected.dv);
}

}  // namespace tandem::harness
