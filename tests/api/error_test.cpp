// Every way in which the tensors of a call can be wrong, and the whole message that says so: rule, value,
// remedy.
#include <gtest/gtest.h>

#include <cstddef>
#include <limits>

#include "error_case.hpp"

namespace tandem::test {
namespace {

constexpr std::int64_t huge = std::int64_t{1} << 62;

using Forward = Case<ForwardArgs>;
using F = ForwardArgs;
class ForwardError : public testing::TestWithParam<Forward> {};
TEST_P(ForwardError, SaysRuleValueAndRemedy) {
  expect_message(GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ForwardError,
    testing::Values(
        Forward{"causal_by_sequence_shape", dense_forward,
                set(&F::causal_by_sequence, tensor(12, DType::i32, {3})),
                "causal_by_sequence has shape (3); it must be (batch) = (2)"},
        Forward{"causal_by_sequence_dtype", dense_forward,
                set(&F::causal_by_sequence, tensor(12, DType::s8, {2})),
                "causal_by_sequence is s8; convert it to i32 or i64"},
        Forward{"causal_by_sequence_device", dense_forward,
                [](F& a) { a.causal_by_sequence = on_gpu(tensor(12, DType::i32, {2}), 0); },
                "causal_by_sequence is on cuda:0 but q is on cpu; move it there"},
        Forward{"q_missing", dense_forward, [](F& a) { a.q = {}; },
                "q is missing; pass a tensor of shape (batch, seqlen_q, heads_q, head_dim)"},
        Forward{"k_missing", dense_forward, [](F& a) { a.k = {}; },
                "k is missing; pass a tensor of shape (batch, seqlen_k, heads_kv, head_dim)"},
        Forward{"v_missing", dense_forward, [](F& a) { a.v = {}; },
                "v is missing; pass a tensor of shape (batch, seqlen_k, heads_kv, head_dim_v)"},
        Forward{"out_missing", dense_forward, [](F& a) { a.out = {}; },
                "out is missing; pass a tensor of shape (batch, seqlen_q, heads_q, head_dim_v)"},
        Forward{"out_missing_packed", packed_forward, [](F& a) { a.out = {}; },
                "out is missing; pass a tensor of shape (total_q, heads_q, head_dim_v)"},
        Forward{"data_without_dimensions", dense_forward, [](F& a) { a.sink.data = a.q.data; },
                "sink has data but 0 dimensions; set its shape, or leave it out altogether"},
        Forward{"negative_rank", dense_forward, [](F& a) { a.q.rank = -1; },
                "q has data but -1 dimensions; set its shape, or leave it out altogether"},
        Forward{"q_rank", dense_forward, set(&F::q, tensor(0, DType::f32, {5, 4, 16})),
                "q has 3 dimensions; it must be (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, "
                "head_dim) with cu_seqlens_q"},
        Forward{"q_rank_five", dense_forward, set(&F::q, tensor(0, DType::f32, {1, 2, 5, 4, 16})),
                "q has 5 dimensions; it must be (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, "
                "head_dim) with cu_seqlens_q"},
        Forward{"q_rank_packed", packed_forward, set(&F::q, tensor(0, DType::f32, {1, 5, 4, 16})),
                "q has 4 dimensions; it must be (total_q, heads_q, head_dim), since cu_seqlens_q is given"},
        Forward{"k_rank", dense_forward, set(&F::k, tensor(1, DType::f32, {7, 2, 16})),
                "k has 3 dimensions; it must be (batch, seqlen_k, heads_kv, head_dim), or (total_k, "
                "heads_kv, head_dim) with cu_seqlens_k"},
        Forward{"k_rank_packed", packed_forward, set(&F::k, tensor(1, DType::f32, {1, 7, 2, 16})),
                "k has 4 dimensions; it must be (total_k, heads_kv, head_dim), since cu_seqlens_k is given"},
        Forward{"v_rank", dense_forward, set(&F::v, tensor(2, DType::f32, {7, 2, 8})),
                "v has 3 dimensions; it must be (batch, seqlen_k, heads_kv, head_dim_v)"},
        Forward{"v_rank_packed", packed_forward, set(&F::v, tensor(2, DType::f32, {1, 7, 2, 8})),
                "v has 4 dimensions; it must be (total_k, heads_kv, head_dim_v)"},
        Forward{"negative_size", dense_forward, [](F& a) { a.q.shape[1] = -5; },
                "q has shape (2, -5, 4, 16); no size may be negative"},
        Forward{"k_batch", dense_forward, set(&F::k, tensor(1, DType::f32, {3, 7, 2, 16})),
                "k has shape (3, 7, 2, 16); it must be (batch of q, seqlen_k, heads_kv, head_dim of q) = (2, "
                "7, 2, 16)"},
        Forward{"k_head_dim", dense_forward, set(&F::k, tensor(1, DType::f32, {2, 7, 2, 24})),
                "k has shape (2, 7, 2, 24); it must be (batch of q, seqlen_k, heads_kv, head_dim of q) = (2, "
                "7, 2, 16)"},
        Forward{"k_head_dim_packed", packed_forward, set(&F::k, tensor(1, DType::f32, {7, 2, 24})),
                "k has shape (7, 2, 24); it must be (total_k, heads_kv, head_dim of q) = (7, 2, 16)"},
        Forward{"v_seqlen", dense_forward, set(&F::v, tensor(2, DType::f32, {2, 6, 2, 8})),
                "v has shape (2, 6, 2, 8); it must be (batch of q, seqlen_k of k, heads_kv of k, head_dim_v) "
                "= (2, 7, 2, 8)"},
        Forward{"v_heads_packed", packed_forward, set(&F::v, tensor(2, DType::f32, {7, 4, 8})),
                "v has shape (7, 4, 8); it must be (total_k of k, heads_kv of k, head_dim_v) = (7, 2, 8)"},
        Forward{
            "out_head_dim", dense_forward, set(&F::out, tensor(3, DType::f32, {2, 5, 4, 16})),
            "out has shape (2, 5, 4, 16); it must be (batch, seqlen_q, heads_q, head_dim_v) = (2, 5, 4, 8)"},
        Forward{"out_rows_packed", packed_forward, set(&F::out, tensor(3, DType::f32, {6, 4, 8})),
                "out has shape (6, 4, 8); it must be (total_q, heads_q, head_dim_v) = (5, 4, 8)"},
        Forward{"lse_shape", dense_forward, set(&F::lse, tensor(4, DType::f32, {2, 5, 4})),
                "lse has shape (2, 5, 4); it must be (batch, heads_q, seqlen_q) = (2, 4, 5)"},
        Forward{"max_logits_shape", dense_forward, set(&F::max_logits, tensor(13, DType::f32, {2, 5, 4})),
                "max_logits has shape (2, 5, 4); it must be (batch, heads_q, seqlen_q) = (2, 4, 5)"},
        Forward{"lse_rank", dense_forward, set(&F::lse, tensor(4, DType::f32, {4, 5})),
                "lse has 2 dimensions; it must be (batch, heads_q, seqlen_q)"},
        Forward{"lse_shape_packed", packed_forward, set(&F::lse, tensor(4, DType::f32, {5, 4})),
                "lse has shape (5, 4); it must be (heads_q, total_q) = (4, 5)"},
        Forward{"sink_shape", dense_forward, set(&F::sink, tensor(5, DType::f32, {2})),
                "sink has shape (2); it must be (heads_q) = (4)"}),
    case_name<ForwardArgs>);

INSTANTIATE_TEST_SUITE_P(
    Heads, ForwardError,
    testing::Values(
        Forward{"no_query_heads", dense_forward, set(&F::q, tensor(0, DType::f32, {2, 5, 0, 16})),
                "q has 0 heads; at least one is needed"},
        Forward{"no_key_heads", dense_forward,
                [](F& a) {
                  a.k = tensor(1, DType::f32, {2, 7, 0, 16});
                  a.v = tensor(2, DType::f32, {2, 7, 0, 8});
                },
                "k has 0 heads; at least one is needed"},
        Forward{
            "heads_not_multiple", dense_forward,
            [](F& a) {
              a.k = tensor(1, DType::f32, {2, 7, 3, 16});
              a.v = tensor(2, DType::f32, {2, 7, 3, 8});
            },
            "heads_q 4 is not a multiple of heads_kv 3; each kv head serves the same number of query heads"},
        Forward{"head_dim_large", dense_forward,
                [](F& a) {
                  a.q = tensor(0, DType::f32, {2, 5, 4, 1032});
                  a.k = tensor(1, DType::f32, {2, 7, 2, 1032});
                },
                "head_dim 1032 is above 1024; split it over more heads"},
        Forward{"head_dim_v_large", dense_forward, set(&F::v, tensor(2, DType::f32, {2, 7, 2, 1025})),
                "head_dim_v 1025 is above 1024; split it over more heads"},
        Forward{"head_dim_zero", dense_forward, set(&F::v, tensor(2, DType::f32, {2, 7, 2, 0})),
                "head_dim_v is 0; it must be from 1 to 1024"}),
    case_name<ForwardArgs>);

INSTANTIATE_TEST_SUITE_P(
    DTypesAndDevices, ForwardError,
    testing::Values(
        Forward{"q_integer", dense_forward, [](F& a) { a.q.dtype = DType::i32; },
                "q is i32; convert it to f32, f16, bf16, e4m3 or s8"},
        Forward{"q_unknown", dense_forward, [](F& a) { a.q.dtype = static_cast<DType>(77); },
                "q is unknown; convert it to f32, f16, bf16, e4m3 or s8"},
        Forward{"k_dtype", dense_forward, [](F& a) { a.k.dtype = DType::bf16; },
                "k is bf16 but q is f32; convert it to f32"},
        Forward{"v_dtype", dense_forward, [](F& a) { a.v.dtype = DType::f16; },
                "v is f16 but q is f32; convert it to f32"},
        Forward{"out_dtype", dense_forward, [](F& a) { a.out.dtype = DType::bf16; },
                "out is bf16 but q is f32; convert it to f32"},
        Forward{"out_dtype_e4m3", e4m3_forward, [](F& a) { a.out.dtype = DType::e4m3; },
                "out is e4m3; convert it to f32, f16 or bf16"},
        Forward{"lse_dtype", dense_forward, [](F& a) { a.lse.dtype = DType::bf16; },
                "lse is bf16; convert it to f32"},
        Forward{"max_logits_dtype", dense_forward, set(&F::max_logits, tensor(13, DType::f16, {2, 4, 5})),
                "max_logits is f16; convert it to f32"},
        Forward{"sink_dtype", dense_forward, set(&F::sink, tensor(5, DType::bf16, {4})),
                "sink is bf16; convert it to f32"},
        Forward{"cu_seqlens_dtype", packed_forward, [](F& a) { a.cu_seqlens_q.dtype = DType::f32; },
                "cu_seqlens_q is f32; convert it to i32 or i64"},
        Forward{"seqused_dtype", dense_forward, set(&F::seqused_k, tensor(5, DType::bf16, {2})),
                "seqused_k is bf16; convert it to i32 or i64"},
        Forward{"device_kind", dense_forward, [](F& a) { a.q.device.kind = static_cast<Device::Kind>(9); },
                "q is on a device of kind 9; use cpu (0) or cuda (1)"},
        Forward{"device_index", dense_forward, [](F& a) { a.q = on_gpu(a.q, -1); },
                "q is on cuda device -1; devices count from 0"},
        Forward{"k_device", dense_forward, [](F& a) { a.k = on_gpu(a.k, 1); },
                "k is on cuda:1 but q is on cpu; move it there"},
        Forward{"q_device", dense_forward, [](F& a) { a.q = on_gpu(a.q, 0); },
                "k is on cpu but q is on cuda:0; move it there"},
        Forward{"other_gpu", dense_forward,
                [](F& a) {
                  a.q = on_gpu(a.q, 0);
                  a.k = on_gpu(a.k, 0);
                  a.v = on_gpu(a.v, 2);
                },
                "v is on cuda:2 but q is on cuda:0; move it there"},
        Forward{"host_metadata", packed_forward,
                [](F& a) {
                  a.q = on_gpu(a.q, 0);
                  a.k = on_gpu(a.k, 0);
                  a.v = on_gpu(a.v, 0);
                },
                "cu_seqlens_q is on cpu but q is on cuda:0; move it there"},
        Forward{"lse_device", dense_forward, [](F& a) { a.lse = on_gpu(a.lse, 0); },
                "lse is on cuda:0 but q is on cpu; move it there"},
        Forward{"scale_without_e4m3", dense_forward, set(&F::k_scale, tensor(5, DType::f32, {1})),
                "k_scale is given but k is f32; scales are for 8-bit tensors, leave it out"},
        Forward{"scale_rank_one", e4m3_forward, set(&F::q_scale, tensor(5, DType::f32, {2})),
                "q_scale has shape (2); it must be (1) or (batch, heads_kv) = (1)"},
        Forward{
            "scale_shape", e4m3_forward, set(&F::v_scale, tensor(5, DType::f32, {2, 4})),
            "v_scale has shape (2, 4); it must be (1), (batch, heads_kv) or (entries, heads_kv, rows), here "
            "(1), (2, 2) or (2, 2, 7)"},
        Forward{"scale_dtype", e4m3_forward, set(&F::q_scale, tensor(5, DType::f16, {1})),
                "q_scale is f16; convert it to f32"}),
    case_name<ForwardArgs>);

INSTANTIATE_TEST_SUITE_P(
    EightBitQueriesOnACache, ForwardError,
    testing::Values(
        Forward{"queries_in_s8", e4m3_paged_forward,
                [](F& a) { a.q.dtype = a.k.dtype = a.v.dtype = DType::s8; },
                "page_table is given with q in s8; pass q in f16, bf16 or f32, beside which k and v may stay "
                "in s8"},
        Forward{"keys_in_another_dtype", e4m3_paged_forward, [](F& a) { a.k.dtype = a.v.dtype = DType::s8; },
                "k is s8 but q is e4m3; convert it to e4m3"},
        Forward{"precision_in_eight_bits", e4m3_paged_forward,
                [](F& a) { a.options.precision = Precision::fp8; },
                "page_table is given with an 8-bit precision; leave the precision exact, which takes k and v "
                "of a cache in 8 bits, and in e4m3 q too"},
        Forward{"scales_of_queries_by_row", e4m3_paged_forward,
                set(&F::q_scale, tensor(5, DType::f32, {2, 4, 5})),
                "q_scale has 3 dimensions; it must be (1) or (batch, heads_kv)"},
        Forward{"scales_of_queries_by_head", e4m3_paged_forward,
                set(&F::q_scale, tensor(5, DType::f32, {2, 4})),
                "q_scale has shape (2, 4); it must be (1) or (batch, heads_kv) = (2, 2)"},
        Forward{
            "scales_of_pages", e4m3_paged_forward, set(&F::k_scale, tensor(5, DType::f32, {6, 2})),
            "k_scale has shape (6, 2); it must be (1), (batch, heads_kv) or (pages, heads_kv, page_size), "
            "here (1), (2, 2) or (6, 2, 4)"},
        Forward{"scales_of_rows_before_heads", e4m3_paged_forward,
                set(&F::v_scale, tensor(5, DType::f32, {6, 4, 2})),
                "v_scale has shape (6, 4, 2); it must be (1), (batch, heads_kv) or (pages, heads_kv, "
                "page_size), here (1), (2, 2) or (6, 2, 4)"},
        Forward{
            "scales_of_three_rows", e4m3_forward, set(&F::k_scale, tensor(5, DType::f32, {2, 2, 3})),
            "k_scale has shape (2, 2, 3); it must be (1), (batch, heads_kv) or (entries, heads_kv, rows), "
            "here (1), (2, 2) or (2, 2, 7)"}),
    case_name<ForwardArgs>);

INSTANTIATE_TEST_SUITE_P(
    Memory, ForwardError,
    testing::Values(
        Forward{"null_data", dense_forward, [](F& a) { a.v.data = nullptr; },
                "v has shape (2, 7, 2, 8) but no data; its address is NULL"},
        Forward{"null_out", dense_forward, [](F& a) { a.out.data = nullptr; },
                "out has shape (2, 5, 4, 8) but no data; its address is NULL"},
        Forward{"misaligned", dense_forward, [](F& a) { a.k.data = reinterpret_cast<const void*>(0x1002); },
                "k is at address 0x1002; f32 elements need an address that is a multiple of 4"},
        Forward{"last_dimension", dense_forward, [](F& a) { a.q.stride[3] = 2; },
                "q has stride 2 in its last dimension; the last dimension must be contiguous (stride 1): "
                "copy q first"},
        Forward{"last_dimension_expanded", dense_forward, [](F& a) { a.k.stride[3] = 0; },
                "k has stride 0 in its last dimension; the last dimension must be contiguous (stride 1): "
                "copy k first"},
        Forward{"last_dimension_out", dense_forward, [](F& a) { a.out.stride[3] = -1; },
                "out has stride -1 in its last dimension; the last dimension must be contiguous (stride 1): "
                "copy out first"},
        Forward{"out_expanded", dense_forward, [](F& a) { a.out.stride[0] = 0; },
                "out of shape (2, 5, 4, 8) and strides (0, 32, 8, 1) overlaps itself in dimension 0; every "
                "element of an output needs memory of its own"},
        Forward{"out_overlaps", dense_forward, [](F& a) { a.out.stride[2] = 4; },
                "out of shape (2, 5, 4, 8) and strides (160, 32, 4, 1) overlaps itself in dimension 2; every "
                "element of an output needs memory of its own"},
        Forward{"lse_expanded", dense_forward, [](F& a) { a.lse.stride[1] = 0; },
                "lse of shape (2, 4, 5) and strides (20, 0, 1) overlaps itself in dimension 1; every element "
                "of an output needs memory of its own"},
        Forward{"out_is_input", dense_forward, [](F& a) { a.out.data = const_cast<void*>(a.v.data); },
                "out shares memory with v; an output needs memory of its own"},
        Forward{"lse_is_sink", dense_forward,
                [](F& a) {
                  a.sink = tensor(5, DType::f32, {4});
                  a.lse.data = static_cast<std::byte*>(const_cast<void*>(a.sink.data)) - 12;
                },
                "lse shares memory with sink; an output needs memory of its own"},
        Forward{"lse_is_out", dense_forward, [](F& a) { a.lse.data = a.out.data; },
                "lse shares memory with out; an output needs memory of its own"},
        Forward{"max_logits_is_lse", dense_forward, [](F& a) { a.max_logits = a.lse; },
                "max_logits shares memory with lse; an output needs memory of its own"},
        Forward{"too_many_elements", dense_forward, [](F& a) { a.q.shape[1] = huge; },
                "q of shape (2, 4611686018427387904, 4, 16) and strides (320, 64, 16, 1) spans more than "
                "9223372036854775807 bytes; offsets must fit 63 bits"},
        // Whose strides, of a contiguous tensor, overflow themselves.
        Forward{
            "too_many_rows", dense_forward,
            [](F& a) {
              a.q = ConstTensor(a.q.data, DType::f32, {2, huge, huge, 16});
            },
            "q of shape (2, 4611686018427387904, 4611686018427387904, 16) and strides (0, 0, 16, 1) spans "
            "more than 9223372036854775807 bytes; offsets must fit 63 bits"},
        Forward{"too_long_stride", dense_forward, [](F& a) { a.k.stride[0] = huge; },
                "k of shape (2, 7, 2, 16) and strides (4611686018427387904, 32, 16, 1) spans more than "
                "9223372036854775807 bytes; offsets must fit 63 bits"},
        Forward{"most_negative_stride", dense_forward,
                [](F& a) { a.out.stride[0] = std::numeric_limits<std::int64_t>::min(); },
                "out of shape (2, 5, 4, 8) and strides (-9223372036854775808, 32, 8, 1) spans more than "
                "9223372036854775807 bytes; offsets must fit 63 bits"}),
    case_name<ForwardArgs>);

}  // namespace
}  // namespace tandem::test
