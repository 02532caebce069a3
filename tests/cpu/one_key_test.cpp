// Rows that see one key, on every instruction set: P is 1 and dS is 0, bit for bit.
#include <gtest/gtest.h>

#include "harness/changes.hpp"
#include "harness/expect.hpp"
#include "harness/runner.hpp"

namespace tandem::harness {
namespace {

/// Row i sees key i alone, whatever the kernel: out and dv are v and dout, dq and dk are 0.
void expect_copies(const Case& c) {
  Call call(c);
  on_every_runner(c, [&](Runner& runner) {
    call.prepare(Pass::forward);
    runner.forward(call);
    ASSERT_TRUE(call.out.raw() == call.v.raw());
    call.prepare(Pass::backward);
    runner.backward(call);
    ASSERT_TRUE(call.dv.raw() == call.dout.raw());
    for (Box* box : {&call.dq, &call.dk}) {
      for (std::int64_t n = 0; n < box->numel(); ++n) ASSERT_EQ(box->get(n), 0.0) << "element " << n;
    }
  });
}

TEST(OneKey, OutIsItsValueAndTheScoresGradientIsZero) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const auto& [batch, rows] : {std::pair{30, 1}, {5, 3}, {5, 8}, {3, 16}, {2, 70}, {1, 300}}) {
      for (const std::int64_t head_dim : {8, 37, 64}) {
        for (const float softcap : {0.0F, 2.0F}) {
          Case c = with({}, {.dtype = dtype, .batch = batch, .heads = 2, .head_dim_qk = head_dim});
          change(c, {.head_dim_v = head_dim + 5, .seqlen = rows, .scale = 0.3F, .softcap = softcap});
          change(c, {.window = 0, .amplitude = 3.0});
          expect_copies(c);
        }
      }
    }
  }
}

/// The softmax of an infinite or NaN logit is NaN, though there is nothing to weigh it against.
TEST(OneKey, ALogitThatIsNotFiniteMakesItsRowNan) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t rows : {1, 40}) {
      for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
        Call call(with({}, {.dtype = dtype, .seqlen = rows, .window = 0}));
        call.k.set(0, bad);
        run_everywhere(call);
      }
    }
  }
}

}  // namespace
}  // namespace tandem::harness
