#include "eight_bit/emulated_eight_bit.hpp"
#include "api/make_problem.hpp"
#include "harness/changes.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/cpu.hpp"
#include "cpu/quantize/quantize.hpp"
#include "emulated_call.hpp"
#include "launch.hpp"
#include "ops/eight_bit/launch.hpp"

namespace tandem::kernel_tests {
namespace {

using harness::Call;
using harness::Case;
using harness::Random;

constexpr std::uint8_t poison = 0x7F;  // NaN in e4m3

/// Quantized values and scales of one tensor, on the axes of quantized_layout.hpp. What the kernel must not
/// use is poison.
struct Quantized {
  std::vector<std::uint8_t> quantized;
  std::vector<float> scales;
  std::vector<float> mean;  ///< K: [batch][head][head_dim]
};

/// What there is to know about a tensor.
struct Side {
  const Operand& operand;
  std::int64_t heads, rows, head_dim;
  bool packed;
  Rows (*rows_of)(const Problem&, std::int64_t);
  OperandType type;
  bool row_scales, rotate, smooth;
};

template <typename F>
void for_each_head(const Problem& p, const Side& side, const F& f) {
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t h = 0; h < side.heads; ++h) f(b, h, side.rows_of(p, b));
  }
}

/// Elements before those of (batch, head), `each` of them a head.
std::int64_t head_begin(const Side& side, std::int64_t b, std::int64_t h, std::int64_t each) {
  return ((side.packed ? 0 : b) * side.heads + h) * each;
}

/// Quantises sequence by sequence. `v`: transposed, in V's order of keys.
Quantized quantize_side(const Problem& p, const Side& side, bool v) {
  const std::int64_t blocks = quantized_blocks(side.rows, p.batch, side.packed);
  const std::int64_t keys = blocks * quant_block;
  const std::int64_t pitch = quantized_pitch(side.head_dim);
  const std::int64_t entries = side.packed ? 1 : p.batch;
  const std::int64_t groups = side.row_scales ? keys : blocks;
  Quantized q;
  q.quantized.assign(static_cast<std::size_t>(entries * side.heads * pitch * (v ? keys : side.rows)), poison);
  q.scales.assign(static_cast<std::size_t>(entries * side.heads * groups), NAN);
  if (side.smooth) q.mean.assign(static_cast<std::size_t>(p.batch * side.heads * side.head_dim), 0.0F);
  for_each_head(p, side, [&](std::int64_t b, std::int64_t h, const Rows& rows) {
    const std::int64_t used = rows.used;
    const std::int64_t in_use = (used + quant_block - 1) / quant_block;
    std::vector<std::uint8_t> quantized(static_cast<std::size_t>(used * side.head_dim));
    std::vector<float> scales(static_cast<std::size_t>(side.row_scales ? used : in_use));
    if (used > 0) {
      const Operand& o = side.operand;
      const std::int64_t at =
          (side.packed ? 0 : b) * o.batch_stride + rows.begin * o.row_stride + h * o.head_stride;
      QuantizeProblem problem;
      problem.batch = problem.heads = 1;
      problem.rows = used;
      problem.head_dim = side.head_dim;
      problem.x = o;
      problem.x.data = static_cast<std::uint16_t*>(o.data) + at;
      problem.codes = {.data = quantized.data(),
                       .dtype = side.type == OperandType::e4m3 ? DType::e4m3 : DType::s8,
                       .batch_stride = 0,
                       .row_stride = side.head_dim,
                       .head_stride = 0};
      problem.scales = {
          .data = scales.data(), .dtype = DType::f32, .batch_stride = 0, .row_stride = 1, .head_stride = 0};
      if (side.smooth) {
        problem.mean = {.data = q.mean.data() + (b * side.heads + h) * side.head_dim,
                        .dtype = DType::f32,
                        .batch_stride = 0,
                        .row_stride = 0,
                        .head_stride = 0};
      }
      problem.group = side.row_scales ? ScaleGroup::row : ScaleGroup::block;
      problem.rotate = side.rotate;
      problem.nan_markers = !v;
      cpu::quantize(problem, cpu::Target::portable, 1);
    }
    const std::int64_t first = first_block(static_cast<int>(rows.begin), static_cast<int>(b), side.packed);
    const std::int64_t group = side.row_scales ? first * quant_block : first;
    std::copy(scales.begin(), scales.end(), q.scales.begin() + head_begin(side, b, h, groups) + group);
    if (v && side.row_scales) {
      for (std::int64_t i = used; i < in_use * quant_block; ++i)
        q.scales[static_cast<std::size_t>(head_begin(side, b, h, groups) + group + i)] = 0.0F;
    }
    for (std::int64_t i = 0; i < (v ? in_use * quant_block : used); ++i) {
      for (std::int64_t c = 0; c < side.head_dim; ++c) {
        const std::uint8_t code = i < used ? quantized[static_cast<std::size_t>(i * side.head_dim + c)] : 0;
        const std::int64_t key = first * quant_block + i / 16 * 16 + v_position_of(static_cast<int>(i % 16));
        const std::int64_t at = v ? head_begin(side, b, h, pitch * keys) + c * keys + key
                                  : head_begin(side, b, h, side.rows * pitch) + (rows.begin + i) * pitch + c;
        const unsigned zero_point =
            v && takes_zero_point(side.type, side.row_scales, side.head_dim) ? 0x80 : 0;
        q.quantized[static_cast<std::size_t>(at)] = static_cast<std::uint8_t>(code ^ zero_point);
      }
    }
  });
  return q;
}

/// scale * q . mean by padded row.
std::vector<float> shifts(const Problem& p, const Side& q_side, const Call& call, const Quantized& k) {
  const std::int64_t keys = quantized_blocks(p.rows_q, p.batch, p.packed_q) * quant_block;
  std::vector<float> result(static_cast<std::size_t>((p.packed_q ? 1 : p.batch) * p.heads_q * keys), NAN);
  for_each_head(p, q_side, [&](std::int64_t b, std::int64_t h, const Rows& rows) {
    const float* mean = k.mean.data() + (b * p.heads_kv + h / p.group()) * p.head_dim_qk;
    for (std::int64_t i = 0; i < rows.used; ++i) {
      double sum = 0.0;
      for (std::int64_t c = 0; c < p.head_dim_qk; ++c) {
        const std::int64_t row = (p.packed_q ? 0 : b * p.rows_q) + rows.begin + i;
        sum += call.q.get((row * p.heads_q + h) * p.head_dim_qk + c) * static_cast<double>(mean[c]);
      }
      const std::int64_t at =
          head_begin(q_side, b, h, keys) + i +
          std::int64_t{first_block(static_cast<int>(rows.begin), static_cast<int>(b), p.packed_q)} *
              quant_block;
      result[static_cast<std::size_t>(at)] = static_cast<float>(sum * static_cast<double>(p.scale));
    }
  });
  return result;
}

}  // namespace

Recipe recipe_of(const EightBitConfig& config) {
  return {.qk = config.qk,
          .pv = config.pv,
          .qk_scales = config.row_scales ? ScaleGroup::row : ScaleGroup::block,
          .v_scales = config.v_row_scales ? ScaleGroup::row : ScaleGroup::block,
          .rotate_v = config.rotated_v,
          .linear_exp2 = config.linear_exp2};
}

harness::Case random_eight_bit_case(std::uint64_t seed, const EightBitConfig& config) {
  Random random(seed + 2000);
  Case c = harness::random_case(seed, 400);
  c.dtype = config.tiling.element == Element::f16 ? DType::f16 : DType::bf16;
  change(c, {.out_dtype = config.tiling.element == Element::f16 ? DType::f16 : DType::bf16, .split_size = 0});
  change(c, {.scales = 0, .amplitude = 1.0});
  c.batch = std::min<std::int64_t>(c.batch, 2);
  c.heads_kv = 1;
  c.heads_q = random.between(1, 2);
  c.head_dim_qk = config.tiling.head_dim_qk - 8 * random.between(0, 3);
  c.head_dim_v = config.tiling.head_dim_v - 8 * random.between(0, 3);
  c.seqlen_q = random.between(1, 200);
  c.seqlen_k = random.between(0, 400);
  const auto batch = static_cast<std::size_t>(c.batch);
  choose_lengths(c, config.mask.varlen, random);
  for (std::vector<std::int64_t>* lengths : {&c.lengths_q, &c.lengths_k, &c.used_q, &c.used_k}) {
    if (lengths->size() > batch) lengths->resize(batch);
    for (std::int64_t& length : *lengths) length = std::min<std::int64_t>(length, 300);
  }
  for (std::size_t b = 0; b < c.used_k.size() && !c.packed_k; ++b)
    c.used_k[b] = std::min(c.used_k[b], c.seqlen_k);
  for (std::size_t b = 0; b < c.used_q.size() && !c.packed_q; ++b)
    c.used_q[b] = std::min(c.used_q[b], c.seqlen_q);
  change(c, {.causal = config.mask.causal, .window_right = -1});
  c.options.window_left = config.mask.local ? random.between(0, 200) : -1;
  c.options.softcap = config.transform == ScoreTransform::softcap ? random.pick({0.5F, 4.0F, 30.0F}) : 0.0F;
  c.options.scale = random.pick({0.0F, 0.05F, 0.125F, 0.2F});
  c.lse = true;
  c.q = c.k = c.v = c.out = c.lse_layout = {};
  c.dout = c.dq = c.dk = c.dv = {};
  return c;
}

void run_eight_bit(const EmulatedEightBit& kernel, harness::Call& call, std::uint64_t interleaving) {
  const Problem p = make_problem(call.forward_args());
  const EightBitConfig& config = kernel.config;
  const Recipe recipe = recipe_of(config);
  const std::int64_t tiles = gpu::forward_tile_count(p, config.tiling);
  if (tiles == 0) return;
  const Side q_side{p.q,        p.heads_q, p.rows_q,          p.head_dim_qk,    p.packed_q,
                    query_rows, recipe.qk, config.row_scales, recipe.rotate_qk, false};
  const Side k_side{p.k,      p.heads_kv, p.rows_k,          p.head_dim_qk,    p.packed_k,
                    key_rows, recipe.qk,  config.row_scales, recipe.rotate_qk, recipe.smooth_k};
  const Side v_side{p.v,       p.heads_kv,          p.rows_k,        p.head_dim_v, p.packed_k, key_rows,
                    recipe.pv, config.v_row_scales, recipe.rotate_v, false};
  const Quantized q = quantize_side(p, q_side, false);
  const Quantized k = quantize_side(p, k_side, false);
  const Quantized v = quantize_side(p, v_side, true);
  const std::vector<float> shift = shifts(p, q_side, call, k);

  emulator::Options options{.seed = interleaving, .unordered = call.rows_overlap};
  add_buffers(options, call.inputs(), false);
  add_buffers(options, call.outputs(Pass::forward), true);
  for (const Quantized* x : {&q, &k, &v}) {
    options.buffers.push_back(emulator::readable(x->quantized));
    options.buffers.push_back(emulator::readable(x->scales));
  }
  options.buffers.push_back(emulator::readable(shift));
  options.of_previous_grid = {emulator::readable(shift)};
  for (const Quantized* x : {&q, &k, &v}) {
    options.of_previous_grid.push_back(emulator::readable(x->quantized));
    options.of_previous_grid.push_back(emulator::readable(x->scales));
  }
  std::vector<unsigned int> tile_counter(1, 0);
  options.buffers.push_back(emulator::writable(tile_counter));
  gpu::LoadedMaps maps = gpu::eight_bit_maps(p, config);
  const std::array<const void*, 3> quantized = {q.quantized.data(), k.quantized.data(), v.quantized.data()};
  for (std::size_t i = 0; i < quantized.size(); ++i) {
    if (maps[i]->region != gpu::Region::none) maps[i]->spec.base = quantized[i];
  }
  const EightBitParams params = gpu::make_eight_bit_params(
      p, config, {.q = q.scales.data(), .k = k.scales.data(), .v = v.scales.data(), .shift = shift.data()},
      maps, &emulator::encode, 64 * 1024, tile_counter.data());
  const emulator::Grid grid{.blocks = static_cast<unsigned>(std::min<std::int64_t>(tiles, 2)),
                            .threads = static_cast<unsigned>(config.threads()),
                            .shared_bytes = static_cast<std::size_t>(eight_bit_shared_bytes(config))};
  if (config.tiling.max_logits) {
    emulator::launch(kernel.with_maxima, gpu::with_maxima(p, params), grid, options);
  } else {
    emulator::launch(kernel.kernel, params, grid, options);
  }
}

}  // namespace tandem::kernel_tests
