#include "same_dtype.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>

#include "cpu/reference/function.hpp"
#include "element.hpp"
#include "matrix.hpp"

namespace tandem::harness {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

Matrix load(const Operand& x, DType dtype, std::int64_t batch, Rows rows, std::int64_t head, std::int64_t dim,
            float factor) {
  Matrix m(rows.used, dim);
  std::vector<double> values(static_cast<std::size_t>(dim));
  for (std::int64_t i = 0; i < rows.used; ++i) {
    decode(x.dtype, x.data, x.offset(batch, rows.begin + i, head), dim, values.data());
    for (std::size_t c = 0; c < values.size(); ++c) m.row(i)[c] = static_cast<float>(values[c]) * factor;
    round_row(dtype, m.row(i), dim);
  }
  return m;
}

/// Where a model rounds.
struct Rounding {
  DType dtype;  ///< of inputs and results
  Model model;

  [[nodiscard]] bool fused() const { return model == Model::fused; }
  [[nodiscard]] DType inside() const { return fused() ? DType::f32 : dtype; }  ///< of each operator
};

/// One head of one sequence, with what autograd would have saved.
struct Saved {
  Rows q_rows, k_rows;
  Matrix q, k, v;
  Matrix slope_input;      ///< tanh(s / cap), where there is a softcap
  Matrix score;            ///< what it sees, where gradients of what it reads are asked for
  Matrix slope;            ///< of the score function, where there is one
  Matrix p;                ///< softmax, 0 where masked
  std::vector<float> sum;  ///< of the softmax, by which P is divided
  std::vector<float> p_sink;
  std::vector<float> lse;
};

/// The functions of a problem on row `i` of logits, which they change: -inf where they mask. A function's
/// value is rounded once, as if it were one operation.
void apply_functions(const Problem& p, DType dtype, reference::Pair pair, const KeyRange& seen, float* row,
                     float* slope) {
  std::optional<reference::FunctionValue> score;
  std::optional<reference::FunctionValue> mask;
  if (p.score_function != nullptr) score.emplace(*p.score_function);
  if (p.mask_function != nullptr) mask.emplace(*p.mask_function);
  for (std::int64_t j = seen.first; j < seen.last; ++j) {
    pair.key = j;
    pair.score = static_cast<double>(row[j]);
    if (score) {
      const reference::Dual value = score->at(pair);
      row[j] = round_fast(dtype, static_cast<float>(value.value));
      slope[j] = round_fast(dtype, static_cast<float>(value.slope));
    }
    if (mask && mask->at(pair).value == 0.0) row[j] = -infinity;
  }
}

bool is_kept(const Problem& p, std::int64_t batch, std::int64_t head, std::int64_t i, std::int64_t j) {
  return !p.dropout.on || reference::is_kept(p.dropout, batch, head, i, j);
}

/// The kept entries of P, each row times a factor. Without dropout and factor P itself.
Matrix kept_of(const Problem& p, const Rounding& r, std::int64_t batch, std::int64_t head, const Saved& s,
               bool times_sum) {
  Matrix kept = s.p;
  for (std::int64_t i = 0; (p.dropout.on || r.fused()) && i < s.p.rows; ++i) {
    const float factor = times_sum ? s.sum[static_cast<std::size_t>(i)] : r.fused() ? 1.0F : p.dropout.scale;
    for (std::int64_t j = 0; j < s.p.cols; ++j) {
      float& x = kept.row(i)[j];
      x = x != 0.0F && is_kept(p, batch, head, i, j) ? round_fast(r.dtype, x * factor) : 0.0F;
    }
  }
  return kept;
}

/// out of a head. Fused attention divides by the softmax's sum at the end.
Matrix out_of(const Problem& p, const Rounding& r, std::int64_t batch, std::int64_t head, const Saved& s) {
  Matrix out = matmul(kept_of(p, r, batch, head, s, r.fused()), s.v, r.inside());
  for (std::int64_t i = 0; r.fused() && i < out.rows; ++i) {
    const float factor = p.dropout.scale / s.sum[static_cast<std::size_t>(i)];
    for (std::int64_t c = 0; c < out.cols; ++c) out.row(i)[c] = round_fast(r.dtype, out.row(i)[c] * factor);
  }
  return out;
}

/// The sigmoid of a row's gate, as an operator of its own; 1 without one.
float gate_of(const Problem& p, const Rounding& r, std::int64_t batch, const Saved& s, std::int64_t head,
              std::int64_t i, std::int64_t c) {
  if (!p.gate.given()) return 1.0F;
  double gate = 0.0;
  decode(p.gate.dtype, p.gate.data, p.gate.offset(batch, s.q_rows.begin + i, head) + c, 1, &gate);
  return round_fast(r.dtype, 1.0F / (1.0F + std::exp(-static_cast<float>(gate))));
}

/// Multiplies rows by their gates' sigmoids, with a rounding.
Matrix gated(Matrix m, const Problem& p, const Rounding& r, std::int64_t batch, std::int64_t head,
             const Saved& s) {
  for (std::int64_t i = 0; p.gate.given() && i < m.rows; ++i) {
    for (std::int64_t c = 0; c < m.cols; ++c) {
      float& x = m.row(i)[c];
      if (x != 0.0F) x = round_fast(r.dtype, x * gate_of(p, r, batch, s, head, i, c));
    }
  }
  return m;
}

/// dgate of a head: dout * O * sigmoid * (1 - sigmoid), an operator each.
Matrix gate_gradient(const Problem& p, const Rounding& r, std::int64_t batch, std::int64_t head,
                     const Saved& s, const Matrix& dout) {
  Matrix m = out_of(p, r, batch, head, s);
  for (std::int64_t i = 0; i < m.rows; ++i) {
    for (std::int64_t c = 0; c < m.cols; ++c) {
      float& x = m.row(i)[c];
      if (x == 0.0F) continue;
      const float gate = gate_of(p, r, batch, s, head, i, c);
      x = round_fast(r.dtype, round_fast(r.dtype, dout.row(i)[c] * x) * gate * (1.0F - gate));
    }
  }
  return m;
}

/// Adds what a pair gives to the gradients of what its score function reads.
void add_captured(const Problem& p, DType dtype, reference::FunctionValue& f, const reference::Pair& pair,
                  float gradient, std::vector<std::vector<double>>& captured) {
  const std::span<const FunctionNode> nodes = p.score_function->nodes();
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    const auto tensor = static_cast<std::size_t>(nodes[n].captured);
    if (nodes[n].op != FunctionOp::read || tensor >= captured.size() || captured[tensor].empty()) continue;
    const auto read = static_cast<std::int16_t>(n);
    const auto slope = static_cast<float>(f.at(pair, read).slope);
    captured[tensor][static_cast<std::size_t>(f.element(read))] +=
        static_cast<double>(round_fast(dtype, gradient * slope));
  }
}

/// How often the indices of query i name each key; empty where the call has none.
std::vector<float> times_named(const Problem& p, const Saved& s, std::int64_t batch, std::int64_t head,
                               std::int64_t i) {
  if (!p.indices.given()) return {};
  std::vector<float> times(static_cast<std::size_t>(s.k_rows.used), 0.0F);
  const std::int64_t row = s.q_rows.begin + i;
  for (std::int64_t n = 0; n < p.indices.length(batch, row); ++n) {
    const std::int64_t key = p.indices.number(batch, row, head / p.group(), n);
    if (key >= 0 && key < s.k_rows.used) times[static_cast<std::size_t>(key)] += 1.0F;
  }
  return times;
}

Saved attend(const Problem& p, const Rounding& r, std::int64_t batch, std::int64_t head) {
  const DType dtype = r.inside();
  const std::int64_t kv_head = head / p.group();
  Saved s;
  s.q_rows = query_rows(p, batch);
  s.k_rows = key_rows(p, batch);
  s.q = load(p.q, r.dtype, batch, s.q_rows, head, p.head_dim_qk, p.q_scale.at(batch, kv_head));
  s.k = load(p.k, r.dtype, batch, s.k_rows, kv_head, p.head_dim_qk, p.k_scale.at(batch, kv_head));
  s.v = load(p.v, r.dtype, batch, s.k_rows, kv_head, p.head_dim_v, p.v_scale.at(batch, kv_head));
  const std::int64_t nq = s.q_rows.used;
  const std::int64_t nk = s.k_rows.used;
  s.p = matmul(s.q, transposed(s.k), dtype);
  if (p.softcap > 0.0F) s.slope_input = Matrix(nq, nk);
  if (p.score_function != nullptr) s.slope = Matrix(nq, nk);
  if (p.wants_captured_gradients()) s.score = Matrix(nq, nk);
  s.p_sink.assign(static_cast<std::size_t>(nq), 0.0F);
  s.sum.assign(static_cast<std::size_t>(nq), 1.0F);
  s.lse.assign(static_cast<std::size_t>(nq), -infinity);
  const float sink = p.sink != nullptr ? round_fast(dtype, p.sink[head * p.sink_stride]) : -infinity;

  for (std::int64_t i = 0; i < nq; ++i) {
    KeyRange seen = visible_keys(window_of(p, batch), i, nq, nk);
    float* row = s.p.row(i);
    for (std::int64_t j = seen.first; j < seen.last; ++j) {
      row[j] = round_fast(dtype, row[j] * p.scale);
      if (p.softcap > 0.0F) {
        const float t = round_fast(dtype, std::tanh(round_fast(dtype, row[j] / p.softcap)));
        s.slope_input.row(i)[j] = t;
        row[j] = round_fast(dtype, t * p.softcap);
      }
    }
    if (s.score.rows > 0) std::copy(row, row + nk, s.score.row(i));
    if (p.has_function()) {
      const reference::Pair pair{.batch = batch, .head = head, .query = i, .seqlen_q = nq, .seqlen_k = nk};
      apply_functions(p, dtype, pair, seen, row, p.score_function != nullptr ? s.slope.row(i) : nullptr);
      if (std::all_of(row + seen.first, row + seen.last, [](float x) { return x == -infinity; })) seen = {};
    }
    const std::vector<float> times = times_named(p, s, batch, head, i);
    const auto is_named = [&](std::int64_t j) {
      return times.empty() || times[static_cast<std::size_t>(j)] > 0.0F;
    };
    while (seen.first < seen.last && !is_named(seen.first)) ++seen.first;
    for (std::int64_t j = seen.first; j < seen.last; ++j) row[j] = is_named(j) ? row[j] : -infinity;
    float maximum = seen.first < seen.last ? sink : -infinity;
    for (std::int64_t j = seen.first; j < seen.last; ++j) maximum = row[j] > maximum ? row[j] : maximum;
    float sum = std::isinf(sink) ? 0.0F : std::exp(sink - maximum);
    for (std::int64_t j = 0; j < nk; ++j) {
      const bool visible = j >= seen.first && j < seen.last;
      row[j] = visible ? std::exp(row[j] - maximum) : 0.0F;
      if (!times.empty()) row[j] = is_named(j) ? row[j] * times[static_cast<std::size_t>(j)] : 0.0F;
      sum += row[j];
    }
    if (seen.first >= seen.last) {  // the sink alone is in the sum
      s.p_sink[static_cast<std::size_t>(i)] = p.sink != nullptr ? 1.0F : 0.0F;
      if (p.sink != nullptr) s.lse[static_cast<std::size_t>(i)] = p.sink[head * p.sink_stride];
      continue;
    }
    s.sum[static_cast<std::size_t>(i)] = sum;
    for (std::int64_t j = seen.first; j < seen.last; ++j) row[j] = round_fast(dtype, row[j] / sum);
    if (!std::isinf(sink))
      s.p_sink[static_cast<std::size_t>(i)] = round_fast(dtype, std::exp(sink - maximum) / sum);
    s.lse[static_cast<std::size_t>(i)] = maximum + std::log(sum);
  }
  return s;
}

/// Adds the rows of `m` times `factor` to a contiguous (batch, rows, heads, dim) array, or (rows, heads, dim)
/// if packed.
void scatter(const Matrix& m, Rows rows, bool packed, std::int64_t batch, std::int64_t head,
             std::int64_t all_rows, std::int64_t heads, std::vector<double>& target, double factor = 1.0) {
  for (std::int64_t i = 0; i < m.rows; ++i) {
    const std::int64_t first = (((packed ? 0 : batch) * all_rows + rows.begin + i) * heads + head) * m.cols;
    for (std::int64_t c = 0; c < m.cols; ++c) {
      target[static_cast<std::size_t>(first + c)] += static_cast<double>(m.row(i)[c]) * factor;
    }
  }
}

/// dS for one head: the softmax's backward, then the softcap's, then the scale's, which fused attention
/// leaves to dq and dk. Adds to dsink.
Matrix score_gradient(const Problem& p, const Rounding& r, std::int64_t batch, std::int64_t head,
                      const Saved& s, const Matrix& dout, reference::Backward& result, double& dsink) {
  const DType dtype = r.inside();
  Matrix ds = matmul(dout, transposed(s.v), dtype);  // dP
  const Matrix out = r.fused() ? out_of(p, r, batch, head, s) : Matrix();
  std::optional<reference::FunctionValue> reads;
  if (!result.captured.empty()) reads.emplace(*p.score_function);
  for (std::int64_t i = 0; p.dropout.on && i < ds.rows; ++i) {
    for (std::int64_t j = 0; j < ds.cols; ++j) {
      float& x = ds.row(i)[j];
      x = is_kept(p, batch, head, i, j) ? round_fast(dtype, x * p.dropout.scale) : 0.0F;
    }
  }
  for (std::int64_t i = 0; i < ds.rows; ++i) {
    KeyRange seen = visible_keys(window_of(p, batch), i, ds.rows, ds.cols);
    const float* const weights = s.p.row(i);
    if (p.has_function() && std::all_of(weights, weights + ds.cols, [](float x) { return x == 0.0F; })) {
      seen = {};
    }
    const auto row_index = static_cast<std::size_t>(i);
    float delta = 0.0F;
    for (std::int64_t c = 0; c < out.cols; ++c) delta += dout.row(i)[c] * out.row(i)[c];
    for (std::int64_t j = seen.first; !r.fused() && j < seen.last; ++j) {
      if (s.p.row(i)[j] != 0.0F || !p.indices.given()) delta += s.p.row(i)[j] * ds.row(i)[j];
    }
    float dlse = 0.0F;
    if (p.dlse.given()) {
      dlse = static_cast<const float*>(p.dlse.data)[p.dlse.offset(batch, s.q_rows.begin + i, head)];
    }
    for (std::int64_t j = 0; j < ds.cols; ++j) {
      float& g = ds.row(i)[j];
      if (j < seen.first || j >= seen.last) {
        g = 0.0F;
        continue;
      }
      const float probability = s.p.row(i)[j];
      g = round_fast(dtype, probability * (g - delta));
      if ((p.has_function() || p.indices.given()) && probability == 0.0F) {
        g = 0.0F;  // masked, or vanished
        continue;
      }
      if (dlse != 0.0F) g = round_fast(dtype, g + round_fast(dtype, probability * dlse));
      if (!result.captured.empty()) {
        add_captured(p, dtype, *reads,
                     {.score = static_cast<double>(s.score.row(i)[j]),
                      .batch = batch,
                      .head = head,
                      .query = i,
                      .key = j,
                      .seqlen_q = ds.rows,
                      .seqlen_k = ds.cols},
                     g, result.captured);
      }
      if (p.score_function != nullptr) g = round_fast(dtype, g * s.slope.row(i)[j]);
      if (p.softcap > 0.0F) {
        const float t = s.slope_input.row(i)[j];
        g = round_fast(dtype, round_fast(dtype, g * p.softcap) * (1.0F - t * t));
        g = round_fast(dtype, g / p.softcap);
      }
      g = r.fused() ? round_fast(r.dtype, g) : round_fast(dtype, g * p.scale);
    }
    dsink += static_cast<double>(round_fast(dtype, s.p_sink[row_index] * (dlse - delta)));
  }
  return ds;
}

std::size_t numel(bool packed, const Problem& p, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  return static_cast<std::size_t>((packed ? 1 : p.batch) * rows * heads * dim);
}

}  // namespace

reference::Forward same_dtype_forward(const Problem& p, DType dtype, Model model) {
  const Rounding r{dtype, model};
  reference::Forward result;
  result.out.assign(numel(p.packed_q, p, p.rows_q, p.heads_q, p.head_dim_v), 0.0);
  result.lse.assign(numel(p.packed_q, p, p.rows_q, p.heads_q, 1), -static_cast<double>(infinity));
  for (std::int64_t batch = 0; batch < p.batch; ++batch) {
    for (std::int64_t head = 0; head < p.heads_q; ++head) {
      const Saved s = attend(p, r, batch, head);
      scatter(gated(out_of(p, r, batch, head, s), p, r, batch, head, s), s.q_rows, p.packed_q, batch, head,
              p.rows_q, p.heads_q, result.out);
      const std::int64_t first = ((p.packed_q ? 0 : batch) * p.heads_q + head) * p.rows_q + s.q_rows.begin;
      for (std::int64_t i = 0; i < s.q_rows.used; ++i) {
        result.lse[static_cast<std::size_t>(first + i)] =
            static_cast<double>(s.lse[static_cast<std::size_t>(i)]);
      }
    }
  }
  return result;
}

reference::Backward same_dtype_backward(const Problem& p, DType dtype, Model model) {
  const Rounding r{dtype, model};
  reference::Backward result;
  result.dq.assign(numel(p.packed_q, p, p.rows_q, p.heads_q, p.head_dim_qk), 0.0);
  result.dk.assign(numel(p.packed_k, p, p.rows_k, p.heads_kv, p.head_dim_qk), 0.0);
  result.dv.assign(numel(p.packed_k, p, p.rows_k, p.heads_kv, p.head_dim_v), 0.0);
  if (p.sink != nullptr) result.dsink.assign(static_cast<std::size_t>(p.heads_q), 0.0);
  if (p.gate.given()) result.dgate.assign(numel(p.packed_q, p, p.rows_q, p.heads_q, p.head_dim_v), 0.0);
  for (const Tensor& t : p.captured_gradients) {
    result.captured.emplace_back(static_cast<std::size_t>(t.given() ? t.numel() : 0), 0.0);
  }
  const double scale = r.fused() ? static_cast<double>(p.scale) : 1.0;
  const double dropout = r.fused() ? static_cast<double>(p.dropout.scale) : 1.0;
  for (std::int64_t batch = 0; batch < p.batch; ++batch) {
    for (std::int64_t head = 0; head < p.heads_q; ++head) {
      const std::int64_t kv_head = head / p.group();
      const Saved s = attend(p, r, batch, head);
      Matrix dout = load(p.dout, dtype, batch, s.q_rows, head, p.head_dim_v, 1.0F);
      if (p.gate.given()) {
        scatter(gate_gradient(p, r, batch, head, s, dout), s.q_rows, p.packed_q, batch, head, p.rows_q,
                p.heads_q, result.dgate);
        dout = gated(std::move(dout), p, r, batch, head, s);
      }
      double dsink = 0.0;
      const Matrix ds = score_gradient(p, r, batch, head, s, dout, result, dsink);
      if (p.sink != nullptr) result.dsink[static_cast<std::size_t>(head)] += dsink;
      const auto add_to_keys = [&](const Matrix& m, double factor, std::vector<double>& target) {
        scatter(m, s.k_rows, p.packed_k, batch, kv_head, p.rows_k, p.heads_kv, target, factor);
      };
      scatter(matmul(ds, s.k, r.inside()), s.q_rows, p.packed_q, batch, head, p.rows_q, p.heads_q, result.dq,
              scale);
      add_to_keys(matmul(transposed(ds), s.q, r.inside()), scale, result.dk);
      add_to_keys(matmul(transposed(kept_of(p, r, batch, head, s, false)), dout, r.inside()), dropout,
                  result.dv);
    }
  }
  // The heads of a group, and the rows behind a sink, are summed in fp32 and rounded once.
  std::vector<std::vector<double>*> outputs{&result.dq, &result.dk, &result.dv, &result.dsink};
  for (std::vector<double>& captured : result.captured) outputs.push_back(&captured);
  for (std::vector<double>* all : outputs) {
    for (double& x : *all) x = static_cast<double>(round_fast(dtype, static_cast<float>(x)));
  }
  return result;
}

}  // namespace tandem::harness
