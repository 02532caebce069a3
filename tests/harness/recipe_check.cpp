#include <fmt/format.h>

#include <cmath>

#include "recipe_reference.hpp"

namespace tandem::harness {

double gain_of(const Box& out, const RecipeExpected& expected) {
  double product = 0.0;
  double squares = 0.0;
  for (std::size_t n = 0; n < expected.out.size(); ++n) {
    if (!std::isfinite(expected.out[n])) continue;
    product += out.get(static_cast<std::int64_t>(n)) * expected.out[n];
    squares += expected.out[n] * expected.out[n];
  }
  return squares > 0.0 ? product / squares : 1.0;
}

testing::AssertionResult follows_recipe(const Call& call, const RecipeExpected& expected) {
  const auto within = [](const char* name, const Box& box, const std::vector<double>& values,
                         const std::vector<double>& bounds) {
    for (std::int64_t n = 0; box.given() && n < box.numel(); ++n) {
      const double want = values[static_cast<std::size_t>(n)];
      const double bound = bounds[static_cast<std::size_t>(n)];
      const double got = box.get(n);
      if (got == want || (std::isnan(got) && std::isnan(want)) || std::abs(got - want) <= bound) continue;
      return testing::AssertionFailure()
             << fmt::format("{}[{}] is {}, by the recipe {} within {}", name, n, got, want, bound);
    }
    return testing::AssertionSuccess();
  };
  if (auto out = within("out", call.out, expected.out, expected.out_bound); !out) return out;
  if (auto lse = within("lse", call.lse, expected.lse, expected.lse_bound); !lse) return lse;
  if (auto max = within("max_logits", call.max_logits, expected.max_logits, expected.max_bound); !max)
    return max;
  const double gain = gain_of(call.out, expected);
  if (std::abs(gain - 1.0) <= expected.gain_bound) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "the gain of out is " << gain << ", by the recipe 1 within "
                                     << expected.gain_bound;
}

}  // namespace tandem::harness
