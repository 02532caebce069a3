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
      Call call = many_queries(dtype, rows);
      run_everywhere(call);
    }
  }
}

}  // namespace
}  // namespace tandem::harness
