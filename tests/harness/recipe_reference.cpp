// The bounds follow from what the recipe rounds. Each is a sum of what cannot be exceeded and of roundings
// that go either way, evenly between -b_j and b_j: together more than 6 of their standard deviations, the
// root of the sum of b_j^2 / 3, once in 5e8 times (of twelve or fewer that are alike, never), where in the
// worst case it were the sum of b_j.
//
// - P of one key, as a share w_j of its row's sum. e4m3 has 4 significant bits: w_j / 16, but no less than
// half
//   of its smallest number, 2^-10, in the unit in which the row's largest P is 28 or more (256 in its block
//   if strict, P then times V's scale). The exponentials that are linear add -3.9 to +2.0 %. u8 is off by
//   half of 255ths of the largest of the block; 16 bits by 2^-8 (bf16) or 2^-11 (f16).
// - What P's roundings have in common: where logits are all alike, so are the roundings. In e4m3 they depend
// on
//   where the reference m was when a key came, which a backend chooses: all places in an octave are tried
//   here, and the worst is allowed. Everywhere else the unit is known, and with it the sum of roundings.
// - S: e4m3's accumulator is cut to 13 bits behind the point after every 32 products, towards 0: half of its
//   last bit is taken off what is expected, and is what remains. f32 scales, differences and exponentials
//   cost 2^-21 of the logits.
// - O: e4m3's accumulator likewise, in every block of 128 keys, in a unit that is not known: 2^-13 of each
//   partial sum. f32 sums, and O rotated back in f32; out's own rounding.
// - LSE: linear exponentials are in its sum, too. The rest is f32's 1e-5. The largest logit is as far off as
//   one of the logits may be.
#include "recipe_reference.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "api/make_problem.hpp"
#include "element.hpp"
#include "problem/recipe_of.hpp"
#include "recipe_operands.hpp"

namespace tandem::harness {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
/// Of the root of the sum of b_j^2: six standard deviations.
constexpr double deviations = 6.0 * 0.57735;
constexpr double e4m3_relative = 0x1p-4;
constexpr double e4m3_smallest = 0x1p-10;  ///< half of the smallest number
constexpr double cut = 0x1p-13;            ///< what e4m3's accumulator loses of itself at a time
constexpr std::int64_t cut_after = 32;     ///< products
/// Halves of a cut that 33 cuts of random signs amount to: each is a third of a unit in the mean square, and
/// three standard deviations of their sum are 10 units.
constexpr double tensor_core_cuts = 20.0;
constexpr double linear_below = 0.039;
constexpr double linear_above = 0.020;

/// 2^x as step 5 of the recipe has it for half of the keys.
double linear_exp2(double x) {
  const double shifted = std::floor(x * 0x1p13) * 0x1p-13 - 470.0 * 0x1p-13;
  const double whole = std::floor(shifted);
  return std::ldexp(1.0 + shifted - whole, static_cast<int>(whole));
}

/// How far off a rounded number is at most, as a share of it.
double unit_of(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-24;
}

/// To the nearest e4m3 number, ties to even, of up to 448. (`rounded` is too slow for this many.)
double round_to_e4m3(double x) {
  const double capped = std::min(x, 448.0);
  const double unit = std::ldexp(1.0, std::max(std::ilogb(std::max(capped, 0x1p-9)) - 3, -9));
  return std::nearbyint(capped / unit) * unit;
}

/// One head of one sequence.
struct Head {
  const Problem& p;
  const Recipe& recipe;
  double cuts;  ///< halves of one that the accumulator may lose at a time
  std::int64_t nq, nk;
  const float* sink;
  QuantizedHead q, k, v;
  std::vector<double> original_q;  ///< as the caller has it: for what K's mean took off
  std::vector<double> values;      ///< of V, not rotated

  [[nodiscard]] bool lazy() const {
    return recipe.pv == OperandType::e4m3 && recipe.v_scales != ScaleGroup::row;
  }
  [[nodiscard]] bool joins_scale() const { return recipe.v_scales == ScaleGroup::row; }
  [[nodiscard]] bool linear(std::int64_t key) const { return recipe.linear_exp2 && lazy() && key % 16 >= 8; }
};

/// A visible key of one row.
struct Key {
  std::int64_t at;
  double logit;
  double blur;            ///< relative error of its P that comes from the logit's f32
  double lost = 0.0;      ///< the same from the cuts of e4m3's accumulator, either way
  double share = 0.0;     ///< w_j
  double rounding = 0.0;  ///< b_j: what the rounding of P may change of it
};

/// A row's results, and what is uncertain about them.
struct Row {
  std::vector<double> out, bound;
  double lse = -infinity;
  double lse_bound = 0.0;
  double max_logit = -infinity;  ///< of the keys
  double max_bound = 0.0;
  double gain_certain = 0.0;  ///< of <error, out>: at most this, and ...
  double gain_squares = 0.0;  ///< ... the root of this times `deviations`
};

std::vector<Key> visible_keys_of(const Head& h, std::int64_t i, double& shift_error) {
  const std::int64_t dim = h.p.head_dim_qk;
  const double scale = static_cast<double>(h.p.scale);
  double shift = 0.0;
  shift_error = 0.0;
  for (std::size_t c = 0; c < h.k.mean.size(); ++c) {
    const double term =
        scale * h.original_q[static_cast<std::size_t>(i * dim) + c] * static_cast<double>(h.k.mean[c]);
    shift += term;
    shift_error += 1e-6 * std::abs(term);
  }
  std::vector<Key> keys;
  for (std::int64_t j = 0; j < h.nk; ++j) {
    const std::int64_t distance = j - (i + h.nk - h.nq);
    if (h.p.window_left >= 0 && distance < -h.p.window_left) continue;
    if (h.p.window_right >= 0 && distance > h.p.window_right) continue;
    double sum = 0.0;
    double lost = 0.0;
    const double unit = h.q.scales[static_cast<std::size_t>(i)] * h.k.scales[static_cast<std::size_t>(j)];
    for (std::int64_t first = 0; first < dim; first += cut_after) {
      for (std::int64_t c = first; c < std::min(first + cut_after, dim); ++c) {
        sum += h.q.values[static_cast<std::size_t>(i * dim + c)] *
               h.k.values[static_cast<std::size_t>(j * dim + c)];
      }
      if (h.recipe.qk != OperandType::e4m3 || !std::isfinite(sum) || sum == 0.0) continue;
      const double half = std::ldexp(unit * cut / 2.0, std::ilogb(sum / unit));
      sum -= std::copysign(half, sum);
      lost += h.cuts * half;
    }
    Key key{.at = j, .logit = scale * sum + shift, .blur = 0x1p-21 * (1.0 + std::abs(scale * sum))};
    key.lost = std::abs(scale) * lost;
    if (h.p.softcap > 0.0F) {
      const double cap = static_cast<double>(h.p.softcap);
      key.logit = cap * std::tanh(key.logit / cap);
      key.blur += shift_error + 0x1p-20 * cap;
    }
    keys.push_back(key);
  }
  return keys;
}

/// The largest share, times V's scale where that joins P, of each block of 128 keys.
std::vector<double> largest_by_block(const Head& h, const std::vector<Key>& keys) {
  std::vector<double> largest(static_cast<std::size_t>(h.nk / quant_block + 1), 0.0);
  for (const Key& key : keys) {
    double& of_block = largest[static_cast<std::size_t>(key.at / quant_block)];
    const double scale = h.joins_scale() ? h.v.scales[static_cast<std::size_t>(key.at)] : 1.0;
    of_block = std::max(of_block, key.share * scale);
  }
  return largest;
}

/// Fills in what rounding P may change, and returns how much of the row's sum all roundings change together.
double round_shares(const Head& h, std::vector<Key>& keys, double largest_share) {
  const std::vector<double> largest = largest_by_block(h, keys);
  double common = 0.0;
  double total = 0.0;
  for (Key& key : keys) {
    const double scale = h.joins_scale() ? h.v.scales[static_cast<std::size_t>(key.at)] : 1.0;
    const double unit = largest[static_cast<std::size_t>(key.at / quant_block)];
    const double p = key.share * scale;
    double step = 0.0;
    double now = p;
    switch (h.recipe.pv) {
      case OperandType::input: break;
      case OperandType::s8:
        step = unit * 0.5 / 255.0;
        if (unit > 0.0) now = std::nearbyint(p / unit * 255.0) * unit / 255.0;
        break;
      case OperandType::e4m3:
        if (h.lazy()) {
          step = std::max(p * e4m3_relative, largest_share * e4m3_smallest / 28.0);
          if (h.linear(key.at)) step = std::max(step, p * (linear_below + e4m3_relative));
        } else {
          step = std::max(p * e4m3_relative, unit * e4m3_smallest / 256.0);
          if (unit > 0.0) now = round_to_e4m3(p / unit * 256.0) * unit / 256.0;
        }
        break;
    }
    key.rounding = (scale > 0.0 ? step / scale : 0.0) + key.share * key.lost;
    common += scale > 0.0 ? (now - p) / scale : 0.0;
    total += key.share;
  }
  return std::abs(common) + 1e-4 * total;
}

/// What the reference of lazily rescaled e4m3 does to a row: the largest common rounding of P over all places
/// that the reference may have in an octave, and the same of the sum of linear exponentials.
struct Common {
  double rounding = 0.0;
  double sum = 0.0;
};
Common worst_reference(const Head& h, const std::vector<Key>& keys, double largest_share) {
  constexpr int places = 16;
  std::vector<double> log2_p;
  for (const Key& key : keys) log2_p.push_back(std::log2(28.0 * key.share / largest_share));
  Common worst;
  for (int place = 0; place < places; ++place) {
    const double up = place / static_cast<double>(places);
    const double times = std::exp2(up) * 28.0 / largest_share;
    double of_p = 0.0;
    double of_sum = 0.0;
    for (std::size_t n = 0; n < keys.size(); ++n) {
      const double exact = keys[n].share * times;
      if (exact < 0x1p-30) continue;
      const double p = h.linear(keys[n].at) ? linear_exp2(log2_p[n] + up) : exact;
      of_p += round_to_e4m3(p) - p;
      of_sum += p - exact;
    }
    worst.rounding = std::max(worst.rounding, std::abs(of_p) / times);
    worst.sum = std::max(worst.sum, std::abs(of_sum) / times);
  }
  return worst;
}

/// What may be wrong with the sum of a row's P.
double sum_bound(const Head& h, const std::vector<Key>& keys, const Common& common) {
  double all = 0.0;
  double squares = 0.0;
  for (const Key& key : keys) {
    if (!h.linear(key.at)) continue;
    all += key.share * linear_below;
    squares += std::pow(key.share * (linear_below + linear_above) / 2.0, 2.0);
  }
  return std::min(all, common.sum + deviations * std::sqrt(squares));
}

/// out of a row, and the bounds of its elements and of its part of the gain.
void attend(const Head& h, const std::vector<Key>& keys, double common, double of_sum, DType out_dtype,
            Row& row) {
  const auto dim = static_cast<std::size_t>(h.p.head_dim_v);
  std::vector<double> worst(dim, 0.0), squares(dim, 0.0), certain(dim, 0.0), part(dim, 0.0);
  double blur = 0.0;
  double size_of_row = 0.0;  // O is rotated back in f32: a channel's error is that of all of them
  const bool cuts = h.recipe.qk == OperandType::e4m3 && h.recipe.pv == OperandType::e4m3;
  std::int64_t last_group = -1;
  std::int64_t last_block = -1;
  const auto end_group = [&] {
    for (std::size_t c = 0; c < dim; ++c) certain[c] += cuts ? cut * std::abs(part[c]) : 0.0;
  };
  for (const Key& key : keys) {
    if (key.at / cut_after != last_group) end_group();
    if (key.at / quant_block != last_block) std::ranges::fill(part, 0.0);
    last_group = key.at / cut_after;
    last_block = key.at / quant_block;
    blur += key.share * (key.blur + key.lost);
    const double* const v = h.values.data() + static_cast<std::size_t>(key.at) * dim;
    for (std::size_t c = 0; c < dim; ++c) {
      row.out[c] += key.share * v[c];
      part[c] += key.share * v[c];
      worst[c] += key.rounding * std::abs(v[c]);
      squares[c] += std::pow(key.rounding * v[c], 2.0);
      certain[c] += key.share * std::abs(v[c]) * (key.blur + 0x1p-20);
      size_of_row += h.recipe.rotate_v ? key.share * std::abs(v[c]) : 0.0;
    }
  }
  end_group();
  const double unit = unit_of(out_dtype);
  for (std::size_t c = 0; c < dim; ++c) {
    const double size = std::abs(row.out[c]);
    certain[c] += size * blur + 0x1p-22 * size_of_row / std::sqrt(static_cast<double>(dim)) + 0x1p-25;
    const double likely = size * (common + of_sum) + deviations * std::sqrt(squares[c]);
    row.bound[c] = certain[c] + size * unit + std::min(worst[c] + size * of_sum, likely);
    row.gain_certain += size * certain[c] + size * size * (common + of_sum);
    row.gain_squares += std::pow(size * size * unit, 2.0);
  }
  for (const Key& key : keys) {
    double product = 0.0;
    for (std::size_t c = 0; c < dim; ++c)
      product += row.out[c] * h.values[static_cast<std::size_t>(key.at) * dim + c];
    row.gain_squares += std::pow(key.rounding * product, 2.0);
  }
}

Row expect_row(const Head& h, std::int64_t i, DType out_dtype) {
  Row row;
  row.out.assign(static_cast<std::size_t>(h.p.head_dim_v), 0.0);
  row.bound = row.out;
  double shift_error = 0.0;
  std::vector<Key> keys = visible_keys_of(h, i, shift_error);
  const double sink = h.sink != nullptr ? static_cast<double>(*h.sink) : -infinity;
  row.lse = sink;
  if (keys.empty()) return row;
  double farthest = 0.0;
  for (const Key& key : keys) {
    row.max_logit = std::fmax(row.max_logit, key.logit);
    farthest = std::fmax(farthest, key.blur + key.lost);
  }
  const double maximum = std::fmax(sink, row.max_logit);
  double sum = std::exp(sink - maximum);
  for (const Key& key : keys) sum += std::exp(key.logit - maximum);
  row.lse = maximum + std::log(sum);
  if (std::isnan(row.lse)) row.max_logit = row.lse;
  row.max_bound = farthest + 1e-5 * std::max(1.0, std::abs(row.max_logit)) + shift_error;
  double largest_share = 0.0;
  for (Key& key : keys) {
    key.share = std::exp(key.logit - row.lse);
    key.blur += 0x1p-21 * std::abs(maximum);
    largest_share = std::max(largest_share, key.share);
  }
  const double shared = round_shares(h, keys, largest_share);
  const Common common = h.lazy() ? worst_reference(h, keys, largest_share) : Common{.rounding = shared};
  const double of_sum = h.lazy() ? sum_bound(h, keys, common) : 0.0;
  attend(h, keys, common.rounding, of_sum, out_dtype, row);
  double blur = 0.0;
  for (const Key& key : keys) blur += key.share * (key.blur + key.lost);
  // log(1 + x) of a sum that is too small by x is less than 1.05 x away for the x that there are.
  row.lse_bound = 1.05 * of_sum + blur + 1e-5 * std::max(1.0, std::abs(row.lse)) + shift_error;
  return row;
}

Head load_head(const Problem& p, const Recipe& recipe, std::int64_t batch, std::int64_t head,
               Accumulator accumulator) {
  Head h{.p = p,
         .recipe = recipe,
         .cuts = accumulator == Accumulator::recipe ? 1.0 : tensor_core_cuts,
         .nq = query_rows(p, batch).used,
         .nk = key_rows(p, batch).used,
         .sink = p.sink != nullptr ? p.sink + head * p.sink_stride : nullptr,
         .q = quantized_head(p, recipe, Tensor8::q, batch, head),
         .k = quantized_head(p, recipe, Tensor8::k, batch, head / p.group()),
         .v = quantized_head(p, recipe, Tensor8::v, batch, head / p.group()),
         .original_q = {},
         .values = {}};
  for (std::int64_t i = 0; i < h.nq && !h.k.mean.empty(); ++i) {
    const std::int64_t at = p.q.offset(batch, query_rows(p, batch).begin + i, head);
    for (std::int64_t c = 0; c < p.head_dim_qk; ++c)
      h.original_q.push_back(decode(p.q.dtype, p.q.data, at + c));
  }
  h.values = h.v.values;
  for (std::int64_t j = 0; j < h.nk && recipe.rotate_v; ++j)
    rotate_back(h.values.data() + j * p.head_dim_v, p.head_dim_v);
  return h;
}

}  // namespace

RecipeExpected expect_recipe(const Call& call, const Recipe& recipe, Accumulator accumulator) {
  const Problem p = call.q.dtype() == DType::s8 || call.q.dtype() == DType::e4m3
                        ? make_problem(call.forward_args())
                        : call.problem();
  RecipeExpected e;
  e.out.assign(static_cast<std::size_t>(call.out.numel()), 0.0);
  e.out_bound = e.out;
  e.lse.assign(static_cast<std::size_t>((p.packed_q ? 1 : p.batch) * p.rows_q * p.heads_q), -infinity);
  e.lse_bound.assign(e.lse.size(), 0.0);
  e.max_logits = e.lse;
  e.max_bound = e.lse_bound;
  double squares = 0.0;
  double certain = 0.0;
  double of_gain = 0.0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t head = 0; head < p.heads_q; ++head) {
      const Head h = load_head(p, recipe, b, head, accumulator);
#pragma omp parallel for schedule(dynamic, 8) reduction(+ : squares, certain, of_gain)
      for (std::int64_t i = 0; i < h.nq; ++i) {
        const Row row = expect_row(h, i, call.out.dtype());
        const std::int64_t entry = p.packed_q ? 0 : b;
        const std::int64_t r = query_rows(p, b).begin + i;
        const auto first =
            static_cast<std::ptrdiff_t>(((entry * p.rows_q + r) * p.heads_q + head) * p.head_dim_v);
        std::ranges::copy(row.out, e.out.begin() + first);
        std::ranges::copy(row.bound, e.out_bound.begin() + first);
        const auto at = static_cast<std::size_t>((entry * p.heads_q + head) * p.rows_q + r);
        e.lse[at] = row.lse;
        e.lse_bound[at] = row.lse_bound;
        e.max_logits[at] = row.max_logit;
        e.max_bound[at] = row.max_bound;
        if (!std::isfinite(row.gain_certain)) continue;
        for (const double x : row.out) squares += x * x;
        certain += row.gain_certain;
        of_gain += row.gain_squares;
      }
    }
  }
  e.gain_bound = squares > 0.0 ? (certain + deviations * std::sqrt(of_gain)) / squares : 0.0;
  return e;
}

RecipeExpected expect_recipe(const Call& call, Accumulator accumulator) {
  const bool quantized_inputs = call.q.dtype() == DType::s8 || call.q.dtype() == DType::e4m3;
  return expect_recipe(call,
                       quantized_inputs ? recipe_of(make_problem(call.forward_args()))
                                        : recipe_of(call.spec.options.precision, call.spec.options.strict),
                       accumulator);
}

}  // namespace tandem::harness
