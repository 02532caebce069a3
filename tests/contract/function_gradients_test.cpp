// Contract line 19: gradients of the tensors that score functions read.
#include "contract/contract.hpp"
#include "contract/published_functions.hpp"

namespace tandem::harness {
namespace {

bool is_real(const Captured& c) {
  return c.dtype == DType::f32 || c.dtype == DType::f16 || c.dtype == DType::bf16;
}

/// The case with the gradients of all real tensors that the function reads.
Case differentiated(Case c, const Named& f) {
  c.score_function = f.score;
  c.mask_function = f.mask;
  c.captured = f.captured;
  for (std::size_t n = 0; n < f.captured.size(); ++n) {
    if (is_real(f.captured[n])) c.differentiated.push_back(static_cast<int>(n));
  }
  return c;
}

/// Functions of every way in which an element can be chosen and enter the logit.
std::vector<Named> functions() {
  return {
      {"ALiBi",
       "add(s, mul(t0[h], real(sub(k, q))))",
       "",
       {{.shape = {4}, .values = {0.25, 0.06, 0.01, 0.0}}}},
      {"one number", "mul(s, t0[0])", "", {{.shape = {1}}}},
      {"by key", "add(s, t0[k])", "", {{.dtype = DType::f16, .shape = {210}}}},
      {"by query and key", "add(s, t0[q, k])", "le(k, add(q, 70))", {{.shape = {160, 210}}}},
      {"a table by distance, with clamped indices",
       "add(s, t0[h, add(sub(q, k), 60)])",
       "",
       {{.shape = {4, 100}}}},
      {"twice the same tensor", "add(mul(s, t0[h]), t0[mod(k, 4)])", "", {{.shape = {4}}}},
      {"a gate", "mul(s, sigmoid(mul(t0[h], s)))", "ne(mod(k, 3), 1)", {{.shape = {4}}}},
      {"a quotient of two",
       "div(s, add(1.0, mul(t0[b], t1[h, mod(k, 5)])))",
       "",
       {{.shape = {8}, .values = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8}},
        {.shape = {4, 5}, .values = std::vector<double>(20, 0.25)}}},
      {"-inf for some",
       "where(eq(mod(k, 4), mod(q, 4)), add(s, mul(0.1, t0[k])), -inf)",
       "",
       {{.shape = {210}}}},
  };
}

void cross(const std::function<void(Case&)>& change) {
  const std::vector<Named> all = functions();
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

/// Tensors that are too large for copies: those whose reads have heads, batch entries or queries as indices,
/// and those that all blocks of queries add to.
std::vector<Named> large_functions() {
  return {
      {"by pair", "add(s, t0[b, h, q, k])", "", {{.shape = {2, 4, 150, 200}}}},
      {"by query and key", "add(s, t0[q, k])", "", {{.dtype = DType::bf16, .shape = {330, 200}}}},
      {"by key and head", "add(s, t0[k, h])", "", {{.shape = {17000, 4}}}},
      {"a table that all share", "add(s, t0[add(sub(q, k), 40000)])", "", {{.shape = {70000}}}},
      {"a large one and a small one",
       "add(mul(s, t1[h]), t0[h, k])",
       "",
       {{.shape = {4, 17000}}, {.shape = {4}}}},
  };
}

TEST(Contract19_FunctionGradients, OfLargeTensors) {
  for (const Named& f : large_functions()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(f.name);
      Case c = differentiated(plain_case(dtype), f);
      c.seqlen_q = 150;
      c.seqlen_k = 200;
      c.options.causal = true;
      c.threads = 3;
      run_everywhere(c);
    }
  }
}

TEST(Contract19_FunctionGradients, ThreadsChangeNoBit) {
  std::vector<Named> all = functions();
  for (const Named& f : large_functions()) all.push_back(f);
  for (const Named& f : all) {
    SCOPED_TRACE(f.name);
    Case c = differentiated(plain_case(DType::f32), f);
    c.seqlen_q = 150;
    c.seqlen_k = 200;
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
    Case c = differentiated(plain_case(dtype), {"", "add(s, t0[h, k])", "le(33, q)", {{.shape = {4, 139}}}});
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
