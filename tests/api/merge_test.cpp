// Every message that merge can give, whole.
#include <gtest/gtest.h>

#include <vector>

#include "arguments.hpp"
#include "error_case.hpp"
#include "tandem/cache.hpp"

namespace tandem::test {
namespace {

/// Three parts of (2, 5, 4, 8).
struct Parts {
  std::vector<ConstTensor> outs, lses;
  Tensor out = tensor(20, DType::bf16, {2, 5, 4, 8});
  Tensor lse = tensor(21, DType::f32, {2, 4, 5});

  Parts() {
    for (std::size_t i = 0; i < 3; ++i) {
      outs.emplace_back(tensor(i, DType::f32, {2, 5, 4, 8}));
      lses.emplace_back(tensor(10 + i, DType::f32, {2, 4, 5}));
    }
  }
};

Parts parts() {
  return {};
}

class MergeError : public testing::TestWithParam<Case<Parts>> {};

TEST_P(MergeError, NamesRuleValueAndRemedy) {
  expect_message(GetParam(),
                 [](const Parts& p) { merge({.outs = p.outs, .lses = p.lses, .out = p.out, .lse = p.lse}); });
}

const Case<Parts> merge_cases[] = {
    {"NoParts", parts, [](Parts& p) { p.outs.clear(), p.lses.clear(); },
     "outs has no parts; pass one at least"},
    {"Unequal", parts, [](Parts& p) { p.lses.pop_back(); },
     "outs has 3 parts and lses 2; each part has both"},
    {"Missing", parts, [](Parts& p) { p.outs[1] = {}; },
     "outs[1] is missing; pass a tensor of shape (batch, seqlen_q, heads_q, head_dim_v) or (total_q, "
     "heads_q, "
     "head_dim_v)"},
    {"Rank", parts,
     [](Parts& p) {
       p.outs[0] = tensor(0, DType::f32, {2, 5});
     },
     "outs[0] has 2 dimensions; it must be (batch, seqlen_q, heads_q, head_dim_v) or (total_q, heads_q, "
     "head_dim_v)"},
    {"Dtype", parts, [](Parts& p) { p.outs[0].dtype = DType::e4m3; },
     "outs[0] is e4m3; convert it to f32, f16 or bf16"},
    {"AnotherDtype", parts, [](Parts& p) { p.outs[2].dtype = DType::f16; },
     "outs[2] is f16 but outs[0] is f32; convert it to f32"},
    {"AnotherShape", parts, [](Parts& p) { p.outs[2].shape[1] = 4; },
     "outs[2] has shape (2, 4, 4, 8); it must be the shape of outs[0] = (2, 5, 4, 8)"},
    {"HeadDim", parts,
     [](Parts& p) {
       p.outs[0] = tensor(0, DType::f32, {1, 1, 1, 2048});
     },
     "head_dim of outs is 2048; it must be from 1 to 1024"},
    {"ShapeOfLse", parts, [](Parts& p) { p.lses[1].shape[1] = 5; },
     "lses[1] has shape (2, 5, 5); it must be (batch, heads_q, seqlen_q) = (2, 4, 5)"},
    {"DtypeOfLse", parts, [](Parts& p) { p.lses[1].dtype = DType::f16; },
     "lses[1] is f16; convert it to f32"},
    {"Device", parts, [](Parts& p) { p.outs[1] = on_gpu(p.outs[1], 1); },
     "outs[1] is on cuda:1 but outs[0] is on cpu; move it there"},
    {"NoResult", parts, [](Parts& p) { p.out = {}; },
     "out is missing; pass a tensor of shape (batch, seqlen_q, heads_q, head_dim_v) or (total_q, heads_q, "
     "head_dim_v)"},
    {"DtypeOfResult", parts, [](Parts& p) { p.out.dtype = DType::s8; },
     "out is s8; convert it to f32, f16 or bf16"},
    {"InPlace", parts, set(&Parts::out, tensor(2, DType::f32, {2, 5, 4, 8})),
     "out shares memory with outs[2]; an output needs memory of its own"},
    {"LseInPlace", parts, set(&Parts::lse, tensor(11, DType::f32, {2, 4, 5})),
     "lse shares memory with lses[1]; an output needs memory of its own"},
    {"OverlapsItself", parts, [](Parts& p) { p.out.stride[0] = 0; },
     "out of shape (2, 5, 4, 8) and strides (0, 32, 8, 1) overlaps itself in dimension 0; every element of "
     "an "
     "output needs memory of its own"},
};

INSTANTIATE_TEST_SUITE_P(Api, MergeError, testing::ValuesIn(merge_cases), case_name<Parts>);

}  // namespace
}  // namespace tandem::test
