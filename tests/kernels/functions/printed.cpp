// The printed functions, compiled.
#include <algorithm>
#include <array>
#include <new>

#include "functions/any_function.hpp"
#include "printed_functions.hpp"

namespace tandem::kernel_tests {
namespace {

template <std::uint64_t digest>
constexpr AnyFunctions any() {
  using User = tile::UserFunctions<digest>;
  using Row = typename User::Row;
  using Key = typename User::Key;
  static_assert(sizeof(Row) <= kept_bytes && sizeof(Key) <= kept_bytes);
  AnyFunctions f{
      .digest = digest,
      .row = [](void* row, const tile::FunctionSequence& sequence, i32 head,
                i32 query) { new (row) Row(User::row(sequence, head, query)); },
      .key = [](void* key, const tile::FunctionSequence& sequence,
                i32 position) { new (key) Key(User::key(sequence, position)); },
      .pair =
          [](const tile::FunctionSequence& sequence, const void* row, const void* key, float score) {
            return User::pair(sequence, *static_cast<const Row*>(row), *static_cast<const Key*>(key), score);
          }};
  if constexpr (requires { User::row_values; }) {
    static_assert(User::row_values <= kept_values && User::key_values <= kept_values);
    f.write_row = [](const void* row, i32* values) {
      std::fill_n(values, kept_values, 0);
      User::write_row(*static_cast<const Row*>(row), values);
    };
    f.write_key = [](const void* key, i32* values) {
      std::fill_n(values, kept_values, 0);
      User::write_key(*static_cast<const Key*>(key), values);
    };
    f.bounds = [](const tile::FunctionSequence& sequence, const Interval* row, const Interval* key) {
      return User::bounds(sequence, row, key);
    };
  }
  if constexpr (requires { User::gradient_count(); }) {
    f.gradients = User::gradient_count();
    f.gradients_read_score = User::gradients_read_score();
    f.pattern = [](int g) { return User::gradient_pattern(g); };
    f.gradient = [](const tile::FunctionSequence& sequence, const CapturedGradient(&gradients)[most_captured],
                    const void* row, const void* key, float score, int g) {
      return User::gradient(sequence, gradients, *static_cast<const Row*>(row), *static_cast<const Key*>(key),
                            score, g);
    };
  }
  return f;
}

template <std::uint64_t... digests>
constexpr std::array<AnyFunctions, sizeof...(digests)> all() {
  return {any<digests>()...};
}

}  // namespace

const AnyFunctions* running = nullptr;

const AnyFunctions* printed_functions(std::uint64_t digest) {
  static constexpr auto functions = all<TANDEM_PRINTED_FUNCTIONS>();
  const auto* const found = std::find_if(functions.begin(), functions.end(),
                                         [&](const AnyFunctions& f) { return f.digest == digest; });
  return found == functions.end() ? nullptr : found;
}

}  // namespace tandem::kernel_tests
