#include "cpu/reference/reference.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>

#include "cpu/common/vector_clones.hpp"
#include "cpu/reference/function.hpp"

namespace tandem::reference {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// The element conversions below are the oracle's own: an oracle shares no code with what it tests.

/// A floating-point code with `exponent_bits`, `mantissa_bits` and a sign, by the IEEE 754 formula.
double decode_ieee(std::uint32_t code, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const auto mantissa = static_cast<double>(code & ((1U << mantissa_bits) - 1));
  const double sign = (code >> (exponent_bits + mantissa_bits)) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0.0 ? sign * infinity : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + std::ldexp(1.0, mantissa_bits), exponent - bias - mantissa_bits);
}

/// Reads a table of every f16, since tests decode as often as they compute.
double decode_f16(std::uint16_t code) {
  static const std::vector<double> values = [] {
    std::vector<double> all(1U << 16U);
    for (std::uint32_t c = 0; c < all.size(); ++c) all[c] = decode_ieee(c, 5, 10);
    return all;
  }();
  return values[code];
}

/// e4m3 (OCP "fn"): no infinities; only the code with all exponent and mantissa bits set is NaN.
double decode_e4m3(std::uint32_t code) {
  if ((code & 0x7FU) == 0x7FU) return std::numeric_limits<double>::quiet_NaN();
  if ((code & 0x78U) == 0x78U) return ((code & 0x80U) != 0 ? -256.0 : 256.0) * (1.0 + (code & 7U) / 8.0);
  return decode_ieee(code, 4, 3);
}

}  // namespace

double stored_value(const void* data, DType dtype, std::int64_t offset) {
  switch (dtype) {
    case DType::f32: return static_cast<double>(static_cast<const float*>(data)[offset]);
    case DType::f16: return decode_f16(static_cast<const std::uint16_t*>(data)[offset]);
    case DType::bf16: {
      const std::uint32_t high = static_cast<const std::uint16_t*>(data)[offset];
      return static_cast<double>(std::bit_cast<float>(high << 16));
    }
    case DType::e4m3: return decode_e4m3(static_cast<const std::uint8_t*>(data)[offset]);
    case DType::s8: return static_cast<double>(static_cast<const std::int8_t*>(data)[offset]);
    case DType::i32: return static_cast<double>(static_cast<const std::int32_t*>(data)[offset]);
    case DType::i64: return static_cast<double>(static_cast<const std::int64_t*>(data)[offset]);
  }
  throw Error(Status::internal, "the reference was given a dtype that it does not know");
}

namespace {

double element(const Operand& x, std::int64_t offset) {
  return stored_value(x.data, x.dtype, offset);
}

/// One head of rows [begin, begin + count) of an operand, times `factor`: a row-major (count, dim) matrix.
std::vector<double> load(const Operand& x, std::int64_t batch, std::int64_t begin, std::int64_t count,
                         std::int64_t head, std::int64_t dim, double factor) {
  std::vector<double> values(static_cast<std::size_t>(count * dim));
  for (std::int64_t row = 0; row < count; ++row) {
    const std::int64_t offset = x.offset(batch, begin + row, head);
    for (std::int64_t c = 0; c < dim; ++c) {
      values[static_cast<std::size_t>(row * dim + c)] = element(x, offset + c) * factor;
    }
  }
  return values;
}

TANDEM_VECTOR_CLONES double dot(const double* a, const double* b, std::int64_t n) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t c = 0; c < n; ++c) sum += a[c] * b[c];
  return sum;
}

/// y += a * x.
TANDEM_VECTOR_CLONES void accumulate(double* y, double a, const double* x, std::int64_t n) {
#pragma omp simd
  for (std::int64_t c = 0; c < n; ++c) y[c] += a * x[c];
}

/// Whether query i sees key j, of a sequence with nq queries and nk keys: contract line 4, as it is written.
bool sees(const Problem& p, std::int64_t batch, std::int64_t i, std::int64_t j, std::int64_t nq,
          std::int64_t nk) {
  const std::int64_t distance =
      j - (i + nk - nq);  // 0 on the diagonal, which ends in the bottom right corner
  const bool causal = p.causal_by_sequence.given() && p.causal_by_sequence[batch] != 0;
  return (p.window_left < 0 || distance >= -p.window_left) &&
         (p.window_right < 0 || distance <= p.window_right) && (!causal || distance <= 0);
}

}  // namespace

// Philox4x32-10 as its paper writes it down.
bool is_kept(const Dropout& dropout, std::int64_t batch, std::int64_t head, std::int64_t query,
             std::int64_t key) {
  if (!dropout.on) return true;
  const auto word = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const DropoutPlace place = dropout.place_of(batch);
  const std::uint32_t at = word(place.key + place.step * static_cast<std::uint64_t>(key));
  std::uint32_t counter[4] = {word(at / 4),
                              word(place.query + place.step * static_cast<std::uint64_t>(query)),
                              word(place.first_head + static_cast<std::uint64_t>(head)), dropout.offset};
  std::uint32_t k[2] = {dropout.key[0], dropout.key[1]};
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57} * counter[2];
    const std::uint32_t next[4] = {word(b >> 32U) ^ counter[1] ^ k[0], word(b),
                                   word(a >> 32U) ^ counter[3] ^ k[1], word(a)};
    std::copy(next, next + 4, counter);
    k[0] += 0x9E3779B9U;
    k[1] += 0xBB67AE85U;
  }
  return counter[at % 4] >= dropout.threshold;
}

namespace {

/// The rows of one sequence that take part, and one of its heads in fp64.
struct Sequence {
  std::int64_t batch = 0;
  std::int64_t head = 0;
  Rows q_rows, k_rows;
  std::vector<double> q, k, v;
};

Sequence load_sequence(const Problem& p, std::int64_t batch, std::int64_t head) {
  const std::int64_t kv_head = head / p.group();
  Sequence s;
  s.batch = batch;
  s.head = head;
  s.q_rows = query_rows(p, batch);
  s.k_rows = key_rows(p, batch);
  const auto factor = [&](const Scales& scales) { return static_cast<double>(scales.at(batch, kv_head)); };
  s.q = load(p.q, batch, s.q_rows.begin, s.q_rows.used, head, p.head_dim_qk, factor(p.q_scale));
  s.k = load(p.k, batch, s.k_rows.begin, s.k_rows.used, kv_head, p.head_dim_qk, factor(p.k_scale));
  s.v = load(p.v, batch, s.k_rows.begin, s.k_rows.used, kv_head, p.head_dim_v, factor(p.v_scale));
  return s;
}

/// The functions of a problem.
struct Functions {
  explicit Functions(const Problem& p) {
    if (p.score_function != nullptr) score.emplace(*p.score_function);
    if (p.mask_function != nullptr) mask.emplace(*p.mask_function);
  }
  std::optional<FunctionValue> score, mask;
};

/// The keys that query i sees, some more than once where its indices name them more than once.
std::vector<std::int64_t> keys_of(const Problem& p, const Sequence& s, std::int64_t i) {
  std::vector<std::int64_t> keys;
  const auto add = [&](std::int64_t j) {
    if (sees(p, s.batch, i, j, s.q_rows.used, s.k_rows.used)) keys.push_back(j);
  };
  const Indices& indices = p.indices;
  if (!indices.given()) {
    for (std::int64_t j = 0; j < s.k_rows.used; ++j) add(j);
    return keys;
  }
  const auto integer = [](const Operand& x, std::int64_t at) {
    return static_cast<std::int64_t>(stored_value(x.data, x.dtype, at));
  };
  const std::int64_t row = s.q_rows.begin + i;
  const Operand& lengths = indices.lengths;
  const std::int64_t length = lengths.given()
                                  ? std::min(integer(lengths, lengths.offset(s.batch, row, 0)), indices.count)
                                  : indices.count;
  for (std::int64_t n = 0; n < length; ++n) {
    const std::int64_t first = indices.numbers.offset(s.batch, row, s.head / p.group());
    const std::int64_t j = integer(indices.numbers, first + n * indices.stride);
    if (j >= 0 && j < s.k_rows.used) add(j);
  }
  return keys;
}

/// One query's softmax over the keys it sees.
struct Row {
  std::vector<std::int64_t> keys;   ///< the visible keys; what follows has one entry for each
  std::vector<double> score;        ///< what the score function sees
  std::vector<double> slope;        ///< d(logit) / d(scale q k): of the softcap and the score function
  std::vector<double> probability;  ///< exp(logit - lse)
  std::vector<double> kept;         ///< by dropout: what P is multiplied by
  std::vector<double> out;
  double lse = -infinity;
  double max_logit = -infinity;  ///< the largest of its keys'; NaN where lse is
  double sink_probability = 0.0;
};

Row softmax_row(const Problem& p, const Sequence& s, std::int64_t i, Functions& functions) {
  Row row;
  row.out.assign(static_cast<std::size_t>(p.head_dim_v), 0.0);
  std::vector<double> logits;
  for (const std::int64_t j : keys_of(p, s, i)) {
    Pair pair{.batch = s.batch,
              .head = s.head,
              .query = i,
              .key = j,
              .seqlen_q = s.q_rows.used,
              .seqlen_k = s.k_rows.used};
    if (functions.mask && functions.mask->at(pair).value == 0.0) continue;
    double logit = static_cast<double>(p.scale) *
                   dot(s.q.data() + i * p.head_dim_qk, s.k.data() + j * p.head_dim_qk, p.head_dim_qk);
    double slope = 1.0;
    if (p.softcap > 0.0F) {
      const double t = std::tanh(logit / static_cast<double>(p.softcap));
      logit = static_cast<double>(p.softcap) * t;
      slope = 1.0 - t * t;
    }
    pair.score = logit;
    if (functions.score) {
      const Dual value = functions.score->at(pair);
      logit = value.value;
      slope *= value.slope;
      if (logit == -infinity) continue;  // as masked
    }
    row.keys.push_back(j);
    row.score.push_back(pair.score);
    row.slope.push_back(slope);
    logits.push_back(logit);
  }
  const double sink = p.sink != nullptr ? static_cast<double>(p.sink[s.head * p.sink_stride]) : -infinity;
  if (row.keys.empty()) {  // nothing but the sink is in the sum
    row.lse = sink;
    row.sink_probability = p.sink != nullptr ? 1.0 : 0.0;
    return row;
  }
  for (const double logit : logits) row.max_logit = logit > row.max_logit ? logit : row.max_logit;
  const double maximum = sink > row.max_logit ? sink : row.max_logit;
  double sum = p.sink != nullptr ? std::exp(sink - maximum) : 0.0;
  for (const double logit : logits) sum += std::exp(logit - maximum);
  row.lse = maximum + std::log(sum);
  if (std::isnan(row.lse)) row.max_logit = row.lse;
  if (p.sink != nullptr) row.sink_probability = std::exp(sink - maximum) / sum;
  for (std::size_t n = 0; n < logits.size(); ++n) {
    row.probability.push_back(std::exp(logits[n] - maximum) / sum);
    const bool kept = is_kept(p.dropout, s.batch, s.head, i, row.keys[n]);
    row.kept.push_back(kept ? static_cast<double>(p.dropout.scale) : 0.0);
    accumulate(row.out.data(), row.probability[n] * row.kept[n], s.v.data() + row.keys[n] * p.head_dim_v,
               p.head_dim_v);
  }
  return row;
}

/// The sigmoid of element `c` of a row's gate; 1 without one.
double gate_of(const Problem& p, std::int64_t batch, std::int64_t row, std::int64_t head, std::int64_t c) {
  if (!p.gate.given()) return 1.0;
  return 1.0 / (1.0 + std::exp(-element(p.gate, p.gate.offset(batch, row, head) + c)));
}

/// Index of the first element of (batch, row, head) in a contiguous (batch, rows, heads, dim) array; a packed
/// array has no batch dimension.
std::size_t index(bool packed, std::int64_t batch, std::int64_t row, std::int64_t head, std::int64_t rows,
                  std::int64_t heads, std::int64_t dim) {
  return static_cast<std::size_t>((((packed ? 0 : batch) * rows + row) * heads + head) * dim);
}

std::size_t numel(bool packed, const Problem& p, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  return static_cast<std::size_t>((packed ? 1 : p.batch) * rows * heads * dim);
}

}  // namespace

Forward forward(const Problem& p) {
  Forward result;
  Functions functions(p);
  result.out.assign(numel(p.packed_q, p, p.rows_q, p.heads_q, p.head_dim_v), 0.0);
  result.lse.assign(numel(p.packed_q, p, p.rows_q, p.heads_q, 1), -infinity);
  result.max_logits = result.lse;
  for (std::int64_t batch = 0; batch < p.batch; ++batch) {
    for (std::int64_t head = 0; head < p.heads_q; ++head) {
      const Sequence s = load_sequence(p, batch, head);
      for (std::int64_t i = 0; i < s.q_rows.used; ++i) {
        const Row row = softmax_row(p, s, i, functions);
        const std::int64_t r = s.q_rows.begin + i;
        double* out =
            result.out.data() + index(p.packed_q, batch, r, head, p.rows_q, p.heads_q, p.head_dim_v);
        for (std::int64_t c = 0; c < p.head_dim_v && !row.keys.empty(); ++c)
          out[c] = row.out[static_cast<std::size_t>(c)] * gate_of(p, batch, r, head, c);
        const std::size_t at = index(p.packed_q, batch, head, r, p.heads_q, p.rows_q, 1);
        result.lse[at] = row.lse;
        result.max_logits[at] = row.max_logit;
      }
    }
  }
  return result;
}

namespace {

/// Adds what a pair gives to the gradients of what its score function reads.
void add_captured(const Problem& p, const Pair& pair, double gradient, Functions& functions,
                  std::vector<std::vector<double>>& captured) {
  const std::span<const FunctionNode> nodes = p.score_function->nodes();
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    const auto tensor = static_cast<std::size_t>(nodes[n].captured);
    if (nodes[n].op != FunctionOp::read || tensor >= captured.size() || captured[tensor].empty()) continue;
    const auto read = static_cast<std::int16_t>(n);
    const double slope = functions.score->at(pair, read).slope;
    captured[tensor][static_cast<std::size_t>(functions.score->element(read))] += gradient * slope;
  }
}

}  // namespace

Backward backward(const Problem& p) {
  const std::int64_t d = p.head_dim_qk;
  const std::int64_t dv = p.head_dim_v;
  Backward result;
  Functions functions(p);
  result.dq.assign(numel(p.packed_q, p, p.rows_q, p.heads_q, d), 0.0);
  result.dk.assign(numel(p.packed_k, p, p.rows_k, p.heads_kv, d), 0.0);
  result.dv.assign(numel(p.packed_k, p, p.rows_k, p.heads_kv, dv), 0.0);
  if (p.sink != nullptr) result.dsink.assign(static_cast<std::size_t>(p.heads_q), 0.0);
  if (p.gate.given()) result.dgate.assign(numel(p.packed_q, p, p.rows_q, p.heads_q, dv), 0.0);
  for (const Tensor& t : p.captured_gradients) {
    result.captured.emplace_back(static_cast<std::size_t>(t.given() ? t.numel() : 0), 0.0);
  }

  for (std::int64_t batch = 0; batch < p.batch; ++batch) {
    for (std::int64_t head = 0; head < p.heads_q; ++head) {
      const std::int64_t kv_head = head / p.group();
      const Sequence s = load_sequence(p, batch, head);
      std::vector<double> dout = load(p.dout, batch, s.q_rows.begin, s.q_rows.used, head, dv, 1.0);
      for (std::int64_t i = 0; i < s.q_rows.used; ++i) {
        const Row row = softmax_row(p, s, i, functions);
        const std::int64_t r = s.q_rows.begin + i;
        double* const dout_row = dout.data() + i * dv;
        for (std::int64_t c = 0; c < dv && p.gate.given(); ++c) {
          const double gate = gate_of(p, batch, r, head, c);
          dout_row[c] *= gate;  // the gradient of O from here on
          if (row.keys.empty()) continue;
          double* dgate =
              result.dgate.data() + index(p.packed_q, batch, r, head, p.rows_q, p.heads_q, dv) + c;
          *dgate = dout_row[c] * row.out[static_cast<std::size_t>(c)] * (1.0 - gate);
        }
        // delta = sum_j P_j dP_j - dlse, so that dS_j = P_j (dP_j - delta); the sink is a key whose dP is 0.
        // Without a key the sum is empty, whatever dout holds, and dlse is the sink's.
        double delta = row.keys.empty() ? 0.0 : dot(dout_row, row.out.data(), dv);
        if (p.dlse.given()) delta -= element(p.dlse, p.dlse.offset(batch, r, head));
        if (p.sink != nullptr) result.dsink[static_cast<std::size_t>(head)] -= row.sink_probability * delta;

        double* dq = result.dq.data() + index(p.packed_q, batch, r, head, p.rows_q, p.heads_q, d);
        for (std::size_t n = 0; n < row.keys.size(); ++n) {
          const std::int64_t j = row.keys[n];
          const std::int64_t key_row = s.k_rows.begin + j;
          const double dp = row.kept[n] == 0.0 ? 0.0 : dot(dout_row, s.v.data() + j * dv, dv) * row.kept[n];
          const double ds = row.probability[n] * (dp - delta) * row.slope[n] * static_cast<double>(p.scale);
          double* dk = result.dk.data() + index(p.packed_k, batch, key_row, kv_head, p.rows_k, p.heads_kv, d);
          double* dv_row =
              result.dv.data() + index(p.packed_k, batch, key_row, kv_head, p.rows_k, p.heads_kv, dv);
          accumulate(dq, ds, s.k.data() + j * d, d);
          accumulate(dk, ds, s.q.data() + i * d, d);
          accumulate(dv_row, row.probability[n] * row.kept[n], dout_row, dv);
          if (!result.captured.empty()) {
            const Pair pair{.score = row.score[n],
                            .batch = batch,
                            .head = head,
                            .query = i,
                            .key = j,
                            .seqlen_q = s.q_rows.used,
                            .seqlen_k = s.k_rows.used};
            add_captured(p, pair, row.probability[n] * (dp - delta), functions, result.captured);
          }
        }
      }
    }
  }
  return result;
}

}  // namespace tandem::reference
