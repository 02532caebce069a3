// Contract line 8: no finite sentinel stands for -inf. Scale 0, negative and 1 are honoured.
#include <initializer_list>
#include <utility>

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

/// Logits `base` + j / 4 for key j, exactly, in every dtype.
Call huge_logits(DType dtype, double base, bool rising) {
  Case c = with(plain_case(dtype), {.batch = 1, .seqlen_q = 5, .seqlen_k = 300, .scale = 1.0F});
  Call call(c);
  for (std::int64_t n = 0; n < call.q.numel(); ++n) {
    const std::int64_t d = n % c.head_dim_qk;
    call.q.set(n, d == 0 ? 64.0 : d == 1 ? 1.0 : 0.0);
  }
  for (std::int64_t n = 0; n < call.k.numel(); ++n) {
    const std::int64_t d = n % c.head_dim_qk;
    const auto j = static_cast<double>(n / c.head_dim_qk / c.heads_kv);
    call.k.set(n, d == 0 ? base / 64.0 : d == 1 ? (rising ? j : 300.0 - j) * 0.25 : 0.0);
  }
  return call;
}

/// Same-dtype PyTorch is useless as a yardstick here (f16 overflows, bf16 steps by 1024), but the logits and
/// their differences are exact in fp32: only the roundings of P and of out remain, half a unit each, of
/// values up to 5.
void expect_right_softmax(Call& call) {
  Expected expected = expect(call, Pass::forward);
  if (call.spec.dtype != DType::f32) {
    const double unit = call.spec.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
    expected.out.bound = {.absolute = 5.0 * unit, .relative = 0.0};
  }
  on_every_runner(call.spec, [&](Runner& runner) {
    call.prepare(Pass::forward);
    runner.forward(call);
    EXPECT_TRUE(correct(call, Pass::forward, expected));
  });
}

TEST(Contract08_NoSentinel, LogitsFarFromZero) {
  for (const DType dtype : float_dtypes) {
    for (const double base : {-200704.0, 61440.0}) {
      for (const bool rising : {true, false}) {
        Call call = huge_logits(dtype, base, rising);
        expect_right_softmax(call);
      }
    }
  }
}

TEST(Contract08_NoSentinel, LogitsFarFromZeroUnderAMask) {
  for (const DType dtype : float_dtypes) {
    Call call = huge_logits(dtype, -200704.0, true);
    call.spec.options.causal = true;  // the masked keys have the larger logits
    expect_right_softmax(call);
    call.spec.options.window_left = 100;
    expect_right_softmax(call);
  }
}

/// Logits abs(scale) * (2^30 + 128 (j % 99)) of key j: of products that are exact in every dtype, the largest
/// that of many keys, in every split of the short kernel.
Call giant_logits(DType dtype, float scale, std::int64_t rows) {
  Case c = with(plain_case(dtype), {.batch = 1, .seqlen_q = rows, .seqlen_k = 2500, .scale = scale});
  c.sink = std::abs(scale) <= 8.0F;
  Call call(c);
  const double sign = scale < 0.0F ? -1.0 : 1.0;
  for (std::int64_t n = 0; n < call.q.numel(); ++n) {
    const std::int64_t d = n % c.head_dim_qk;
    call.q.set(n, d == 0 ? sign * 0x1p15 : d == 1 ? sign : 0.0);
  }
  for (std::int64_t n = 0; n < call.k.numel(); ++n) {
    const std::int64_t d = n % c.head_dim_qk;
    const auto j = static_cast<double>(n / c.head_dim_qk / c.heads_kv % 99);
    call.k.set(n, d == 0 ? 0x1p15 : d == 1 ? 128.0 * j : 0.0);
  }
  // As much as one of the keys at the top.
  for (std::int64_t h = 0; c.sink && h < c.heads_q; ++h) {
    call.sink.set(h, std::abs(scale) * (0x1p30 + 128.0 * 98.0));
  }
  return call;
}

TEST(Contract08_NoSentinel, LogitsFrom1e9To1e12) {
  for (const DType dtype : float_dtypes) {
    for (const float scale : {1.0F, -8.0F, 1000.0F}) {
      Call calls[]{giant_logits(dtype, scale, 1), giant_logits(dtype, scale, 70)};
      for (Call& call : calls) expect_right_softmax(call);
    }
  }
}

TEST(Contract08_NoSentinel, ScaleOf1e30) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t rows : {1, 70}) {
      Call call(with(plain_case(dtype), {.seqlen_q = rows, .scale = 1e30F}));
      expect_right_softmax(call);
    }
  }
}

/// Logits of 8 size^2 whose rounding, in units of log2(e), exceeds what 2^x has room for in f16 and in f32.
template <typename Check>
void with_equal_keys(std::initializer_list<std::pair<int, int>> rows_and_keys, Check check) {
  for (const DType dtype : float_dtypes) {
    for (const double size : {0x1.04p15, -0x1.04p15, 0x1.04p17, 0x1.04p60}) {
      if (dtype == DType::f16 && size > 65504.0) continue;  // infinite
      for (const auto& [rows, keys] : rows_and_keys) {
        Call call(with(plain_case(dtype), {.batch = 1, .seqlen_q = rows, .seqlen_k = keys}));
        for (std::int64_t n = 0; n < call.q.numel(); ++n) call.q.set(n, std::abs(size));
        for (std::int64_t n = 0; n < call.k.numel(); ++n) call.k.set(n, size);
        check(call);
      }
    }
  }
}

TEST(Contract08_NoSentinel, EqualKeysWithGiantLogitsAreTheirMean) {
  with_equal_keys({{1, 1}, {1, 300}}, expect_right_softmax);
}
TEST(Contract08_NoSentinel, EqualKeysWithGiantLogitsOfManyQueriesAreTheirMean) {
  with_equal_keys({{5, 2}, {70, 1}, {70, 5}, {70, 300}}, expect_right_softmax);
}
/// Kernels that cannot hold such a row's weights say so by NaN.
TEST(Contract08_NoSentinel, EqualKeysWithGiantLogitsOfManyQueriesAreNeverWrongInSilence) {
  with_equal_keys({{5, 2}, {70, 1}, {70, 5}, {70, 300}, {300, 300}}, [](Call& call) {
    on_every_runner(call.spec, [&](Runner& runner) {
      const Expected expected = expect(call, Pass::forward);
      call.prepare(Pass::forward);
      runner.forward(call);
      double largest = 0.0;
      for (std::int64_t n = 0; n < call.out.numel(); ++n) {
        const double got = call.out.get(n);
        if (!std::isnan(got))
          largest = std::max(largest, std::abs(got - expected.out.values[static_cast<std::size_t>(n)]));
      }
      EXPECT_LE(largest, 0.02);
    });
  });
}

TEST(Contract08_NoSentinel, OneKeyWithAFarLogitIsItsValue) {
  for (const double base : {-200704.0, 61440.0}) {
    Call call = huge_logits(DType::f32, base, true);
    change(call.spec, {.causal = true, .window_left = 0});
    on_every_runner(call.spec, [&](Runner& runner) {
      call.prepare(Pass::forward);
      runner.forward(call);
      const Case& c = call.spec;
      for (std::int64_t n = 0; n < call.out.numel(); ++n) {
        const std::int64_t i = n / (c.heads_q * c.head_dim_v);
        const std::int64_t h = n / c.head_dim_v % c.heads_q;
        const std::int64_t key = i + c.seqlen_k - c.seqlen_q;
        const std::int64_t source = (key * c.heads_kv + h / 2) * c.head_dim_v + n % c.head_dim_v;
        ASSERT_FLOAT_EQ(static_cast<float>(call.out.get(n)), static_cast<float>(call.v.get(source)));
      }
    });
  }
}

/// Logits that grow from the last keys to the first by `step` twice: beyond what exponentials relative to an
/// earlier maximum can hold in 16 bits (12), keep their precision in (40), and express at all (400).
TEST(Contract08_NoSentinel, LogitsThatOutgrowTheMaximaBeforeThem) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const double step : {12.0, 40.0, 400.0}) {
      for (const bool falling : {false, true}) {
        Case c = with(plain_case(dtype), {.seqlen_k = 700, .causal = falling});
        Call call(c);
        const std::int64_t width = c.head_dim_qk;
        for (std::int64_t row = 0; row < call.q.numel() / width; ++row) call.q.set(row * width, 8.0);
        for (std::int64_t row = 0; row < call.k.numel() / width; ++row) {
          const std::int64_t key = row / c.heads_kv % c.seqlen_k;
          const double steps = key < 90 ? 2.0 : key < 300 ? 1.0 : 0.0;
          call.k.set(row * width, falling ? -steps * step : steps * step);  // the logit, at scale 1/8
        }
        SCOPED_TRACE("step " + std::to_string(step));
        run_everywhere(call, false);
      }
    }
  }
}

/// Logits that grow from key to key in eight rows of a tile, and fall in the eight beside them: a kernel that
/// rescales only rows whose maximum moves must not take some rows' for all. Rows are queries, or the heads of
/// one query.
TEST(Contract08_NoSentinel, LogitsThatOutgrowTheMaximaInEverySecondEightRows) {
  struct Heads {
    std::int64_t qk;
    std::int64_t v;
  };
  for (const Heads dims : {Heads{64, 64}, Heads{128, 128}, Heads{576, 512}}) {
    for (const bool one_query : {false, true}) {
      for (const std::int64_t growing : {0, 1}) {
        Case c = with(plain_case(DType::bf16), {.batch = 1, .heads_q = one_query ? 16 : 1, .heads_kv = 1});
        change(c, {.head_dim_qk = dims.qk, .head_dim_v = dims.v, .seqlen_q = one_query ? 1 : 64});
        change(c, {.seqlen_k = 500, .scale = 0.125F});
        Call call(c);
        for (std::int64_t row = 0; row < c.seqlen_q * c.heads_q; ++row)
          call.q.set(row * dims.qk, row / 8 % 2 == growing ? 8.0 : -8.0);
        for (std::int64_t key = 0; key < c.seqlen_k; ++key)  // the logit's size, at scale 1/8
          call.k.set(key * dims.qk, key < 90 ? 24.0 : key < 300 ? 12.0 : 0.0);
        SCOPED_TRACE("growing " + std::to_string(growing));
        run_everywhere(call, false);
      }
    }
  }
}

TEST(Contract08_NoSentinel, ScaleZeroNegativeAndOne) {
  for (const DType dtype : float_dtypes) {
    for (const float scale : {0.0F, -0.125F, -1.0F, 1.0F}) {
      Case c = plain_case(dtype);
      c.head_dim_qk = 8;  // keeps logits of scale 1 moderate
      c.options.scale = scale;
      run_everywhere(c);
      c.options.causal = c.sink = true;
      run_everywhere(c);
    }
  }
}

}  // namespace
}  // namespace tandem::harness
