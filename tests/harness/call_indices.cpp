// Calls whose queries choose their keys.
#include <limits>
#include <numeric>

#include "call.hpp"

namespace tandem::harness {
namespace {

/// Keys that nobody names, so that they may be NaN.
bool is_never_named(std::int64_t key) {
  return key % 5 == 3;
}

/// Keys of sequence `b` that take part.
std::int64_t keys_in_use(const Case& c, std::int64_t b) {
  if (c.of_cache()) return c.cache_rows(b) - c.cache_padding(b);
  const auto at = static_cast<std::size_t>(b);
  return !c.used_k.empty() ? c.used_k[at] : c.packed_k ? c.lengths_k[at] : c.seqlen_k;
}

/// A number that names no key of `keys`.
double no_key(Random& random, DType dtype, std::int64_t keys) {
  const double above = dtype == DType::i64 ? 0x1p40 : 2147483647.0;
  return random.pick({-1.0, static_cast<double>(keys), above, -above - 1.0, static_cast<double>(keys + 1)});
}

double any_number(Random& random, DType dtype, std::int64_t keys) {
  const std::int64_t key = keys > 0 ? random.between(0, keys - 1) : 0;
  if (keys == 0 || is_never_named(key) || random.chance(0.1)) return no_key(random, dtype, keys);
  return static_cast<double>(key);
}

}  // namespace

void Call::make_indices(Random& random) {
  const Case& c = spec;
  std::vector<std::int64_t> shape{c.rows_q()};
  if (!c.packed_q) shape.insert(shape.begin(), c.batch);
  if (c.topk_lengths) topk_length = Box(c.metadata, shape, {}, false);
  if (c.topk_by_head) shape.push_back(c.heads_kv);
  shape.push_back(c.topk);
  indices = Box(c.metadata, shape, c.indices, false);
  const std::int64_t heads = c.topk_by_head ? c.heads_kv : 1;
  for_each_query_row(c, [&](std::int64_t b, std::int64_t row, bool used) {
    const std::int64_t keys = used ? keys_in_use(c, b) : 0;
    const std::int64_t query = c.packed_q ? row : b * c.seqlen_q + row;
    if (c.topk_lengths) topk_length.set(query, static_cast<double>(random.between(-1, c.topk + 2)));
    const bool sees_none = random.chance(0.1);
    for (std::int64_t n = 0; n < heads * c.topk; ++n) {
      const std::int64_t at = query * heads * c.topk + n;
      const bool again = n % c.topk > 0 && random.chance(0.1);
      const double chosen = again ? indices.get(at - 1) : any_number(random, c.metadata, keys);
      indices.set(at, sees_none ? no_key(random, c.metadata, keys) : chosen);
    }
  });
  // A row of a shared entry is another key of each sequence behind padding of its own.
  if (c.k.expanded != 0 || c.v.expanded != 0 || (!c.cache_index.empty() && !c.leftpad.empty())) return;
  std::int64_t begin = 0;
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t key = 0; key < keys_in_use(c, b); ++key) {
      if (!is_never_named(key)) continue;
      const auto [entry, at] = c.of_cache() ? cache_place(b, c.cache_padding(b) + key) : std::pair{b, key};
      const std::int64_t row = c.packed_k ? begin + key : entry * k.view().shape[1] + at;
      for (Box* box : {&k, &v}) {
        const std::int64_t inner =
            box->view().shape[static_cast<std::size_t>(box->view().rank - 1)] * c.heads_kv;
        for (std::int64_t i = 0; i < inner; ++i) {
          box->set(row * inner + i, std::numeric_limits<double>::quiet_NaN());
        }
      }
    }
    if (c.packed_k) begin += c.lengths_k[static_cast<std::size_t>(b)];
  }
}

Indices Call::indices_of_problem() const {
  const auto operand = [&](const Box& box, bool by_head) {
    const Tensor& t = box.view();
    const std::size_t row = spec.packed_q ? 0 : 1;
    return Operand{.data = t.data,
                   .dtype = t.dtype,
                   .batch_stride = spec.packed_q ? 0 : t.stride[0],
                   .row_stride = t.stride[row],
                   .head_stride = by_head ? t.stride[row + 1] : 0};
  };
  Indices result{.numbers = operand(indices, spec.topk_by_head),
                 .stride = indices.view().stride[static_cast<std::size_t>(indices.view().rank - 1)],
                 .count = spec.topk,
                 .lengths = {}};
  if (spec.topk_lengths) result.lengths = operand(topk_length, false);
  return result;
}

}  // namespace tandem::harness
