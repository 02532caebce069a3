// Gradients of the tensors that a score function reads, from a thread's transposed scores: of each element,
// the sum over the pairs that read it of d(loss) / d(logit) * d(logit) / d(element). Pairs of a warp that
// read one element are added up first; the sums go to global memory by atomic operations, in any order.
#pragma once

#include "ptx/warp.cuh"
#include "tile/functions.cuh"

namespace tandem::tile {

/// Adds to an element. 0 is what hidden pairs have: nothing is written for it.
TANDEM_DEVICE void add_to_element(i64 address, float value) {
  if (value != 0.0F) ptx::atomic_add(reinterpret_cast<float*>(address), value);
}

/// The sum over the lanes whose numbers differ in the bits `first` (lowest) to `last`.
template <int first, int last>
TANDEM_DEVICE float sum_of_lanes(float x) {
#pragma unroll
  for (int distance = first; distance <= last; distance *= 2) x += ptx::shuffle_xor(x, distance);
  return x;
}

/// As add_to_element for all lanes of a warp: where they have one element, as pairs at a distance beyond the
/// last bucket of a table, with one addition.
TANDEM_DEVICE void add_to_elements(i64 address, float value) {
  const u32 adding = ptx::ballot(value != 0.0F);
  if (adding == 0) return;
  const int leader = ptx::find_first_set(adding);
  const u32 low = ptx::shuffle(static_cast<u32>(address), leader);
  const u32 high = ptx::shuffle(static_cast<u32>(static_cast<u64>(address) >> 32), leader);
  const bool same =
      static_cast<u32>(address) == low && static_cast<u32>(static_cast<u64>(address) >> 32) == high;
  if (ptx::ballot(value != 0.0F && !same) != 0) return add_to_element(address, value);
  value = sum_of_lanes<1, 16>(value);
  if (static_cast<int>(ptx::thread_index()) % warp_size == leader) add_to_element(address, value);
}

/// The sum of `count` terms that read one element: those of the scores score_at(0), score_at(1), ...
template <int count, typename Term, typename ScoreAt>
TANDEM_DEVICE ElementSlope sum_of_terms(Term&& term, ScoreAt&& score_at) {
  ElementSlope sum{};
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const ElementSlope each = term(score_at(i));
    sum = {each.address, sum.value + each.value};
  }
  return sum;
}

/// What one read of the function adds. `term(i)` gives score i's ElementSlope, its value times the gradient
/// of the logit. A thread's scores are those of two keys with n / 2 queries: score i is of key i / 2 % 2 and
/// of query i / 4 * 8 + i % 2 from the thread's first. The four lanes of a quad have the same keys, every
/// fourth lane the same queries.
template <int n, typename Term>
TANDEM_DEVICE void add_read(const ElementPattern& pattern, Term&& term) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  if (!pattern.by_query && !pattern.by_key) {
    ElementSlope sum = sum_of_terms<n>(term, [](int i) { return i; });
    sum.value = sum_of_lanes<1, 16>(sum.value);
    if (lane == 0) add_to_element(sum.address, sum.value);
  } else if (!pattern.by_query) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      ElementSlope sum = sum_of_terms<n / 2>(term, [h](int i) { return i / 2 * 4 + 2 * h + i % 2; });
      sum.value = sum_of_lanes<1, 2>(sum.value);
      if (lane % 4 == 0) add_to_element(sum.address, sum.value);
    }
  } else if (!pattern.by_key) {
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const ElementSlope first = term(i / 2 * 4 + i % 2);
      const float sum = sum_of_lanes<4, 16>(first.value + term(i / 2 * 4 + i % 2 + 2).value);
      if (lane < 4) add_to_element(first.address, sum);
    }
  } else if (pattern.apart) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const ElementSlope each = term(i);
      add_to_element(each.address, each.value);
    }
  } else {
    // Neighbouring queries often read one element, as those of a table's bucket do.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      ElementSlope sum{};
#pragma unroll
      for (int i = 0; i < n / 2; ++i) {
        const ElementSlope each = term(i / 2 * 4 + 2 * h + i % 2);
        if (each.value == 0.0F) continue;
        if (each.address != sum.address) {
          add_to_element(sum.address, sum.value);
          sum = {each.address, 0.0F};
        }
        sum.value += each.value;
      }
      add_to_elements(sum.address, sum.value);
    }
  }
}

/// What all reads add. `keys` has the thread's FunctionKeys, `query` is its first query, `change` has
/// d(loss) / d(logit) of its scores, 0 where a pair is hidden, and input(i) gives what the function takes for
/// score i. All lanes of a warp call.
template <Functions F, int n, typename Input>
TANDEM_DEVICE void add_captured_gradients(const FunctionKeys<F, n, true>& keys,
                                          const CapturedGradient (&gradients)[most_captured], int query,
                                          const float (&change)[n], Input&& input) {
  using User = UserFunctions<F.digest>;
#pragma unroll
  for (int g = 0; g < User::gradient_count(); ++g) {
    add_read<n>(User::gradient_pattern(g), [&](int i) {
      ElementSlope slope =
          User::gradient(keys.function_sequence, gradients,
                         User::row(keys.function_sequence, keys.function_head, query + i / 4 * 8 + i % 2),
                         keys.function_keys[i / 2 % 2], User::gradients_read_score() ? input(i) : 0.0F, g);
      // A slope of a hidden pair may be anything.
      slope.value = change[i] != 0.0F ? change[i] * slope.value : 0.0F;
      return slope;
    });
  }
}

}  // namespace tandem::tile
