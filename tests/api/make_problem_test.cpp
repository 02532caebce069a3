// What make_problem makes of legal arguments.
#include "problem/problem.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>

#include "api/make_problem.hpp"
#include "arguments.hpp"

namespace tandem::test {
namespace {

constexpr std::int64_t odd = 987654321;  // no index but 0 may be multiplied by it

TEST(Problem, TakesSizesAndStridesFromDenseTensors) {
  const Problem p = make_problem(dense_forward());
  EXPECT_EQ(p.pass, Pass::forward);
  EXPECT_EQ(p.device, Device{});
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.heads_q, 4);
  EXPECT_EQ(p.heads_kv, 2);
  EXPECT_EQ(p.group(), 2);
  EXPECT_EQ(p.head_dim_qk, 16);
  EXPECT_EQ(p.head_dim_v, 8);
  EXPECT_EQ(p.rows_q, 5);
  EXPECT_EQ(p.rows_k, 7);
  EXPECT_FALSE(p.packed_q);
  EXPECT_FALSE(p.packed_k);
  EXPECT_FLOAT_EQ(p.scale, 0.25F);
  EXPECT_EQ(p.q.batch_stride, 5 * 4 * 16);
  EXPECT_EQ(p.q.row_stride, 4 * 16);
  EXPECT_EQ(p.q.head_stride, 16);
  EXPECT_EQ(p.lse.batch_stride, 4 * 5);
  EXPECT_EQ(p.lse.head_stride, 5);
  EXPECT_EQ(p.lse.row_stride, 1);
  EXPECT_EQ(p.window_left, -1);
  EXPECT_EQ(p.window_right, -1);
  EXPECT_EQ(p.sink, nullptr);
}

TEST(Problem, LeavesOutWhatIsNotGiven) {
  ForwardArgs a = dense_forward();
  a.lse = {};
  const Problem p = make_problem(a);
  EXPECT_FALSE(p.lse.given());
  EXPECT_FALSE(p.cu_seqlens_q.given());
  EXPECT_FALSE(p.seqused_k.given());
  EXPECT_EQ(p.q_scale.at(1, 1), 1.0F);
}

TEST(Problem, TakesPackedTensors) {
  const Problem p = make_problem(packed_forward());
  EXPECT_TRUE(p.packed_q);
  EXPECT_TRUE(p.packed_k);
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.rows_q, 5);
  EXPECT_EQ(p.q.batch_stride, 0);
  EXPECT_EQ(p.q.row_stride, 64);
  EXPECT_EQ(p.lse.batch_stride, 0);
  EXPECT_EQ(p.lse.head_stride, 5);
  EXPECT_EQ(query_rows(p, 1).begin, 3);
  EXPECT_EQ(key_rows(p, 1).end, 7);
}

TEST(Problem, TakesPackedQueriesWithDenseKeys) {
  ForwardArgs a = packed_forward();
  a.cu_seqlens_k = {};
  a.k = tensor(1, DType::f32, {2, 7, 2, 16});
  a.v = tensor(2, DType::f32, {2, 7, 2, 8});
  const Problem p = make_problem(a);
  EXPECT_TRUE(p.packed_q);
  EXPECT_FALSE(p.packed_k);
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.rows_k, 7);
}

TEST(Problem, TakesDenseQueriesWithPackedKeys) {
  ForwardArgs a = dense_forward();
  const ForwardArgs packed = packed_forward();
  a.k = packed.k;
  a.v = packed.v;
  a.cu_seqlens_k = packed.cu_seqlens_k;
  const Problem p = make_problem(a);
  EXPECT_FALSE(p.packed_q);
  EXPECT_TRUE(p.packed_k);
  EXPECT_EQ(p.k.batch_stride, 0);
}

TEST(Problem, TakesWideStridedLengths) {
  static const std::array<std::int64_t, 6> every_other{0, -9, 3, -9, 5, -9};
  ForwardArgs a = packed_forward();
  a.cu_seqlens_q = ConstTensor(every_other.data(), DType::i64, {3});
  a.cu_seqlens_q.stride[0] = 2;
  a.options.check = true;
  const Problem p = make_problem(a);
  EXPECT_TRUE(p.cu_seqlens_q.wide);
  EXPECT_EQ(p.cu_seqlens_q[2], 5);
}

TEST(Problem, AcceptsTrailingRowsAndFullUse) {
  static const std::array<std::int32_t, 3> short_of_end{0, 3, 4};
  static const std::array<std::int32_t, 2> all_used{3, 1};
  ForwardArgs a = packed_forward();
  a.cu_seqlens_q = ConstTensor(short_of_end.data(), DType::i32, {3});
  a.seqused_q = ConstTensor(all_used.data(), DType::i32, {2});
  a.options.check = true;
  EXPECT_NO_THROW(make_problem(a));
}

TEST(Problem, IgnoresStridesOfSizeOneDimensions) {
  ForwardArgs a;
  a.q = tensor(0, DType::f32, {1, 1, 1, 8});
  a.k = tensor(1, DType::f32, {1, 1, 1, 8});
  a.v = tensor(2, DType::f32, {1, 1, 1, 8});
  a.out = tensor(3, DType::f32, {1, 1, 1, 8});
  a.lse = tensor(4, DType::f32, {1, 1, 1});
  for (ConstTensor* t : {&a.q, &a.k, &a.v})
    t->stride = {-odd, 0, std::numeric_limits<std::int64_t>::max(), 1};
  a.out.stride = {0, 0, std::numeric_limits<std::int64_t>::min(), 1};
  a.lse.stride = {0, -odd, 0, 0};
  const Problem p = make_problem(a);
  EXPECT_EQ(p.q.batch_stride, 0);
  EXPECT_EQ(p.q.head_stride, 0);
  EXPECT_EQ(p.out.head_stride, 0);
}

TEST(Problem, AcceptsAnyLastStrideOfOneElement) {
  ForwardArgs a = dense_forward();
  a.v = tensor(2, DType::f32, {2, 7, 2, 1});
  a.v.stride[3] = 17;
  a.out = tensor(3, DType::f32, {2, 5, 4, 1});
  EXPECT_EQ(make_problem(a).head_dim_v, 1);
}

TEST(Problem, AcceptsExpandedAndReversedInputs) {
  ForwardArgs a = dense_forward();
  a.k.stride[0] = 0;
  a.k.stride[2] = 0;
  a.q.stride[1] = -a.q.stride[1];
  a.q.data = static_cast<const float*>(a.q.data) + std::ptrdiff_t{4} * 64;
  const Problem p = make_problem(a);
  EXPECT_EQ(p.k.batch_stride, 0);
  EXPECT_EQ(p.k.head_stride, 0);
  EXPECT_EQ(p.q.row_stride, -64);
}

TEST(Problem, AcceptsSlicesOfOneFusedBuffer) {
  // dq, dk and dv as interleaved slices of (2, 7, 4 + 2 + 2 heads, 16): their address ranges meet, their
  // elements do not.
  BackwardArgs a = dense_backward();
  a.q = tensor(0, DType::f32, {2, 7, 4, 16});
  a.v = tensor(2, DType::f32, {2, 7, 2, 16});
  a.out = tensor(3, DType::f32, {2, 7, 4, 16});
  a.dout = tensor(6, DType::f32, {2, 7, 4, 16});
  a.lse = tensor(4, DType::f32, {2, 4, 7});
  a.dlse = {};
  const auto slice = [](std::int64_t first_head, std::int64_t heads) {
    Tensor t = tensor(8, DType::f32, {2, 7, heads, 16});
    t.data = static_cast<float*>(t.data) + first_head * 16;
    t.stride = {7 * 8 * 16, 8 * 16, 16, 1};
    return t;
  };
  a.dq = slice(0, 4);
  a.dk = slice(4, 2);
  a.dv = slice(6, 2);
  const Problem p = make_problem(a);
  EXPECT_EQ(p.dk.row_stride, 8 * 16);
}

TEST(Problem, AcceptsTransposedOutputs) {
  ForwardArgs a = dense_forward();
  a.out.stride = {4 * 5 * 8, 8, 5 * 8, 1};  // (batch, heads, seqlen, head_dim) in memory
  EXPECT_EQ(make_problem(a).out.row_stride, 8);
}

TEST(Problem, GivesEmptyTensorsAnAddress) {
  ForwardArgs a = dense_forward();
  a.k = ConstTensor(nullptr, DType::f32, {2, 0, 2, 16});
  a.v = ConstTensor(nullptr, DType::f32, {2, 0, 2, 8});
  const Problem p = make_problem(a);
  EXPECT_EQ(p.rows_k, 0);
  EXPECT_TRUE(p.k.given());
}

TEST(Problem, AcceptsEmptyBatches) {
  ForwardArgs a;
  a.q = ConstTensor(nullptr, DType::bf16, {0, 5, 4, 16});
  a.k = ConstTensor(nullptr, DType::bf16, {0, 7, 2, 16});
  a.v = ConstTensor(nullptr, DType::bf16, {0, 7, 2, 8});
  a.out = Tensor(nullptr, DType::bf16, {0, 5, 4, 8});
  EXPECT_EQ(make_problem(a).batch, 0);
}

TEST(Problem, FoldsCausalIntoWindowRight) {
  ForwardArgs a = dense_forward();
  a.options.causal = true;
  EXPECT_EQ(make_problem(a).window_right, 0);
  a.options.window_right = 2;
  EXPECT_EQ(make_problem(a).window_right, 0);
}

TEST(Problem, TakesAMaskBySequence) {
  ForwardArgs a = dense_forward();
  static std::array<std::int64_t, 4> flags{0, 7, 3, 7};
  a.options.window_right = 2;
  a.causal_by_sequence = Tensor(flags.data(), DType::i64, {2});
  a.causal_by_sequence.stride[0] = 2;
  const Problem p = make_problem(a);
  EXPECT_EQ(window_of(p, 0).right, 2);
  EXPECT_EQ(window_of(p, 1).right, 0);
  a.causal_by_sequence.dtype = DType::i32;
  a.q.shape[1] = a.out.shape[1] = a.lse.shape[2] = 1;
  EXPECT_FALSE(make_problem(a).causal_by_sequence.given()) << "one query sees all keys whatever it is";
}

TEST(Problem, FoldsWindowsThatHideNothing) {
  // 5 queries, 7 keys: the last query's diagonal is key 6, the first one's key 2, with 4 keys to its right.
  ForwardArgs a = dense_forward();
  a.options.window_left = 5;
  a.options.window_right = 3;
  EXPECT_EQ(make_problem(a).window_left, 5);
  EXPECT_EQ(make_problem(a).window_right, 3);
  a.options.window_left = 6;
  a.options.window_right = 4;
  EXPECT_EQ(make_problem(a).window_left, -1);
  EXPECT_EQ(make_problem(a).window_right, -1);
  a.options.window_left = std::numeric_limits<std::int64_t>::max();
  a.options.window_right = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(make_problem(a).window_left, -1);
  EXPECT_EQ(make_problem(a).window_right, -1);
}

TEST(Problem, KeepsWhatWindowsHideWhenFolding) {
  // Against the definition, for every window and every pair of lengths that used rows can give.
  for (std::int64_t left = -1; left <= 8; ++left) {
    for (std::int64_t right = -1; right <= 8; ++right) {
      ForwardArgs a = dense_forward();
      a.options.window_left = left;
      a.options.window_right = right;
      const Problem p = make_problem(a);
      for (std::int64_t seqlen_q = 1; seqlen_q <= 5; ++seqlen_q) {
        for (std::int64_t seqlen_k = 0; seqlen_k <= 7; ++seqlen_k) {
          for (std::int64_t i = 0; i < seqlen_q; ++i) {
            const KeyRange visible = visible_keys(window_of(p, 0), i, seqlen_q, seqlen_k);
            for (std::int64_t j = 0; j < seqlen_k; ++j) {
              const std::int64_t diagonal = i + seqlen_k - seqlen_q;
              const bool sees = (left < 0 || j >= diagonal - left) && (right < 0 || j <= diagonal + right);
              ASSERT_EQ(j >= visible.first && j < visible.last, sees)
                  << left << ' ' << right << ' ' << i << ' ' << j;
            }
          }
        }
      }
    }
  }
}

TEST(Problem, CountsPairs) {
  Problem p;
  EXPECT_EQ(counted_pairs(window_of(p, 0), 5, 7), 35.0);
  p.window_right = 0;
  EXPECT_EQ(counted_pairs(window_of(p, 0), 6, 6), 18.0) << "a causal square is half";
  EXPECT_EQ(counted_pairs(window_of(p, 0), 2, 4), 3.0 + 4.0);
  EXPECT_EQ(counted_pairs(window_of(p, 0), 4, 2), 0.0 + 0.0 + 1.0 + 2.0);
  p.window_left = 1;
  EXPECT_EQ(counted_pairs(window_of(p, 0), 4, 4), 1.0 + 2.0 + 2.0 + 2.0);
}

TEST(Problem, TakesScales) {
  ForwardArgs a = e4m3_forward();
  const Tensor per_head = tensor(5, DType::f32, {2, 2});
  static_cast<float*>(per_head.data)[3] = 2.5F;
  a.k_scale = per_head;
  const Tensor one = tensor(6, DType::f32, {1});
  static_cast<float*>(one.data)[0] = 0.5F;
  a.v_scale = one;
  const Problem p = make_problem(a);
  EXPECT_EQ(p.q_scale.at(1, 1), 1.0F);
  EXPECT_EQ(p.k_scale.at(1, 1), 2.5F);
  EXPECT_EQ(p.v_scale.at(1, 1), 0.5F);
  EXPECT_EQ(p.out.dtype, DType::bf16);
}

TEST(Problem, TakesEightBitQueriesOnACache) {
  ForwardArgs a = e4m3_paged_forward();
  const Tensor scale = tensor(5, DType::f32, {2, 2});
  static_cast<float*>(scale.data)[2] = 3.0F;
  a.q_scale = scale;
  const Problem p = make_problem(a);
  EXPECT_TRUE(p.quantized_inputs() && p.of_cache() && !p.mixed());
  EXPECT_EQ(p.q_scale.at(1, 0), 3.0F);
  EXPECT_EQ(p.rows_k, 8);
}

TEST(Problem, TakesHeadDimensionsThatAreNoMultipleOf8) {
  ForwardArgs a = dense_forward();
  a.v = tensor(2, DType::f32, {2, 7, 2, 5});
  a.out = tensor(3, DType::f32, {2, 5, 4, 5});
  EXPECT_EQ(make_problem(a).head_dim_v, 5);
}

TEST(Problem, KeepsOptions) {
  ForwardArgs a = dense_forward();
  a.options.scale = -3.0F;
  a.options.softcap = 30.0F;
  a.options.deterministic = true;
  const Problem p = make_problem(a);
  EXPECT_EQ(p.scale, -3.0F);
  EXPECT_EQ(p.softcap, 30.0F);
  EXPECT_TRUE(p.deterministic);
}

TEST(Problem, TakesBackwardTensors) {
  const BackwardArgs a = dense_backward();
  const Problem p = make_problem(a);
  EXPECT_EQ(p.pass, Pass::backward);
  EXPECT_EQ(p.dq.data, a.dq.data);
  EXPECT_EQ(p.dk.row_stride, 2 * 16);
  EXPECT_EQ(p.dv.row_stride, 2 * 8);
  EXPECT_EQ(p.dlse.head_stride, 5);
  EXPECT_EQ(p.dsink, a.dsink.data);
  EXPECT_EQ(p.sink, a.sink.data);
}

TEST(Problem, DescribedTensorsNeedNoMemory) {
  ForwardArgs a = packed_forward();
  for (ConstTensor* t : {&a.q, &a.k, &a.v, &a.cu_seqlens_q, &a.cu_seqlens_k}) t->data = nullptr;
  a.out.data = nullptr;
  a.lse.data = nullptr;
  a.options.check = true;
  EXPECT_THROW(make_problem(a), Error);
  const Problem p = make_problem(a, Memory::described);
  EXPECT_TRUE(p.cu_seqlens_q.given());
  EXPECT_TRUE(p.lse.given());
}

}  // namespace
}  // namespace tandem::test
