// The contract's accuracy rule where sums have very many terms: sums by blocks lose no digits that one long
// sum would.
#include "harness/long_sums.hpp"

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

/// Numbers of keys, or of queries, that every runner here has time for.
std::vector<std::int64_t> lengths(DType dtype) {
  const bool emulated =
      std::ranges::any_of(runners(), [](const Runner* r) { return !r->name().starts_with("cpu "); });
  if (emulated) return {2048, 10000};
  return dtype == DType::f16 ? std::vector<std::int64_t>{2048, 10000, 100000}
                             : std::vector<std::int64_t>{2048, 10000, 100000, 1000000};
}

TEST(ContractAccuracy, SumsOverManyKeysKeepTheirDigits) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t keys : lengths(dtype)) {
      for (const std::int64_t rows : {1, 9}) {
        for (const bool raised : {false, true}) {
          // The largest takes long: once for each kernel, where the most is lost.
          if (keys >= 1000000 && (!raised || (rows == 1) != (dtype == DType::bf16))) continue;
          Call call = many_keys(dtype, rows, keys, raised);
          run_everywhere(call);
        }
      }
    }
  }
}

TEST(ContractAccuracy, SumsOverManyQueriesKeepTheirDigits) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t rows : lengths(dtype)) {
      // dk and dv in f32 are sums of blocks of 256 queries, and of those one sum (records/numerics.md).
      if (dtype == DType::f32 && rows > 100000) continue;
      Call call = many_queries(dtype, rows);
      run_everywhere(call);
    }
  }
}

/// An LSE in f32 has no room for log n beside a far logit, and P is relative to it (docs/numerics.md).
TEST(ContractAccuracy, RowsOfPSumToOneAsFarAsTheLseIsKnown) {
  for (const DType dtype : float_dtypes) {
    for (const double size : {4.0, 32.0, 1024.0, 2896.0}) {  // logits of -16, -1024, -1e6 and -8.4e6
      constexpr std::int64_t keys = 100;
      Case c = with({}, {.dtype = dtype, .seqlen_q = 1, .seqlen_k = keys, .scale = 1.0F});
      Call call(c);
      for (Box* box : {&call.q, &call.k, &call.dout}) {
        for (std::int64_t n = 0; n < box->numel(); ++n) {
          box->set(n, n % c.head_dim_qk != 0 ? 0.0 : box == &call.q ? size : box == &call.k ? -size : 1.0);
        }
      }
      on_every_runner(c, [&](Runner& runner) {
        call.prepare(Pass::forward);
        runner.forward(call);
        call.prepare(Pass::backward);
        runner.backward(call);
        double sum = 0.0;
        for (std::int64_t j = 0; j < keys; ++j) sum += call.dv.get(j * c.head_dim_v);
        // The GPU's exponents are roundings of log2(e) times logit and LSE besides.
        const double unit = runner.name().starts_with("cpu ") ? 0x1p-24 : 0x1p-22;
        const double rounding = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 1e-5;
        EXPECT_LE(std::abs(std::log(sum)), std::abs(call.lse.get(0)) * unit + rounding) << "sum " << sum;
      });
    }
  }
}

}  // namespace
}  // namespace tandem::harness
