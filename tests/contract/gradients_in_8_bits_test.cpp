// The contract's lines of gradients in 8 bits (backward_precision), whose rule of accuracy is their recipe:
// docs/results/gradients-in-8-bits.md in fp64, on the out, LSE and largest logits that forward has left.
#include <cmath>
#include <functional>
#include <limits>

#include "contract/contract.hpp"
#include "harness/gradient_recipe.hpp"

namespace tandem::harness {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

/// plain_case with heads that all kernels take.
Case in_8_bits(const Changes& changes) {
  Case c = with(plain_case(DType::bf16), {.head_dim = 128, .precision = Precision::int8});
  change(c, changes);
  c.options.backward_precision = Precision::int8;
  return c;
}

void follow(Call call) {
  on_every_runner(call.spec, [&](Runner& runner) { run_by_gradient_recipe(runner, call); });
}
void follow(const Changes& changes) {
  follow(Call(in_8_bits(changes)));
}

/// What features meet each other: dtype, order of additions, a gradient of the LSE, scales by row, gradients
/// in f32, and those that are added to what there is.
void cross(const std::function<void(Case&)>& feature) {
  const auto run = [&](const Changes& changes, unsigned f32_gradients = 0, unsigned added = 0) {
    Case c = in_8_bits(changes);
    c.f32_gradients = f32_gradients;
    c.added = added;
    feature(c);
    follow(Call(c));
  };
  run({});
  run({.dtype = DType::f16, .dlse = true});
  run({.deterministic = true});
  run({.deterministic = true, .dlse = true, .threads = 3});
  run({.dlse = true}, 3);
  run({}, 3, 3);
  run({.strict = true});
  run({.strict = true, .dlse = true});
}

TEST(ContractAccuracy_GradientsIn8Bits, WithEveryMask) {
  cross([](Case& c) { c.batch = 1; });
  cross([](Case& c) { change(c, {.batch = 1, .causal = true}); });
  cross([](Case& c) {
    c.batch = 1;
    see_a_window(c);
  });
  cross([](Case& c) { change(c, {.batch = 1, .causal = true, .window_left = 33}); });
}

TEST(ContractAccuracy_GradientsIn8Bits, OfPackedSequences) {
  cross(pack_four_sequences);
  cross([](Case& c) {
    pack_four_sequences(c);
    c.head_dim_qk = c.head_dim_v = 64;
  });
  cross([](Case& c) {
    pack_four_sequences(c);
    change(c, {.metadata = DType::i64, .causal = true});
  });
  cross([](Case& c) {
    pack_four_sequences(c);
    see_a_window(c);
  });
}

TEST(ContractAccuracy_GradientsIn8Bits, OfHeadsThatShareKeys) {
  for (const std::int64_t heads_kv : {1, 2, 6}) {
    for (const std::int64_t head_dim : {64, 128}) {
      const Case c = in_8_bits({.batch = 1, .heads_q = 6, .heads_kv = heads_kv, .head_dim = head_dim});
      for (const bool causal : {false, true}) follow(Call(with(c, {.causal = causal, .dlse = causal})));
    }
  }
}

/// Where blocks of 128 rows, and units of 64, begin and end.
TEST(ContractAccuracy_GradientsIn8Bits, OfLengthsBesideBlocks) {
  for (const std::int64_t rows : {1, 63, 64, 65, 127, 128, 129, 257}) {
    for (const std::int64_t head_dim : {64, 128}) {
      const Case c = in_8_bits({.batch = 1, .heads_q = 2, .heads_kv = 1, .head_dim = head_dim});
      follow(Call(with(c, {.seqlen = rows, .causal = true})));
      follow(Call(with(c, {.seqlen_q = 130, .seqlen_k = rows})));
    }
  }
}

/// The CPU alone has others than 64 and 128.
TEST(ContractAccuracy_GradientsIn8Bits, OfHeadsOfEverySize) {
  for (const std::int64_t head_dim : {8, 64, 72, 128, 192, 256}) {
    for (const bool strict_setting : {false, true})
      follow({.head_dim = head_dim, .causal = true, .strict = strict_setting});
  }
}

TEST(ContractAccuracy_GradientsIn8Bits, OfThoseThatAreWanted) {
  for (const unsigned unwanted : {1U, 2U, 4U, 5U, 6U}) {
    for (const bool causal : {false, true}) follow({.causal = causal, .unwanted = unwanted});
  }
}

/// Whatever their queries and dO hold.
TEST(Contract02_GradientsIn8Bits, QueriesThatSeeNoKeyHaveNone) {
  for (const bool deterministic : {false, true}) {
    Call call(in_8_bits({.seqlen_q = 150, .seqlen_k = 70, .causal = true, .deterministic = deterministic}));
    const std::int64_t row = call.spec.heads_q * 128;
    for (std::int64_t n = 0; n < row; ++n) {
      call.q.set(5 * row + n, nan_value);
      call.dout.set(7 * row + n, nan_value);
    }
    on_every_runner(call.spec, [&](Runner& runner) {
      run_by_gradient_recipe(runner, call);
      for (std::int64_t n = 0; n < 80 * row; ++n) ASSERT_EQ(call.dq.get(n), 0.0) << n;
      for (const Box* box : {&call.dk, &call.dv}) {
        for (const double x : box->values()) ASSERT_TRUE(std::isfinite(x));
      }
    });
  }
}

TEST(Contract03_GradientsIn8Bits, WithNothingToDo) {
  for (const Changes& changes :
       {Changes{.batch = 0}, Changes{.seqlen_q = 0}, Changes{.seqlen_k = 0},
        Changes{.batch = 2, .packed = true, .lengths_q = {0, 3}, .lengths_k = {5, 0}}}) {
    follow(changes);
  }
}

TEST(Contract05_GradientsIn8Bits, OfRowsInUse) {
  cross(use_fewer_rows);
}

TEST(Contract07_GradientsIn8Bits, NaNReachesThePairsThatHaveIt) {
  constexpr std::int64_t at = 93;
  for (Box Call::*const with_nan : {&Call::q, &Call::k, &Call::dout}) {
    for (const double value : {nan_value, std::numeric_limits<double>::infinity()}) {
      Call call(in_8_bits({.batch = 1, .heads = 2, .seqlen = 150, .causal = true, .deterministic = true}));
      (call.*with_nan).set(at * 256 + 3, value);  // of the first head
      const bool of_key = with_nan == &Call::k;
      on_every_runner(call.spec, [&](Runner& runner) {
        run_by_gradient_recipe(runner, call);
        for (std::int64_t row = 0; row < 150; ++row) {
          const bool sees = of_key ? row >= at : row == at;
          const bool seen = of_key ? true : row <= at;
          ASSERT_EQ(std::isnan(call.dq.get(row * 256)), sees) << row;
          for (const Box* box : {&call.dk, &call.dv}) {
            if (seen || !of_key) {
              ASSERT_EQ(std::isnan(box->get(row * 256)), seen) << row;
            }
            ASSERT_FALSE(std::isnan(box->get(row * 256 + 128))) << row;
          }
          ASSERT_FALSE(std::isnan(call.dq.get(row * 256 + 128))) << row;
        }
      });
    }
  }
}

TEST(Contract08_GradientsIn8Bits, ScalesOfAnySign) {
  for (const float scale : {0.0F, -0.125F, 0.25F}) {
    for (const bool causal : {false, true}) follow({.scale = scale, .causal = causal});
  }
}

TEST(Contract10_GradientsIn8Bits, TensorsInAnyLayout) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    Random random(seed);
    Case c = in_8_bits({.causal = seed % 2 == 0, .deterministic = seed % 4 < 2, .dlse = true});
    for (Layout* x : {&c.q, &c.k, &c.v, &c.dout}) *x = random_layout(random, 4, true);
    for (Layout* x : {&c.out, &c.dq, &c.dk, &c.dv}) *x = random_layout(random, 4, false);
    c.lse_layout = Layout{.order = {1, 0, 2}, .pad = 9, .base_offset = 1};
    follow(Call(c));
  }
}

TEST(Contract15_GradientsIn8Bits, InAFixedOrderHaveTheSameBits) {
  Call call(in_8_bits({.batch = 1, .seqlen = 300, .causal = true, .deterministic = true}));
  on_every_runner(call.spec, [&](Runner& runner) {
    const Results first = run(runner, call);
    for (int n = 0; n < 3; ++n) {
      call.spec.threads = n + 1;
      EXPECT_TRUE(same_bits(run(runner, call), first));
    }
  });
}

}  // namespace
}  // namespace tandem::harness
