// Contract line 19 where lanes are consecutive queries of one head, so that values of the distance between
// query and key are computed once for each distance; and masks that hide parts of blocks in every way.
#include "contract/contract.hpp"
#include "contract/published_functions.hpp"

namespace tandem::harness {
namespace {

Case own_heads(DType dtype, const Named& f) {
  Case c = plain_case(dtype);
  c.heads_kv = c.heads_q;
  change(c, {.score_function = f.score, .mask_function = f.mask});
  c.captured = f.captured;
  return c;
}

TEST(Contract19_ConsecutiveQueries, PublishedFunctions) {
  for (const std::vector<Named>& all : {published_masks(), published_scores()}) {
    for (const Named& f : all) {
      SCOPED_TRACE(f.name);
      run_everywhere(own_heads(DType::f32, f));
    }
  }
}

TEST(Contract19_ConsecutiveQueries, ValuesOfTheDistance) {
  const Captured table{.shape = {4, 100}};
  for (const Named& f : std::vector<Named>{
           {"both grow twice as fast", "add(s, real(sub(add(q, q), add(k, k))))", ""},
           {"a sum of both, which is none", "add(s, mul(0.01, real(add(q, k))))", ""},
           {"through a sum of both", "add(s, mul(0.1, real(sub(add(q, k), add(k, k)))))", ""},
           {"a table with clamped indices", "add(s, t0[h, add(sub(q, k), 60)])", "", {table}},
           {"a table from its end", "add(s, t0[h, sub(0, abs(sub(q, k)))])", "", {table}},
           {"of which one pair has its own", "where(eq(sub(k, q), 3), mul(2.0, s), s)", ""},
           {"beside values of rows and keys", "add(s, mul(real(mod(q, 3)), div(real(mod(k, 5)), 9.0)))", ""},
           {"no score", "mul(0.01, real(sub(q, k)))", ""},
           {"a number of its own", "0.5", ""},
           {"large constants", "add(s, mul(0.0, real(add(sub(q, 2000000000), k))))",
            "le(sub(k, 2000000000), sub(q, 2000000000))"},
           {"constants that wrap", "", "le(add(k, 2147483647), q)"},
           {"aligned at the end", "", "and(le(k, add(q, sub(nk, nq))), lt(sub(add(q, 64), k), 50))"},
       }) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(f.name);
      Case c = own_heads(dtype, f);
      if (dtype == DType::f32) {
        pack_four_sequences(c);
      } else {
        see_a_window(c);
      }
      run_everywhere(c);
    }
  }
}

/// Rows that see other keys than the rows on both sides of them: registers of a stripe have gaps.
TEST(Contract19_ConsecutiveQueries, MasksWithGaps) {
  for (const std::int64_t rows : {4, 8, 16}) {
    for (const char* const rest : {"lt(k, 20)", "eq(floordiv(k, 16), 2)", "false"}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        const std::string row = "floordiv(q, " + std::to_string(rows) + ")";
        Case c = own_heads(dtype, {"gaps", "", "or(ne(mod(" + row + ", 3), 1), " + rest + ")"});
        change(c, {.batch = 1, .heads = 1, .seqlen_q = 150});
        run_everywhere(c);
        change(c, {.mask_function = "or(eq(mod(" + row + ", 3), 1), " + rest + ")", .sink = true});
        run_everywhere(c);
      }
    }
  }
}

/// Documents in sequences of many blocks, on any threads: the bits are those of one.
TEST(Contract19_ConsecutiveQueries, DocumentsOfManyLengths) {
  Captured documents{.dtype = DType::i64, .shape = {600}};
  for (int i = 0; i < 600; ++i) documents.values.push_back(i < 5 ? 0 : i < 260 ? 1 : i < 400 ? 2 : i / 40);
  for (const char* const mask : {"eq(t0[q], t0[k])", "and(eq(t0[q], t0[k]), le(k, q))", "lt(t0[k], t0[q])"}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Case c = with(own_heads(dtype, {"documents", "", mask, {documents}}), {.batch = 1, .heads = 2});
      change(c, {.seqlen = 600});
      Call call(c);
      run_everywhere(call);
      on_every_runner(c, [&](Runner& runner) {
        const Results one = run(runner, call);
        call.spec.threads = 3;
        EXPECT_TRUE(same_bits(run(runner, call), one));
        call.spec.threads = 1;
      });
    }
  }
}

}  // namespace
}  // namespace tandem::harness
