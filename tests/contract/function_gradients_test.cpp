// Contract line 19: gradients of the tensors that score functions read.
#include "contract/contract.hpp"
#include "contract/published_functions.hpp"

namespace tandem::harness {
namespace {

/// The case with the gradients of all real tensors that the function reads.
Case differentiated(Case c, const Named& f) {
  change(c, {.score_function = f.score, .mask_function = f.mask});
  c.captured = f.captured;
  c.differentiated = real_captured(f);
  return c;
}

void cross(const std::function<void(Case&)>& change) {
  const std::vector<Named> all = differentiated_functions();
  for (std::size_t n = 0; n < all.size(); ++n) {
    SCOPED_TRACE(all[n].name);
    // The bounds of 16 bits take nine problems each: a third of the functions.
    for (const DType dtype : {DType::f32, DType::bf16}) {
      if (dtype == DType::bf16 && n % 3 != 0) continue;
      Case c = differentiated(plain_case(dtype), all[n]);
      change(c);
      run_everywhere(c);
    }
  }
}

TEST(Contract19_FunctionGradients, OfPublishedScores) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Named& f : published_scores()) {
      SCOPED_TRACE(f.name);
      const Case c = differentiated(plain_case(dtype), f);
      if (!c.differentiated.empty()) run_everywhere(c);
    }
  }
}

TEST(Contract19_FunctionGradients, Alone) {
  cross([](Case&) {});
  cross([](Case& c) { c.unwanted = 7; });
}

TEST(Contract19_FunctionGradients, WithCausalWindowsAndSoftcap) {
  cross([](Case& c) { c.options.causal = true; });
  cross(cap_a_window);
}

TEST(Contract19_FunctionGradients, WithASinkAndDlse) {
  cross([](Case& c) { c.sink = c.dlse = true; });
}

TEST(Contract19_FunctionGradients, OfPackedSequences) {
  cross(pack_four_sequences);
  cross(use_fewer_rows);
}

TEST(Contract19_FunctionGradients, WithHeadsOfEveryRatio) {
  for (const std::int64_t heads_kv : {1, 4}) {
    cross([&](Case& c) { c.heads_kv = heads_kv; });
  }
}

TEST(Contract19_FunctionGradients, WithDropout) {
  cross([](Case& c) { c.options.dropout_p = 0.3F; });
}

TEST(Contract19_FunctionGradients, OfLargeTensors) {
  for (const Named& f : large_functions()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(f.name);
      Case c = with(differentiated(plain_case(dtype), f), {.seqlen_q = 150, .seqlen_k = 200, .causal = true});
      c.threads = 3;
      run_everywhere(c);
    }
  }
}

TEST(Contract19_FunctionGradients, ThreadsChangeNoBit) {
  std::vector<Named> all = differentiated_functions();
  for (const Named& f : large_functions()) all.push_back(f);
  for (const Named& f : all) {
    SCOPED_TRACE(f.name);
    Case c = with(differentiated(plain_case(DType::f32), f), {.seqlen_q = 150, .seqlen_k = 200});
    Call call(c);
    on_every_runner(c, [&](Runner& runner) {
      const Results one = run(runner, call);
      call.spec.threads = 4;
      EXPECT_TRUE(same_bits(run(runner, call), one));
      call.spec.threads = 1;
    });
  }
}

/// A row that sees nothing gives nothing, whatever dout holds there.
TEST(Contract19_FunctionGradients, OfRowsThatSeeNothing) {
  for (const DType dtype : float_dtypes) {
    Case c = differentiated(plain_case(dtype), gradient_of_blind_rows());
    Call call(c);
    const std::int64_t width = c.heads_q * c.head_dim_v;
    for (std::int64_t n = 0; n < call.dout.numel(); ++n) {
      if (n / width % c.seqlen_q < 33) call.dout.set(n, n % 2 == 0 ? std::nan("") : HUGE_VAL);
    }
    run_everywhere(call);
  }
}

}  // namespace
}  // namespace tandem::harness
