// Every way in which arguments can be wrong, and the whole message that says so: rule, value, remedy.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "api/problem.hpp"
#include "arguments.hpp"

namespace tandem::test {
namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t huge = std::int64_t{1} << 62;

template <typename Args>
struct Case {
  const char* name;
  Args (*legal)();
  void (*break_it)(Args&);
  const char* message;

  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};

template <typename Args>
void expect_message(const Case<Args>& c) {
  Args args = c.legal();
  ASSERT_NO_THROW(make_problem(args)) << "the arguments are wrong before they are broken";
  c.break_it(args);
  try {
    make_problem(args);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::invalid_argument);
    EXPECT_STREQ(e.what(), c.message);
  }
}

template <typename Args>
std::string case_name(const testing::TestParamInfo<Case<Args>>& info) {
  return info.param.name;
}

Tensor on_gpu(Tensor t, int index) {
  t.device = {.kind = Device::Kind::cuda, .index = index};
  return t;
}
ConstTensor on_gpu(ConstTensor t, int index) {
  t.device = {.kind = Device::Kind::cuda, .index = index};
  return t;
}

using Forward = Case<ForwardArgs>;
using F = ForwardArgs;
class ForwardError : public testing::TestWithParam<Forward> {};
TEST_P(ForwardError, SaysRuleValueAndRemedy) {
  expect_message(GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ForwardError,
    testing::Values(
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
        Forward{"q_rank", dense_forward,
                [](F& a) {
                  a.q = tensor(0, DType::f32, {5, 4, 16});
                },
                "q has 3 dimensions; it must be (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, "
                "head_dim) with "
                "cu_seqlens_q"},
        Forward{"q_rank_five", dense_forward,
                [](F& a) {
                  a.q = tensor(0, DType::f32, {1, 2, 5, 4, 16});
                },
                "q has 5 dimensions; it must be (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, "
                "head_dim) with "
                "cu_seqlens_q"},
        Forward{"q_rank_packed", packed_forward,
                [](F& a) {
                  a.q = tensor(0, DType::f32, {1, 5, 4, 16});
                },
                "q has 4 dimensions; it must be (total_q, heads_q, head_dim), since cu_seqlens_q is given"},
        Forward{"k_rank", dense_forward,
                [](F& a) {
                  a.k = tensor(1, DType::f32, {7, 2, 16});
                },
                "k has 3 dimensions; it must be (batch, seqlen_k, heads_kv, head_dim), or (total_k, "
                "heads_kv, head_dim) with "
                "cu_seqlens_k"},
        Forward{"k_rank_packed", packed_forward,
                [](F& a) {
                  a.k = tensor(1, DType::f32, {1, 7, 2, 16});
                },
                "k has 4 dimensions; it must be (total_k, heads_kv, head_dim), since cu_seqlens_k is given"},
        Forward{"v_rank", dense_forward,
                [](F& a) {
                  a.v = tensor(2, DType::f32, {7, 2, 8});
                },
                "v has 3 dimensions; it must be (batch, seqlen_k, heads_kv, head_dim_v)"},
        Forward{"v_rank_packed", packed_forward,
                [](F& a) {
                  a.v = tensor(2, DType::f32, {1, 7, 2, 8});
                },
                "v has 4 dimensions; it must be (total_k, heads_kv, head_dim_v)"},
        Forward{"negative_size", dense_forward, [](F& a) { a.q.shape[1] = -5; },
                "q has shape (2, -5, 4, 16); no size may be negative"},
        Forward{"k_batch", dense_forward,
                [](F& a) {
                  a.k = tensor(1, DType::f32, {3, 7, 2, 16});
                },
                "k has shape (3, 7, 2, 16); it must be (batch of q, seqlen_k, heads_kv, head_dim of q) = (2, "
                "7, 2, 16)"},
        Forward{"k_head_dim", dense_forward,
                [](F& a) {
                  a.k = tensor(1, DType::f32, {2, 7, 2, 24});
                },
                "k has shape (2, 7, 2, 24); it must be (batch of q, seqlen_k, heads_kv, head_dim of q) = (2, "
                "7, 2, 16)"},
        Forward{"k_head_dim_packed", packed_forward,
                [](F& a) {
                  a.k = tensor(1, DType::f32, {7, 2, 24});
                },
                "k has shape (7, 2, 24); it must be (total_k, heads_kv, head_dim of q) = (7, 2, 16)"},
        Forward{"v_seqlen", dense_forward,
                [](F& a) {
                  a.v = tensor(2, DType::f32, {2, 6, 2, 8});
                },
                "v has shape (2, 6, 2, 8); it must be (batch of q, seqlen_k of k, heads_kv of k, head_dim_v) "
                "= (2, 7, 2, 8)"},
        Forward{"v_heads_packed", packed_forward,
                [](F& a) {
                  a.v = tensor(2, DType::f32, {7, 4, 8});
                },
                "v has shape (7, 4, 8); it must be (total_k of k, heads_kv of k, head_dim_v) = (7, 2, 8)"},
        Forward{
            "out_head_dim", dense_forward,
            [](F& a) {
              a.out = tensor(3, DType::f32, {2, 5, 4, 16});
            },
            "out has shape (2, 5, 4, 16); it must be (batch, seqlen_q, heads_q, head_dim_v) = (2, 5, 4, 8)"},
        Forward{"out_rows_packed", packed_forward,
                [](F& a) {
                  a.out = tensor(3, DType::f32, {6, 4, 8});
                },
                "out has shape (6, 4, 8); it must be (total_q, heads_q, head_dim_v) = (5, 4, 8)"},
        Forward{"lse_shape", dense_forward,
                [](F& a) {
                  a.lse = tensor(4, DType::f32, {2, 5, 4});
                },
                "lse has shape (2, 5, 4); it must be (batch, heads_q, seqlen_q) = (2, 4, 5)"},
        Forward{"lse_rank", dense_forward,
                [](F& a) {
                  a.lse = tensor(4, DType::f32, {4, 5});
                },
                "lse has 2 dimensions; it must be (batch, heads_q, seqlen_q)"},
        Forward{"lse_shape_packed", packed_forward,
                [](F& a) {
                  a.lse = tensor(4, DType::f32, {5, 4});
                },
                "lse has shape (5, 4); it must be (heads_q, total_q) = (4, 5)"},
        Forward{"sink_shape", dense_forward, [](F& a) { a.sink = tensor(5, DType::f32, {2}); },
                "sink has shape (2); it must be (heads_q) = (4)"}),
    case_name<ForwardArgs>);

INSTANTIATE_TEST_SUITE_P(
    Heads, ForwardError,
    testing::Values(
        Forward{"no_query_heads", dense_forward,
                [](F& a) {
                  a.q = tensor(0, DType::f32, {2, 5, 0, 16});
                },
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
        Forward{"head_dim_multiple", dense_forward,
                [](F& a) {
                  a.q = tensor(0, DType::f32, {2, 5, 4, 65});
                  a.k = tensor(1, DType::f32, {2, 7, 2, 65});
                },
                "head_dim 65 is not a multiple of 8; pad q and k to 72, or pass pad=True"},
        Forward{"head_dim_v_multiple", dense_forward,
                [](F& a) {
                  a.v = tensor(2, DType::f32, {2, 7, 2, 12});
                },
                "head_dim_v 12 is not a multiple of 8; pad v to 16, or pass pad=True"},
        Forward{"head_dim_large", dense_forward,
                [](F& a) {
                  a.q = tensor(0, DType::f32, {2, 5, 4, 264});
                  a.k = tensor(1, DType::f32, {2, 7, 2, 264});
                },
                "head_dim 264 is above 256; split it over more heads"},
        Forward{"head_dim_large_padded", dense_forward,
                [](F& a) {
                  a.v = tensor(2, DType::f32, {2, 7, 2, 257});
                  a.options.pad = true;
                },
                "head_dim_v 257 is above 256; split it over more heads"},
        Forward{"head_dim_zero", dense_forward,
                [](F& a) {
                  a.v = tensor(2, DType::f32, {2, 7, 2, 0});
                },
                "head_dim_v is 0; it must be from 1 to 256"}),
    case_name<ForwardArgs>);

INSTANTIATE_TEST_SUITE_P(
    DTypesAndDevices, ForwardError,
    testing::Values(
        Forward{"q_integer", dense_forward, [](F& a) { a.q.dtype = DType::i32; },
                "q is i32; convert it to f32, f16, bf16 or e4m3"},
        Forward{"q_unknown", dense_forward, [](F& a) { a.q.dtype = static_cast<DType>(77); },
                "q is unknown; convert it to f32, f16, bf16 or e4m3"},
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
        Forward{"sink_dtype", dense_forward, [](F& a) { a.sink = tensor(5, DType::bf16, {4}); },
                "sink is bf16; convert it to f32"},
        Forward{"cu_seqlens_dtype", packed_forward, [](F& a) { a.cu_seqlens_q.dtype = DType::f32; },
                "cu_seqlens_q is f32; convert it to i32 or i64"},
        Forward{"seqused_dtype", dense_forward, [](F& a) { a.seqused_k = tensor(5, DType::bf16, {2}); },
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
        Forward{"scale_without_e4m3", dense_forward, [](F& a) { a.k_scale = tensor(5, DType::f32, {1}); },
                "k_scale is given but q is f32; scales are for e4m3 tensors, leave it out"},
        Forward{"scale_rank_one", e4m3_forward, [](F& a) { a.q_scale = tensor(5, DType::f32, {2}); },
                "q_scale has shape (2); it must be (1) or (batch, heads_kv) = (1)"},
        Forward{"scale_shape", e4m3_forward,
                [](F& a) {
                  a.v_scale = tensor(5, DType::f32, {2, 4});
                },
                "v_scale has shape (2, 4); it must be (1) or (batch, heads_kv) = (2, 2)"},
        Forward{"scale_dtype", e4m3_forward, [](F& a) { a.q_scale = tensor(5, DType::f16, {1}); },
                "q_scale is f16; convert it to f32"}),
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
                "element of an "
                "output needs memory of its own"},
        Forward{"out_overlaps", dense_forward, [](F& a) { a.out.stride[2] = 4; },
                "out of shape (2, 5, 4, 8) and strides (160, 32, 4, 1) overlaps itself in dimension 2; every "
                "element of an "
                "output needs memory of its own"},
        Forward{"lse_expanded", dense_forward, [](F& a) { a.lse.stride[1] = 0; },
                "lse of shape (2, 4, 5) and strides (20, 0, 1) overlaps itself in dimension 1; every element "
                "of an output "
                "needs memory of its own"},
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
        Forward{"too_many_elements", dense_forward, [](F& a) { a.q.shape[1] = huge; },
                "q of shape (2, 4611686018427387904, 4, 16) and strides (320, 64, 16, 1) spans more than "
                "9223372036854775807 bytes; offsets must fit 63 bits"},
        Forward{"too_long_stride", dense_forward, [](F& a) { a.k.stride[0] = huge; },
                "k of shape (2, 7, 2, 16) and strides (4611686018427387904, 32, 16, 1) spans more than "
                "9223372036854775807 bytes; offsets must fit 63 bits"},
        Forward{"most_negative_stride", dense_forward,
                [](F& a) { a.out.stride[0] = std::numeric_limits<std::int64_t>::min(); },
                "out of shape (2, 5, 4, 8) and strides (-9223372036854775808, 32, 8, 1) spans more than "
                "9223372036854775807 bytes; offsets must fit 63 bits"}),
    case_name<ForwardArgs>);

INSTANTIATE_TEST_SUITE_P(
    Options, ForwardError,
    testing::Values(Forward{"scale_nan", dense_forward, [](F& a) { a.options.scale = nan; },
                            "scale is nan; it must be finite"},
                    Forward{"scale_infinite", dense_forward, [](F& a) { a.options.scale = -infinity; },
                            "scale is -inf; it must be finite"},
                    Forward{"softcap_negative", dense_forward, [](F& a) { a.options.softcap = -1.5F; },
                            "softcap is -1.5; it must be finite and at least 0 (0: off)"},
                    Forward{"softcap_nan", dense_forward, [](F& a) { a.options.softcap = nan; },
                            "softcap is nan; it must be finite and at least 0 (0: off)"},
                    Forward{"softcap_infinite", dense_forward, [](F& a) { a.options.softcap = infinity; },
                            "softcap is inf; it must be finite and at least 0 (0: off)"},
                    Forward{"window_left", dense_forward, [](F& a) { a.options.window_left = -2; },
                            "window_left is -2; it must be at least 0, or -1 for unbounded"},
                    Forward{
                        "window_right", dense_forward,
                        [](F& a) {
                          a.options.window_right = std::numeric_limits<std::int64_t>::min();
                          a.options.causal = true;
                        },
                        "window_right is -9223372036854775808; it must be at least 0, or -1 for unbounded"}),
    case_name<ForwardArgs>);

/// packed_forward with contents of its own, to be checked.
template <typename Integer, std::size_t count>
ConstTensor values(const std::array<Integer, count>& contents) {
  return {
      contents.data(), sizeof(Integer) == 8 ? DType::i64 : DType::i32, {static_cast<std::int64_t>(count)}};
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
    Metadata, ForwardError,
    testing::Values(Forward{"cu_seqlens_rank", packed_forward,
                            [](F& a) {
                              a.cu_seqlens_q = tensor(5, DType::i32, {3, 1});
                            },
                            "cu_seqlens_q has 2 dimensions; it must be (batch + 1)"},
                    Forward{"cu_seqlens_empty", packed_forward,
                            [](F& a) { a.cu_seqlens_q = tensor(5, DType::i32, {0}); },
                            "cu_seqlens_q has shape (0); it needs batch + 1 elements, one at least"},
                    Forward{"cu_seqlens_k_count", packed_forward,
                            [](F& a) { a.cu_seqlens_k = tensor(5, DType::i32, {4}); },
                            "cu_seqlens_k has shape (4); it must be (batch + 1) = (3)"},
                    Forward{"seqused_count", dense_forward,
                            [](F& a) { a.seqused_q = tensor(5, DType::i64, {3}); },
                            "seqused_q has shape (3); it must be (batch) = (2)"},
                    Forward{"cu_seqlens_start", checked_packed,
                            [](F& a) {
                              static const std::array<std::int32_t, 3> c{1, 3, 5};
                              a.cu_seqlens_q = values(c);
                            },
                            "cu_seqlens_q[0] is 1; the first sequence starts at row 0"},
                    Forward{"cu_seqlens_descends", checked_packed,
                            [](F& a) {
                              static const std::array<std::int64_t, 3> c{0, 7, 4};
                              a.cu_seqlens_k = values(c);
                            },
                            "cu_seqlens_k[2] is 4, below cu_seqlens_k[1] = 7; offsets must ascend"},
                    Forward{"cu_seqlens_past_end", checked_packed,
                            [](F& a) {
                              static const std::array<std::int64_t, 3> c{0, 4, 8};
                              a.cu_seqlens_k = values(c);
                            },
                            "cu_seqlens_k[2] is 8; offsets are at most total_k = 7"},
                    Forward{"seqused_negative", checked_packed,
                            [](F& a) {
                              static const std::array<std::int32_t, 2> c{3, -1};
                              a.seqused_q = values(c);
                            },
                            "seqused_q[1] is -1; it must be from 0 to the length of sequence 1, 2"},
                    Forward{"seqused_past_end", checked_packed,
                            [](F& a) {
                              static const std::array<std::int32_t, 2> c{5, 3};
                              a.seqused_k = values(c);
                            },
                            "seqused_k[0] is 5; it must be from 0 to the length of sequence 0, 4"},
                    Forward{"seqused_past_seqlen", checked_dense,
                            [](F& a) {
                              static const std::array<std::int64_t, 2> c{7, 8};
                              a.seqused_k = values(c);
                            },
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
        Backward{"q_integer", dense_backward, [](B& a) { a.q.dtype = DType::s8; },
                 "q is s8; convert it to f32, f16 or bf16"},
        Backward{"out_missing", dense_backward, [](B& a) { a.out = {}; },
                 "out is missing; pass a tensor of shape (batch, seqlen_q, heads_q, head_dim_v)"},
        Backward{"lse_missing", dense_backward, [](B& a) { a.lse = {}; },
                 "lse is missing; pass a tensor of shape (batch, heads_q, seqlen_q), or (heads_q, total_q) "
                 "with cu_seqlens_q"},
        Backward{"dout_missing", dense_backward, [](B& a) { a.dout = {}; },
                 "dout is missing; pass a tensor of shape (batch, seqlen_q, heads_q, head_dim_v)"},
        Backward{"dq_missing", dense_backward, [](B& a) { a.dq = {}; },
                 "dq is missing; pass a tensor of shape (batch, seqlen_q, heads_q, head_dim)"},
        Backward{"dk_missing", dense_backward, [](B& a) { a.dk = {}; },
                 "dk is missing; pass a tensor of shape (batch, seqlen_k, heads_kv, head_dim)"},
        Backward{"dv_missing", dense_backward, [](B& a) { a.dv = {}; },
                 "dv is missing; pass a tensor of shape (batch, seqlen_k, heads_kv, head_dim_v)"},
        Backward{
            "dout_shape", dense_backward,
            [](B& a) {
              a.dout = tensor(6, DType::f32, {2, 5, 4, 16});
            },
            "dout has shape (2, 5, 4, 16); it must be (batch, seqlen_q, heads_q, head_dim_v) = (2, 5, 4, 8)"},
        Backward{
            "dk_shape", dense_backward,
            [](B& a) {
              a.dk = tensor(9, DType::f32, {2, 7, 4, 16});
            },
            "dk has shape (2, 7, 4, 16); it must be (batch, seqlen_k, heads_kv, head_dim) = (2, 7, 2, 16)"},
        Backward{"dlse_shape", dense_backward,
                 [](B& a) {
                   a.dlse = tensor(7, DType::f32, {2, 4, 6});
                 },
                 "dlse has shape (2, 4, 6); it must be (batch, heads_q, seqlen_q) = (2, 4, 5)"},
        Backward{"dq_dtype", dense_backward, [](B& a) { a.dq.dtype = DType::f16; },
                 "dq is f16 but q is f32; convert it to f32"},
        Backward{"dsink_shape", dense_backward, [](B& a) { a.dsink = tensor(11, DType::f32, {2}); },
                 "dsink has shape (2); it must be (heads_q) = (4)"},
        Backward{"dsink_without_sink", dense_backward, [](B& a) { a.sink = {}; },
                 "dsink is given without sink; pass both, or neither"},
        Backward{"dsink_expanded", dense_backward, [](B& a) { a.dsink.stride[0] = 0; },
                 "dsink of shape (4) and strides (0) overlaps itself in dimension 0; every element of an "
                 "output needs memory "
                 "of its own"},
        Backward{"dk_is_dv", dense_backward, [](B& a) { a.dv.data = a.dk.data; },
                 "dv shares memory with dk; an output needs memory of its own"},
        Backward{"dq_is_dout", dense_backward, [](B& a) { a.dq.data = const_cast<void*>(a.dout.data); },
                 "dq shares memory with dout; an output needs memory of its own"},
        Backward{"dk_expanded", dense_backward, [](B& a) { a.dk.stride[2] = 0; },
                 "dk of shape (2, 7, 2, 16) and strides (224, 32, 0, 1) overlaps itself in dimension 2; "
                 "every element of an "
                 "output needs memory of its own"},
        Backward{"dout_device", dense_backward, [](B& a) { a.dout = on_gpu(a.dout, 0); },
                 "dout is on cuda:0 but q is on cpu; move it there"}),
    case_name<BackwardArgs>);

}  // namespace
}  // namespace tandem::test
