#include "merge_call.hpp"

#include <cmath>
#include <limits>
#include <sstream>

#include "element.hpp"

namespace tandem::harness {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// Both NaN, both the same infinity, or within `bound`.
bool close(double got, double wanted, double bound) {
  if (std::isnan(wanted)) return std::isnan(got);
  if (std::isinf(wanted)) return got == wanted;
  return std::abs(got - wanted) <= bound;
}

}  // namespace

std::string MergeCase::describe() const {
  std::ostringstream text;
  text << "merge seed " << seed << " " << name_of(dtype) << " to " << name_of(out_dtype) << " parts " << parts
       << " batch " << batch << (packed ? " packed" : "") << " rows " << rows << " heads " << heads << " d "
       << head_dim << " lse " << lse_center << " +- " << lse_spread << " empty " << empty;
  return text.str();
}

MergeCall::MergeCall(const MergeCase& c) : spec(c) {
  Random random(c.seed);
  const auto rows = [&](DType dtype, const Layout& layout, bool output) {
    return c.packed ? Box(dtype, {c.rows, c.heads, c.head_dim}, layout, output)
                    : Box(dtype, {c.batch, c.rows, c.heads, c.head_dim}, layout, output);
  };
  const auto statistics = [&](const Layout& layout, bool output) {
    return c.packed ? Box(DType::f32, {c.heads, c.rows}, layout, output)
                    : Box(DType::f32, {c.batch, c.heads, c.rows}, layout, output);
  };
  for (std::int64_t i = 0; i < c.parts; ++i) {
    Box& part = outs.emplace_back(rows(c.dtype, c.layout, false));
    Box& of_part = lses.emplace_back(statistics(c.lse_layout, false));
    fill(part, random, 1.0);
    for (std::int64_t n = 0; n < of_part.numel(); ++n) {
      of_part.set(n, c.lse_center + c.lse_spread * random.normal());
    }
    for (std::int64_t n = 0; n < of_part.numel(); ++n) {
      if (!random.chance(c.empty)) continue;
      of_part.set(n, -infinity);
      const std::int64_t row = n % c.rows;
      const std::int64_t head = n / c.rows % c.heads;
      const std::int64_t first = out_at(n / c.rows / c.heads, row, head);
      for (std::int64_t k = 0; k < c.head_dim; ++k) part.set(first + k, std::nan(""));
    }
  }
  out = rows(c.out_dtype, c.out_layout, true);
  if (c.lse) lse = statistics({}, true);
}

MergeArgs MergeCall::args() const {
  out_views_.clear();
  lse_views_.clear();
  for (const Box& box : outs) out_views_.emplace_back(box.view());
  for (const Box& box : lses) lse_views_.emplace_back(box.view());
  MergeArgs args{.outs = out_views_, .lses = lse_views_, .out = out.view(), .lse = {}};
  if (lse.given()) args.lse = lse.view();
  return args;
}

void MergeCall::prepare() {
  for (Box* box : {&out, &lse}) {
    if (!box->given()) continue;
    box->poison();
    box->snapshot();
  }
  for (Box& box : outs) box.snapshot();
  for (Box& box : lses) box.snapshot();
}

std::int64_t MergeCall::out_at(std::int64_t b, std::int64_t row, std::int64_t head) const {
  return ((b * spec.rows + row) * spec.heads + head) * spec.head_dim;
}

std::int64_t MergeCall::lse_at(std::int64_t b, std::int64_t row, std::int64_t head) const {
  return (b * spec.heads + head) * spec.rows + row;
}

testing::AssertionResult MergeCall::correct() const {
  const std::int64_t batch = spec.packed ? 1 : spec.batch;
  for (std::int64_t n = 0; n < batch * spec.rows * spec.heads; ++n) {
    const std::int64_t head = n % spec.heads;
    const std::int64_t row = n / spec.heads % spec.rows;
    const std::int64_t b = n / spec.heads / spec.rows;
    double largest = -infinity;
    bool defined = true;
    for (const Box& part : lses) {
      const double value = part.get(lse_at(b, row, head));
      defined = defined && !std::isnan(value) && value != infinity;
      largest = std::max(largest, value);
    }
    double sum = 0.0;
    for (const Box& part : lses) {
      const double value = part.get(lse_at(b, row, head));
      if (value != -infinity) sum += std::exp(value - largest);
    }
    const double total = !defined ? std::nan("") : sum == 0.0 ? -infinity : largest + std::log(sum);
    const double lse_bound = 1e-6 * std::max(1.0, std::abs(total));
    if (lse.given() && !close(lse.get(lse_at(b, row, head)), total, lse_bound)) {
      return testing::AssertionFailure() << "lse of batch " << b << ", row " << row << ", head " << head
                                         << " is " << lse.get(lse_at(b, row, head)) << ", not " << total;
    }
    for (std::int64_t c = 0; c < spec.head_dim; ++c) {
      double value = defined ? 0.0 : std::nan("");
      double magnitude = 0.0;
      for (std::size_t i = 0; defined && i < outs.size(); ++i) {
        const double of_part = lses[i].get(lse_at(b, row, head));
        if (of_part == -infinity) continue;
        const double term = std::exp(of_part - largest) / sum * outs[i].get(out_at(b, row, head) + c);
        value += term;
        magnitude += std::abs(term);
      }
      // Half a unit in the last place of the result: 2^-9 of a bf16, 2^-12 of an f16.
      const double rounding = spec.out_dtype == DType::bf16  ? 0x1p-8
                              : spec.out_dtype == DType::f16 ? 0x1p-11
                                                             : 0.0;
      const double bound = 1e-6 * std::max(1.0, magnitude) + rounding * std::abs(value);
      const double got = out.get(out_at(b, row, head) + c);
      if (!close(got, value, bound)) {
        return testing::AssertionFailure()
               << "out of batch " << b << ", row " << row << ", head " << head << ", column " << c << " is "
               << got << ", not " << value << " (bound " << bound << ")";
      }
    }
  }
  for (const Box* box : {&out, &lse}) {
    if (!box->given()) continue;
    const std::string outside = box->changed_outside();
    if (!outside.empty()) return testing::AssertionFailure() << outside;
  }
  for (const auto* boxes : {&outs, &lses}) {
    for (const Box& box : *boxes) {
      if (box.changed()) return testing::AssertionFailure() << "an input was written";
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace tandem::harness
