#include "append_call.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <sstream>

#include "element.hpp"

namespace tandem::harness {
namespace {

std::vector<double> doubles(const std::vector<std::int64_t>& values) {
  return {values.begin(), values.end()};
}

Box integers(DType dtype, const std::vector<std::int64_t>& values) {
  return values.empty() ? Box() : vector_box(dtype, doubles(values));
}

bool is_integer_code(DType dtype) {
  return dtype == DType::s8;
}

double largest_code(DType dtype) {
  return is_integer_code(dtype) ? 127.0 : 448.0;
}

/// The code of a value whose quotient by its scale rounds to an f32: to nearest even, saturated.
double code_value(DType dtype, double value, double quotient) {
  if (!std::isfinite(value)) {
    return is_integer_code(dtype) ? 0.0 : std::numeric_limits<double>::quiet_NaN();
  }
  quotient = static_cast<double>(static_cast<float>(quotient));
  if (std::isnan(quotient)) return is_integer_code(dtype) ? 0.0 : quotient;
  const double inside = std::clamp(quotient, -largest_code(dtype), largest_code(dtype));
  return is_integer_code(dtype) ? std::nearbyint(inside) : inside;
}

/// The scale of a row of its own, and what its values are multiplied by, both f32: 0 of a row of zeros. A row
/// of s8 that is not all numbers has scale NaN.
struct FoundScale {
  double stored = 0.0;
  double inverse = 0.0;
};

FoundScale found_scale(DType dtype, const std::vector<double>& row) {
  double largest = 0.0;
  bool numbers = true;
  for (const double x : row) {
    numbers &= std::isfinite(x);
    if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
  }
  FoundScale scale;
  if (largest >= 0x1p-100) {
    scale.stored = static_cast<double>(static_cast<float>(largest / largest_code(dtype)));
    scale.inverse = static_cast<double>(static_cast<float>(largest_code(dtype) / largest));
  }
  if (is_integer_code(dtype) && !numbers) scale.stored = std::numeric_limits<double>::quiet_NaN();
  return scale;
}

void random_bytes(const Box& box, Random& random) {
  const auto item = static_cast<std::int64_t>(size_of(box.dtype()));
  auto* const data = static_cast<std::byte*>(box.view().data);
  const Tensor& t = box.view();
  std::int64_t at[4];
  const std::int64_t columns = t.rank == 4 ? t.shape[3] : 1;
  for (at[0] = 0; at[0] < t.shape[0]; ++at[0]) {
    for (at[1] = 0; at[1] < t.shape[1]; ++at[1]) {
      for (at[2] = 0; at[2] < t.shape[2]; ++at[2]) {
        std::byte* const row =
            data + (at[0] * t.stride[0] + at[1] * t.stride[1] + at[2] * t.stride[2]) * item;
        for (std::int64_t n = 0; n < columns * item; ++n) row[n] = static_cast<std::byte>(random.bits());
      }
    }
  }
}

}  // namespace

std::int64_t AppendCase::rows() const {
  if (!slots.empty()) return static_cast<std::int64_t>(slots.size());
  return std::accumulate(lengths.begin(), lengths.end(), slack);
}

std::string AppendCase::describe() const {
  std::ostringstream text;
  text << "append seed " << seed << " " << name_of(dtype) << " to " << name_of(cache_dtype) << " batch "
       << batch << " new " << (packed() ? rows() : seqlen_new) << " heads " << heads_kv << "/" << heads_q
       << " d " << head_dim << "/" << head_dim_v << " entry_rows " << entry_rows << " max_pages " << max_pages
       << " slots " << slots.size() << " rotary " << rotary_dim << " scales " << scales;
  return text.str();
}

Box AppendCall::new_rows(std::int64_t heads, std::int64_t dim, const Layout& layout, bool output) const {
  return spec.packed() ? Box(spec.dtype, {spec.rows(), heads, dim}, layout, output)
                       : Box(spec.dtype, {spec.batch, spec.seqlen_new, heads, dim}, layout, output);
}

AppendCall::AppendCall(const AppendCase& c) : spec(c) {
  Random random(c.seed);
  k_new = new_rows(c.heads_kv, c.head_dim, c.k_new, false);
  fill(k_new, random, 2.0);
  std::int64_t entries = c.entries;
  if (c.max_pages > 0) entries = c.batch * c.max_pages + 2;
  if (entries == 0) entries = c.batch;
  k_cache = Box(c.cache_dtype, {entries, c.entry_rows, c.heads_kv, c.head_dim}, c.k_cache, true);
  if (c.head_dim_v > 0) {
    v_new = new_rows(c.heads_kv, c.head_dim_v, c.v_new, false);
    fill(v_new, random, 2.0);
    v_cache = Box(c.cache_dtype, {entries, c.entry_rows, c.heads_kv, c.head_dim_v}, c.v_cache, true);
  }
  if (!c.lengths.empty()) {
    std::vector<std::int64_t> offsets{0};
    for (const std::int64_t length : c.lengths) offsets.push_back(offsets.back() + length);
    cu_seqlens_new = integers(c.metadata, offsets);
  }
  seqused_new = integers(c.metadata, c.used);
  cache_seqlens = integers(c.metadata, c.before);
  cache_batch_idx = integers(c.metadata, c.index);
  slot_mapping = integers(c.metadata, c.slots);
  leftpad_k = integers(c.metadata, c.leftpad);
  rotary_offsets = integers(c.metadata, c.offsets);
  if (c.max_pages > 0) make_page_table(random);
  if (c.scales == 3) {
    const std::vector<std::int64_t> by_row{entries, c.heads_kv, c.entry_rows};
    k_scale_cache = Box(DType::f32, by_row, c.scale_cache, true);
    if (c.head_dim_v > 0) v_scale_cache = Box(DType::f32, by_row, c.scale_cache, true);
  } else if (c.scales > 0) {
    make_scales(random);
  }
  if (c.rotary_dim > 0) make_rotary(random);
}

void AppendCall::make_page_table(Random& random) {
  const AppendCase& c = spec;
  std::vector<double> pages(static_cast<std::size_t>(k_cache.view().shape[0]));
  std::iota(pages.begin(), pages.end(), 0.0);
  for (std::size_t n = pages.size(); n-- > 1;) {
    std::swap(pages[n], pages[static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(n)))]);
  }
  Layout layout;
  layout.ends_at_guard = true;
  page_table = Box(c.metadata, {c.batch, c.max_pages}, layout, false);
  for (std::int64_t n = 0; n < page_table.numel(); ++n) {
    page_table.set(n, pages[static_cast<std::size_t>(n)]);
  }
  // Entries that no new token needs hold nonsense.
  for (std::int64_t b = 0; b < c.batch; ++b) {
    std::vector<bool> needed(static_cast<std::size_t>(c.max_pages));
    for (const AppendedToken& token : tokens()) {
      const std::int64_t row = c.before[static_cast<std::size_t>(b)] + token.index;
      if (token.sequence == b && row >= 0 && row / c.entry_rows < c.max_pages) {
        needed[static_cast<std::size_t>(row / c.entry_rows)] = true;
      }
    }
    for (std::int64_t i = 0; i < c.max_pages; ++i) {
      if (needed[static_cast<std::size_t>(i)]) continue;
      page_table.set(b * c.max_pages + i, random.pick({-1.0, 2147483647.0, -2147483648.0, 0.0}));
    }
  }
}

void AppendCall::make_scales(Random& random) {
  const AppendCase& c = spec;
  std::vector<std::int64_t> shape{c.batch, c.heads_kv};
  if (c.scales == 1) shape = {1};
  if (c.scales == 4) shape.push_back(c.seqlen_new);
  for (Box* box : {&k_scale, &v_scale}) {
    if (box == &v_scale && c.head_dim_v == 0) continue;
    *box = Box(DType::f32, shape, {}, false);
    for (std::int64_t n = 0; n < box->numel(); ++n) {
      box->set(n, std::exp(random.normal()) / (is_integer_code(c.cache_dtype) ? 30.0 : 4.0));
    }
  }
}

void AppendCall::make_rotary(Random& random) {
  const AppendCase& c = spec;
  for (Box* box : {&rotary_cos, &rotary_sin}) {
    Layout layout;
    layout.ends_at_guard = true;
    layout.pad = c.seed % 3 == 0 ? 3 : 0;
    *box = Box(c.table_dtype, {c.positions, c.rotary_dim / 2}, layout, false);
    for (std::int64_t n = 0; n < box->numel(); ++n) {
      const double angle = static_cast<double>(n / (c.rotary_dim / 2)) *
                           std::pow(0.7, static_cast<double>(n % (c.rotary_dim / 2)));
      box->set(n, box == &rotary_cos ? std::cos(angle) : std::sin(angle));
    }
  }
  if (c.heads_q > 0) {
    q = new_rows(c.heads_q, c.head_dim, c.q, false);
    fill(q, random, 2.0);
    q_out = new_rows(c.heads_q, c.head_dim, c.q_out, true);
  }
}

AppendArgs AppendCall::args() const {
  AppendArgs args;
  for_each_tensor(args, [](auto& field, const Box& box) {
    if (box.given()) field = box.view();
  });
  args.rotary_interleaved = spec.interleaved;
  args.check = spec.check;
  return args;
}

void AppendCall::prepare() {
  Random random(spec.seed + 77);
  for (const Box* box : {&k_cache, &v_cache, &k_scale_cache, &v_scale_cache}) {
    if (!box->given()) continue;
    random_bytes(*box, random);
    before_[box] = box->raw();
  }
  if (q_out.given()) q_out.poison();
  AppendArgs fields;
  for_each_tensor(fields, [](auto&, const Box& box) {
    if (box.given()) const_cast<Box&>(box).snapshot();
  });
}

std::vector<AppendedToken> AppendCall::tokens() const {
  std::vector<AppendedToken> all;
  if (!spec.slots.empty()) {
    for (std::int64_t n = 0; n < spec.rows(); ++n) all.push_back({.row = n, .sequence = 0, .index = n});
    return all;
  }
  std::int64_t row = 0;
  for (std::int64_t b = 0; b < spec.batch; ++b) {
    const auto at = static_cast<std::size_t>(b);
    const std::int64_t length = spec.lengths.empty() ? spec.seqlen_new : spec.lengths[at];
    const std::int64_t used = spec.used.empty() ? length : std::clamp<std::int64_t>(spec.used[at], 0, length);
    for (std::int64_t j = 0; j < used; ++j) all.push_back({.row = row + j, .sequence = b, .index = j});
    row += length;
  }
  return all;
}

std::int64_t AppendCall::slot(const AppendedToken& token) const {
  const std::int64_t entries = k_cache.view().shape[0];
  const auto at = static_cast<std::size_t>(token.sequence);
  if (!spec.slots.empty()) {
    const std::int64_t slot = spec.slots[static_cast<std::size_t>(token.index)];
    return slot >= 0 && slot < entries * spec.entry_rows ? slot : -1;
  }
  const std::int64_t row = spec.before[at] + token.index;
  const std::int64_t rows = spec.max_pages > 0 ? spec.max_pages * spec.entry_rows : spec.entry_rows;
  if (spec.before[at] < 0 || row >= rows) return -1;
  std::int64_t entry = token.sequence;
  if (spec.max_pages > 0) {
    entry =
        static_cast<std::int64_t>(page_table.get(token.sequence * spec.max_pages + row / spec.entry_rows));
  } else if (!spec.index.empty()) {
    entry = spec.index[at];
  }
  return entry >= 0 && entry < entries ? entry * spec.entry_rows + row % spec.entry_rows : -1;
}

std::vector<double> AppendCall::row_of(const Box& box, const AppendedToken& token, std::int64_t heads,
                                       std::int64_t head, std::int64_t dim, bool embedded) const {
  std::vector<double> row;
  for (std::int64_t c = 0; c < dim; ++c) row.push_back(box.get((token.row * heads + head) * dim + c));
  if (!embedded || spec.rotary_dim == 0) return row;
  std::int64_t position = token.index;
  if (!spec.slots.empty()) {
    position = spec.offsets[static_cast<std::size_t>(token.index)];
  } else {
    position += (spec.offsets.empty() ? spec.before : spec.offsets)[static_cast<std::size_t>(token.sequence)];
  }
  position = std::clamp<std::int64_t>(position, 0, spec.positions - 1);
  const std::int64_t half = spec.rotary_dim / 2;
  // Products of two f32 are exact in f64, and sums rounded to f64 and then to f32 are rounded as if once.
  const auto f32 = [](double x) { return static_cast<double>(static_cast<float>(x)); };
  for (std::int64_t c = 0; c < half; ++c) {
    const double cos = rotary_cos.get(position * half + c);
    const double sin = rotary_sin.get(position * half + c);
    double& first = row[static_cast<std::size_t>(spec.interleaved ? 2 * c : c)];
    double& second = row[static_cast<std::size_t>(spec.interleaved ? 2 * c + 1 : c + half)];
    const double a = first;
    const double b = second;
    first = f32(f32(a * cos) - f32(b * sin));
    second = f32(f32(b * cos) + f32(a * sin));
  }
  return row;
}

AppendCall::WrittenRows AppendCall::expected(const Box& rows, const Box& cache, const Box& scale,
                                             std::int64_t dim, bool embedded) const {
  WrittenRows written;
  const bool rounds = is_eight_bit(cache.dtype()) && !is_eight_bit(rows.dtype());
  const bool widens = is_eight_bit(rows.dtype()) && !is_eight_bit(cache.dtype());
  for (const AppendedToken& token : tokens()) {
    const std::int64_t to = slot(token);
    if (to < 0) continue;
    for (std::int64_t h = 0; h < spec.heads_kv; ++h) {
      const std::vector<double> row = row_of(rows, token, spec.heads_kv, h, dim, embedded);
      double of_head = 1.0;
      double times = 1.0;
      if (scale.given()) {
        const std::int64_t at = (spec.slots.empty() ? token.sequence : 0) * spec.heads_kv + h;
        const std::int64_t by_row = at * spec.seqlen_new + token.index;
        of_head = scale.get(spec.scales == 1 ? 0 : spec.scales == 4 ? by_row : at);
      }
      if (spec.scales == 3) {
        const FoundScale found = found_scale(cache.dtype(), row);
        times = found.inverse;
        const std::int64_t entry = to / spec.entry_rows;
        written.scales[(entry * spec.heads_kv + h) * spec.entry_rows + to % spec.entry_rows] = found.stored;
      }
      for (std::int64_t c = 0; c < dim; ++c) {
        double x = row[static_cast<std::size_t>(c)];
        if (rounds) x = code_value(cache.dtype(), x, x * times / of_head);
        if (widens) x = static_cast<double>(static_cast<float>(x * of_head));
        written.cache[(to * spec.heads_kv + h) * dim + c] = rounded(cache.dtype(), x);
      }
    }
  }
  return written;
}

AppendCall::Written AppendCall::expected_queries() const {
  Written written;
  for (std::int64_t n = 0; n < q_out.numel(); ++n) written[n] = 0.0;
  for (const AppendedToken& token : tokens()) {
    for (std::int64_t h = 0; h < spec.heads_q; ++h) {
      const std::vector<double> row = row_of(q, token, spec.heads_q, h, spec.head_dim, true);
      for (std::int64_t c = 0; c < spec.head_dim; ++c) {
        written[(token.row * spec.heads_q + h) * spec.head_dim + c] =
            rounded(spec.dtype, row[static_cast<std::size_t>(c)]);
      }
    }
  }
  return written;
}

namespace {

/// `box` holds the written values, equal or NaN where they are, and the bytes of `before` everywhere else.
testing::AssertionResult holds(const char* name, const Box& box,
                               const std::map<std::int64_t, double>& written,
                               const std::vector<std::byte>& before) {
  const std::vector<std::byte> now = box.raw();
  const auto item = static_cast<std::int64_t>(size_of(box.dtype()));
  for (std::int64_t n = 0; n < box.numel(); ++n) {
    const auto found = written.find(n);
    if (found == written.end()) {
      if (std::memcmp(now.data() + n * item, before.data() + n * item, static_cast<std::size_t>(item)) == 0) {
        continue;
      }
      return testing::AssertionFailure() << name << ": element " << n << " was not named and has changed";
    }
    const double value = decode(box.dtype(), now.data(), n);
    const bool same = std::isnan(found->second)
                          ? std::isnan(value)
                          : value == found->second && std::signbit(value) == std::signbit(found->second);
    if (!same) {
      return testing::AssertionFailure()
             << name << ": element " << n << " is " << value << " and should be " << found->second;
    }
  }
  const std::string outside = box.changed_outside();
  if (!outside.empty()) return testing::AssertionFailure() << name << ": " << outside;
  return testing::AssertionSuccess();
}

}  // namespace

testing::AssertionResult AppendCall::cache_is_correct(const char* name, const Box& rows, const Box& cache,
                                                      const Box& scale, const Box& found,
                                                      bool embedded) const {
  const WrittenRows written = expected(rows, cache, scale, cache.view().shape[3], embedded);
  auto result = holds(name, cache, written.cache, before_.at(&cache));
  if (!result || !found.given()) return result;
  return holds(name, found, written.scales, before_.at(&found)) << " in its scales";
}

testing::AssertionResult AppendCall::correct() const {
  auto result = cache_is_correct("k_cache", k_new, k_cache, k_scale, k_scale_cache, true);
  if (!result) return result;
  if (v_cache.given()) {
    result = cache_is_correct("v_cache", v_new, v_cache, v_scale, v_scale_cache, false);
    if (!result) return result;
  }
  if (q_out.given()) {
    result = holds("q_out", q_out, expected_queries(), {});
    if (!result) return result;
  }
  for (const Box* box : {&k_new, &v_new, &q, &cu_seqlens_new, &page_table, &slot_mapping, &rotary_cos}) {
    if (box->given() && box->changed()) return testing::AssertionFailure() << "an input was written";
  }
  return testing::AssertionSuccess();
}

}  // namespace tandem::harness
