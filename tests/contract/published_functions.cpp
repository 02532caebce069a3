#include "contract/published_functions.hpp"

#include <cmath>

namespace tandem::harness {
namespace {

Captured reals(std::vector<std::int64_t> shape, Layout layout = {}) {
  return {.dtype = DType::f32, .shape = std::move(shape), .layout = std::move(layout)};
}
Captured integers(std::vector<std::int64_t> shape, std::int64_t low, std::int64_t high) {
  return {.dtype = DType::i32, .shape = std::move(shape), .low = low, .high = high};
}
/// Nothing behind the last element can be read.
Layout at_guard() {
  Layout layout;
  layout.ends_at_guard = true;
  return layout;
}
/// The slopes of the paper for four heads: logits stay small enough that their rounding to f32 is within the
/// bounds.
Captured slopes() {
  return {.shape = {4}, .values = {0.25, 0.0625, 0.015625, 0.00390625}};
}
/// Ascending numbers of documents of these lengths.
Captured documents(const std::vector<std::int64_t>& lengths) {
  Captured c{.dtype = DType::i64, .shape = {0}};
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    c.values.insert(c.values.end(), static_cast<std::size_t>(lengths[n]), static_cast<double>(n));
  }
  c.shape[0] = static_cast<std::int64_t>(c.values.size());
  return c;
}
/// Numbers of documents that 32 bits do not hold: two have the lower halves of others.
Captured hashes(const std::vector<std::int64_t>& lengths) {
  Captured c = documents(lengths);
  constexpr double numbers[] = {0x1p62 + 0x1p20, 0x1p33 + 7, 0x1p34 + 7, -0x1p40 + 7, 7};
  for (double& x : c.values) x = numbers[static_cast<int>(x) % 5];
  return c;
}
/// Milliseconds since 1970 of positions that are a second apart.
Captured time_stamps(std::int64_t count) {
  Captured c{.dtype = DType::i64, .shape = {count}};
  for (std::int64_t n = 0; n < count; ++n) c.values.push_back(1.7e12 + 1000.0 * static_cast<double>(n));
  return c;
}
/// A polynomial of the key with more numbers than a kernel takes as parameters.
std::string polynomial() {
  std::string text = "0.1";
  for (int n = 1; n < 40; ++n) {
    text = "add(mul(" + text + ", $0), " + std::to_string(0.3 - 0.017 * (n * 7 % 40)) + ")";
  }
  return "$0=mul(real(k), 0.007); add(s, " + text + ")";
}
/// Every fifth is NaN.
Captured with_nan(std::int64_t count) {
  Captured c{.dtype = DType::f32, .shape = {count}};
  for (std::int64_t n = 0; n < count; ++n) {
    c.values.push_back(n % 5 == 2 ? std::nan("") : static_cast<double>(n % 7) - 3.0);
  }
  return c;
}

constexpr std::int64_t nq = 75;
constexpr std::int64_t nk = 139;

}  // namespace

std::vector<Named> published_masks() {
  return {
      {"causal", "", "le(k, q)"},
      {"causal, aligned at the bottom right", "", "le(k, add(q, sub(nk, nq)))"},
      {"block causal", "", "le(floordiv(k, 16), floordiv(q, 16))"},
      {"block causal by 24", "", "le(floordiv(k, 24), floordiv(q, 24))"},
      {"sliding window", "", "$0=sub(q, k); and(le(0, $0), lt($0, 20))"},
      {"sliding window both ways", "", "le(abs(sub(q, k)), 9)"},
      {"dilated sliding window", "", "$0=abs(sub(q, k)); and(le($0, 40), eq(mod($0, 3), 0))"},
      {"document", "", "eq(t0[q], t0[k])", {documents({30, 1, 50, 58})}},
      {"document, causal", "", "and(eq(t0[q], t0[k]), le(k, q))", {documents({31, 33, 75})}},
      {"document by hashes", "", "eq(t0[q], t0[k])", {hashes({30, 1, 50, 40, 18})}},
      {"sooner than five seconds before",
       "",
       "and(le(t0[k], t0[q]), lt(sub(t0[q], t0[k]), 5500))",
       {time_stamps(nk)}},
      {"hashed pairs", "", "lt(mod(add(mul(t0[q], 2654435761), t0[k]), 1000003), 500000)", {time_stamps(nk)}},
      {"keys that are not NaN", "", "not(ne(t0[k], t0[k]))", {with_nan(nk)}},
      {"prefix-LM", "", "or(lt(k, t0[b]), le(k, q))", {integers({2}, 1, 60)}},
      {"chunked", "", "and(le(k, q), eq(floordiv(k, 32), floordiv(q, 32)))"},
      {"shared prefix", "", "or(lt(k, 17), eq(mod(k, 4), mod(q, 4)))"},
      {"shared prefix of other keys", "", "or(lt(k, 70), eq(mod(k, 4), mod(q, 4)))"},
      {"two-dimensional neighbourhood (NATTEN)", "",
       "and(le(abs(sub(floordiv(q, 12), floordiv(k, 12))), 2), le(abs(sub(mod(q, 12), mod(k, 12))), 3))"},
      {"tiles of a neighbourhood (STA)", "",
       "$0=sub(floordiv(floordiv(q, 12), 4), floordiv(floordiv(k, 12), 4)); and(le(abs($0), 1), "
       "eq(floordiv(mod(q, 12), 6), floordiv(mod(k, 12), 6)))"},
      {"strided", "", "and(le(k, q), or(eq(mod(sub(q, k), 8), 0), lt(sub(q, k), 8)))"},
      {"boolean tensor",
       "",
       "ne(t0[b, h, q, k], 0)",
       {{.dtype = DType::s8, .shape = {2, 4, nq, nk}, .layout = at_guard(), .high = 1}}},
      {"keys by padding", "", "lt(k, t0[b])", {integers({2}, 0, nk)}},
      {"heads that differ", "", "le(k, add(q, mul(h, 10)))"},
      {"tree by ancestors", "", "ne(and(t0[q], t1[k]), 0)", {integers({nq}, 0, 255), integers({nk}, 0, 15)}},
      {"of the batch alone", "", "eq(b, 1)"},
      {"nothing", "", "false"},
      {"everything", "", "true"},
  };
}

std::vector<Named> published_scores() {
  return {
      {"identity", "s", ""},
      {"scaled again", "mul(s, 1.5)", ""},
      {"scaled by less", "mul(s, 0.37)", ""},  // with the kernel of the one before
      {"scaled by a number below 0", "mul(s, -0.7)", ""},
      {"relative position", "add(s, real(sub(q, k)))", ""},
      {"ALiBi", "add(s, mul(t0[h], real(sub(k, q))))", "", {slopes()}},
      {"ALiBi by batch and head, aligned at the bottom right",
       "sub(s, mul(mul(0.1, abs(t0[b, h])), real(abs(sub(add(q, sub(nk, nq)), k)))))",
       "",
       {reals({2, 4})}},
      {"softcap by tanh", "mul(tanh(div(s, 3.0)), 3.0)", ""},
      {"additive bias", "add(s, t0[b, h, q, k])", "", {reals({2, 4, nq, nk}, at_guard())}},
      {"additive bias of a transposed tensor",
       "add(s, t0[k, h, q])",
       "",
       {reals({nk, 4, nq}, {.order = {2, 1, 0}})}},
      {"additive bias in 16 bits", "add(s, t0[h, q, k])", "", {{.dtype = DType::bf16, .shape = {4, nq, nk}}}},
      {"bias by key", "add(s, t0[k])", "", {{.dtype = DType::f16, .shape = {nk}}}},
      {"relative table", "add(s, t0[h, add(sub(q, k), 138)])", "", {reals({4, nq + nk})}},
      {"T5 buckets",
       "$0=max(sub(q, k), 0); $1=int(mul(log(div(real(max($0, 1)), 8.0)), 2.885)); "
       "add(s, t0[where(lt($0, 8), $0, min(add($1, 8), 15)), h])",
       "",
       {reals({16, 4})}},
      {"causal by -inf", "where(le(k, q), s, -inf)", ""},
      {"forty numbers", polynomial(), ""},
      {"gate by a sigmoid", "mul(s, sigmoid(add(s, t0[h])))", "", {reals({4})}},
      {"quadratic", "mul(s, s)", ""},
      {"absolute value", "neg(abs(s))", ""},
      {"clamped", "min(max(s, -1.0), 1.5)", ""},
      {"logarithm of a sum", "log(add(1.0, exp(s)))", ""},
      {"root", "sqrt(add(mul(s, s), 0.25))", ""},
      {"quotient", "div(s, add(1.0, mul(0.1, mul(s, s))))", ""},
      {"without the derivative of a part", "add(s, stop(tanh(s)))", ""},
      {"waves", "add(s, add(sin(add(s, mul(0.1, real(sub(q, k))))), mul(cos(s), 0.5)))", ""},
      {"logarithms and erf", "add(mul(s, erf(s)), add(log1p(exp(s)), log2(add(2.0, mul(s, s)))))", ""},
      {"whole parts",
       "add(s, add(floor(mul(real(sub(q, k)), 0.25)), mul(0.1, add(round(mul(real(k), 0.5)), "
       "fmod(real(sub(q, k)), 7.0)))))",
       ""},
      {"-inf for NaN", "where(ne(t0[k], t0[k]), -inf, add(s, t0[k]))", "", {with_nan(nk)}},
      {"two buffers", "add(add(s, t0[q]), t1[h, k])", "", {reals({nq}), reals({4, nk})}},
      {"distance in two dimensions",
       "sub(s, sqrt(add(real(mul(sub(mod(q, 12), mod(k, 12)), sub(mod(q, 12), mod(k, 12)))), 1.0)))", ""},
      {"softcap and ALiBi, causal",
       "mul(tanh(div(add(s, mul(t0[h], real(sub(k, q)))), 20.0)), 20.0)",
       "le(k, q)",
       {slopes()}},
      {"document bias",
       "add(s, where(eq(t0[q], t0[k]), 0.5, -0.5))",
       "ne(mod(add(q, k), 5), 0)",
       {documents({40, 60, 39})}},
  };
}

std::vector<Named> crossed_functions() {
  return {
      {"causal", "", "le(k, q)"},
      {"dilated", "", "eq(mod(sub(q, k), 3), 0)"},
      {"by head", "", "or(eq(mod(h, 2), 1), lt(k, 8))"},  // of some heads no query sees a tile of keys
      {"ALiBi", "add(s, mul(t0[h], real(sub(k, q))))", "", {slopes()}},
      {"softcap and prefix", "mul(tanh(div(s, 2.0)), 2.0)", "or(lt(k, 5), le(k, q))"},
      {"-inf", "where(eq(mod(k, 4), mod(q, 4)), add(s, t0[h]), -inf)", "", {reals({4})}},
  };
}

Named value_of_masked(const std::string& value) {
  return {"what a mask hides", "where(le(k, add(q, 9)), s, " + value + ")", "le(k, add(q, 9))"};
}
Named value_of_causal(const std::string& value) {
  return {"what causal hides", "where(le(k, add(q, sub(nk, nq))), s, " + value + ")", ""};
}
Named one_nan() {
  return {"a NaN", "where(and(eq(q, 20), eq(k, 7)), nan, s)", ""};
}
Named hidden_keys() {
  return {"keys that nobody sees", "", "ne(mod(k, 9), 4)"};
}
Named blind_by_score() {
  return {"queries that see nothing", "where(lt(q, 33), -inf, s)", ""};
}
Named blind_by_mask() {
  return {"queries that see nothing", "", "le(33, q)"};
}

std::vector<Named> differentiated_functions() {
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

std::vector<int> real_captured(const Named& f) {
  std::vector<int> numbers;
  for (std::size_t n = 0; n < f.captured.size(); ++n) {
    const DType type = f.captured[n].dtype;
    if (type == DType::f32 || type == DType::f16 || type == DType::bf16)
      numbers.push_back(static_cast<int>(n));
  }
  return numbers;
}

Named gradient_of_blind_rows() {
  return {"a bias beside queries that see nothing", "add(s, t0[h, k])", "le(33, q)", {{.shape = {4, nk}}}};
}

std::vector<Named> tested_functions() {
  std::vector<Named> all{one_nan(), hidden_keys(), blind_by_score(), blind_by_mask(),
                         gradient_of_blind_rows()};
  for (const char* const value : {"nan", "inf", "1e30", "-inf"}) {
    all.push_back(value_of_masked(value));
    all.push_back(value_of_causal(value));
  }
  for (const std::vector<Named>& more : {published_masks(), published_scores(), crossed_functions(),
                                         differentiated_functions(), large_functions()})
    all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace tandem::harness
