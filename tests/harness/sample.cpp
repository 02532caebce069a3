#include "sample.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <utility>

#include "element.hpp"
#include "neighbour.hpp"
#include "rounding.hpp"

namespace tandem::harness {
namespace {

constexpr std::int64_t block_rows = 16;
constexpr std::int64_t blocks = 4;

void* element_address(const Operand& x, std::int64_t batch, std::int64_t row, std::int64_t head) {
  return static_cast<std::byte*>(x.data) +
         x.offset(batch, row, head) * static_cast<std::int64_t>(size_of(x.dtype));
}

Operand from(Operand x, std::int64_t batch, std::int64_t row, std::int64_t head) {
  if (x.given()) x.data = element_address(x, batch, row, head);
  return x;
}

Scales from(Scales scales, std::int64_t batch, std::int64_t kv_head) {
  if (scales.data != nullptr) scales.data += batch * scales.batch_stride + kv_head * scales.head_stride;
  return scales;
}

/// The part's queries and the keys that they see, as a problem of one head: a causal mask is aligned to the
/// bottom right corner, so that the keys end with the one that the last query sees last.
Problem problem_of(const Problem& p, const Part& part) {
  const std::int64_t kv_head = part.head / p.group();
  const bool causal = p.window_right == 0;
  Problem sub = p;
  sub.batch = sub.heads_q = sub.heads_kv = 1;
  sub.rows_q = part.count;
  if (causal)
    sub.rows_k = std::clamp<std::int64_t>(part.first + part.count + p.rows_k - p.rows_q, 0, p.rows_k);
  sub.q = from(p.q, part.batch, part.first, part.head);
  sub.dout = from(p.dout, part.batch, part.first, part.head);
  sub.k = from(p.k, part.batch, 0, kv_head);
  sub.v = from(p.v, part.batch, 0, kv_head);
  sub.q_scale = from(p.q_scale, part.batch, kv_head);
  sub.k_scale = from(p.k_scale, part.batch, kv_head);
  sub.v_scale = from(p.v_scale, part.batch, kv_head);
  return sub;
}

void check_supported(const Problem& p) {
  const bool windows = p.window_left >= 0 || p.window_right > 0;
  const bool lengths = p.packed_q || p.packed_k || p.seqused_q.given() || p.seqused_k.given();
  if (windows || lengths || p.softcap > 0.0F || p.sink != nullptr || p.dlse.given()) {
    throw Error(Status::internal, "a sample of this problem's results cannot be compared");
  }
}

std::vector<double> row_of(const Operand& x, std::int64_t batch, std::int64_t row, std::int64_t head,
                           std::int64_t dim) {
  std::vector<double> values(static_cast<std::size_t>(dim));
  for (std::int64_t c = 0; c < dim; ++c) {
    values[static_cast<std::size_t>(c)] = decode(x.dtype, x.data, x.offset(batch, row, head) + c);
  }
  return values;
}

using Matrix = std::vector<std::vector<double>>;

Matrix rows_of(const Operand& x, const Part& part, std::int64_t head, std::int64_t dim) {
  Matrix rows;
  for (std::int64_t r = 0; r < part.count; ++r) {
    rows.push_back(row_of(x, part.batch, part.first + r, head, dim));
  }
  return rows;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (std::size_t c = 0; c < a.size(); ++c) sum += a[c] * b[c];
  return sum;
}

void accumulate(std::vector<double>& y, double a, const std::vector<double>& x) {
#pragma omp simd
  for (std::size_t c = 0; c < x.size(); ++c) y[c] += a * x[c];
}

/// dk and dv of a part's keys.
struct KeyGradients {
  Matrix dk, dv;
};

/// One query and what it has to do with a part's keys: exactly, and as eager PyTorch in `dtype` computes it,
/// with one rounding after every operator, and fused PyTorch, with one of P and of dS (same_dtype.hpp). Of
/// the other keys the models, too, have the exact sums: the softmax's in LSE and that of dP * P in delta. So
/// they err rather less than PyTorch.
struct Query {
  std::vector<double> q, dout;
  std::vector<double> p, ds;              ///< by key
  std::vector<double> model_p, model_ds;  ///< the same, rounded as eager PyTorch does
  std::vector<double> fused_p, fused_ds;
};

Query query_of(const Problem& p, const Part& part, std::int64_t i, std::int64_t head, std::int64_t keys,
               const Matrix& k, const Matrix& v, DType dtype) {
  const auto round = [dtype](double x) {
    return static_cast<double>(round_fast(dtype, static_cast<float>(x)));
  };
  const auto scale = static_cast<double>(p.scale);
  const double lse = decode(p.lse.dtype, p.lse.data, p.lse.offset(part.batch, i, head));
  Query r;
  r.q = row_of(p.q, part.batch, i, head, p.head_dim_qk);
  r.dout = row_of(p.dout, part.batch, i, head, p.head_dim_v);
  const double delta = dot(r.dout, row_of(p.out, part.batch, i, head, p.head_dim_v));
  const auto count = static_cast<std::size_t>(keys);
  double model_sum = 1.0;  // of all probabilities before the division by their sum
  double model_delta = delta;
  std::vector<double> dp;
  for (std::size_t j = 0; j < count; ++j) {
    const double score = dot(r.q, k[j]);
    r.p.push_back(std::exp(score * scale - lse));
    r.model_p.push_back(std::exp(round(round(score) * scale) - lse));
    model_sum += r.model_p[j] - r.p[j];
    dp.push_back(dot(r.dout, v[j]));
    const double ds = r.p[j] * (dp[j] - delta);
    r.ds.push_back(ds * scale);
    r.fused_p.push_back(round(r.p[j]));
    r.fused_ds.push_back(round(ds) * scale);
  }
  for (std::size_t j = 0; j < count; ++j) {
    r.model_p[j] = round(r.model_p[j] / model_sum);
    model_delta += r.model_p[j] * round(dp[j]) - r.p[j] * dp[j];
  }
  for (std::size_t j = 0; j < count; ++j) {
    r.model_ds.push_back(round(round(r.model_p[j] * (round(dp[j]) - model_delta)) * scale));
  }
  return r;
}

void add(Matrix& sum, const Matrix& other, const std::function<double(double)>& f) {
  for (std::size_t j = 0; j < sum.size(); ++j) {
    for (std::size_t c = 0; c < sum[j].size(); ++c) sum[j][c] += f(other[j][c]);
  }
}

/// The exact gradients and the models'. Sums are fp64 in all: PyTorch's fp32 ones are off by less than its
/// roundings.
struct Gradients {
  KeyGradients exact, model, fused;
};

Gradients key_gradients(const Problem& p, const Part& part, DType dtype) {
  const auto round = [dtype](double x) {
    return static_cast<double>(round_fast(dtype, static_cast<float>(x)));
  };
  const std::int64_t kv_head = part.head / p.group();
  const Matrix k = rows_of(p.k, part, kv_head, p.head_dim_qk);
  const Matrix v = rows_of(p.v, part, kv_head, p.head_dim_v);
  const auto zeros = [&](std::int64_t dim) {
    return Matrix(static_cast<std::size_t>(part.count), std::vector<double>(static_cast<std::size_t>(dim)));
  };
  const KeyGradients none{zeros(p.head_dim_qk), zeros(p.head_dim_v)};
  Gradients sums{none, none, none};
  auto& [exact, model, fused] = sums;
  for (std::int64_t head = kv_head * p.group(); head < (kv_head + 1) * p.group(); ++head) {
    KeyGradients of_head = none;  // PyTorch rounds a head's sum before it adds the group's
    for (std::int64_t i = 0; i < p.rows_q; ++i) {
      const KeyRange seen = visible_keys(window_of(p, part.batch), i, p.rows_q, p.rows_k);
      const std::int64_t keys = std::min(seen.last - part.first, part.count);
      if (keys <= 0) continue;
      const Query query = query_of(p, part, i, head, keys, k, v, dtype);
      for (std::size_t j = 0; j < query.p.size(); ++j) {
        accumulate(exact.dk[j], query.ds[j], query.q);
        accumulate(exact.dv[j], query.p[j], query.dout);
        accumulate(of_head.dk[j], query.model_ds[j], query.q);
        accumulate(of_head.dv[j], query.model_p[j], query.dout);
        accumulate(fused.dk[j], query.fused_ds[j], query.q);
        accumulate(fused.dv[j], query.fused_p[j], query.dout);
      }
    }
    add(model.dk, of_head.dk, round);
    add(model.dv, of_head.dv, round);
  }
  for (Matrix* all : {&model.dk, &model.dv, &fused.dk, &fused.dv}) {
    for (auto& row : *all) std::ranges::transform(row, row.begin(), round);
  }
  return sums;
}

Target target_of(const Matrix& exact, const Matrix& model, const Matrix& fused, DType dtype, double queries) {
  std::vector<double> values;
  Sums sums;
  double error = 0.0;
  for (std::size_t j = 0; j < exact.size(); ++j) {
    for (std::size_t c = 0; c < exact[j].size(); ++c) {
      values.push_back(exact[j][c]);
      error = std::max(error, std::abs(model[j][c] - exact[j][c]));
      sums.add(exact[j][c], fused[j][c]);
    }
  }
  return gradient_target(dtype, std::move(values), error, dtype == DType::f32 ? Sums() : sums, queries,
                         static_cast<std::int64_t>(exact.front().size()));
}

/// What the outputs of a pass should hold in one part.
Expected expect_part(const Problem& p, DType dtype, Pass pass, const Part& part) {
  Expected e = expect(problem_of(p, part), dtype, pass, scores(p));
  if (pass == Pass::forward) return e;
  const auto [exact, model, fused] = key_gradients(p, part, dtype);
  const auto queries = static_cast<double>(p.rows_q * p.group());
  e.dk = target_of(exact.dk, model.dk, fused.dk, dtype, queries);
  e.dv = target_of(exact.dv, model.dv, fused.dv, dtype, queries);
  return e;
}

/// One output: where its values of the parts lie.
struct Output {
  const char* name;
  const Operand* operand;
  std::int64_t dim;
  bool of_keys;
  Target Expected::*target;
};

std::vector<Output> outputs_of(const Problem& p, Pass pass) {
  if (pass == Pass::forward) {
    return {{"out", &p.out, p.head_dim_v, false, &Expected::out}, {"lse", &p.lse, 1, false, &Expected::lse}};
  }
  return {{"dq", &p.dq, p.head_dim_qk, false, &Expected::dq},
          {"dk", &p.dk, p.head_dim_qk, true, &Expected::dk},
          {"dv", &p.dv, p.head_dim_v, true, &Expected::dv}};
}

SampleError compare_output(const Problem& p, const Output& output, const std::vector<Part>& parts,
                           const std::vector<Expected>& expected) {
  Target all;
  std::vector<std::array<std::int64_t, 4>> places;  // batch, row, head, element
  for (std::size_t n = 0; n < parts.size(); ++n) {
    const Target& target = expected[n].*output.target;
    const Part& part = parts[n];
    // A whole tensor's bound follows from its largest errors: so does a sample's.
    all.bound.absolute = std::max(all.bound.absolute, target.bound.absolute);
    all.bound.relative = std::max(all.bound.relative, target.bound.relative);
    all.values.insert(all.values.end(), target.values.begin(), target.values.end());
    all.fused.add(target.fused);
    all.f32_rms = std::max(all.f32_rms, target.f32_rms);
    all.queries += target.queries;
    all.row = target.row;
    const std::int64_t head = output.of_keys ? part.head / p.group() : part.head;
    for (std::int64_t r = 0; r < part.count; ++r) {
      for (std::int64_t c = 0; c < output.dim; ++c) places.push_back({part.batch, part.first + r, head, c});
    }
  }
  SampleError error{output.name, {}, all.bound, {}};
  error.deviation = compare(all, [&](std::int64_t n) {
    const auto& [batch, row, head, c] = places[static_cast<std::size_t>(n)];
    return decode(output.operand->dtype, output.operand->data, output.operand->offset(batch, row, head) + c);
  });
  if (error.deviation.worst >= 0) {
    const auto& [batch, row, head, c] = places[static_cast<std::size_t>(error.deviation.worst)];
    error.worst = fmt::format("batch {}, row {}, head {}, element {}", batch, row, head, c);
  }
  return error;
}

}  // namespace

std::vector<Part> sample_parts(const Problem& p, std::uint64_t seed) {
  std::uint64_t state = seed;
  const auto below = [&state](std::int64_t end) {  // Knuth's multiplier; the upper bits are random enough
    state = state * 6364136223846793005U + 1442695040888963407U;
    return static_cast<std::int64_t>((state >> 33U) % static_cast<std::uint64_t>(end));
  };
  const std::int64_t rows = std::min(p.rows_q, p.rows_k);
  std::vector<Part> parts;
  for (const bool last : {true, false}) {
    const std::int64_t batch = last ? p.batch - 1 : below(p.batch);
    const std::int64_t head = last ? p.heads_q - 1 : below(p.heads_q);
    if (rows <= blocks * block_rows) {
      parts.push_back({batch, head, 0, rows});
      continue;
    }
    const std::int64_t end = rows - block_rows;
    for (const std::int64_t first : {std::int64_t{0}, below(end), below(end), end}) {
      parts.push_back({batch, head, first, block_rows});
    }
  }
  return parts;
}

std::vector<SampleError> compare_sample(const Problem& p, DType dtype, Pass pass,
                                        const std::vector<Part>& parts) {
  check_supported(p);
  std::vector<Expected> expected(parts.size());
#pragma omp parallel for schedule(dynamic)
  for (std::size_t n = 0; n < parts.size(); ++n) expected[n] = expect_part(p, dtype, pass, parts[n]);
  std::vector<SampleError> errors;
  for (const Output& output : outputs_of(p, pass)) {
    if (output.operand->given()) errors.push_back(compare_output(p, output, parts, expected));
  }
  return errors;
}

}  // namespace tandem::harness
