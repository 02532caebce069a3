#include "gradient_recipe.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "gradient_operands.hpp"
#include "problem/recipe_of.hpp"

namespace tandem::harness {
namespace {

/// What a tensor core's accumulator may lose of itself after each 32 products.
constexpr double cut = 0x1p-13;
constexpr std::int64_t cut_after = 32;

/// A gradient of one head, rotated, row by row.
struct Sums {
  std::int64_t dim;
  double lost;  ///< at most, of each term, in f32: sums of 128 terms, added up
  std::vector<double> values, bounds, unrounded;
  std::vector<double> passed;  ///< magnitudes of sums that were cut, all added up
  double cuts = 0.0;

  Sums(std::int64_t rows, std::int64_t dim_, std::int64_t terms)
      : dim(dim_),
        lost(0x1p-24 * static_cast<double>(quant_block + terms / quant_block)),
        values(static_cast<std::size_t>(rows * dim_), 0.0),
        bounds(values),
        unrounded(values),
        passed(values) {}
  /// Row `to` gains x, which was `exact`, times row `from` of an operand, times `factor`.
  void add(std::int64_t to, double exact, const Rounded& x, const RoundedRows& rows, std::int64_t from,
           double factor = 1.0) {
    for (std::int64_t c = 0; c < dim; ++c) {
      const auto at = static_cast<std::size_t>(to * dim + c);
      const auto of_row = static_cast<std::size_t>(from * dim + c);
      const double y = rows.values[of_row];
      const double size = std::abs(y) + rows.errors[of_row];
      values[at] += x.value * y * factor;
      unrounded[at] += exact * y * factor;
      bounds[at] += (x.error * size + std::abs(x.value) * (rows.errors[of_row] + lost * size)) * factor;
    }
  }
  /// All sums are cut.
  void pass() {
    ++cuts;
    for (std::size_t n = 0; n < values.size(); ++n) passed[n] += std::abs(values[n]);
  }
  /// Sums may have been made in another order: from any of these on, around.
  void allow_cuts() {
    for (std::size_t n = 0; n < values.size(); ++n)
      bounds[n] += cut * (2.0 * passed[n] + cuts * std::abs(values[n]));
  }
};

/// A pair of query and key: P and dS as they are rounded, and before.
struct Pair {
  double p = 0.0;
  double ds = 0.0;
  Rounded p_e4m3 = {}, ds_e4m3 = {};
};

double product(const std::vector<double>& a, std::int64_t i, const std::vector<double>& b, std::int64_t j,
               std::int64_t dim) {
  double sum = 0.0;
  for (std::int64_t c = 0; c < dim; ++c)
    sum += a[static_cast<std::size_t>(i * dim + c)] * b[static_cast<std::size_t>(j * dim + c)];
  return sum;
}

Pair pair_of(const Problem& problem, const GradientHead& h, std::int64_t i, std::int64_t j) {
  const double logit =
      static_cast<double>(problem.scale) * product(h.q.values, i, h.k.values, j, problem.head_dim_qk);
  const double dp = product(h.dout.values, i, h.v.values, j, problem.head_dim_v);
  const auto row = static_cast<std::size_t>(i);
  const double lse = h.lse[row];
  // A NaN of the row is in its LSE alone: in 8 bits there may be anything.
  const double p = std::isnan(lse) ? lse : std::exp(logit - lse);
  const double p_error = p * 0x1p-21 * (4.0 + std::abs(logit) + std::abs(lse));
  const double distance = std::isnan(lse) ? lse : dp - h.delta[row];
  const double ds = p * distance;
  const double ds_error = p_error * std::abs(distance) +
                          p * (0x1p-21 * (std::abs(dp) + std::abs(h.delta[row])) + h.delta_error[row]);
  const double p_factor = 256.0 / h.root[row];
  const double ds_factor = h.ds_scale[row] > 0.0 ? 0x1p-10 / (h.root[row] * h.ds_scale[row]) : 0.0;
  Pair pair{.p = p * p_factor, .ds = ds * ds_factor};
  pair.p_e4m3 = to_e4m3(pair.p, p_error * p_factor + root_error * pair.p);
  pair.ds_e4m3 = to_e4m3(pair.ds, ds_error * ds_factor + root_error * std::abs(pair.ds));
  return pair;
}

/// Adds what pairs of a query head give to gradients of keys, and to its own.
void add_pairs(const Problem& p, const GradientHead& h, Sums& dq, Sums& dk, Sums& dv) {
  for (std::int64_t i = 0; i < h.nq; ++i) {
    if (i % cut_after == 0) {
      dk.pass();
      dv.pass();
    }
    if (h.root[static_cast<std::size_t>(i)] == 0.0) continue;
    const KeyRange seen = visible_keys({p.window_left, p.window_right}, i, h.nq, h.nk);
    for (std::int64_t j = seen.first; j < seen.last; ++j) {
      const Pair pair = pair_of(p, h, i, j);
      dv.add(j, pair.p, pair.p_e4m3, h.dout_e4m3, i);
      dk.add(j, pair.ds, pair.ds_e4m3, h.q_e4m3, i);
      dq.add(i, pair.ds, pair.ds_e4m3, h.k_e4m3, j, h.k.scales[static_cast<std::size_t>(j)] / 2.0);
    }
  }
}

std::vector<double> turned_row(const std::vector<double>& x, std::int64_t row, std::int64_t dim) {
  std::vector<double> turned(x.begin() + row * dim, x.begin() + (row + 1) * dim);
  rotate_back(turned.data(), dim);
  return turned;
}

/// Rows of a head, rotated back and times `factor` of the row, to where a box has them. f32 has the row's
/// whole size in each channel on the way.
template <typename F>
void write(const Sums& sums, std::int64_t rows, F&& factor_of, const Box& box, std::int64_t first_row,
           std::int64_t heads, std::int64_t head, GradientExpected& to) {
  if (!box.given()) return;
  const double unit = box.dtype() == DType::bf16 ? 0x1p-8 : box.dtype() == DType::f16 ? 0x1p-11 : 0x1p-24;
  std::int64_t smallest = 1;
  for (std::int64_t left = sums.dim; left > 0; left -= smallest) {
    for (smallest = 1; 2 * smallest <= left;) smallest *= 2;
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    const double factor = factor_of(i);
    const std::vector<double> row = turned_row(sums.values, i, sums.dim);
    const std::vector<double> unrounded = turned_row(sums.unrounded, i, sums.dim);
    double squares = 0.0;
    for (const double x : row) squares += x * x;
    // Each channel is a sum of all, over the root of the matrix's size: of 64 or more of head_dim 96.
    double bound = 0.0;
    for (std::int64_t c = 0; c < sums.dim; ++c)
      bound += sums.bounds[static_cast<std::size_t>(i * sums.dim + c)];
    bound = bound / std::sqrt(static_cast<double>(smallest)) + 0x1p-20 * std::sqrt(squares);
    for (std::int64_t c = 0; c < sums.dim; ++c) {
      const auto at = static_cast<std::size_t>(((first_row + i) * heads + head) * sums.dim + c);
      to.values[at] += factor * row[static_cast<std::size_t>(c)];
      to.unrounded[at] += factor * unrounded[static_cast<std::size_t>(c)];
      to.bounds[at] =
          std::abs(factor) * bound + unit * (std::abs(to.values[at]) + std::abs(factor) * bound) + 1e-7;
    }
  }
}

/// K's mean, which rows of dS miss by the gradient of the LSE alone.
void add_mean(const Call& call, const Problem& p, const GradientHead& h, std::int64_t batch,
              std::int64_t head, GradientExpected& dq) {
  if (!call.dlse.given() || !call.dq.given()) return;
  const std::int64_t entry = p.packed_q ? 0 : batch;
  for (std::int64_t i = 0; i < h.nq; ++i) {
    if (h.root[static_cast<std::size_t>(i)] == 0.0) continue;
    const std::int64_t row = query_rows(p, batch).begin + i;
    const double more =
        static_cast<double>(p.scale) * call.dlse.get((entry * p.heads_q + head) * p.rows_q + row);
    for (std::size_t c = 0; c < h.k.mean.size(); ++c) {
      const auto first = static_cast<std::size_t>((entry * p.rows_q + row) * p.heads_q + head);
      for (std::vector<double>* to : {&dq.values, &dq.unrounded})
        (*to)[first * h.k.mean.size() + c] += more * static_cast<double>(h.k.mean[c]);
    }
  }
}

GradientExpected zeros(const Box& box) {
  const std::vector<double> values(box.given() ? static_cast<std::size_t>(box.numel()) : 0, 0.0);
  return {.values = values, .bounds = values, .unrounded = values};
}

/// What a gradient is added to.
void add_before(const Call& call, const Box& box, GradientExpected& to) {
  for (std::size_t n = 0; call.adds_to(box) && n < to.values.size(); ++n)
    to.values[n] += Call::before(static_cast<std::int64_t>(n));
}

}  // namespace

GradientsExpected expect_gradients_in_8_bits(const Call& call, Accumulators accumulators) {
  const Problem p = call.problem();
  const Recipe recipe = recipe_of(call.spec.options.backward_precision, call.spec.options.strict);
  const auto scale = static_cast<double>(p.scale);
  const bool cuts = accumulators == Accumulators::tensor_cores;
  GradientsExpected e{.dq = zeros(call.dq), .dk = zeros(call.dk), .dv = zeros(call.dv)};
#pragma omp parallel for schedule(dynamic, 1)
  for (std::int64_t n = 0; n < p.batch * p.heads_kv; ++n) {
    const std::int64_t batch = n / p.heads_kv;
    const std::int64_t kv_head = n % p.heads_kv;
    const Rows keys = key_rows(p, batch);
    const Rows queries = query_rows(p, batch);
    const GradientGroup group = gradient_group(call, p, recipe, batch, kv_head);
    Sums dk(keys.used, p.head_dim_qk, queries.used * p.group());
    Sums dv(keys.used, p.head_dim_v, queries.used * p.group());
    for (std::int64_t n_head = 0; n_head < p.group(); ++n_head) {
      const GradientHead& h = group.heads[static_cast<std::size_t>(n_head)];
      const std::int64_t head = kv_head * p.group() + n_head;
      Sums dq(queries.used, p.head_dim_qk, keys.used);
      // Of a block's products no sum is larger than those of its terms' magnitudes.
      if (cuts) dq.lost += cut * static_cast<double>(quant_block / cut_after);
      add_pairs(p, h, dq, dk, dv);
      add_mean(call, p, h, batch, head, e.dq);
      const auto of_row = [&](std::int64_t i) {
        const auto row = static_cast<std::size_t>(i);
        return scale * 0x1p10 * h.root[row] * h.ds_scale[row];
      };
      write(dq, queries.used, of_row, call.dq, (p.packed_q ? 0 : batch) * p.rows_q + queries.begin, p.heads_q,
            head, e.dq);
    }
    for (Sums* sums : {&dk, &dv}) {
      if (cuts) sums->allow_cuts();
    }
    const std::int64_t first = (p.packed_k ? 0 : batch) * p.rows_k + keys.begin;
    const auto of_dk = [&](std::int64_t) { return scale * 0x1p10 * group.q_unit; };
    const auto of_dv = [&](std::int64_t) { return group.dout_unit / 256.0; };
    write(dk, keys.used, of_dk, call.dk, first, p.heads_kv, kv_head, e.dk);
    write(dv, keys.used, of_dv, call.dv, first, p.heads_kv, kv_head, e.dv);
  }
  for (const auto& [box, to] : {std::pair{&call.dq, &e.dq}, {&call.dk, &e.dk}, {&call.dv, &e.dv}})
    add_before(call, *box, *to);
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

/// What is left are numbers next to the middle of two of e4m3's (1/16 of a term, of a few in a thousand),
/// what tensor cores cut off their sums (2^-13 a step), and the gradient's own rounding (2^-9): in the root
/// of the mean square less than 1 %. A wrong scale of a block, order of rows or mask is far more. NaN
/// is where the recipe has it.
testing::AssertionResult is_near(const Call& call, const GradientsExpected& expected) {
  const auto near = [](const char* name, const Box& box, const std::vector<double>& values) {
    double squares = 0.0;
    double errors = 0.0;
    for (std::size_t n = 0; n < values.size(); ++n) {
      const double got = box.get(static_cast<std::int64_t>(n));
      const double want = values[n];
      if (std::isnan(got) != std::isnan(want))
        return testing::AssertionFailure()
               << fmt::format("{}[{}] is {}, by the recipe {}", name, n, got, want);
      if (std::isnan(want)) continue;
      squares += want * want;
      errors += (got - want) * (got - want);
    }
    if (std::sqrt(errors) <= 0.01 * std::sqrt(squares)) return testing::AssertionSuccess();
    return testing::AssertionFailure()
           << fmt::format("{} is off by {:.3f} of it", name, std::sqrt(errors / squares));
  };
  if (auto dq = near("dq", call.dq, expected.dq.values); !dq) return dq;
  if (auto dk = near("dk", call.dk, expected.dk.values); !dk) return dk;
  return near("dv", call.dv, expected.dv.values);
}

void expect_gradients_by_recipe(Call& call, Accumulators accumulators,
                                const std::function<void(Call&)>& backward) {
  const GradientsExpected expected = expect_gradients_in_8_bits(call, accumulators);
  call.prepare(Pass::backward);
  backward(call);
  EXPECT_TRUE(follows_recipe(call, expected));
  constexpr std::int64_t enough = 4096;  // elements: of fewer one next to a tie of e4m3 is 1 %
  if (std::min(call.q.numel(), call.k.numel()) >= enough) {
    EXPECT_TRUE(is_near(call, expected));
  }
  for (const Box* box : call.outputs(Pass::backward)) {
    if (box->given()) {
      EXPECT_EQ(box->changed_outside(), "");
    }
  }
  for (const Box* input : call.inputs()) EXPECT_FALSE(input->given() && input->changed());
}

void run_by_gradient_recipe(Runner& runner, Call& call) {
  call.prepare(Pass::forward);
  runner.forward(call);
  expect_gradients_by_recipe(call, runner.accumulators(), [&](Call& c) { runner.backward(c); });
}

}  // namespace tandem::harness
