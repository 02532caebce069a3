// One tile of queries in 8 bits: blocked online softmax with the roundings of the GPU kernels, query rows in
// the lanes.
//
// Without a matrix unit, and for e4m3, products of quantized values are computed in f32. That is exact where
// it has to be: an s8 product over at most 256 channels is below 127^2 * 256 = 4129024 and a u8 x s8 product
// over quant_block keys below 255 * 127 * 128 = 4145280, whole numbers under 2^24 that every order of
// addition gives exactly, so they are the 32-bit sums of the integer tensor cores. e4m3 products are exact in
// f32 too; their accumulator is truncated after every e4m3_depth_step of them.
//
// Compiled once for each instruction set (targets/targets.cmake).
#include "cpu/eight_bit/on_unit.hpp"
#include "cpu/eight_bit/products.hpp"
#include "cpu/eight_bit/softmax.hpp"
#include "cpu/eight_bit/stage.hpp"
#include "cpu/eight_bit/work.hpp"
#include "cpu/forward/finish_row.hpp"
#include "cpu/forward/lane_totals.hpp"
#include "cpu/simd/rotate.hpp"

namespace tandem::cpu::TANDEM_TARGET::eight_bit {
namespace {

/// Every row's sums before the first block, and the keys it sees.
void open_stripes(const Work& w, Stripe* stripes, int count) {
  for (int i = 0; i < w.t.block_q; ++i) {
    w.s.maximum[i] = w.s.largest[i] = negative_infinity;
    w.s.sum[i] = 0.0F;
    w.s.pending[i] = 1.0F;
  }
  __builtin_memset(w.s.out, 0,
                   sizeof(float) * static_cast<std::size_t>(count * stripe_lanes) *
                       static_cast<std::size_t>(w.t.head_dim_v));
  for (int n = 0; n < count; ++n) {
    Stripe& s = stripes[n];
    s.index = n;
    s.count = w.t.count - n * stripe_lanes < stripe_lanes ? w.t.count - n * stripe_lanes : stripe_lanes;
    s.begin = s.all_end = w.t.seqlen_k;
    s.end = s.all_begin = 0;
    for (int i = 0; i < stripe_lanes; ++i) {
      s.first[i] = s.last[i] = 0;
      if (i >= s.count) continue;
      const RowKeys keys = row_keys(w.t, w.t.first + n * stripe_lanes + i);
      s.first[i] = keys.begin;
      s.last[i] = keys.end;
      s.all_begin = keys.begin > s.all_begin ? keys.begin : s.all_begin;
      s.all_end = keys.end < s.all_end ? keys.end : s.all_end;
      if (keys.begin >= keys.end) continue;
      s.begin = keys.begin < s.begin ? keys.begin : s.begin;
      s.end = keys.end > s.end ? keys.end : s.end;
    }
  }
}

template <typename Out>
void write_stripe(const Work& w, const Stripe& s) {
  const int dim = w.t.head_dim_v;
  const float* out = w.s.out + static_cast<std::int64_t>(s.index) * dim * stripe_lanes;
  float* const rows = w.s.k;
  transpose(out, stripe_lanes, dim, stripe_lanes, rows, dim);
  for (int i = 0; i < s.count; ++i) {
    const int at = s.index * stripe_lanes + i;
    float* const row = rows + static_cast<std::int64_t>(i) * dim;
    if (w.tile.recipe.rotate_v) rotate_back(row, dim);
    const float shift = w.t.softcap != 0.0F ? 0.0F : w.s.shift[at] * log2_e;
    const auto logit = [&](float in_log2) { return static_cast<double>(in_log2 + shift) * ln_2; };
    const RowSum sum{.top = logit(w.s.maximum[at]),
                     .sum = w.s.sum[at],
                     .max_logit = static_cast<float>(logit(w.s.largest[at]))};
    write_row<Out>(w.t, w.t.first + at, 0, s.first[i] < s.last[i], sum, row);
  }
}

/// One block of keys against one stripe of queries.
void attend(const Work& w, const Stripe& s, const KeyBlock& b) {
  bool masked = false;
  for (int i = 0; i < s.count; ++i) masked |= s.first[i] > b.begin || s.last[i] < b.begin + b.count;
  score(w, w.s.q + static_cast<std::int64_t>(s.index) * w.t.head_dim_qk * stripe_lanes, b.count);
  for (int lane = 0; lane < stripe_lanes; lane += vec_lanes) soften(w, s, b, lane, masked, w.s.scores);
  accumulate(w, s, b);
}

/// Adds a run's sums to the totals; `last`: and takes these for the row's.
void fold(const Work& w, int stripe, bool last) {
  const int dim = w.t.head_dim_v;
  const int row = stripe * stripe_lanes;
  const LaneTotals totals = totals_at(w.s.totals, w.t.block_q, row, dim);
  float* const out = w.s.out + static_cast<std::int64_t>(row) * dim;
  fold_run<stripe_lanes>(totals, dim, out, w.s.sum + row, w.s.maximum + row,
                         [](Vec old, Vec now) { return hn::Sub(old, now); });
  if (last) close_totals<stripe_lanes>(totals, dim, out, w.s.sum + row, w.s.maximum + row);
}

/// Keys [begin, end) of a run, block by block, against all stripes; false where the caller wants to stop.
bool attend_run(const Work& w, const Stripe* stripes, int count, std::int64_t begin, std::int64_t end) {
#if defined(TANDEM_MATRIX_UNIT)
  // A stripe's O stays in the first-level cache while the run's quantized values pass from the second.
  for (int n = 0; w.tile.on_unit && n < count; ++n) {
    if (w.t.stop()) return false;
    attend_run_on_unit(w, stripes[n], begin, end);
  }
  if (w.tile.on_unit) return true;
#endif
  int held = 0;
  for (std::int64_t key = begin; key < end; key += quant_block) {
    const int keys = end - key < quant_block ? static_cast<int>(end - key) : quant_block;
    const bool closes = held + 1 == w.tile.recipe.promote_every || key + quant_block >= end;
    const KeyBlock b{.begin = key, .count = keys, .opens = held == 0, .closes = closes};
    held = closes ? 0 : held + 1;
    if (w.t.stop()) return false;
    stage(w, b);
    for (int n = 0; n < count; ++n) attend(w, stripes[n], b);
  }
  return true;
}

void run(const EightBitTile& tile) {
  const Recipe& r = tile.recipe;
  const bool lazy = r.pv == OperandType::e4m3 && r.v_scales != ScaleGroup::row;
  const Work w{.tile = tile,
               .t = tile.forward,
               .s = scratch_of(tile.forward, tile.on_unit),
               .truncates = r.qk == OperandType::e4m3,
               .lazy_rescaling = lazy,
               .p_linear = r.linear_exp2 && lazy};
  const MatrixUnit in_use;
  stage_queries(w);
  find_shifts(w);
  Stripe stripes[has_matrix_unit ? max_stripes : quant_block / stripe_lanes];
  const int count = (w.t.count + stripe_lanes - 1) / stripe_lanes;
  open_stripes(w, stripes, count);

  const std::int64_t begin = row_keys(w.t, w.t.first).begin / quant_block * quant_block;
  const std::int64_t end = row_keys(w.t, w.t.first + w.t.count - 1).end;
  const bool in_runs = begin < end && begin / run_keys != (end - 1) / run_keys;
  for (int n = 0; in_runs && n < count; ++n) {
    open_totals<stripe_lanes>(totals_at(w.s.totals, w.t.block_q, n * stripe_lanes, w.t.head_dim_v),
                              w.t.head_dim_v);
  }
  for (std::int64_t key = begin; key < end;) {
    const std::int64_t run_end = (key / run_keys + 1) * run_keys;
    if (!attend_run(w, stripes, count, key, run_end < end ? run_end : end)) return;
    for (int n = 0; in_runs && n < count; ++n) fold(w, n, run_end >= end);
    key = run_end;
  }
  for (int n = 0; n < count; ++n) {
    with_out_type(w.t, [&]<typename Out>() { write_stripe<Out>(w, stripes[n]); });
  }
}

}  // namespace
}  // namespace tandem::cpu::TANDEM_TARGET::eight_bit

namespace tandem::cpu::TANDEM_TARGET {

extern const EightBitKernel eight_bit_kernel;
#if defined(TANDEM_MATRIX_UNIT)
const EightBitKernel eight_bit_kernel{.run = eight_bit::run,
                                      .arrange_keys = eight_bit::arrange_keys,
                                      .arrange_values = eight_bit::arrange_values};
#else
const EightBitKernel eight_bit_kernel{
    .run = eight_bit::run, .arrange_keys = nullptr, .arrange_values = nullptr};
#endif

}  // namespace tandem::cpu::TANDEM_TARGET
