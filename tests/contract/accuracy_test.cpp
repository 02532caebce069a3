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
        Case c = plain_case(dtype);
        c.batch = 1;
        c.heads_q = 2;
        c.heads_kv = 1;
        c.head_dim_qk = c.head_dim_v = d;
        c.seqlen_q = c.seqlen_k = 515;
        c.options.causal = causal;
        c.threads = 2;
        run_everywhere(c);
      }
    }
  }
}

TEST(ContractAccuracy, GradientThroughTheLse) {
  for (const DType dtype : float_dtypes) {
    Case c = plain_case(dtype);
    c.dlse = true;
    c.sink = true;
    c.options.softcap = 3.0F;
    run_everywhere(c);
  }
}

TEST(ContractAccuracy, LongRows) {
  for (const DType dtype : float_dtypes) {
    Case c = plain_case(dtype);
    c.batch = 1;
    c.heads_q = 2;
    c.heads_kv = 1;
    c.seqlen_q = 17;
    c.seqlen_k = 9001;
    c.options.causal = true;
    run_everywhere(c);
  }
}

TEST(ContractAccuracy, OutliersAmongTheInputs) {
  // The paper's distribution: N(0, 1) + N(0, 100) * Bernoulli(0.001).
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Case c = plain_case(dtype);
    c.batch = 1;
    c.seqlen_q = c.seqlen_k = 256;
    Call call(c);
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
