// What make_problem makes of legal arguments, where no result of a call shows it: tests/contract has the
// rest.
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
