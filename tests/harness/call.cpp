#include "call.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace tandem::harness {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

std::int64_t total(const std::vector<std::int64_t>& lengths, std::int64_t slack) {
  return std::accumulate(lengths.begin(), lengths.end(), slack);
}

std::vector<std::int64_t> shape_of(bool packed, std::int64_t batch, std::int64_t rows, std::int64_t heads,
                                   std::int64_t dim) {
  if (packed) return {rows, heads, dim};
  return {batch, rows, heads, dim};
}

/// lse and dlse put heads before rows.
std::vector<std::int64_t> lse_shape(const Case& c) {
  if (c.packed_q) return {c.heads_q, c.rows_q()};
  return {c.batch, c.heads_q, c.seqlen_q};
}

Box cumulative(const Case& c, bool packed, const std::vector<std::int64_t>& lengths) {
  if (!packed) return {};
  std::vector<double> sums{0.0};
  for (const std::int64_t n : lengths) sums.push_back(sums.back() + static_cast<double>(n));
  return vector_box(c.metadata, sums);
}

Box seqused(const Case& c, const std::vector<std::int64_t>& used) {
  if (used.empty()) return {};
  return vector_box(c.metadata, {used.begin(), used.end()});
}

/// Fills k or v with normal numbers; s8 ones in units of 1 / s8_deviation, which their scales make up for.
void fill_keys(Box& box, Random& random, double amplitude) {
  if (box.dtype() != DType::s8) return fill(box, random, amplitude);
  std::vector<double> values = random.normals(box.numel());
  for (double& x : values) x = std::clamp(std::round(x * s8_deviation), -128.0, 127.0);
  box.set_all(values);
}

Box scale_box(const Case& c, Random& random) {
  if (c.scales == 0) return {};
  Box box(DType::f32,
          c.scales == 1 ? std::vector<std::int64_t>{1} : std::vector<std::int64_t>{c.batch, c.heads_kv}, {},
          false);
  const double unit = c.key_dtype == DType::s8 ? 1.0 / s8_deviation : 1.0;
  for (std::int64_t n = 0; n < box.numel(); ++n) box.set(n, (0.5 + random.uniform()) * unit);
  return box;
}

void visit_rows(bool packed, std::int64_t batch, std::int64_t seqlen,
                const std::vector<std::int64_t>& lengths, std::int64_t slack,
                const std::vector<std::int64_t>& used, const RowVisitor& f) {
  std::int64_t begin = 0;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = packed ? lengths[static_cast<std::size_t>(b)] : seqlen;
    const std::int64_t count = used.empty() ? length : used[static_cast<std::size_t>(b)];
    for (std::int64_t i = 0; i < length; ++i) f(b, packed ? begin + i : i, i < count);
    begin += length;
  }
  if (!packed) return;
  for (std::int64_t i = 0; i < slack; ++i) f(batch, begin + i, false);
}

/// Makes all heads of the rows that take no part NaN, unless expanded memory is shared with rows that do.
void poison_rows(Box& box, const Layout& layout, bool packed, std::int64_t rows, std::int64_t inner,
                 const std::function<void(const RowVisitor&)>& for_each_row) {
  if (!box.given() || layout.expanded != 0) return;
  for_each_row([&](std::int64_t b, std::int64_t row, bool used) {
    if (used) return;
    const std::int64_t first = ((packed ? 0 : b) * rows + row) * inner;
    for (std::int64_t n = 0; n < inner; ++n) box.set(first + n, nan_value);
  });
}

Operand operand(const Box& box, bool packed) {
  if (!box.given()) return {};
  const Tensor& t = box.view();
  Operand o{.data = t.data, .dtype = t.dtype};
  const std::size_t first = packed ? 0 : 1;
  o.batch_stride = packed || t.shape[0] == 1 ? 0 : t.stride[0];
  o.row_stride = t.shape[first] == 1 ? 0 : t.stride[first];
  o.head_stride = t.shape[first + 1] == 1 ? 0 : t.stride[first + 1];
  return o;
}

/// lse and dlse: (batch, heads, rows).
Operand lse_operand(const Box& box, bool packed) {
  if (!box.given()) return {};
  const Tensor& t = box.view();
  const std::size_t first = packed ? 0 : 1;
  Operand o{.data = t.data, .dtype = t.dtype};
  o.batch_stride = packed || t.shape[0] == 1 ? 0 : t.stride[0];
  o.head_stride = t.shape[first] == 1 ? 0 : t.stride[first];
  o.row_stride = t.stride[first + 1];
  return o;
}

Scales scales(const Box& box) {
  if (!box.given()) return {};
  const Tensor& t = box.view();
  Scales s{.data = static_cast<const float*>(t.data)};
  if (t.rank == 2) {
    s.batch_stride = t.stride[0];
    s.head_stride = t.stride[1];
  }
  return s;
}

Lengths lengths_of(const Box& box) {
  if (!box.given()) return {};
  return {.data = box.view().data, .wide = box.dtype() == DType::i64, .stride = 1};
}

}  // namespace

std::int64_t Case::rows_q() const {
  return packed_q ? total(lengths_q, slack_q) : seqlen_q;
}
std::int64_t Case::rows_k() const {
  return packed_k ? total(lengths_k, slack_k) : seqlen_k;
}

std::string Case::describe() const {
  std::string text = fmt::format("seed {} {} b {} hq {} hkv {} d {}/{} sq {} sk {}", seed, name_of(dtype),
                                 batch, heads_q, heads_kv, head_dim_qk, head_dim_v, rows_q(), rows_k());
  if (dtype == DType::e4m3) text += fmt::format(" -> {} scales {}", name_of(out_dtype), scales);
  if (key_dtype) text += fmt::format(" on {} scales {}", name_of(*key_dtype), scales);
  if (packed_q) text += fmt::format(" lengths_q {} slack {}", lengths_q, slack_q);
  if (packed_k) text += fmt::format(" lengths_k {} slack {}", lengths_k, slack_k);
  if (v_in_k) text += " v in k";
  if (page_size > 0) text += fmt::format(" page_size {}", page_size);
  if (!leftpad.empty()) text += fmt::format(" leftpad {}", leftpad);
  if (!cache_index.empty()) text += fmt::format(" cache_index {} of {}", cache_index, cache_batch);
  if (f32_out) text += " -> f32";
  if (!causal_by_sequence.empty()) text += fmt::format(" causal_by_sequence {}", causal_by_sequence);
  if (topk > 0) {
    text += fmt::format(" topk {}{}{}", topk, topk_by_head ? " by head" : "", topk_lengths ? " lengths" : "");
  }
  if (!used_q.empty()) text += fmt::format(" used_q {}", used_q);
  if (!used_k.empty()) text += fmt::format(" used_k {}", used_k);
  if (options.scale) text += fmt::format(" scale {}", *options.scale);
  if (options.causal) text += " causal";
  if (options.window_left != -1 || options.window_right != -1) {
    text += fmt::format(" window {},{}", options.window_left, options.window_right);
  }
  if (options.softcap != 0.0F) text += fmt::format(" softcap {}", options.softcap);
  if (options.deterministic) text += " deterministic";
  if (options.split_size != 0) text += fmt::format(" split_size {}", options.split_size);
  if (!score_function.empty()) text += fmt::format(" score {}", score_function);
  if (!mask_function.empty()) text += fmt::format(" mask {}", mask_function);
  if (!differentiated.empty()) text += fmt::format(" differentiated {}", differentiated);
  if (options.dropout_p > 0.0F) {
    text += fmt::format(" dropout {} seed {} offset {}", options.dropout_p, options.dropout_seed,
                        options.dropout_offset);
    if (!dropout_places.empty()) text += fmt::format(" at {}", dropout_places);
  }
  if (sink) text += " sink";
  if (gate) text += " gate";
  if (dlse) text += " dlse";
  if (f32_gradients != 0) text += fmt::format(" gradients in f32 {} added {}", f32_gradients, added);
  if (unwanted != 0) text += fmt::format(" unwanted {}", unwanted);
  if (amplitude != 1.0) text += fmt::format(" amplitude {}", amplitude);
  text += fmt::format(" threads {}{}", threads, workspace ? " workspace" : "");
  return text;
}

Call::Call(const Case& c) : spec(c) {
  Random random(c.seed);
  const auto tensor = [&](bool packed, std::int64_t rows, std::int64_t heads, std::int64_t dim, DType dtype,
                          const Layout& layout, bool output) {
    return Box(dtype, shape_of(packed, c.batch, rows, heads, dim), layout, output);
  };
  const DType result = c.result_dtype();
  q = tensor(c.packed_q, c.rows_q(), c.heads_q, c.head_dim_qk, c.dtype, c.q, false);
  const bool pages = c.page_size > 0;
  const std::int64_t entries = pages                    ? c.batch * c.pages_per_sequence() + 2
                               : !c.cache_index.empty() ? c.cache_batch
                                                        : c.batch;
  const auto keys = [&](std::int64_t dim, const Layout& layout) {
    return Box(c.key_dtype.value_or(c.dtype),
               shape_of(c.packed_k, entries, pages ? c.page_size : c.rows_k(), c.heads_kv, dim), layout,
               false);
  };
  k = keys(c.head_dim_qk, c.k);
  v = c.v_in_k ? k.first_columns(c.head_dim_v) : keys(c.head_dim_v, c.v);
  out = tensor(c.packed_q, c.rows_q(), c.heads_q, c.head_dim_v, result, c.out, true);
  fill(q, random, c.amplitude);
  fill_keys(k, random, c.amplitude);
  if (!c.v_in_k) fill_keys(v, random, 1.0);
  if (c.lse) lse = Box(DType::f32, lse_shape(c), c.lse_layout, true);
  if (c.options.backward_precision != Precision::exact) ask_for_max_logits();
  if (c.sink) {
    sink = Box(DType::f32, {c.heads_q}, {}, false);
    fill(sink, random, 1.0);
    dsink = Box(DType::f32, {c.heads_q}, {}, true);
  }
  cu_seqlens_q = cumulative(c, c.packed_q, c.lengths_q);
  cu_seqlens_k = cumulative(c, c.packed_k, c.lengths_k);
  seqused_q = seqused(c, c.used_q);
  seqused_k = seqused(c, c.used_k);
  causal_by_sequence = seqused(c, c.causal_by_sequence);
  make_functions(random);

  const auto query_rows_of = [&](const RowVisitor& f) { for_each_query_row(c, f); };
  const auto key_rows_of = [&](const RowVisitor& f) { for_each_key_row(c, f); };
  poison_rows(q, c.q, c.packed_q, c.rows_q(), c.heads_q * c.head_dim_qk, query_rows_of);
  if (c.of_cache()) {
    make_cache(random);
  } else {
    poison_rows(k, c.k, c.packed_k, c.rows_k(), c.heads_kv * c.head_dim_qk, key_rows_of);
    poison_rows(v, c.v_in_k ? c.k : c.v, c.packed_k, c.rows_k(), c.heads_kv * c.head_dim_v, key_rows_of);
  }

  if (c.gate) {
    gate = tensor(c.packed_q, c.rows_q(), c.heads_q, c.head_dim_v, c.dtype, c.gate_layout, false);
    fill(gate, random, 2.0);
    poison_rows(gate, c.gate_layout, c.packed_q, c.rows_q(), c.heads_q * c.head_dim_v, query_rows_of);
  }
  if (c.topk > 0) make_indices(random);
  if (c.dtype == DType::e4m3) q_scale = scale_box(c, random);
  if (c.dtype == DType::e4m3 || c.key_dtype) {
    k_scale = c.scales == 3 ? row_scales(k, random) : scale_box(c, random);
    v_scale = c.scales == 3 ? row_scales(v, random) : scale_box(c, random);
  }
  if (!c.has_gradients()) return;
  dout = tensor(c.packed_q, c.rows_q(), c.heads_q, c.head_dim_v, result, c.dout, false);
  // dP and delta are sums of head_dim_v terms, and dS is what is left of their difference: with dP in the
  // tens, fp32 would owe more than 1e-5 to their rounding alone, whatever the algorithm.
  fill(dout, random, std::min(1.0, 4.0 / std::sqrt(static_cast<double>(c.head_dim_v))));
  poison_rows(dout, c.dout, c.packed_q, c.rows_q(), c.heads_q * c.head_dim_v, query_rows_of);
  if (c.dlse) {
    dlse = Box(DType::f32, lse_shape(c), {}, false);
    fill(dlse, random, 1.0);
  }
  if ((c.unwanted & 1U) == 0)
    dq = tensor(c.packed_q, c.rows_q(), c.heads_q, c.head_dim_qk, c.gradient_dtype(1), c.dq, true);
  if ((c.unwanted & 2U) == 0)
    dk = tensor(c.packed_k, c.rows_k(), c.heads_kv, c.head_dim_qk, c.gradient_dtype(2), c.dk, true);
  if ((c.unwanted & 4U) == 0)
    dv = tensor(c.packed_k, c.rows_k(), c.heads_kv, c.head_dim_v, c.gradient_dtype(2), c.dv, true);
  if (c.gate && (c.unwanted & 8U) == 0)
    dgate = tensor(c.packed_q, c.rows_q(), c.heads_q, c.head_dim_v, c.dtype, c.gate_layout, true);
}

Problem Call::problem() const {
  const Case& c = spec;
  Problem p;
  p.batch = c.batch;
  p.heads_q = c.heads_q;
  p.heads_kv = c.heads_kv;
  p.head_dim_qk = c.head_dim_qk;
  p.head_dim_v = c.head_dim_v;
  p.rows_q = c.rows_q();
  p.rows_k = c.rows_k();
  p.packed_q = c.packed_q;
  p.packed_k = c.packed_k;
  p.scale = c.options.scale.value_or(1.0F / std::sqrt(static_cast<float>(c.head_dim_qk)));
  p.softcap = c.options.softcap;
  p.window_left = c.options.window_left;
  p.window_right = c.options.causal ? 0 : c.options.window_right;
  p.q = operand(q, c.packed_q);
  p.k = operand(k, c.packed_k);
  p.v = operand(v, c.packed_k);
  p.dout = operand(dout, c.packed_q);
  p.dlse = lse_operand(dlse, c.packed_q);
  p.gate = operand(gate, c.packed_q);
  if (sink.given()) p.sink = static_cast<const float*>(sink.view().data);
  p.q_scale = scales(q_scale);
  if (c.scales == 3) {
    dense_k_ = scaled_keys(k, k_scale);
    dense_v_ = scaled_keys(v, v_scale);
    p.k = operand(dense_k_, c.packed_k);
    p.v = operand(dense_v_, c.packed_k);
  } else {
    p.k_scale = scales(k_scale);
    p.v_scale = scales(v_scale);
  }
  p.cu_seqlens_q = lengths_of(cu_seqlens_q);
  p.cu_seqlens_k = lengths_of(cu_seqlens_k);
  p.seqused_q = lengths_of(seqused_q);
  p.seqused_k = lengths_of(seqused_k);
  p.causal_by_sequence = lengths_of(causal_by_sequence);
  p.score_function = score_of();
  p.mask_function = mask_of();
  p.captured_gradients = captured_gradient_views;
  p.dropout = dropout();
  if (c.topk > 0) p.indices = indices_of_problem();
  if (!c.of_cache()) return p;
  dense_k_ = dense_keys(k, k_scale);
  dense_v_ = dense_keys(v, v_scale);
  std::vector<double> used;
  for (std::int64_t b = 0; b < c.batch; ++b) {
    used.push_back(static_cast<double>(c.cache_rows(b) - c.cache_padding(b)));
  }
  dense_used_ = vector_box(DType::i64, used);
  p.k = operand(dense_k_, false);
  p.v = operand(dense_v_, false);
  p.seqused_k = lengths_of(dense_used_);
  return p;
}

void Call::ask_for_max_logits() {
  max_logits = Box(DType::f32, lse_shape(spec), spec.lse_layout, true);
}

void Call::prepare(Pass pass) {
  for (Box* box : outputs(pass)) {
    if (box->given()) box->poison();
    for (std::int64_t n = 0; adds_to(*box) && n < box->numel(); ++n) box->set(n, before(n));
  }
  for (Box* box : inputs()) {
    if (box->given()) box->snapshot();
  }
  for (const Pass any : {Pass::forward, Pass::backward}) {
    for (Box* box : outputs(any)) {
      if (box->given()) box->snapshot();
    }
  }
}

void for_each_query_row(const Case& c, const RowVisitor& f) {
  visit_rows(c.packed_q, c.batch, c.seqlen_q, c.lengths_q, c.slack_q, c.used_q, f);
}

void for_each_key_row(const Case& c, const RowVisitor& f) {
  visit_rows(c.packed_k, c.batch, c.seqlen_k, c.lengths_k, c.slack_k, c.used_k, f);
}

}  // namespace tandem::harness
