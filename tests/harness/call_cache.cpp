// Calls whose k and v are a cache: where each row lies, and the same rows as dense tensors.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "call.hpp"

namespace tandem::harness {

std::int64_t Case::cache_rows(std::int64_t b) const {
  return used_k.empty() ? seqlen_k : used_k[static_cast<std::size_t>(b)];
}

std::int64_t Case::cache_padding(std::int64_t b) const {
  return leftpad.empty() ? 0 : leftpad[static_cast<std::size_t>(b)];
}

Box vector_box(DType dtype, const std::vector<double>& values) {
  Layout layout;
  layout.ends_at_guard = true;  // metadata is where an access out of bounds is likeliest
  Box box(dtype, {static_cast<std::int64_t>(values.size())}, layout, false);
  for (std::size_t n = 0; n < values.size(); ++n) box.set(static_cast<std::int64_t>(n), values[n]);
  return box;
}

std::pair<std::int64_t, std::int64_t> Call::cache_place(std::int64_t b, std::int64_t row) const {
  if (spec.page_size > 0) {
    const std::int64_t entry = b * spec.pages_per_sequence() + row / spec.page_size;
    return {static_cast<std::int64_t>(page_table.get(entry)), row % spec.page_size};
  }
  if (!spec.cache_index.empty()) return {spec.cache_index[static_cast<std::size_t>(b)], row};
  return {b, row};
}

/// The table of pages, in a random order with two pages that nobody uses, and what else says where keys are.
/// NaN wherever no sequence has a row, and nonsense in entries that no row needs.
void Call::make_cache(Random& random) {
  const Case& c = spec;
  if (c.page_size > 0) {
    std::vector<double> pages(static_cast<std::size_t>(k.view().shape[0]));
    std::iota(pages.begin(), pages.end(), 0.0);
    for (std::size_t n = pages.size(); n-- > 1;) {
      std::swap(pages[n], pages[static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(n)))]);
    }
    Layout layout;
    layout.ends_at_guard = true;
    page_table = Box(c.metadata, {c.batch, c.pages_per_sequence()}, layout, false);
    for (std::int64_t b = 0; b < c.batch; ++b) {
      for (std::int64_t i = 0; i < c.pages_per_sequence(); ++i) {
        const std::int64_t entry = b * c.pages_per_sequence() + i;
        const bool needed = i * c.page_size < c.cache_rows(b);
        page_table.set(entry, needed ? pages[static_cast<std::size_t>(entry)]
                                     : random.pick({-1.0, 2147483647.0, -2147483648.0, 0.0}));
      }
    }
  }
  if (!c.leftpad.empty()) leftpad_k = vector_box(c.metadata, {c.leftpad.begin(), c.leftpad.end()});
  if (!c.cache_index.empty()) {
    cache_batch_idx = vector_box(c.metadata, {c.cache_index.begin(), c.cache_index.end()});
  }
  poison_cache(k, c.k);
  poison_cache(v, c.v_in_k ? c.k : c.v);
}

std::vector<bool> Call::used_cache_rows() const {
  const std::int64_t rows = k.view().shape[1];
  std::vector<bool> used(static_cast<std::size_t>(k.view().shape[0] * rows), false);
  for (std::int64_t b = 0; b < spec.batch; ++b) {
    for (std::int64_t row = spec.cache_padding(b); row < spec.cache_rows(b); ++row) {
      const auto [entry, at] = cache_place(b, row);
      used[static_cast<std::size_t>(entry * rows + at)] = true;
    }
  }
  return used;
}

void Call::poison_cache(Box& box, const Layout& layout) const {
  if (layout.expanded != 0) return;
  const std::int64_t inner = spec.heads_kv * box.view().shape[3];
  const std::vector<bool> used = used_cache_rows();
  for (std::size_t n = 0; n < used.size(); ++n) {
    if (used[n]) continue;
    for (std::int64_t i = 0; i < inner; ++i) {
      box.set(static_cast<std::int64_t>(n) * inner + i, std::numeric_limits<double>::quiet_NaN());
    }
  }
}

Box Call::row_scales(const Box& keys, Random& random) const {
  const Tensor& t = keys.view();
  const std::size_t first = t.rank == 4 ? 1 : 0;
  const std::int64_t rows = t.shape[first];
  std::vector<std::int64_t> shape{spec.heads_kv, rows};
  if (t.rank == 4) shape.insert(shape.begin(), t.shape[0]);
  Box box(DType::f32, shape, t.rank == 4 ? spec.scale_layout : Layout{}, false);
  std::vector<bool> used(static_cast<std::size_t>(box.numel() / spec.heads_kv), false);
  if (spec.of_cache()) {
    used = used_cache_rows();
  } else {
    for_each_key_row(spec, [&](std::int64_t b, std::int64_t row, bool takes_part) {
      used[static_cast<std::size_t>((t.rank == 4 ? b * rows : 0) + row)] = takes_part;
    });
  }
  const double unit = keys.dtype() == DType::s8 ? 1.0 / s8_deviation : 1.0;
  for (std::int64_t n = 0; n < box.numel(); ++n) {
    const std::int64_t row = n / rows / spec.heads_kv * rows + n % rows;
    const double scale = std::exp2(3.0 * random.uniform() - 2.0) * unit;
    box.set(n, used[static_cast<std::size_t>(row)] ? scale : std::numeric_limits<double>::quiet_NaN());
  }
  return box;
}

Box Call::scaled_keys(const Box& keys, const Box& scale) const {
  if (spec.scales != 3) return keys;
  const Tensor& t = keys.view();
  const std::int64_t rows = t.shape[t.rank == 4 ? 1 : 0];
  const std::int64_t dim = t.shape[static_cast<std::size_t>(t.rank - 1)];
  Box scaled(DType::f32, {t.shape.begin(), t.shape.begin() + t.rank}, {}, false);
  std::vector<double> values = keys.values();
  for (std::int64_t n = 0; n < keys.numel(); ++n) {
    const std::int64_t head = n / dim % spec.heads_kv;
    const std::int64_t row = n / dim / spec.heads_kv;
    const double s = scale.get((row / rows * spec.heads_kv + head) * rows + row % rows);
    values[static_cast<std::size_t>(n)] *= s;
  }
  scaled.set_all(values);
  return scaled;
}

Box Call::dense_keys(const Box& stored, const Box& scale) const {
  const Box cache = scaled_keys(stored, scale);
  const std::int64_t dim = cache.view().shape[3];
  const std::int64_t inner = spec.heads_kv * dim;
  Box dense(cache.dtype(), {spec.batch, spec.seqlen_k, spec.heads_kv, dim}, {}, false);
  const std::vector<double> stored_values = cache.values();
  std::vector<double> values = dense.values();
  for (std::int64_t b = 0; b < spec.batch; ++b) {
    const std::int64_t first = spec.cache_padding(b);
    for (std::int64_t row = first; row < spec.cache_rows(b); ++row) {
      const auto [entry, at] = cache_place(b, row);
      const bool exists = entry >= 0 && entry < cache.view().shape[0];
      const auto to = values.begin() + (b * spec.seqlen_k + row - first) * inner;
      if (exists) {
        std::copy_n(stored_values.begin() + (entry * cache.view().shape[1] + at) * inner, inner, to);
      } else {
        std::fill_n(to, inner, 0.0);
      }
    }
  }
  dense.set_all(values);
  return dense;
}

}  // namespace tandem::harness
