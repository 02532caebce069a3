#include "contract/faulty_oracle.hpp"

#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>

namespace tandem::harness {
namespace {

void write(Box& box, const std::vector<double>& values) {
  for (std::int64_t n = 0; box.given() && n < box.numel(); ++n) {
    box.set(n, values.empty() ? 0.0 : values[static_cast<std::size_t>(n)]);
  }
}

void multiply(std::vector<double>& values, double factor) {
  for (double& value : values) value *= factor;
}

/// Whether errors of 2 % hide below the bound of single elements: bf16, and rows that are means of many keys.
bool hides_two_percent(const Call& call) {
  return call.spec.dtype == DType::bf16 && !call.spec.options.causal;
}

constexpr double unwritten = std::numeric_limits<double>::quiet_NaN();

// The problem that is solved instead.

void diagonal_one_late(Problem& p) {
  if (p.window_right >= 0) ++p.window_right;
}

void diagonal_from_the_top_left(Problem& p) {
  const std::int64_t shift = p.rows_k - p.rows_q;
  if (p.window_right >= shift) p.window_right -= shift;
  if (p.window_left >= 0) p.window_left += shift;
}

void left_edge_exclusive(Problem& p) {
  if (p.window_left > 0) --p.window_left;
}

void last_keys_dropped(Problem& p) {
  constexpr std::int64_t block = 64;
  if (!p.packed_k) p.rows_k = p.rows_k / block * block;
}

/// Key heads in the other order: query heads read the wrong ones.
void wrong_key_head(Problem& p) {
  for (Operand* x : {&p.k, &p.v}) {
    x->data = static_cast<std::byte*>(x->data) +
              (p.heads_kv - 1) * x->head_stride * static_cast<std::int64_t>(size_of(x->dtype));
    x->head_stride = -x->head_stride;
  }
}

void wide_lengths_cut_off(Problem& p) {
  for (Lengths* lengths : {&p.cu_seqlens_q, &p.cu_seqlens_k}) {
    if (lengths->wide) lengths->stride *= 2;
    lengths->wide = false;
  }
}

/// As if scales were of the first sequence, or the first head, for want of a stride.
void scales_of_the_first_sequence(Problem& p) {
  for (Scales* s : {&p.q_scale, &p.k_scale, &p.v_scale}) s->batch_stride = 0;
}
void scales_of_the_first_head(Problem& p) {
  for (Scales* s : {&p.q_scale, &p.k_scale, &p.v_scale}) s->head_stride = 0;
}

// The oracle's results, changed.
void nan_dropped(const Call&, reference::Forward& f) {
  make_zero_if_nan(f.out);
  make_zero_if_nan(f.lse);
}

void max_logits_with_the_sink(const Call& call, reference::Forward& f) {
  for (double& x : f.max_logits) x = call.sink.given() ? std::max(x, call.sink.get(0)) : x;
}

void nothing_is_minus_infinity(const Call&, reference::Forward& f) {
  for (double& lse : f.lse) lse = std::max(lse, -3e38);
}

void finite_sentinel(const Call&, reference::Forward& f) {
  for (double& lse : f.lse) lse = std::isinf(lse) ? lse : std::max(lse, -1e5);
}

void wide_heads_cut_off(const Call& call, reference::Forward& f) {
  Problem p = call.problem();
  p.head_dim_qk = std::min<std::int64_t>(p.head_dim_qk, 256);
  f = reference::forward(p);
}

/// By 1/32, which 16 bits do not need and P in 8 bits would cost.
void fewer_bits(const Call& call, reference::Forward& f) {
  if (call.spec.result_dtype() == DType::f32) return;
  for (std::size_t n = 0; n < f.out.size(); ++n) f.out[n] *= n % 2 == 0 ? 1.0 + 0x1p-5 : 1.0 - 0x1p-5;
}

/// As if a kernel rounded to the inputs' dtype before it converts.
void sixteen_bits_in_f32(const Call& call, reference::Forward& f) {
  if (!call.spec.f32_out) return;
  Box rounded(call.spec.dtype, {static_cast<std::int64_t>(f.out.size())}, {}, false);
  for (std::size_t n = 0; n < f.out.size(); ++n) {
    rounded.set(static_cast<std::int64_t>(n), f.out[n]);
    f.out[n] = rounded.get(static_cast<std::int64_t>(n));
  }
}

void column_without_nan(const Call& call, reference::Forward& f) {
  const auto width = static_cast<std::size_t>(call.spec.head_dim_v);
  for (std::size_t n = 7; n < f.out.size(); n += width) f.out[n] = std::isnan(f.out[n]) ? 0.0 : f.out[n];
}

/// 0 times what lies in the last row of K, which takes no part where the test has rows past the end.
void reads_past_the_end(const Call& call, reference::Forward& f) {
  if (!f.out.empty()) f.out[0] += 0.0 * call.k.get(call.k.numel() - 1);
}

/// The result with other scales by row, each of place(number of the scale); what no row has stays as it is.
template <typename Place>
void rescaled(const Call& call, reference::Forward& f, const Place& place) {
  if (call.spec.scales != 3) return;
  Call other = call;
  for (const auto& [from, to] : {std::pair{&call.k_scale, &other.k_scale}, {&call.v_scale, &other.v_scale}}) {
    const Tensor& t = from->view();
    *to = Box(DType::f32, {t.shape.begin(), t.shape.begin() + t.rank}, {}, false);
    for (std::int64_t n = 0; n < from->numel(); ++n) {
      const double scale = from->get(std::min(place(n), from->numel() - 1));
      to->set(n, std::isnan(scale) ? from->get(n) : scale);
    }
  }
  f = reference::forward(other.problem());
}

/// Rows have the scales of those beside them, and heads those of the first.
void scales_of_the_row_beside(const Call& call, reference::Forward& f) {
  rescaled(call, f, [](std::int64_t n) { return n ^ 1; });
}
void row_scales_of_the_first_head(const Call& call, reference::Forward& f) {
  if (call.spec.scales != 3) return;
  const Tensor& t = call.k_scale.view();
  const std::int64_t rows = t.shape[static_cast<std::size_t>(t.rank - 1)];
  const std::int64_t heads = call.spec.heads_kv;
  rescaled(call, f, [=](std::int64_t n) { return n / rows / heads * heads * rows + n % rows; });
}

/// As sums in the order that threads come in would.
void depends_on_the_call(const Call&, reference::Forward& f) {
  static int calls = 0;
  if (!f.out.empty()) f.out[0] *= 1.0 + 0.01 * (++calls % 2);
}

/// As where splits end depends on all lengths of the batch, or kernels on the number of queries.
void depends_on_the_batch(const Call& call, reference::Forward& f) {
  for (double& x : f.out) x *= 1.0 + 0.01 * static_cast<double>(call.spec.batch);
}
void depends_on_the_queries(const Call& call, reference::Forward& f) {
  for (double& x : f.out) x *= call.spec.rows_q() == 1 ? 1.01 : 1.0;
}

/// As if the first entry's results were the second's for want of a stride.
void depends_on_the_layout(const Call& call, reference::Forward& f) {
  if (!call.spec.q.order.empty() && !f.out.empty()) std::swap(f.out.front(), f.out.back());
}

// Memory, when results have been written.

void row_unwritten(Call& call) {
  const std::int64_t width = std::min(call.spec.head_dim_v, call.out.numel());
  for (std::int64_t n = 0; n < width; ++n) call.out.set(call.out.numel() - 1 - n, unwritten);
}

void lse_unwritten(Call& call) {
  if (call.lse.given() && call.lse.numel() > 0) call.lse.set(call.lse.numel() / 2, unwritten);
}

void max_logits_unwritten(Call& call) {
  if (call.max_logits.given()) call.max_logits.set(call.max_logits.numel() / 2, unwritten);
}

void unused_rows_unwritten(Call& call) {
  const Case& c = call.spec;
  const std::int64_t width = c.heads_q * c.head_dim_v;
  for_each_query_row(c, [&](std::int64_t b, std::int64_t row, bool used) {
    const std::int64_t first = ((c.packed_q ? 0 : b) * c.rows_q() + row) * width;
    for (std::int64_t n = 0; !used && n < width; ++n) call.out.set(first + n, unwritten);
  });
}

void empty_rows_are_a_mean(Call& call) {
  if (call.spec.seqlen_q <= call.spec.seqlen_k || !call.spec.options.causal) return;
  for (std::int64_t n = 0; n < call.spec.head_dim_v; ++n) call.out.set(n, 0.125);
}

void input_overwritten(Call& call) {
  if (call.k.given() && call.k.numel() > 0) call.k.set(0, 1.0 + call.k.get(0));
}

/// Where elements have padding between them.
void stray_store(Call& call) {
  if (call.spec.out.pad == 0 || call.spec.out.ends_at_guard || call.out.numel() == 0) return;
  auto* const data = static_cast<std::byte*>(call.out.view().data);
  data[call.spec.head_dim_v * static_cast<std::int64_t>(size_of(call.out.dtype()))] ^= std::byte{1};
}

constexpr const char* every_feature = "Contract01_EveryElementWritten.DenseWithEveryFeature";
constexpr const char* accuracy = "ContractAccuracy.ForwardAndBackwardWithinTheRule";
constexpr const char* through_lse = "ContractAccuracy.GradientThroughTheLse";
constexpr const char* empty_rows = "Contract02_QueryThatSeesNoKey.CausalWithMoreQueriesThanKeys";
constexpr const char* windows = "Contract04_Masks.EveryWindowOnSmallShapes";
constexpr const char* seqused = "Contract05_RowsPastTheEnd.PastSequsedDense";
constexpr const char* scales = "Contract08_NoSentinel.ScaleZeroNegativeAndOne";
constexpr const char* eight_bits = "Contract17_Caches.EightBitQueriesInEntriesChosenByIndex";
constexpr const char* by_row = "Contract17_RowScales.PagesOfAnySize";

const Fault all_faults[] = {
    {.name = "diagonal_one_late", .caught_by = windows, .problem = diagonal_one_late},
    {.name = "diagonal_from_the_top_left", .caught_by = empty_rows, .problem = diagonal_from_the_top_left},
    {.name = "left_edge_exclusive", .caught_by = windows, .problem = left_edge_exclusive},
    {.name = "scale_one_percent_off",
     .caught_by = every_feature,
     .problem = [](Problem& p) { p.scale *= 1.01F; }},
    {.name = "scale_without_its_sign",
     .caught_by = scales,
     .problem = [](Problem& p) { p.scale = std::abs(p.scale); }},
    {.name = "scale_0_is_the_default",
     .caught_by = scales,
     .problem =
         [](Problem& p) {
           if (p.scale == 0.0F) p.scale = 1.0F / std::sqrt(static_cast<float>(p.head_dim_qk));
         }},
    {.name = "last_keys_dropped", .caught_by = every_feature, .problem = last_keys_dropped},
    {.name = "sink_left_out", .caught_by = through_lse, .problem = [](Problem& p) { p.sink = nullptr; }},
    {.name = "softcap_left_out", .caught_by = every_feature, .problem = [](Problem& p) { p.softcap = 0.0F; }},
    {.name = "dlse_left_out", .caught_by = through_lse, .problem = [](Problem& p) { p.dlse = {}; }},
    {.name = "wrong_key_head", .caught_by = every_feature, .problem = wrong_key_head},
    {.name = "one_batch_entry_for_all",
     .caught_by = every_feature,
     .problem = [](Problem& p) { p.k.batch_stride = 0; }},
    {.name = "seqused_k_ignored", .caught_by = seqused, .problem = [](Problem& p) { p.seqused_k = {}; }},
    {.name = "mask_of_the_first_sequence_for_all",
     .caught_by = "Contract04_BySequence.CausalAndNotInOneCall",
     .problem = [](Problem& p) { p.causal_by_sequence.stride = 0; }},
    {.name = "topk_length_ignored",
     .caught_by = "Contract22_Indices.WhereverKeysLie",
     .problem = [](Problem& p) { p.indices.lengths = {}; }},
    {.name = "sixteen_bits_in_f32",
     .caught_by = "Contract20_OutInF32.HasMoreDigitsThanTheInputs",
     .forward = sixteen_bits_in_f32},
    {.name = "scale_of_queries_left_out",
     .caught_by = eight_bits,
     .problem = [](Problem& p) { p.q_scale = {}; }},
    {.name = "scale_of_queries_twice",
     .caught_by = eight_bits,
     .problem = [](Problem& p) { p.k_scale = p.q_scale; }},
    {.name = "scales_of_keys_and_values_exchanged",
     .caught_by = eight_bits,
     .problem = [](Problem& p) { std::swap(p.k_scale, p.v_scale); }},
    {.name = "scales_of_the_first_sequence",
     .caught_by = eight_bits,
     .problem = scales_of_the_first_sequence},
    {.name = "scales_of_the_first_head", .caught_by = eight_bits, .problem = scales_of_the_first_head},
    {.name = "scales_of_the_row_beside", .caught_by = by_row, .forward = scales_of_the_row_beside},
    {.name = "row_scales_of_the_first_head", .caught_by = by_row, .forward = row_scales_of_the_first_head},
    {.name = "lengths_of_queries_for_keys",
     .caught_by = "Contract03_NothingToDo.OneSideOfASequenceEmpty",
     .problem = [](Problem& p) { p.cu_seqlens_k = p.cu_seqlens_q; }},
    {.name = "wide_lengths_cut_off",
     .caught_by = "Contract12_Metadata.WideOffsetsAreNotTruncated",
     .problem = wide_lengths_cut_off},
    {.name = "wide_heads_cut_off",
     .caught_by = "Contract11_WideHeads.UpTo1024AndOthersPadded",
     .forward = wide_heads_cut_off},
    {.name = "lse_in_base_2",
     .caught_by = every_feature,
     .forward = [](const Call&, reference::Forward& f) { multiply(f.lse, std::numbers::log2e); }},
    {.name = "out_two_percent_off",
     .caught_by = "ContractAccuracy.OutliersAmongTheInputs",
     .forward = [](const Call&, reference::Forward& f) { multiply(f.out, 1.02); }},
    {.name = "gain_two_percent_off",
     .caught_by = accuracy,
     .forward =
         [](const Call& call, reference::Forward& f) {
           if (hides_two_percent(call)) multiply(f.out, 1.02);
         }},
    {.name = "gain_of_gradients_one_percent_off",
     .caught_by = accuracy,
     .backward =
         [](const Call& call, reference::Backward& b) {
           for (auto* gradient : {&b.dq, &b.dk, &b.dv}) {
             if (hides_two_percent(call)) multiply(*gradient, 1.01);
           }
         }},
    {.name = "fewer_bits", .caught_by = "ContractAccuracy.OutliersAmongTheInputs", .forward = fewer_bits},
    {.name = "nan_dropped",
     .caught_by = "Contract07_NaN.VisibleKeyMakesExactlyItsRowsNaN",
     .forward = nan_dropped},
    {.name = "column_without_nan",
     .caught_by = "Contract07_NaN.VisibleValueReachesItsColumn",
     .forward = column_without_nan},
    {.name = "nothing_is_minus_infinity", .caught_by = empty_rows, .forward = nothing_is_minus_infinity},
    {.name = "finite_sentinel",
     .caught_by = "Contract08_NoSentinel.LogitsFarFromZero",
     .forward = finite_sentinel},
    {.name = "reads_past_the_end",
     .caught_by = "Contract06_PastTheEnd.WhateverLiesThereTheResultIsTheSame",
     .forward = reads_past_the_end},
    {.name = "depends_on_the_call",
     .caught_by = "Contract15_Reproducible.ShortQueriesOverLongKeys",
     .forward = depends_on_the_call},
    {.name = "depends_on_the_batch",
     .caught_by = "Contract16_BatchInvariance.NothingDependsOnTheRestOfTheBatch",
     .forward = depends_on_the_batch},
    {.name = "depends_on_the_queries",
     .caught_by = "Contract16_BatchInvariance.PrefillChunksAndStepsGiveTheSameBits",
     .forward = depends_on_the_queries},
    {.name = "depends_on_the_layout",
     .caught_by = "Contract10_Strides.InputsInAnyLayoutGiveTheSameBits",
     .forward = depends_on_the_layout},
    {.name = "dq_without_scale",
     .caught_by = every_feature,
     .backward =
         [](const Call& call, reference::Backward& b) {
           multiply(b.dq, std::sqrt(static_cast<double>(call.spec.head_dim_qk)));
         }},
    {.name = "dk_one_percent_off",
     .caught_by = every_feature,
     .backward = [](const Call&, reference::Backward& b) { multiply(b.dk, 1.01); }},
    {.name = "dv_of_one_head_of_the_group",
     .caught_by = every_feature,
     .backward =
         [](const Call& call, reference::Backward& b) {
           multiply(b.dv, static_cast<double>(call.spec.heads_kv) / static_cast<double>(call.spec.heads_q));
         }},
    {.name = "dsink_without_its_sign",
     .caught_by = through_lse,
     .backward = [](const Call&, reference::Backward& b) { multiply(b.dsink, -1.0); }},
    {.name = "row_unwritten", .caught_by = every_feature, .after = row_unwritten},
    {.name = "lse_unwritten", .caught_by = every_feature, .after = lse_unwritten},
    {.name = "max_logits_unwritten",
     .caught_by = "Contract21_MaxLogits.InAnyLayoutAndWithoutLse",
     .after = max_logits_unwritten},
    {.name = "max_logits_lag",
     .caught_by = "Contract21_MaxLogits.OfLogitsThatGrowSlowly",
     .forward =
         [](const Call&, reference::Forward& f) {
           for (double& x : f.max_logits) x -= 0.5;
         }},
    {.name = "max_logits_with_the_sink",
     .caught_by = "Contract21_MaxLogits.LeavesTheSinkOut",
     .forward = max_logits_with_the_sink},
    {.name = "nan_dropped_from_max_logits",
     .caught_by = "Contract21_MaxLogits.IsNaNWhereTheLseIs",
     .forward = [](const Call&, reference::Forward& f) { make_zero_if_nan(f.max_logits); }},
    {.name = "unused_rows_unwritten", .caught_by = seqused, .after = unused_rows_unwritten},
    {.name = "empty_rows_are_a_mean", .caught_by = empty_rows, .after = empty_rows_are_a_mean},
    {.name = "input_overwritten", .caught_by = every_feature, .after = input_overwritten},
    {.name = "stray_store",
     .caught_by = "Contract10_Strides.OutputsInAnyLayoutGiveTheSameBits",
     .after = stray_store},
};

}  // namespace

void make_zero_if_nan(std::vector<double>& values) {
  for (double& value : values) value = std::isnan(value) ? 0.0 : value;
}

std::span<const Fault> faults() {
  return all_faults;
}

void FaultyOracle::forward(Call& call) {
  Problem problem = call.problem();
  if (fault_.problem != nullptr) fault_.problem(problem);
  reference::Forward result = reference::forward(problem);
  if (fault_.forward != nullptr) fault_.forward(call, result);
  write(call.out, result.out);
  write(call.lse, result.lse);
  write(call.max_logits, result.max_logits);
  if (fault_.after != nullptr) fault_.after(call);
}

void FaultyOracle::backward(Call& call) {
  Problem problem = call.problem();
  if (fault_.problem != nullptr) fault_.problem(problem);
  reference::Backward result = expected_backward(call, problem);
  if (fault_.backward != nullptr) fault_.backward(call, result);
  write(call.dq, result.dq);
  write(call.dk, result.dk);
  write(call.dv, result.dv);
  write(call.dsink, result.dsink);
  write(call.dgate, result.dgate);
}

}  // namespace tandem::harness
