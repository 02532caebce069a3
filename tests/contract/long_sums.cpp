// The contract's accuracy rule where sums have very many terms: sums by blocks lose no digits that one long
// sum would.
#include "harness/long_sums.hpp"

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

/// Numbers of keys, or of queries, that every runner here has time for.
std::vector<std::int64_t> lengths() {
  const bool emulated =
      std::ranges::any_of(runners(), [](const Runner* r) { return !r->name().starts_with("cpu "); });
  if (emulated) return {2048, 10000};
  return {2048, 10000, 100000, 1000000};
}

TEST(ContractAccuracy, SumsOverManyKeysKeepTheirDigits) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t keys : lengths()) {
      for (const std::int64_t rows : {1, 16}) {
        for (const bool raised : {false, true}) {
          if (keys > 10000 && !raised) continue;  // takes long, and the other loses more
          Call call = many_keys(dtype, rows, keys, raised);
          run_everywhere(call);
        }
      }
    }
  }
}

TEST(ContractAccuracy, SumsOverManyQueriesKeepTheirDigits) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t rows : lengths()) {
      Call call = many_queries(dtype, rows);
      run_everywhere(call);
    }
  }
}

}  // namespace
}  // namespace tandem::harness
