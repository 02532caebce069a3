// The contract's accuracy rule on shapes large enough for errors to build up, and that its yardstick is not
// slack.
#include "contract/contract.hpp"
#include "harness/same_dtype.hpp"

namespace tandem::harness {
namespace {

TEST(ContractAccuracy, ForwardAndBackwardWithinTheRule) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t d : {64, 128}) {
      for (const bool causal : {false, true}) {
        Case c = with(plain_case(dtype), {.batch = 1, .heads_q = 2, .heads_kv = 1, .head_dim = d});
        change(c, {.seqlen = 515, .causal = causal, .threads = 2});
        run_everywhere(c);
      }
    }
  }
}

TEST(ContractAccuracy, GradientThroughTheLse) {
  for (const DType dtype : float_dtypes) {
    run_everywhere(with(plain_case(dtype), {.softcap = 3.0F, .sink = true, .dlse = true}));
  }
}

TEST(ContractAccuracy, LongRows) {
  for (const DType dtype : float_dtypes) {
    Case c = with(plain_case(dtype), {.batch = 1, .heads_q = 2, .heads_kv = 1, .seqlen_q = 17});
    change(c, {.seqlen_k = 9001, .causal = true});
    run_everywhere(c);
  }
}

TEST(ContractAccuracy, OutliersAmongTheInputs) {
  // The paper's distribution: N(0, 1) + N(0, 100) * Bernoulli(0.001).
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Call call(with(plain_case(dtype), {.batch = 1, .seqlen = 256}));
    Random random(5);
    for (Box* box : {&call.q, &call.k, &call.v}) {
      for (std::int64_t n = 0; n < box->numel(); ++n) {
        box->set(n, random.normal() + (random.chance(0.001) ? 10.0 * random.normal() : 0.0));
      }
    }
    run_everywhere(call);
  }
}

}  // namespace
}  // namespace tandem::harness
