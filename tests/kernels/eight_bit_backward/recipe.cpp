#include "eight_bit_backward/recipe.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "harness/element.hpp"
#include "problem/problem.hpp"
#include "problem/recipe.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr std::size_t dim = 128;
constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
using Row = std::array<double, dim>;

void add(Row& to, double factor, const Row& x) {
  for (std::size_t c = 0; c < dim; ++c) to[c] += factor * x[c];
}
double dot(const Row& a, const Row& b) {
  double sum = 0.0;
  for (std::size_t c = 0; c < dim; ++c) sum += a[c] * b[c];
  return sum;
}

void hadamard(Row& x) {
  for (std::size_t half = 1; half < dim; half *= 2) {
    for (std::size_t c = 0; c < dim; ++c) {
      if ((c & half) != 0) continue;
      const double sum = x[c] + x[c + half];
      x[c + half] = x[c] - x[c + half];
      x[c] = sum;
    }
  }
  for (double& e : x) e /= std::sqrt(static_cast<double>(dim));
}
void change_signs(Row& x) {
  for (std::size_t c = 0; c < dim; ++c) x[c] *= static_cast<double>(rotation_sign(static_cast<int>(c)));
}
Row turned(Row x) {
  change_signs(x);
  hadamard(x);
  return x;
}
Row turned_back(Row x) {
  hadamard(x);
  change_signs(x);
  return x;
}
Row in_e4m3(Row x, double factor) {
  for (double& e : x) e = harness::rounded(DType::e4m3, e * factor);
  return x;
}
bool is_finite(const Row& x) {
  return std::all_of(x.begin(), x.end(), [](double e) { return std::isfinite(e); });
}

/// Rows of a head, rotated, and in s8 with a scale a block. Those that are no numbers are 0.
struct Operand8 {
  std::vector<Row> raw, rotated, whole;
  std::vector<double> scale;  ///< by row

  /// `element` gives channel c of row i.
  template <typename Element>
  Operand8(std::int64_t rows, const Element& element, const Row& mean = {}) {
    for (std::int64_t i = 0; i < rows; ++i) {
      Row row;
      for (std::size_t c = 0; c < dim; ++c) row[c] = element(i, static_cast<std::int64_t>(c));
      raw.push_back(row);
      add(row, -1.0, mean);
      rotated.push_back(is_finite(row) ? turned(row) : Row{});
    }
    const std::size_t count = raw.size();
    for (std::size_t first = 0; first < count; first += quant_block) {
      double largest = 0.0;
      const std::size_t end = std::min(first + quant_block, count);
      for (std::size_t i = first; i < end; ++i) {
        for (const double e : rotated[i]) largest = std::max(largest, std::abs(e));
      }
      for (std::size_t i = first; i < end; ++i) {
        scale.push_back(largest / 127.0);
        Row row = rotated[i];
        for (double& e : row) e = largest > 0.0 ? std::nearbyint(e / largest * 127.0) : 0.0;
        whole.push_back(row);
      }
    }
  }
};

/// Elements of one head of a sequence.
auto elements(const Operand& x, std::int64_t batch, const Rows& rows, std::int64_t head) {
  return [=](std::int64_t i, std::int64_t c) {
    return harness::decode(x.dtype, x.data, x.offset(batch, rows.begin + i, head) + c);
  };
}

double power_of_two(double x) {
  return x > 0.0 ? std::exp2(std::ceil(std::log2(x))) : 1.0;
}
double norm(const Row& x) {
  return std::sqrt(dot(x, x));
}

/// A query head's rows.
struct Queries {
  Operand8 q, dout;
  std::vector<double> lse, root, delta, dlse, ds_scale;
};

Queries load_queries(const harness::Call& call, const Problem& p, std::int64_t batch, std::int64_t head,
                     const Row& mean, double v_scale) {
  const Rows rows = query_rows(p, batch);
  Queries h{.q = {rows.used, elements(p.q, batch, rows, head)},
            .dout = {rows.used, elements(p.dout, batch, rows, head)},
            .lse = {},
            .root = {},
            .delta = {},
            .dlse = {},
            .ds_scale = {}};
  const std::int64_t first_row = (p.packed_q ? 0 : batch) * p.rows_q + rows.begin;
  const Operand8 out(rows.used, [&](std::int64_t i, std::int64_t c) {
    return call.out.get(((first_row + i) * p.heads_q + head) * static_cast<std::int64_t>(dim) + c);
  });
  const std::int64_t first = ((p.packed_q ? 0 : batch) * p.heads_q + head) * p.rows_q + rows.begin;
  for (std::size_t i = 0; i < h.q.raw.size(); ++i) {
    const std::int64_t at = first + static_cast<std::int64_t>(i);
    const auto lse = static_cast<float>(call.lse.get(at));
    const auto most = static_cast<float>(call.max_logits.get(at));
    const bool sees = most != -std::numeric_limits<float>::infinity();
    const float x = std::clamp(most - lse, -44.0F, 44.0F);
    const bool bad = !is_finite(h.q.raw[i]) || !is_finite(h.dout.raw[i]) || std::isnan(x);
    const double power = std::nearbyint(x * 0x1.715476p-1F);
    h.root.push_back(!sees ? 0.0 : bad ? 1.0 : std::exp(static_cast<double>(x)) * std::exp2(-power));
    h.lse.push_back(bad ? nan_value
                        : static_cast<double>(lse) - static_cast<double>(p.scale) * dot(h.q.raw[i], mean));
    h.dlse.push_back(sees && call.dlse.given() ? call.dlse.get(at) : 0.0);
    h.delta.push_back(dot(h.dout.whole[i], out.rotated[i]) * h.dout.scale[i] - h.dlse.back());
  }
  for (std::size_t first_of = 0; first_of < h.root.size(); first_of += quant_block) {
    const std::size_t end = std::min(first_of + quant_block, h.root.size());
    double of_dlse = 0.0;
    for (std::size_t i = first_of; i < end; ++i) of_dlse = std::max(of_dlse, 0x1p-14 * std::abs(h.dlse[i]));
    h.ds_scale.insert(h.ds_scale.end(), end - first_of, std::max(h.dout.scale[first_of] * v_scale, of_dlse));
  }
  return h;
}

/// What rows of dO and of Q are divided by, of a KV head's query heads.
std::array<double, 2> units_of(const std::vector<Queries>& heads, double v_scale) {
  std::array<double, 2> largest{};
  for (const Queries& h : heads) {
    for (std::size_t first = 0; first < h.root.size(); first += quant_block) {
      double q = 0.0;
      double dout = 0.0;
      double dlse = 0.0;
      for (std::size_t i = first; i < std::min(first + quant_block, h.root.size()); ++i) {
        dlse = std::max(dlse, std::abs(h.dlse[i]));
        if (h.root[i] == 0.0 || std::isnan(h.lse[i])) continue;
        q = std::max(q, norm(h.q.raw[i]) * h.root[i]);
        dout = std::max(dout, norm(h.dout.raw[i]));
        largest[0] = std::max(largest[0], norm(h.dout.raw[i]) * h.root[i] / 448.0);
      }
      largest[1] = std::max(largest[1], q * std::max(dout * v_scale / 127.0, 0x1p-14 * dlse) / 448.0);
    }
  }
  return {power_of_two(largest[0]), power_of_two(largest[1])};
}

/// Rows of a head, rotated back, to where a gradient's box has them.
void store(std::vector<double>& to, std::int64_t first, std::int64_t heads, std::int64_t head,
           const std::vector<Row>& rows, double factor) {
  for (std::size_t i = 0; i < rows.size() && !to.empty(); ++i) {
    const Row row = turned_back(rows[i]);
    for (std::size_t c = 0; c < dim; ++c) {
      const auto at =
          static_cast<std::size_t>((first + static_cast<std::int64_t>(i)) * heads + head) * dim + c;
      to[at] += factor * row[c];
    }
  }
}

void add_kv_head(const harness::Call& call, const Problem& p, std::int64_t batch, std::int64_t kv_head,
                 RecipeGradients& to) {
  const Rows key_range = key_rows(p, batch);
  const auto of_k = elements(p.k, batch, key_range, kv_head);
  const Operand8 plain(key_range.used, of_k);
  const std::size_t nk = plain.raw.size();
  Row mean{};
  for (const Row& row : plain.raw) {
    for (std::size_t c = 0; c < dim; ++c)
      mean[c] += std::isfinite(row[c]) ? row[c] / static_cast<double>(nk) : 0.0;
  }
  const Operand8 k(key_range.used, of_k, mean);
  const Operand8 v(key_range.used, elements(p.v, batch, key_range, kv_head));
  const double most = v.scale.empty() ? 0.0 : *std::max_element(v.scale.begin(), v.scale.end());
  const double v_scale = most > 0.0 ? most : 1.0;
  std::vector<Queries> heads;
  for (std::int64_t n = 0; n < p.group(); ++n)
    heads.push_back(load_queries(call, p, batch, kv_head * p.group() + n, mean, v_scale));
  const auto [dout_unit, q_unit] = units_of(heads, v_scale);
  std::vector<Row> dk(nk), dv(nk), columns;
  for (std::size_t j = 0; j < nk; ++j)
    columns.push_back(in_e4m3(k.rotated[j], k.scale[j] > 0.0 ? 2.0 / k.scale[j] : 0.0));
  for (std::size_t n = 0; n < heads.size(); ++n) {
    const Queries& h = heads[n];
    const auto nq = static_cast<std::int64_t>(h.root.size());
    std::vector<Row> dq(h.root.size());
    for (std::size_t i = 0; i < h.root.size(); ++i) {
      if (h.root[i] == 0.0) continue;
      const double r = h.root[i];
      const double kept = std::isnan(h.lse[i]) ? 0.0 : r;
      const Row of_dout = in_e4m3(h.dout.rotated[i], kept / dout_unit);
      const Row of_q = in_e4m3(h.q.rotated[i], kept * h.ds_scale[i] / q_unit);
      const KeyRange seen = visible_keys({p.window_left, p.window_right}, static_cast<std::int64_t>(i), nq,
                                         static_cast<std::int64_t>(nk));
      for (auto j = static_cast<std::size_t>(seen.first);
           j < static_cast<std::size_t>(std::max(seen.first, seen.last)); ++j) {
        const double logit =
            static_cast<double>(p.scale) * h.q.scale[i] * k.scale[j] * dot(h.q.whole[i], k.whole[j]);
        const double probability = std::exp(logit - h.lse[i]);
        const double dp = h.dout.scale[i] * v.scale[j] * dot(h.dout.whole[i], v.whole[j]);
        const double ds = probability * (dp - h.delta[i]);
        const double a = harness::rounded(DType::e4m3, 256.0 * probability / r);
        const double b =
            h.ds_scale[i] == 0.0 ? 0.0 : harness::rounded(DType::e4m3, 0x1p-10 * ds / (r * h.ds_scale[i]));
        add(dv[j], a, of_dout);
        add(dk[j], b, of_q);
        add(dq[i], 0x1p9 * r * h.ds_scale[i] * k.scale[j] * b, columns[j]);
      }
      add(dq[i], h.dlse[i], turned(mean));
    }
    const std::int64_t first = (p.packed_q ? 0 : batch) * p.rows_q + query_rows(p, batch).begin;
    store(to.dq, first, p.heads_q, kv_head * p.group() + static_cast<std::int64_t>(n), dq,
          static_cast<double>(p.scale));
  }
  const std::int64_t first = (p.packed_k ? 0 : batch) * p.rows_k + key_range.begin;
  store(to.dk, first, p.heads_kv, kv_head, dk, 0x1p10 * q_unit * static_cast<double>(p.scale));
  store(to.dv, first, p.heads_kv, kv_head, dv, dout_unit / 256.0);
}

}  // namespace

RecipeGradients gradients_by_recipe(const harness::Call& call) {
  const Problem p = call.problem();
  RecipeGradients to;
  for (const auto& [box, values] : {std::pair{&call.dq, &to.dq}, {&call.dk, &to.dk}, {&call.dv, &to.dv}}) {
    if (box->given()) values->assign(static_cast<std::size_t>(box->numel()), 0.0);
  }
  for (std::int64_t n = 0; n < p.batch * p.heads_kv; ++n)
    add_kv_head(call, p, n / p.heads_kv, n % p.heads_kv, to);
  return to;
}

}  // namespace tandem::kernel_tests
