#include "gradient_operands.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "element.hpp"

namespace tandem::harness {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

const double* row_of(const std::vector<double>& x, std::int64_t row, std::int64_t dim) {
  return x.data() + row * dim;
}

/// The Euclidean norm of a row as the caller has it; NaN or infinite where it holds what is no number.
double norm_of(const Operand& x, std::int64_t batch, std::int64_t row, std::int64_t head, std::int64_t dim) {
  double squares = 0.0;
  for (std::int64_t c = 0; c < dim; ++c) {
    const double value = decode(x.dtype, x.data, x.offset(batch, row, head) + c);
    squares += value * value;
  }
  return std::sqrt(squares);
}

/// What is found of a head's rows before anything is rounded to e4m3.
struct Norms {
  std::vector<double> q, dout;  ///< 0 of rows that count in no largest value
  std::vector<double> dlse;     ///< magnitudes; likewise
};

void find_statistics(const Call& call, const Problem& p, std::int64_t batch, std::int64_t head,
                     GradientHead& h, Norms& norms) {
  const Rows rows = query_rows(p, batch);
  const std::int64_t entry = p.packed_q ? 0 : batch;
  for (std::int64_t i = 0; i < h.nq; ++i) {
    const std::int64_t row = rows.begin + i;
    const std::int64_t at = (entry * p.heads_q + head) * p.rows_q + row;
    const double q = norm_of(p.q, batch, row, head, p.head_dim_qk);
    const double dout = norm_of(p.dout, batch, row, head, p.head_dim_v);
    double shift = 0.0;
    for (std::size_t c = 0; c < h.k.mean.size(); ++c) {
      shift += static_cast<double>(p.scale) * static_cast<double>(h.k.mean[c]) *
               decode(p.q.dtype, p.q.data, p.q.offset(batch, row, head) + static_cast<std::int64_t>(c));
    }
    const auto lse = static_cast<float>(call.lse.get(at));
    const auto most = static_cast<float>(call.max_logits.get(at));
    const bool sees_none = most == -std::numeric_limits<float>::infinity();
    // In f32, so that all backends have one exponent.
    const float log_p = std::clamp(most - lse, -44.0F, 44.0F);
    const bool spoilt = !sees_none && (!std::isfinite(q) || !std::isfinite(dout) || std::isnan(log_p));
    const double root = std::exp(static_cast<double>(log_p) -
                                 std::log(2.0) * static_cast<double>(std::nearbyint(log_p * 0x1.715476p-1F)));
    h.root.push_back(sees_none ? 0.0 : spoilt ? 1.0 : root);
    h.lse.push_back(spoilt ? nan_value : static_cast<double>(lse) - shift);
    const bool counts = !sees_none && !spoilt;
    norms.q.push_back(counts ? q * h.root.back() : 0.0);
    norms.dout.push_back(counts ? dout : 0.0);
    const double dlse = call.dlse.given() ? call.dlse.get(at) : 0.0;
    norms.dlse.push_back(!sees_none && std::isfinite(dlse) ? std::abs(dlse) : 0.0);

    std::vector<double> turned(row_of(h.dout.values, i, p.head_dim_v),
                               row_of(h.dout.values, i, p.head_dim_v) + p.head_dim_v);
    rotate_back(turned.data(), p.head_dim_v);
    double delta = 0.0;
    double size = 0.0;
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
      const double term = turned[static_cast<std::size_t>(c)] *
                          call.out.get(((entry * p.rows_q + row) * p.heads_q + head) * p.head_dim_v + c);
      delta += term;
      size += std::abs(term);
    }
    h.delta.push_back(delta - dlse);
    // out is rotated in f32.
    h.delta_error.push_back(0x1p-20 * size * std::sqrt(static_cast<double>(p.head_dim_v)));
  }
}

/// The largest scale of V among the keys up to the last that row i sees if `strict`, else among all.
double largest_v_scale(const Problem& p, const GradientHead& h, std::int64_t i, bool strict) {
  const std::int64_t end = strict ? visible_keys({p.window_left, p.window_right}, i, h.nq, h.nk).last : h.nk;
  double largest = 0.0;
  for (std::int64_t j = 0; j < end; ++j) {
    if (!std::isnan(h.v.values[static_cast<std::size_t>(j * p.head_dim_v)]))
      largest = std::max(largest, h.v.scales[static_cast<std::size_t>(j)]);
  }
  return largest;
}

/// The largest of the rows [first, last).
double largest_of(const std::vector<double>& x, std::int64_t first, std::int64_t last) {
  return *std::max_element(x.begin() + first, x.begin() + last);
}

/// E of each row, and what T' is at least.
double find_ds_scales(const Problem& p, const Norms& norms, bool strict, GradientHead& h) {
  constexpr double dlse_share = 0x1p-14;
  const std::int64_t step = strict ? 1 : quant_block;
  double unit = 0.0;
  double v = largest_v_scale(p, h, 0, false);
  for (std::int64_t first = 0; first < h.nq; first += step) {
    const std::int64_t last = std::min(first + step, h.nq);
    if (strict) v = largest_v_scale(p, h, first, true);
    const double of_dlse = dlse_share * largest_of(norms.dlse, first, last);
    const double scale = std::max(h.dout.scales[static_cast<std::size_t>(first)] * v, of_dlse);
    for (std::int64_t i = first; i < last; ++i) h.ds_scale.push_back(scale);
    const double bound = std::max(v * largest_of(norms.dout, first, last) / 127.0, of_dlse);
    unit = std::max(unit, largest_of(norms.q, first, last) * bound / 448.0);
  }
  return unit;
}

/// The smallest power of two that is at least x; 1 of 0.
double power_of_two(double x) {
  return x > 0.0 ? std::exp2(std::ceil(std::log2(x))) : 1.0;
}

/// Rows times factors, in e4m3; 0 where a row is none or its factor is 0.
template <typename F>
RoundedRows round_rows(const QuantizedHead& from, std::int64_t rows, std::int64_t dim, F&& factor) {
  RoundedRows to;
  for (std::int64_t i = 0; i < rows; ++i) {
    const float* const row = from.unrounded.data() + i * dim;
    const bool finite = std::all_of(row, row + dim, [](float x) { return std::isfinite(x); });
    const double f = finite ? factor(static_cast<std::size_t>(i)) : 0.0;
    for (std::int64_t c = 0; c < dim; ++c) {
      const double x = f != 0.0 ? static_cast<double>(row[c]) * f : 0.0;
      const Rounded r = to_e4m3(x, root_error * std::abs(x));
      to.values.push_back(r.value);
      to.errors.push_back(r.error);
    }
  }
  return to;
}

GradientHead load_head(const Problem& p, const Recipe& recipe, std::int64_t batch, std::int64_t head) {
  Problem of_dout = p;
  of_dout.q = p.dout;
  of_dout.head_dim_qk = p.head_dim_v;
  Recipe rounds_dout = recipe;
  rounds_dout.qk_scales = recipe.v_scales;
  rounds_dout.rotate_qk = recipe.rotate_v;
  return {.nq = query_rows(p, batch).used,
          .nk = key_rows(p, batch).used,
          .q = quantized_head(p, recipe, Tensor8::q, batch, head),
          .k = quantized_head(p, recipe, Tensor8::k, batch, head / p.group()),
          .v = quantized_head(p, recipe, Tensor8::v, batch, head / p.group()),
          .dout = quantized_head(of_dout, rounds_dout, Tensor8::q, batch, head)};
}

}  // namespace

Rounded to_e4m3(double x, double unsure) {
  const auto nearest = [](double y) {
    const double capped = std::clamp(y, -448.0, 448.0);
    const double unit = std::ldexp(1.0, std::max(std::ilogb(std::max(std::abs(capped), 0x1p-9)) - 3, -9));
    return std::nearbyint(capped / unit) * unit;
  };
  if (std::isnan(x)) return {.value = x, .error = x};
  const double value = nearest(x);
  return {.value = value, .error = std::max(nearest(x + unsure) - value, value - nearest(x - unsure))};
}

GradientGroup gradient_group(const Call& call, const Problem& p, const Recipe& recipe, std::int64_t batch,
                             std::int64_t kv_head) {
  GradientGroup group;
  const bool strict = recipe.qk_scales == ScaleGroup::row;
  double dout_unit = 0.0;
  double q_unit = 0.0;
  for (std::int64_t head = kv_head * p.group(); head < (kv_head + 1) * p.group(); ++head) {
    GradientHead h = load_head(p, recipe, batch, head);
    Norms norms;
    find_statistics(call, p, batch, head, h, norms);
    for (std::size_t i = 0; i < norms.dout.size(); ++i)
      dout_unit = std::max(dout_unit, norms.dout[i] * h.root[i] / 448.0);
    q_unit = std::max(q_unit, find_ds_scales(p, norms, strict, h));
    group.heads.push_back(std::move(h));
  }
  group.dout_unit = power_of_two(dout_unit);
  group.q_unit = power_of_two(q_unit);
  for (GradientHead& h : group.heads) {
    const auto root = [&](std::size_t i) { return std::isnan(h.lse[i]) ? 0.0 : h.root[i]; };
    h.dout_e4m3 =
        round_rows(h.dout, h.nq, p.head_dim_v, [&](std::size_t i) { return root(i) / group.dout_unit; });
    h.q_e4m3 = round_rows(h.q, h.nq, p.head_dim_qk,
                          [&](std::size_t i) { return root(i) * h.ds_scale[i] / group.q_unit; });
    h.k_e4m3 = round_rows(h.k, h.nk, p.head_dim_qk,
                          [&](std::size_t j) { return h.k.scales[j] > 0.0 ? 2.0 / h.k.scales[j] : 0.0; });
  }
  return group;
}

}  // namespace tandem::harness
