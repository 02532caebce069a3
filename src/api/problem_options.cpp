// Scale, softcap, windows and precision.
#include "api/problem_builder.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace tandem {

using check::invalid;

namespace {

/// Gradients in 8 bits are those of a forward pass in int8.
void validate_backward_precision(const AttentionOptions& options, const AttentionInputs& in) {
  const Precision asked = options.backward_precision;
  if (asked == Precision::exact) return;
  if (asked == Precision::fp8) invalid("backward_precision is fp8 (1); it must be exact (0) or int8 (2)");
  if (asked != Precision::int8) {
    invalid("backward_precision is {}; it must be exact (0) or int8 (2)", static_cast<int>(asked));
  }
  if (options.precision != Precision::int8) {
    invalid(
        "backward_precision int8 takes the values and the LSE of a forward pass in int8, but precision is "
        "{}; "
        "pass precision int8, or leave backward_precision out",
        name_of(options.precision));
  }
  if (is_eight_bit(in.q.dtype)) {
    invalid("backward_precision int8 is given with q in {}, which has no gradients; leave it out",
            name_of(in.q.dtype));
  }
  if (options.softcap != 0.0F || in.sink.given() || in.gate.given()) {
    fail(Status::unsupported,
         "{} is given with backward_precision int8, whose gradients have none; leave one of both out",
         options.softcap != 0.0F ? "softcap"
         : in.sink.given()       ? "sink"
                                 : "gate");
  }
}

}  // namespace

void ProblemBuilder::options() {
  if (options_.scale && !std::isfinite(*options_.scale))
    invalid("scale is {}; it must be finite", *options_.scale);
  p_.scale = options_.scale.value_or(1.0F / std::sqrt(static_cast<float>(p_.head_dim_qk)));
  if (!(options_.softcap >= 0.0F) || !std::isfinite(options_.softcap)) {
    invalid("softcap is {}; it must be finite and at least 0 (0: off)", options_.softcap);
  }
  // 32-bit products of a larger one with log2(e), and quotients by it, leave the range of f32.
  constexpr float max_softcap = 1e30F;
  if (options_.softcap > max_softcap) {
    invalid("softcap is {}; it must be at most 1e30, beyond any logit: leave it out (0: off)",
            options_.softcap);
  }
  p_.softcap = options_.softcap;
  check::window_bound("window_left", options_.window_left);
  check::window_bound("window_right", options_.window_right);
  // Query i's diagonal lies from i - seqlen_q + 1 below the last key to the last key itself, so a window
  // this wide hides nothing. Folding it to "unbounded" spares the backends the masking and the overflow of
  // diagonal + window.
  p_.window_left = options_.window_left >= p_.rows_k - 1 ? -1 : options_.window_left;
  const std::int64_t right = options_.causal ? 0 : options_.window_right;
  p_.window_right = right >= p_.rows_q - 1 ? -1 : right;
  causal_by_sequence();
  p_.deterministic = options_.deterministic;
  precision();
  split_size();
  dropout();
}

void ProblemBuilder::dropout() {
  if (!(options_.dropout_p >= 0.0F && options_.dropout_p < 1.0F)) {
    invalid("dropout_p is {}; it must be at least 0 (off) and below 1", options_.dropout_p);
  }
  if (options_.dropout_p > 0.0F && p_.precision != Precision::exact) {
    fail(Status::unsupported,
         "dropout_p is {} with precision {}, which has no dropout; leave the precision exact",
         options_.dropout_p, name_of(p_.precision));
  }
  p_.dropout = make_dropout(options_.dropout_p, options_.dropout_seed, options_.dropout_offset, p_.heads_q);
  dropout_places();
}

void ProblemBuilder::dropout_places() {
  const Argument& places = inputs_[15];
  check::consistent(places);
  if (!places.given()) return;
  if (!p_.dropout.on) invalid("dropout_places is given without dropout_p; pass both, or neither");
  check::shape(places, {p_.batch, 4}, "(batch, 4)");
  check::dtype(places, {DType::i32});
  common(places);
  check::last_dimension_contiguous(places);
  p_.dropout.places = static_cast<const std::int32_t*>(address_of(places.tensor));
  p_.dropout.place_stride = stride_of(places.tensor, 0);
}

void ProblemBuilder::causal_by_sequence() {
  if (!causal_by_sequence_.given()) return;
  if (p_.pass == Pass::backward) {
    invalid(
        "causal_by_sequence is given to backward, which has one mask for all sequences; pass the causal ones "
        "and the others in calls of their own");
  }
  if (options_.causal) {
    invalid(
        "causal and causal_by_sequence are both given; leave causal out, and set causal_by_sequence to 1 "
        "where a sequence is causal");
  }
  // The only query of a sequence sees no key past its own whatever the bound.
  if (p_.rows_q <= 1) p_.causal_by_sequence = {};
}

void ProblemBuilder::split_size() {
  constexpr std::int64_t unit = 128;  // every kernel's blocks of keys divide it
  const std::int64_t size = options_.split_size;
  if (size < 0 || size % unit != 0) {
    const std::int64_t least = std::max<std::int64_t>(size / unit, 0) + 1;
    invalid("split_size is {}; it must be a multiple of {}, such as {}, or 0 (off)", size, unit,
            std::min<std::int64_t>(least, std::int64_t{1} << 40) * unit);
  }
  if (size > 0 && p_.pass == Pass::forward && p_.precision != Precision::exact) {
    invalid(
        "split_size is {} with precision {}, whose scales depend on a sequence's other rows; leave the "
        "precision exact, or split_size out",
        size, name_of(p_.precision));
  }
  p_.split_size = size;
}

void ProblemBuilder::precision() {
  const Precision precision = options_.precision;
  if (precision < Precision::exact || precision > Precision::int8) {
    invalid("precision is {}; it must be exact (0), fp8 (1) or int8 (2)", static_cast<int>(precision));
  }
  p_.precision = precision;
  p_.strict = options_.strict;
  validate_backward_precision(options_, in_);
  p_.backward_precision = options_.backward_precision;
  const DType dtype = q_.tensor.dtype;
  eight_bit_head_dims();
  if (quantized_inputs()) return precision_of_quantized(precision, dtype);
  if (p_.pass == Pass::forward && mixed() && precision != Precision::exact) {
    invalid(
        "precision {} rounds q, k and v to 8 bits, but k is {} already; leave the precision exact, whose "
        "products are then in q's dtype, or pass q in {} too",
        name_of(precision), name_of(k_.tensor.dtype), name_of(k_.tensor.dtype));
  }
  if (precision == Precision::exact || dtype == DType::f16 || dtype == DType::bf16) return;
  invalid(
      "precision {} rounds f16 or bf16 inputs to 8 bits, but q is {}; convert q, k and v first, or leave "
      "the precision exact",
      name_of(precision), name_of(dtype));
}

void ProblemBuilder::eight_bit_head_dims() const {
  if (p_.precision == Precision::exact) return;
  for (const auto& [name, head_dim] :
       {std::pair{"head_dim", p_.head_dim_qk}, {"head_dim_v", p_.head_dim_v}}) {
    if (head_dim <= max_eight_bit_head_dim) continue;
    invalid("{} {} is above {}, the most with precision {}; {}", name, head_dim, max_eight_bit_head_dim,
            name_of(p_.precision),
            q_.tensor.dtype == DType::s8 ? "pass q in f16, bf16 or f32 and leave the precision exact"
                                         : "leave the precision exact");
  }
}

void ProblemBuilder::precision_of_quantized(Precision precision, DType dtype) const {
  const Precision own = dtype == DType::s8 ? Precision::int8 : Precision::fp8;
  if (precision == Precision::exact && dtype == DType::s8) {
    invalid("q is s8, which has no exact products; pass precision int8");
  }
  if (precision != Precision::exact && precision != own) {
    invalid("precision {} does not take q in {}; pass precision {}, or 16-bit tensors", name_of(precision),
            name_of(dtype), name_of(own));
  }
  if (options_.strict) {
    invalid("strict says how q, k and v are rounded, but they are {} already; leave it out", name_of(dtype));
  }
}

}  // namespace tandem
