// What make_problem makes of legal arguments.
#include "api/problem.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace tandem {
namespace {

/// Memory that every tensor of a test may point at; make_problem does not read it.
alignas(64) std::byte memory[1 << 20];

Tensor tensor(DType dtype, std::initializer_list<std::int64_t> shape, std::size_t slot = 0) {
  return {memory + slot * 65536, dtype, shape};
}

ForwardArgs dense() {
  ForwardArgs a;
  a.q = tensor(DType::f32, {2, 5, 4, 16}, 0);
  a.k = tensor(DType::f32, {2, 7, 2, 16}, 1);
  a.v = tensor(DType::f32, {2, 7, 2, 8}, 2);
  a.out = tensor(DType::f32, {2, 5, 4, 8}, 3);
  return a;
}

TEST(Problem, TakesSizesAndStridesFromDenseTensors) {
  const Problem p = make_problem(dense());
  EXPECT_EQ(p.pass, Pass::forward);
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.heads_q, 4);
  EXPECT_EQ(p.heads_kv, 2);
  EXPECT_EQ(p.head_dim_qk, 16);
  EXPECT_EQ(p.head_dim_v, 8);
  EXPECT_EQ(p.rows_q, 5);
  EXPECT_EQ(p.rows_k, 7);
  EXPECT_FLOAT_EQ(p.scale, 0.25F);
  EXPECT_EQ(p.q.batch_stride, 5 * 4 * 16);
  EXPECT_EQ(p.q.row_stride, 4 * 16);
  EXPECT_EQ(p.q.head_stride, 16);
  EXPECT_FALSE(p.lse.given());
  EXPECT_EQ(p.window_left, -1);
  EXPECT_EQ(p.window_right, -1);
}

TEST(Problem, FoldsCausalIntoWindowRight) {
  ForwardArgs a = dense();
  a.options.causal = true;
  EXPECT_EQ(make_problem(a).window_right, 0);
  a.options.window_right = 2;
  EXPECT_EQ(make_problem(a).window_right, 0);
}

}  // namespace
}  // namespace tandem
