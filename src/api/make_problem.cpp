#include "api/make_problem.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <string>
#include <string_view>

#include "api/check.hpp"
#include "api/lengths.hpp"

namespace tandem {
namespace {

using check::Argument;
using check::invalid;

constexpr std::int64_t max_head_dim = 256;
constexpr std::int64_t head_dim_multiple = 8;

/// The address of tensors that were given without one: empty tensors, and tensors that are only described.
/// Never read.
alignas(256) constexpr std::byte nowhere{};

/// Given operands have an address, empty ones too.
void* address_of(const ConstTensor& t) {
  if (!t.given()) return nullptr;
  return const_cast<void*>(t.data != nullptr ? t.data : &nowhere);
}

/// The stride of a dimension; 0 where its size leaves one index, whatever the user's odd stride says.
std::int64_t stride_of(const ConstTensor& t, std::size_t dim) {
  return t.shape[dim] > 1 ? t.stride[dim] : 0;
}

/// "(batch, seqlen_q, heads_q, head_dim)": a shape as the documentation calls it. The text lives inside the
/// object, since a call with a workspace does not allocate.
class Symbols {
 public:
  Symbols(std::string_view rows, std::string_view heads, std::string_view dim) {
    fmt::format_to(std::back_inserter(text_), "({}, {}, {})", rows, heads, dim);
  }
  [[nodiscard]] std::string_view view() const { return {text_.data(), text_.size()}; }

 private:
  fmt::memory_buffer text_;
};

/// Turns arguments into a Problem: first the sizes, from q, k, v and cu_seqlens, then everything else against
/// them.
class Builder {
 public:
  Builder(const AttentionInputs& in, const AttentionOptions& options, Pass pass, Memory memory)
      : in_(in), options_(options), memory_(memory) {
    p_.pass = pass;
  }

  void sizes() {
    check::given(q_, "(batch, seqlen_q, heads_q, head_dim)");
    check::given(k_, "(batch, seqlen_k, heads_kv, head_dim)");
    check::given(v_, "(batch, seqlen_k, heads_kv, head_dim_v)");
    for (const Argument& a : {cu_seqlens_q_, cu_seqlens_k_}) check::consistent(a);
    p_.packed_q = cu_seqlens_q_.given();
    p_.packed_k = cu_seqlens_k_.given();
    if (p_.packed_q) {
      check::rank(q_, 3, "(total_q, heads_q, head_dim), since cu_seqlens_q is given");
    } else {
      check::rank(q_, 4,
                  "(batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with cu_seqlens_q");
    }
    if (p_.packed_k) {
      check::rank(k_, 3, "(total_k, heads_kv, head_dim), since cu_seqlens_k is given");
    } else {
      check::rank(
          k_, 4, "(batch, seqlen_k, heads_kv, head_dim), or (total_k, heads_kv, head_dim) with cu_seqlens_k");
    }
    check::rank(v_, k_.tensor.rank,
                p_.packed_k ? "(total_k, heads_kv, head_dim_v)" : "(batch, seqlen_k, heads_kv, head_dim_v)");
    for (const Argument& a : {q_, k_, v_}) check::extent(a);

    const int dim_q = p_.packed_q ? 0 : 1;  // where the rows are
    const int dim_k = p_.packed_k ? 0 : 1;
    p_.batch = p_.packed_q ? sequences(cu_seqlens_q_) : q_.size(0);
    p_.rows_q = q_.size(dim_q);
    p_.heads_q = q_.size(dim_q + 1);
    p_.head_dim_qk = q_.size(dim_q + 2);
    p_.rows_k = k_.size(dim_k);
    p_.heads_kv = k_.size(dim_k + 1);
    p_.head_dim_v = v_.last_size();
    if (p_.packed_k) {
      check::shape(k_, {p_.rows_k, p_.heads_kv, p_.head_dim_qk}, "(total_k, heads_kv, head_dim of q)");
      check::shape(v_, {p_.rows_k, p_.heads_kv, p_.head_dim_v}, "(total_k of k, heads_kv of k, head_dim_v)");
    } else {
      check::shape(k_, {p_.batch, p_.rows_k, p_.heads_kv, p_.head_dim_qk},
                   "(batch of q, seqlen_k, heads_kv, head_dim of q)");
      check::shape(v_, {p_.batch, p_.rows_k, p_.heads_kv, p_.head_dim_v},
                   "(batch of q, seqlen_k of k, heads_kv of k, head_dim_v)");
    }
    heads();
    head_dim("head_dim", p_.head_dim_qk, "q and k");
    head_dim("head_dim_v", p_.head_dim_v, "v");
  }

  void inputs() {
    if (p_.pass == Pass::backward) {
      if (of_codes()) {
        invalid("q is {}; the backward of an 8-bit forward is 16-bit: pass q, k and v in f16, bf16 or f32",
                name_of(q_.tensor.dtype));
      }
      check::dtype(q_, {DType::f32, DType::f16, DType::bf16});
      for (const Argument* a : {&k_, &v_}) no_codes(*a);
    } else {
      check::dtype(q_, {DType::f32, DType::f16, DType::bf16, DType::e4m3, DType::s8});
    }
    if (p_.pass == Pass::forward && mixed()) {
      check::same_dtype(v_, k_);
    } else {
      check::same_dtype(k_, q_);
      check::same_dtype(v_, q_);
    }
    device();
    p_.q = operand(q_, p_.packed_q);
    p_.k = operand(k_, p_.packed_k);
    p_.v = operand(v_, p_.packed_k);
    p_.cu_seqlens_q = lengths(cu_seqlens_q_, p_.batch + 1, "(batch + 1)");
    p_.cu_seqlens_k = lengths(cu_seqlens_k_, p_.batch + 1, "(batch + 1)");
    p_.seqused_q = lengths(inputs_[5], p_.batch, "(batch)");
    p_.seqused_k = lengths(inputs_[6], p_.batch, "(batch)");
    by_head(inputs_[7]);
    p_.sink = static_cast<const float*>(address_of(in_.sink));
    p_.sink_stride = stride_of(in_.sink, 0);
    p_.q_scale = scales(inputs_[8], q_, p_.packed_q, p_.heads_q, p_.rows_q);
    p_.k_scale = scales(inputs_[9], k_, p_.packed_k, p_.heads_kv, p_.rows_k);
    p_.v_scale = scales(inputs_[10], v_, p_.packed_k, p_.heads_kv, p_.rows_k);
  }

  void options() {
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
    window("window_left", options_.window_left);
    window("window_right", options_.window_right);
    // Query i's diagonal lies from i - seqlen_q + 1 below the last key to the last key itself, so a window
    // this wide hides nothing. Folding it to "unbounded" spares the backends the masking and the overflow of
    // diagonal + window.
    p_.window_left = options_.window_left >= p_.rows_k - 1 ? -1 : options_.window_left;
    const std::int64_t right = options_.causal ? 0 : options_.window_right;
    p_.window_right = right >= p_.rows_q - 1 ? -1 : right;
    p_.deterministic = options_.deterministic;
    precision();
  }

  /// A tensor with the rows and heads of q.
  Operand like_q(const Argument& a, std::int64_t head_dim, const char* dim_name) {
    const Symbols symbols(p_.packed_q ? "total_q" : "batch, seqlen_q", "heads_q", dim_name);
    return rows(a, p_.packed_q, p_.rows_q, p_.heads_q, head_dim, symbols.view());
  }

  /// A tensor with the rows and heads of k.
  Operand like_k(const Argument& a, std::int64_t head_dim, const char* dim_name) {
    const Symbols symbols(p_.packed_k ? "total_k" : "batch, seqlen_k", "heads_kv", dim_name);
    return rows(a, p_.packed_k, p_.rows_k, p_.heads_kv, head_dim, symbols.view());
  }

  /// lse or its gradient.
  Operand row_statistics(const Argument& a) {
    check::consistent(a);
    if (!a.given()) return {};
    if (p_.packed_q) {
      check::shape(a, {p_.heads_q, p_.rows_q}, "(heads_q, total_q)");
    } else {
      check::shape(a, {p_.batch, p_.heads_q, p_.rows_q}, "(batch, heads_q, seqlen_q)");
    }
    check::dtype(a, {DType::f32});
    common(a);
    const std::size_t head = p_.packed_q ? 0 : 1;
    return {.data = address_of(a.tensor),
            .dtype = DType::f32,
            .batch_stride = p_.packed_q ? 0 : stride_of(a.tensor, 0),
            .row_stride = stride_of(a.tensor, head + 1),
            .head_stride = stride_of(a.tensor, head)};
  }

  /// (heads_q) f32, optional.
  void by_head(const Argument& a) {
    check::consistent(a);
    if (!a.given()) return;
    check::shape(a, {p_.heads_q}, "(heads_q)");
    check::dtype(a, {DType::f32});
    common(a);
  }

  /// Outputs do not overlap themselves, one another or an input.
  void outputs(std::initializer_list<Argument> outputs, std::initializer_list<Argument> more_inputs) const {
    for (const Argument& a : outputs) check::no_self_overlap(a);
    check::separate(outputs, more_inputs, inputs_);
  }

  void contents() const {
    if (options_.check && memory_ == Memory::present) check::lengths_contents(p_);
  }

  Problem& problem() { return p_; }

 private:
  static std::int64_t sequences(const Argument& cu_seqlens) {
    check::rank(cu_seqlens, 1, "(batch + 1)");
    if (cu_seqlens.size(0) < 1) {
      invalid("{} has shape {}; it needs batch + 1 elements, one at least", cu_seqlens.name,
              check::shape_of(cu_seqlens.tensor));
    }
    return cu_seqlens.size(0) - 1;
  }

  void heads() const {
    if (p_.heads_q < 1) invalid("q has {} heads; at least one is needed", p_.heads_q);
    if (p_.heads_kv < 1) invalid("k has {} heads; at least one is needed", p_.heads_kv);
    if (p_.heads_q % p_.heads_kv != 0) {
      invalid(
          "heads_q {} is not a multiple of heads_kv {}; each kv head serves the same number of query heads",
          p_.heads_q, p_.heads_kv);
    }
  }

  void head_dim(const char* name, std::int64_t d, const char* tensors) const {
    if (d < 1) invalid("{} is {}; it must be from 1 to {}", name, d, max_head_dim);
    if (d > max_head_dim) invalid("{} {} is above {}; split it over more heads", name, d, max_head_dim);
    if (d % head_dim_multiple != 0 && !options_.pad) {
      const std::int64_t padded = (d / head_dim_multiple + 1) * head_dim_multiple;
      invalid("{} {} is not a multiple of {}; pad {} to {}, or set the option pad", name, d,
              head_dim_multiple, tensors, padded);
    }
  }

  void device() {
    const Device d = q_.tensor.device;
    if (d.kind != Device::Kind::cpu && d.kind != Device::Kind::cuda) {
      invalid("q is on a device of kind {}; use cpu (0) or cuda (1)", static_cast<int>(d.kind));
    }
    if (d.kind == Device::Kind::cuda && d.index < 0)
      invalid("q is on cuda device {}; devices count from 0", d.index);
    p_.device = d;
  }

  void precision() {
    const Precision precision = options_.precision;
    if (precision < Precision::exact || precision > Precision::int8_accurate) {
      invalid("precision is {}; it must be exact (0), fp8 (1), int8 (2) or int8_accurate (3)",
              static_cast<int>(precision));
    }
    p_.precision = precision;
    p_.strict = options_.strict;
    const DType dtype = q_.tensor.dtype;
    if (of_codes()) return precision_of_codes(precision, dtype);
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

  void precision_of_codes(Precision precision, DType dtype) const {
    const Precision own = dtype == DType::s8 ? Precision::int8 : Precision::fp8;
    if (precision == Precision::exact && dtype == DType::s8) {
      invalid("q is s8, which has no exact products; pass precision int8");
    }
    if (precision != Precision::exact && precision != own) {
      invalid("precision {} does not take q in {}; pass precision {}, or 16-bit tensors", name_of(precision),
              name_of(dtype), name_of(own));
    }
    if (options_.strict) {
      invalid("strict says how q, k and v are rounded, but they are {} already; leave it out",
              name_of(dtype));
    }
  }

  /// q is of 8-bit codes, and so are k and v then.
  [[nodiscard]] bool of_codes() const { return is_code(q_.tensor.dtype); }
  /// k and v alone are.
  [[nodiscard]] bool mixed() const { return is_code(k_.tensor.dtype) && !of_codes(); }

  /// Of k and v in backward: converting codes, as the rule on dtypes would say, loses their scales.
  void no_codes(const Argument& a) const {
    if (!is_code(a.tensor.dtype)) return;
    invalid("{} is {}; 8-bit k and v have no backward: pass those they were made from, in {}", a.name,
            name_of(a.tensor.dtype), name_of(q_.tensor.dtype));
  }

  static void window(const char* name, std::int64_t value) {
    if (value >= -1) return;
    invalid(
        "{} is {}; it must be at least 0, or -1 for unbounded: FlashAttention takes any negative bound for "
        "unbounded, pass -1",
        name, value);
  }

  /// What holds for every tensor once its shape and dtype are known.
  void common(const Argument& a) {
    check::same_device(a, q_);
    check::extent(a);
    if (memory_ == Memory::present) check::memory(a);
  }

  Operand rows(const Argument& a, bool packed, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
               std::string_view symbols) {
    check::given(a, symbols);
    if (packed) {
      check::shape(a, {rows, heads, head_dim}, symbols);
    } else {
      check::shape(a, {p_.batch, rows, heads, head_dim}, symbols);
    }
    if (of_codes()) {
      check::dtype(a, {DType::f32, DType::f16, DType::bf16});
    } else {
      check::same_dtype(a, q_);
    }
    return operand(a, packed);
  }

  Operand operand(const Argument& a, bool packed) {
    common(a);
    check::last_dimension_contiguous(a);
    const std::size_t row = packed ? 0 : 1;
    return {.data = address_of(a.tensor),
            .dtype = a.tensor.dtype,
            .batch_stride = packed ? 0 : stride_of(a.tensor, 0),
            .row_stride = stride_of(a.tensor, row),
            .head_stride = stride_of(a.tensor, row + 1)};
  }

  Lengths lengths(const Argument& a, std::int64_t count, std::string_view symbols) {
    check::consistent(a);
    if (!a.given()) return {};
    check::shape(a, {count}, symbols);
    check::dtype(a, {DType::i32, DType::i64});
    common(a);
    return {
        .data = address_of(a.tensor), .wide = a.tensor.dtype == DType::i64, .stride = stride_of(a.tensor, 0)};
  }

  /// Scales of a tensor of codes with these heads and rows.
  Scales scales(const Argument& a, const Argument& of, bool packed, std::int64_t heads, std::int64_t rows) {
    check::consistent(a);
    if (!a.given()) return {};
    if (!is_code(of.tensor.dtype)) {
      invalid("{} is given but {} is {}; scales are for 8-bit tensors, leave it out", a.name, of.name,
              name_of(of.tensor.dtype));
    }
    check::dtype(a, {DType::f32});
    const bool coarse = options_.precision == Precision::exact && !mixed();
    const char* symbols = coarse   ? "(1) or (batch, heads_kv)"
                          : packed ? "(1), (batch, heads) or (heads, total)"
                                   : "(1), (batch, heads), (batch, heads, ceil(seqlen / 128)) or (batch, "
                                     "heads, seqlen)";
    // Before anything reads as many sizes as the caller's rank says there are.
    if (a.tensor.rank > (coarse || packed ? 2 : 3)) {
      invalid("{} has {} dimensions; it must be {}", a.name, a.tensor.rank, symbols);
    }
    common(a);
    Scales s{.data = static_cast<const float*>(address_of(a.tensor))};
    if (a.tensor.rank == 1 && (coarse || has_shape(a, {1}))) {
      check::shape(a, {1}, symbols);
    } else if (coarse || has_shape(a, {p_.batch, p_.heads_kv})) {
      check::shape(a, {p_.batch, p_.heads_kv}, "(1) or (batch, heads_kv)");
      s.batch_stride = stride_of(a.tensor, 0);
      s.head_stride = stride_of(a.tensor, 1);
      s.heads = heads / p_.heads_kv;
    } else {
      fine_scales(s, a, packed, heads, rows, symbols);
    }
    return s;
  }

  /// Scales of query heads of their own, of blocks and of rows.
  void fine_scales(Scales& s, const Argument& a, bool packed, std::int64_t heads, std::int64_t rows,
                   const char* symbols) const {
    const std::int64_t blocks = (rows + quant_block - 1) / quant_block;
    const std::size_t head = packed ? 0 : 1;
    if (has_shape(a, {p_.batch, heads})) {
      s.batch_stride = stride_of(a.tensor, 0);
      s.head_stride = stride_of(a.tensor, 1);
      return;
    }
    if (packed && !has_shape(a, {heads, rows})) {
      invalid("{} has shape {}; it must be {}, here (1), ({}, {}) or ({}, {})", a.name,
              check::shape_of(a.tensor), symbols, p_.batch, heads, heads, rows);
    }
    if (!packed && !has_shape(a, {p_.batch, heads, blocks}) && !has_shape(a, {p_.batch, heads, rows})) {
      invalid("{} has shape {}; it must be {}, here (1), ({}, {}), ({}, {}, {}) or ({}, {}, {})", a.name,
              check::shape_of(a.tensor), symbols, p_.batch, heads, p_.batch, heads, blocks, p_.batch, heads,
              rows);
    }
    s.group = !packed && a.size(2) == blocks ? ScaleGroup::block : ScaleGroup::row;
    s.batch_stride = packed ? 0 : stride_of(a.tensor, 0);
    s.head_stride = stride_of(a.tensor, head);
    s.group_stride = stride_of(a.tensor, head + 1);
  }

  static bool has_shape(const Argument& a, std::initializer_list<std::int64_t> shape) {
    return a.tensor.rank == static_cast<int>(shape.size()) &&
           std::equal(shape.begin(), shape.end(), a.tensor.shape.begin());
  }

  const AttentionInputs& in_;
  const AttentionOptions& options_;
  Memory memory_;
  Problem p_;
  std::array<Argument, 11> inputs_{{{"q", in_.q},
                                    {"k", in_.k},
                                    {"v", in_.v},
                                    {"cu_seqlens_q", in_.cu_seqlens_q},
                                    {"cu_seqlens_k", in_.cu_seqlens_k},
                                    {"seqused_q", in_.seqused_q},
                                    {"seqused_k", in_.seqused_k},
                                    {"sink", in_.sink},
                                    {"q_scale", in_.q_scale},
                                    {"k_scale", in_.k_scale},
                                    {"v_scale", in_.v_scale}}};
  const Argument& q_ = inputs_[0];
  const Argument& k_ = inputs_[1];
  const Argument& v_ = inputs_[2];
  const Argument& cu_seqlens_q_ = inputs_[3];
  const Argument& cu_seqlens_k_ = inputs_[4];
};

}  // namespace

Problem make_problem(const ForwardArgs& args, Memory memory) {
  Builder builder(args, args.options, Pass::forward, memory);
  builder.sizes();
  builder.inputs();
  builder.options();
  Problem& p = builder.problem();
  const Argument out{"out", args.out};
  const Argument lse{"lse", args.lse};
  p.out = builder.like_q(out, p.head_dim_v, "head_dim_v");
  p.lse = builder.row_statistics(lse);
  builder.outputs({out, lse}, {});
  builder.contents();
  return p;
}

Problem make_problem(const BackwardArgs& args, Memory memory) {
  Builder builder(args, args.options, Pass::backward, memory);
  builder.sizes();
  builder.inputs();
  builder.options();
  Problem& p = builder.problem();
  const Argument out{"out", args.out};
  const Argument lse{"lse", args.lse};
  const Argument dout{"dout", args.dout};
  const Argument dlse{"dlse", args.dlse};
  const Argument dq{"dq", args.dq};
  const Argument dk{"dk", args.dk};
  const Argument dv{"dv", args.dv};
  const Argument dsink{"dsink", args.dsink};
  p.out = builder.like_q(out, p.head_dim_v, "head_dim_v");
  check::given(lse, "(batch, heads_q, seqlen_q), or (heads_q, total_q) with cu_seqlens_q");
  p.lse = builder.row_statistics(lse);
  p.dout = builder.like_q(dout, p.head_dim_v, "head_dim_v");
  p.dlse = builder.row_statistics(dlse);
  if (!dq.given() && !dk.given() && !dv.given() && !dsink.given()) {
    invalid("dq, dk, dv and dsink are all missing; pass those that are wanted");
  }
  for (const Argument& a : {dq, dk, dv}) check::consistent(a);
  if (dq.given()) p.dq = builder.like_q(dq, p.head_dim_qk, "head_dim");
  if (dk.given()) p.dk = builder.like_k(dk, p.head_dim_qk, "head_dim");
  if (dv.given()) p.dv = builder.like_k(dv, p.head_dim_v, "head_dim_v");
  builder.by_head(dsink);
  if (dsink.given() && !args.sink.given()) invalid("dsink is given without sink; pass both, or neither");
  p.dsink = static_cast<float*>(address_of(args.dsink));
  p.dsink_stride = stride_of(args.dsink, 0);
  builder.outputs({dq, dk, dv, dsink}, {out, lse, dout, dlse});
  builder.contents();
  return p;
}

}  // namespace tandem
