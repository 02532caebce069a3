// Outputs have memory of their own: every way to share an element is an error, and every slice of a common
// buffer that shares none is legal.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "api/make_problem.hpp"
#include "arguments.hpp"
#include "harness/error_of.hpp"
#include "tandem/quantize.hpp"

namespace tandem::test {
namespace {

template <typename Args>
std::string error_of(const Args& args) {
  return tandem::error_of(Status::invalid_argument, [&] { make_problem(args); });
}

/// `count` heads from `first` of a buffer of (rows, heads, 8) f32, as a tensor of batch 1.
Tensor heads_of(std::vector<float>& buffer, std::int64_t heads, std::int64_t first, std::int64_t count) {
  const auto rows = static_cast<std::int64_t>(buffer.size()) / (heads * 8);
  Tensor t(buffer.data() + first * 8, DType::f32, {1, rows, count, 8});
  t.stride = {rows * heads * 8, heads * 8, 8, 1};
  return t;
}

/// Five rows of q, k, v and out with four heads each; out and v are slices of one buffer of eight heads.
struct Fused {
  std::vector<float> shared = std::vector<float>(5 * 8 * 8);
  std::vector<float> q = std::vector<float>(5 * 4 * 8), k = q;

  Fused() {
    std::mt19937 random(7);
    for (auto* values : {&shared, &q, &k}) {
      for (float& value : *values) value = std::normal_distribution<float>()(random);
    }
  }
  ForwardArgs args(std::int64_t out_first, std::int64_t v_first) {
    ForwardArgs a;
    a.q = heads_of(q, 4, 0, 4);
    a.k = heads_of(k, 4, 0, 4);
    a.v = heads_of(shared, 8, v_first, 4);
    a.out = heads_of(shared, 8, out_first, 4);
    return a;
  }
};

TEST(Overlap, OutBesideAnInputInOneBufferIsLegal) {
  for (const std::int64_t out_first : {0, 4}) {
    Fused fused;
    Fused apart = fused;
    std::vector<float> own(5 * 4 * 8);
    ForwardArgs expected = apart.args(out_first, 4 - out_first);
    expected.out = heads_of(own, 4, 0, 4);
    forward(expected);
    forward(fused.args(out_first, 4 - out_first));
    for (std::size_t row = 0; row < 5; ++row) {
      const std::size_t begin = row * 64;
      const auto first = static_cast<std::size_t>(out_first) * 8;
      EXPECT_EQ(std::memcmp(&fused.shared[begin + first], &own[row * 32], 32 * sizeof(float)), 0);
      EXPECT_EQ(std::memcmp(&fused.shared[begin + 32 - first], &apart.shared[begin + 32 - first],
                            32 * sizeof(float)),
                0)
          << "v was written";
    }
  }
}

/// `t` such that its last element begins on the first byte of `other`'s last one.
void end_in(Tensor& t, const ConstTensor& other) {
  const auto last = [](const ConstTensor& tensor) {
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(tensor.rank); ++i)
      offset += (tensor.shape[i] - 1) * tensor.stride[i];
    return offset * static_cast<std::int64_t>(size_of(tensor.dtype));
  };
  t.data = static_cast<std::byte*>(const_cast<void*>(other.data)) + last(other) - last(t);
}

/// A name, and how to find the tensor of that name.
template <typename Args>
struct Named {
  const char* name;
  ConstTensor (*get)(const Args&);
};

TEST(Overlap, NoOutputOfForwardMayShareOneElementWithAnything) {
  const auto legal = [] {
    ForwardArgs a = dense_forward();
    a.sink = tensor(5, DType::f32, {4});
    a.seqused_q = tensor(6, DType::i32, {2});
    a.seqused_k = tensor(7, DType::i64, {2});
    return a;
  };
  using F = ForwardArgs;
  const std::array<Named<F>, 6> inputs{{{"q", [](const F& a) { return a.q; }},
                                        {"k", [](const F& a) { return a.k; }},
                                        {"v", [](const F& a) { return a.v; }},
                                        {"sink", [](const F& a) { return a.sink; }},
                                        {"seqused_q", [](const F& a) { return a.seqused_q; }},
                                        {"seqused_k", [](const F& a) { return a.seqused_k; }}}};
  ASSERT_EQ(error_of(legal()), "");
  for (const auto& [name, get] : inputs) {
    for (Tensor F::*output : {&F::out, &F::lse}) {
      ForwardArgs a = legal();
      end_in(a.*output, get(a));
      EXPECT_EQ(error_of(a), std::string(output == &F::out ? "out" : "lse") + " shares memory with " + name +
                                 "; an output needs memory of its own");
    }
  }
  ForwardArgs a = legal();
  end_in(a.lse, a.out);
  EXPECT_EQ(error_of(a), "lse shares memory with out; an output needs memory of its own");
}

TEST(Overlap, NoGradientMayShareOneElementWithAnything) {
  using B = BackwardArgs;
  struct Gradient {
    const char* name;
    Tensor B::*tensor;
  };
  const std::array<Gradient, 4> gradients{
      {{"dq", &B::dq}, {"dk", &B::dk}, {"dv", &B::dv}, {"dsink", &B::dsink}}};
  const std::array<Named<B>, 8> inputs{{{"q", [](const B& a) { return a.q; }},
                                        {"k", [](const B& a) { return a.k; }},
                                        {"v", [](const B& a) { return a.v; }},
                                        {"sink", [](const B& a) { return a.sink; }},
                                        {"out", [](const B& a) { return a.out; }},
                                        {"lse", [](const B& a) { return a.lse; }},
                                        {"dout", [](const B& a) { return a.dout; }},
                                        {"dlse", [](const B& a) { return a.dlse; }}}};
  ASSERT_EQ(error_of(dense_backward()), "");
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    for (const auto& [name, get] : inputs) {
      BackwardArgs a = dense_backward();
      end_in(a.*gradients[i].tensor, get(a));
      EXPECT_EQ(error_of(a), std::string(gradients[i].name) + " shares memory with " + name +
                                 "; an output needs memory of its own");
    }
    for (std::size_t j = 0; j < i; ++j) {
      BackwardArgs a = dense_backward();
      end_in(a.*gradients[i].tensor, a.*gradients[j].tensor);
      EXPECT_EQ(error_of(a), std::string(gradients[i].name) + " shares memory with " + gradients[j].name +
                                 "; an output needs memory of its own");
    }
  }
}

/// As many captured tensors as a call can have: 16 of a score function, which adds them up by key, and 16 of
/// a mask function.
struct ManyCaptured {
  static constexpr std::size_t values = Function::max_captured * 7;
  std::vector<float> of_score = std::vector<float>(values, 0.0F), gradients = of_score;
  std::vector<float> of_mask = std::vector<float>(values + 64, 0.0F);  ///< and room behind the last
  std::vector<Tensor> gradient_views;
  Function score = make(of_score, Function::Kind::score);
  Function mask = make(of_mask, Function::Kind::mask);

  ManyCaptured() {
    for (std::size_t n = 0; n < Function::max_captured; ++n)
      gradient_views.emplace_back(gradients.data() + n * 7, DType::f32,
                                  std::initializer_list<std::int64_t>{7});
  }
  static Function make(const std::vector<float>& values, Function::Kind kind) {
    std::vector<ConstTensor> views;
    std::vector<int> all;
    std::string sum = kind == Function::Kind::score ? "s" : "0.0";
    for (std::size_t n = 0; n < Function::max_captured; ++n) {
      views.push_back(ConstTensor(values.data() + n * 7, DType::f32, {7}));
      if (kind == Function::Kind::score) all.push_back(static_cast<int>(n));
      sum = "add(" + sum + ", t" + std::to_string(n) + "[k])";
    }
    return Function::parse(kind == Function::Kind::score ? sum : "lt(" + sum + ", 1.0)", kind, views, all);
  }
};

TEST(Overlap, AsManyCapturedTensorsAsThereCanBe) {
  ManyCaptured many;
  ForwardArgs f = dense_forward();
  f.score_function = &many.score;
  f.mask_function = &many.mask;
  EXPECT_NO_THROW(forward(f));
  f.lse.data = many.of_mask.data() + ManyCaptured::values - 1;
  EXPECT_EQ(error_of(f), "lse shares memory with t15; an output needs memory of its own");

  BackwardArgs b = dense_backward();
  b.score_function = &many.score;
  b.mask_function = &many.mask;
  b.captured_gradients = many.gradient_views;
  EXPECT_NO_THROW(backward(b));
  b.dsink.data = many.of_mask.data() + ManyCaptured::values - 1;
  EXPECT_EQ(error_of(b), "dsink shares memory with t15; an output needs memory of its own");
}

TEST(Overlap, GradientsMayBeSlicesOfOneBuffer) {
  std::vector<float> qkv(7 * 12 * 8), gradients(7 * 12 * 8);
  BackwardArgs a;
  a.q = heads_of(qkv, 12, 0, 4);
  a.k = heads_of(qkv, 12, 4, 4);
  a.v = heads_of(qkv, 12, 8, 4);
  a.out = tensor(0, DType::f32, {1, 7, 4, 8});
  a.dout = tensor(1, DType::f32, {1, 7, 4, 8});
  a.lse = tensor(2, DType::f32, {1, 4, 7});
  a.dq = heads_of(gradients, 12, 0, 4);
  a.dk = heads_of(gradients, 12, 4, 4);
  a.dv = heads_of(gradients, 12, 8, 4);
  EXPECT_EQ(error_of(a), "");
  a.dv = heads_of(gradients, 12, 7, 4);
  EXPECT_EQ(error_of(a), "dv shares memory with dk; an output needs memory of its own");
}

TEST(Overlap, OutputsOfQuantizeHaveMemoryOfTheirOwn) {
  // bf16 rows of 2 heads of 16; e4m3 quantized values, a byte an element, in the second half of each of x's
  // elements.
  std::vector<std::uint16_t> x(6 * 2 * 16);
  std::vector<float> scales(2);
  QuantizeArgs a;
  a.x = ConstTensor(x.data(), DType::bf16, {6, 2, 16});
  a.codes = Tensor(x.data() + 3 * 16, DType::e4m3, {3, 2, 16});
  a.codes.shape[0] = 6;
  a.scales = Tensor(scales.data(), DType::f32, {2});
  EXPECT_EQ(tandem::error_of(Status::invalid_argument, [&] { quantize(a); }),
            "codes shares memory with x; an output needs memory of its own");
  EXPECT_EQ(x, std::vector<std::uint16_t>(x.size()));
  // Rows of x in the first half of a buffer's rows, quantized values behind them.
  std::vector<std::uint8_t> rows(6 * 96, 0);
  a.x = ConstTensor(rows.data(), DType::bf16, {6, 2, 16});
  a.x.stride[0] = 48;
  a.codes = Tensor(rows.data() + 64, DType::e4m3, {6, 2, 16});
  a.codes.stride[0] = 96;
  EXPECT_NO_THROW(quantize(a));
  a.codes.data = rows.data() + 63;
  EXPECT_THROW(quantize(a), Error);
}

TEST(Overlap, DescribedTensorsAndEmptyOnesShareNothing) {
  ForwardArgs a = dense_forward();
  a.q.data = a.k.data = a.v.data = nullptr;
  a.out.data = a.lse.data = nullptr;
  EXPECT_NO_THROW(make_problem(a, Memory::described));
  ForwardArgs empty = dense_forward();
  for (ConstTensor* t : {&empty.q, &empty.k, &empty.v}) t->shape[0] = 0;
  empty.out.shape[0] = empty.lse.shape[0] = 0;
  empty.out.data = const_cast<void*>(empty.v.data);
  EXPECT_EQ(error_of(empty), "");
}

}  // namespace
}  // namespace tandem::test
