// Every way in which options, metadata and the backward pass's own tensors can be wrong, and the whole
// message.
#include <gtest/gtest.h>

#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

#include "api/make_problem.hpp"
#include "error_case.hpp"

namespace tandem::test {
namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

/// dense_forward of bf16 and gradients in 8 bits.
ForwardArgs forward_for_8_bit_gradients() {
  ForwardArgs a = dense_forward();
  a.q.dtype = a.k.dtype = a.v.dtype = a.out.dtype = DType::bf16;
  a.options.precision = a.options.backward_precision = Precision::int8;
  return a;
}

/// packed_forward of 8-bit inputs.
ForwardArgs packed_e4m3_forward() {
  ForwardArgs a = packed_forward();
  a.q.dtype = a.k.dtype = a.v.dtype = DType::e4m3;
  a.out.dtype = DType::bf16;
  a.options.precision = Precision::fp8;
  return a;
}

using Forward = Case<ForwardArgs>;
using F = ForwardArgs;
class OptionError : public testing::TestWithParam<Forward> {};
TEST_P(OptionError, SaysRuleValueAndRemedy) {
  expect_message(GetParam());
}

TEST(EightBitGradientError, GradientsIn8BitsHaveNeitherSoftcapNorSink) {
  const auto refusal = [](const ForwardArgs& a) {
    return error_of(Status::unsupported, [&] { make_problem(a); });
  };
  ForwardArgs capped = forward_for_8_bit_gradients();
  EXPECT_NO_THROW(make_problem(capped));
  capped.options.softcap = 30.0F;
  EXPECT_EQ(
      refusal(capped),
      "softcap is given with backward_precision int8, whose gradients have none; leave one of both out");
  ForwardArgs with_sink = forward_for_8_bit_gradients();
  with_sink.sink = tensor(5, DType::f32, {4});
  EXPECT_EQ(refusal(with_sink),
            "sink is given with backward_precision int8, whose gradients have none; leave one of both out");
}

INSTANTIATE_TEST_SUITE_P(
    Options, OptionError,
    testing::Values(
        Forward{"scale_nan", dense_forward, [](F& a) { a.options.scale = nan; },
                "scale is nan; it must be finite"},
        Forward{"scale_infinite", dense_forward, [](F& a) { a.options.scale = -infinity; },
                "scale is -inf; it must be finite"},
        Forward{"split_size_uneven", dense_forward, [](F& a) { a.options.split_size = 200; },
                "split_size is 200; it must be a multiple of 128, such as 256, or 0 (off)"},
        Forward{"split_size_negative", dense_forward, [](F& a) { a.options.split_size = -128; },
                "split_size is -128; it must be a multiple of 128, such as 128, or 0 (off)"},
        Forward{"split_size_of_eight_bits", e4m3_forward,
                [](F& a) {
                  a.options.precision = Precision::fp8;
                  a.options.split_size = 256;
                },
                "split_size is 256 with precision fp8, whose scales depend on a sequence's other rows; leave "
                "the precision exact, or split_size out"},
        Forward{
            "causal_twice", dense_forward,
            [](F& a) {
              a.options.causal = true;
              a.causal_by_sequence = tensor(12, DType::i32, {2});
            },
            "causal and causal_by_sequence are both given; leave causal out, and set causal_by_sequence to "
            "1 where a sequence is causal"},
        Forward{"dropout_p_negative", dense_forward, [](F& a) { a.options.dropout_p = -0.1F; },
                "dropout_p is -0.1; it must be at least 0 (off) and below 1"},
        Forward{"dropout_p_one", dense_forward, [](F& a) { a.options.dropout_p = 1.0F; },
                "dropout_p is 1; it must be at least 0 (off) and below 1"},
        Forward{"dropout_p_nan", dense_forward, [](F& a) { a.options.dropout_p = nan; },
                "dropout_p is nan; it must be at least 0 (off) and below 1"},
        Forward{"dropout_places_alone", dense_forward,
                set(&F::dropout_places, tensor(14, DType::i32, {2, 4})),
                "dropout_places is given without dropout_p; pass both, or neither"},
        Forward{"softcap_negative", dense_forward, [](F& a) { a.options.softcap = -1.5F; },
                "softcap is -1.5; it must be finite and at least 0 (0: off)"},
        Forward{"softcap_nan", dense_forward, [](F& a) { a.options.softcap = nan; },
                "softcap is nan; it must be finite and at least 0 (0: off)"},
        Forward{"softcap_infinite", dense_forward, [](F& a) { a.options.softcap = infinity; },
                "softcap is inf; it must be finite and at least 0 (0: off)"},
        Forward{"softcap_huge", dense_forward, [](F& a) { a.options.softcap = 2.5e38F; },
                "softcap is 2.5e+38; it must be at most 1e30, beyond any logit: leave it out (0: off)"},
        Forward{"window_left", dense_forward, [](F& a) { a.options.window_left = -2; },
                "window_left is -2; it must be at least 0, or -1 for unbounded: FlashAttention takes any "
                "negative bound for unbounded, pass -1"},
        Forward{"precision_unknown", dense_forward,
                [](F& a) { a.options.precision = static_cast<Precision>(3); },
                "precision is 3; it must be exact (0), fp8 (1) or int8 (2)"},
        Forward{"precision_of_f32", dense_forward, [](F& a) { a.options.precision = Precision::int8; },
                "precision int8 rounds f16 or bf16 inputs to 8 bits, but q is f32; "
                "convert q, k and v first, or leave the precision exact"},
        Forward{"precision_of_wide_heads", dense_forward,
                [](F& a) {
                  a.q = tensor(0, DType::bf16, {2, 5, 4, 576});
                  a.k = tensor(1, DType::bf16, {2, 7, 2, 576});
                  a.v.dtype = a.out.dtype = DType::bf16;
                  a.options.precision = Precision::fp8;
                },
                "head_dim 576 is above 256, the most with precision fp8; leave the precision exact"},
        Forward{"precision_of_wide_s8", e4m3_forward,
                [](F& a) {
                  a.q.dtype = a.k.dtype = DType::s8;
                  a.v = tensor(2, DType::s8, {2, 7, 2, 512});
                  a.options.precision = Precision::int8;
                },
                "head_dim_v 512 is above 256, the most with precision int8; pass q in f16, bf16 or f32 and "
                "leave the precision exact"},
        Forward{"precision_of_e4m3", e4m3_forward, [](F& a) { a.options.precision = Precision::int8; },
                "precision int8 does not take q in e4m3; pass precision fp8, or 16-bit tensors"},
        Forward{"backward_precision_of_e4m3", forward_for_8_bit_gradients,
                [](F& a) { a.options.backward_precision = Precision::fp8; },
                "backward_precision is fp8 (1); it must be exact (0) or int8 (2)"},
        Forward{"backward_precision_alone", forward_for_8_bit_gradients,
                [](F& a) { a.options.precision = Precision::fp8; },
                "backward_precision int8 takes the values and the LSE of a forward pass in int8, but "
                "precision is fp8; pass precision int8, or leave backward_precision out"},
        Forward{"backward_precision_of_s8", e4m3_forward,
                [](F& a) {
                  a.q.dtype = a.k.dtype = a.v.dtype = DType::s8;
                  a.options.precision = a.options.backward_precision = Precision::int8;
                },
                "backward_precision int8 is given with q in s8, which has no gradients; leave it out"},
        Forward{
            "precision_of_mixed", e4m3_forward,
            [](F& a) {
              a.q.dtype = a.out.dtype = DType::bf16;
              a.options.precision = Precision::fp8;
            },
            "precision fp8 rounds q, k and v to 8 bits, but k is e4m3 already; leave the precision exact, "
            "whose products are then in q's dtype, or pass q in e4m3 too"},
        Forward{"mixed_v", e4m3_forward,
                [](F& a) {
                  a.q.dtype = a.out.dtype = DType::bf16;
                  a.v.dtype = DType::s8;
                },
                "v is s8 but k is e4m3; convert it to e4m3"},
        Forward{"mixed_q_scale", e4m3_forward,
                [](F& a) {
                  a.q.dtype = a.out.dtype = DType::bf16;
                  a.q_scale = tensor(5, DType::f32, {1});
                },
                "q_scale is given but q is bf16; scales are for 8-bit tensors, leave it out"},
        Forward{"mixed_out", e4m3_forward,
                [](F& a) {
                  a.q.dtype = DType::bf16;
                  a.out.dtype = DType::f16;
                },
                "out is f16 but q is bf16; convert it to bf16"},
        Forward{"strict_of_e4m3", e4m3_forward,
                [](F& a) {
                  a.options.precision = Precision::fp8;
                  a.options.strict = true;
                },
                "strict says how q, k and v are rounded, but they are e4m3 already; leave it out"},
        Forward{"exact_of_s8", e4m3_forward, [](F& a) { a.q.dtype = a.k.dtype = a.v.dtype = DType::s8; },
                "q is s8, which has no exact products; pass precision int8"},
        Forward{"scales_of_rows", e4m3_forward,
                [](F& a) {
                  a.options.precision = Precision::fp8;
                  a.k_scale = tensor(5, DType::f32, {2, 2, 6});
                },
                "k_scale has shape (2, 2, 6); it must be (1), (batch, heads), (batch, heads, ceil(seqlen / "
                "128)) or (batch, heads, seqlen), here (1), (2, 2), (2, 2, 1) or (2, 2, 7)"},
        Forward{"scales_of_another_size", e4m3_forward,
                [](F& a) {
                  a.options.precision = Precision::fp8;
                  a.k_scale = tensor(5, DType::f32, {5});
                },
                "k_scale has shape (5); it must be (1), (batch, heads), (batch, heads, ceil(seqlen / 128)) "
                "or (batch, heads, seqlen), here (1), (2, 2), (2, 2, 1) or (2, 2, 7)"},
        Forward{"scales_of_a_shape_that_is_not_there", e4m3_forward,
                [](F& a) {
                  a.options.precision = Precision::fp8;
                  a.q_scale = tensor(5, DType::f32, {1});
                  a.q_scale.rank = 12;
                },
                "q_scale has 12 dimensions; it must be (1), (batch, heads), (batch, heads, ceil(seqlen / "
                "128)) or (batch, heads, seqlen)"},
        Forward{"scales_of_k_of_a_wild_rank", e4m3_forward,
                [](F& a) {
                  a.k_scale = tensor(5, DType::f32, {1});
                  a.k_scale.rank = 100'000'000;
                },
                "k_scale has 100000000 dimensions; it must be (1), (batch, heads_kv) or (entries, heads_kv, "
                "rows)"},
        Forward{"scales_of_v_of_four_dimensions", e4m3_forward,
                [](F& a) {
                  a.options.precision = Precision::fp8;
                  a.v_scale = tensor(5, DType::f32, {2, 2, 7, 1});
                },
                "v_scale has 4 dimensions; it must be (1), (batch, heads), (batch, heads, ceil(seqlen / "
                "128)) or (batch, heads, seqlen)"},
        Forward{"scales_of_packed_rows", packed_e4m3_forward,
                set(&F::k_scale, tensor(5, DType::f32, {1, 2, 7})),
                "k_scale has 3 dimensions; it must be (1), (batch, heads) or (heads, total)"},
        Forward{"scales_of_packed_heads", packed_e4m3_forward,
                set(&F::k_scale, tensor(5, DType::f32, {2, 6})),
                "k_scale has shape (2, 6); it must be (1), (batch, heads) or (heads, total), here (1), (2, "
                "2) or (2, 7)"},
        Forward{"window_right", dense_forward,
                [](F& a) {
                  a.options.window_right = std::numeric_limits<std::int64_t>::min();
                  a.options.causal = true;
                },
                "window_right is -9223372036854775808; it must be at least 0, or -1 for unbounded: "
                "FlashAttention takes any negative bound for unbounded, pass -1"}),
    case_name<ForwardArgs>);

/// A rank is refused before as many sizes are read: every tensor has room for four.
template <typename Args, typename Member>
void expect_wild_rank_refused(Args args, Member member, const char* name) {
  if (!(args.*member).given()) args.*member = tensor(12, DType::f32, {1});
  (args.*member).rank = 100'000'000;
  const std::string said = error_of(Status::invalid_argument, [&] { make_problem(args); });
  EXPECT_TRUE(said.starts_with(std::string(name) + " has 100000000 dimensions; it must be ")) << said;
}
template <typename Tensor, typename Args>
using Members = std::initializer_list<std::pair<Tensor Args::*, const char*>>;

TEST(WildRank, IsRefusedOfEveryTensor) {
  using I = AttentionInputs;
  for (const auto& [member, name] : Members<ConstTensor, I>{{&I::q, "q"},
                                                            {&I::k, "k"},
                                                            {&I::v, "v"},
                                                            {&I::seqused_q, "seqused_q"},
                                                            {&I::seqused_k, "seqused_k"},
                                                            {&I::sink, "sink"}}) {
    expect_wild_rank_refused(dense_forward(), member, name);
    expect_wild_rank_refused(dense_backward(), member, name);
  }
  for (const auto& [member, name] : Members<ConstTensor, I>{{&I::q, "q"},
                                                            {&I::k, "k"},
                                                            {&I::v, "v"},
                                                            {&I::cu_seqlens_q, "cu_seqlens_q"},
                                                            {&I::cu_seqlens_k, "cu_seqlens_k"},
                                                            {&I::q_scale, "q_scale"},
                                                            {&I::k_scale, "k_scale"},
                                                            {&I::v_scale, "v_scale"}}) {
    expect_wild_rank_refused(packed_e4m3_forward(), member, name);
  }
  for (const auto& [member, name] : Members<Tensor, F>{{&F::out, "out"}, {&F::lse, "lse"}}) {
    expect_wild_rank_refused(dense_forward(), member, name);
    expect_wild_rank_refused(packed_forward(), member, name);
  }
  using B = BackwardArgs;
  for (const auto& [member, name] :
       Members<ConstTensor, B>{{&B::out, "out"}, {&B::lse, "lse"}, {&B::dout, "dout"}, {&B::dlse, "dlse"}}) {
    expect_wild_rank_refused(dense_backward(), member, name);
  }
  for (const auto& [member, name] :
       Members<Tensor, B>{{&B::dq, "dq"}, {&B::dk, "dk"}, {&B::dv, "dv"}, {&B::dsink, "dsink"}}) {
    expect_wild_rank_refused(dense_backward(), member, name);
  }
}

ForwardArgs checked_packed() {
  ForwardArgs a = packed_forward();
  a.options.check = true;
  return a;
}
ForwardArgs checked_dense() {
  ForwardArgs a = dense_forward();
  a.options.check = true;
  return a;
}

INSTANTIATE_TEST_SUITE_P(
    Metadata, OptionError,
    testing::Values(
        Forward{"cu_seqlens_rank", packed_forward, set(&F::cu_seqlens_q, tensor(5, DType::i32, {3, 1})),
                "cu_seqlens_q has 2 dimensions; it must be (batch + 1)"},
        Forward{"cu_seqlens_empty", packed_forward, set(&F::cu_seqlens_q, tensor(5, DType::i32, {0})),
                "cu_seqlens_q has shape (0); it needs batch + 1 elements, one at least"},
        Forward{"cu_seqlens_k_count", packed_forward, set(&F::cu_seqlens_k, tensor(5, DType::i32, {4})),
                "cu_seqlens_k has shape (4); it must be (batch + 1) = (3)"},
        Forward{"seqused_count", dense_forward, set(&F::seqused_q, tensor(5, DType::i64, {3})),
                "seqused_q has shape (3); it must be (batch) = (2)"},
        Forward{"cu_seqlens_start", checked_packed, set(&F::cu_seqlens_q, integers<1, 3, 5>()),
                "cu_seqlens_q[0] is 1; the first sequence starts at row 0"},
        Forward{"cu_seqlens_descends", checked_packed, set(&F::cu_seqlens_k, integers<0L, 7L, 4L>()),
                "cu_seqlens_k[2] is 4, below cu_seqlens_k[1] = 7; offsets must ascend"},
        Forward{"cu_seqlens_past_end", checked_packed, set(&F::cu_seqlens_k, integers<0L, 4L, 8L>()),
                "cu_seqlens_k[2] is 8; offsets are at most total_k = 7"},
        Forward{"seqused_negative", checked_packed, set(&F::seqused_q, integers<3, -1>()),
                "seqused_q[1] is -1; it must be from 0 to the length of sequence 1, 2"},
        Forward{"seqused_past_end", checked_packed, set(&F::seqused_k, integers<5, 3>()),
                "seqused_k[0] is 5; it must be from 0 to the length of sequence 0, 4"},
        Forward{"seqused_past_seqlen", checked_dense, set(&F::seqused_k, integers<7L, 8L>()),
                "seqused_k[1] is 8; it must be from 0 to the length of sequence 1, 7"}),
    case_name<ForwardArgs>);

using Backward = Case<BackwardArgs>;
using B = BackwardArgs;
class BackwardError : public testing::TestWithParam<Backward> {};
TEST_P(BackwardError, SaysRuleValueAndRemedy) {
  expect_message(GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    All, BackwardError,
    testing::Values(
        Backward{
            "e4m3", dense_backward, [](B& a) { a.q.dtype = DType::e4m3; },
            "q is e4m3; the backward of an 8-bit forward is 16-bit: pass q, k and v in f16, bf16 or f32"},
        Backward{
            "causal_by_sequence", dense_backward, set(&B::causal_by_sequence, tensor(12, DType::i32, {2})),
            "causal_by_sequence is given to backward, which has one mask for all sequences; pass the causal "
            "ones and the others in calls of their own"},
        Backward{"mixed_k", dense_backward, [](B& a) { a.k.dtype = a.v.dtype = DType::s8; },
                 "k is s8; 8-bit k and v have no backward: pass those they were made from, in f32"},
        Backward{"mixed_v", dense_backward, [](B& a) { a.v.dtype = DType::e4m3; },
                 "v is e4m3; 8-bit k and v have no backward: pass those they were made from, in f32"},
        Backward{"q_integer", dense_backward, [](B& a) { a.q.dtype = DType::i32; },
                 "q is i32; convert it to f32, f16 or bf16"},
        Backward{"out_missing", dense_backward, [](B& a) { a.out = {}; },
                 "out is missing; pass a tensor of shape (batch, seqlen_q, heads_q, head_dim_v)"},
        Backward{"lse_missing", dense_backward, [](B& a) { a.lse = {}; },
                 "lse is missing; pass a tensor of shape (batch, heads_q, seqlen_q), or (heads_q, total_q) "
                 "with cu_seqlens_q"},
        Backward{"dout_missing", dense_backward, [](B& a) { a.dout = {}; },
                 "dout is missing; pass a tensor of shape (batch, seqlen_q, heads_q, head_dim_v)"},
        Backward{"gradients_missing", dense_backward, [](B& a) { a.dq = a.dk = a.dv = a.dsink = {}; },
                 "dq, dk, dv, dsink and dgate are all missing; pass those that are wanted"},
        Backward{
            "dout_shape", dense_backward, set(&B::dout, tensor(6, DType::f32, {2, 5, 4, 16})),
            "dout has shape (2, 5, 4, 16); it must be (batch, seqlen_q, heads_q, head_dim_v) = (2, 5, 4, 8)"},
        Backward{
            "dk_shape", dense_backward, set(&B::dk, tensor(9, DType::f32, {2, 7, 4, 16})),
            "dk has shape (2, 7, 4, 16); it must be (batch, seqlen_k, heads_kv, head_dim) = (2, 7, 2, 16)"},
        Backward{"dlse_shape", dense_backward, set(&B::dlse, tensor(7, DType::f32, {2, 4, 6})),
                 "dlse has shape (2, 4, 6); it must be (batch, heads_q, seqlen_q) = (2, 4, 5)"},
        Backward{"max_logits_missing", dense_backward,
                 [](B& a) {
                   for (ConstTensor* x : {&a.q, &a.k, &a.v, &a.out, &a.dout}) x->dtype = DType::bf16;
                   a.sink = {};
                   a.options.precision = a.options.backward_precision = Precision::int8;
                 },
                 "max_logits is missing; pass a tensor of shape (batch, heads_q, seqlen_q), or (heads_q, "
                 "total_q) with cu_seqlens_q"},
        Backward{"max_logits_of_exact_gradients", dense_backward,
                 set(&B::max_logits, tensor(13, DType::f32, {2, 4, 5})),
                 "max_logits is given, but backward_precision is exact and does not read it; leave it out"},
        Backward{"dq_dtype", dense_backward, [](B& a) { a.dq.dtype = DType::f16; },
                 "dq is f16 but q is f32; convert it to f32"},
        Backward{"dk_dtype", dense_backward,
                 [](B& a) {
                   for (ConstTensor* x : {&a.q, &a.k, &a.v, &a.out, &a.dout}) x->dtype = DType::bf16;
                   for (Tensor* x : {&a.dq, &a.dv}) x->dtype = DType::bf16;
                 },
                 "dv is bf16 but dk is f32; convert it to f32"},
        Backward{"dsink_shape", dense_backward, set(&B::dsink, tensor(11, DType::f32, {2})),
                 "dsink has shape (2); it must be (heads_q) = (4)"},
        Backward{"dsink_without_sink", dense_backward, [](B& a) { a.sink = {}; },
                 "dsink is given without sink; pass both, or neither"},
        Backward{"dsink_expanded", dense_backward, [](B& a) { a.dsink.stride[0] = 0; },
                 "dsink of shape (4) and strides (0) overlaps itself in dimension 0; every element of an "
                 "output needs memory of its own"},
        Backward{"dk_is_dv", dense_backward, [](B& a) { a.dv.data = a.dk.data; },
                 "dv shares memory with dk; an output needs memory of its own"},
        Backward{"dq_is_dout", dense_backward, [](B& a) { a.dq.data = const_cast<void*>(a.dout.data); },
                 "dq shares memory with dout; an output needs memory of its own"},
        Backward{"dk_expanded", dense_backward, [](B& a) { a.dk.stride[2] = 0; },
                 "dk of shape (2, 7, 2, 16) and strides (224, 32, 0, 1) overlaps itself in dimension 2; "
                 "every element of an output needs memory of its own"},
        Backward{"dout_device", dense_backward, [](B& a) { a.dout = on_gpu(a.dout, 0); },
                 "dout is on cuda:0 but q is on cpu; move it there"}),
    case_name<BackwardArgs>);

}  // namespace
}  // namespace tandem::test
