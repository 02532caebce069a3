// The forward pass in 8 bits: K and V of a KV head are quantised block by block, then tiles of queries attend
// to them.
#include "cpu/eight_bit/forward.hpp"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <variant>

#include "cpu/common/operand.hpp"
#include "cpu/common/workspace.hpp"
#include "cpu/cpu.hpp"
#include "cpu/quantize/mean.hpp"
#include "cpu/targets/kernels.hpp"

namespace tandem::cpu {
namespace {

std::int64_t blocks_in(std::int64_t rows) {
  return (rows + quant_block - 1) / quant_block;
}

/// One call: what its threads share.
struct Run {
  const Problem& p;
  const EightBitPlan& plan;
  const Recipe& recipe;
  const Kernels& kernels;
  const EightBitStore& layout;
  int block_q;        ///< queries of a tile
  std::byte* tiles;   ///< a tile's scratch for each thread, and its store where threads take whole heads
  std::byte* shared;  ///< the store of all threads where they do not
  float *q_largest, *k_largest, *v_largest;  ///< by (batch, head); null where no scale needs them
  Stop* stop;                                ///< may be null

  [[nodiscard]] bool stops() const { return stop != nullptr && stop->wanted(); }
  [[nodiscard]] std::byte* scratch() const {
    return tiles + static_cast<std::size_t>(omp_get_thread_num()) * plan.thread_bytes;
  }
  [[nodiscard]] std::byte* store() const { return shared != nullptr ? shared : scratch() + plan.tile_bytes; }
  [[nodiscard]] EightBitScratch scratch_layout() const {
    return eight_bit_scratch(p.head_dim_qk, p.head_dim_v, block_q, plan.on_unit);
  }
  [[nodiscard]] float* floats(std::size_t at) const { return reinterpret_cast<float*>(scratch()) + at; }
  [[nodiscard]] float* rows_scratch() const { return floats(scratch_layout().k); }
};

/// One KV head of one sequence.
struct Head {
  const Run& run;
  std::int64_t b;
  std::int64_t kv_head;
  std::byte* store;

  template <typename T>
  [[nodiscard]] T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(store + offset);
  }
  [[nodiscard]] Rows keys() const { return key_rows(run.p, b); }
  [[nodiscard]] const float* mean() const {
    return run.recipe.smooth_k ? at<const float>(run.layout.mean) : nullptr;
  }
};

QuantizeRows rows_of(const Run& run, const Operand& x, std::int64_t b, std::int64_t head, const Rows& rows,
                     std::int64_t first, std::int64_t count, std::int64_t dim) {
  return {.data = element(x, b, rows.begin + first, head),
          .dtype = x.dtype,
          .stride = x.row_stride,
          .rows = static_cast<int>(count),
          .dim = static_cast<int>(dim),
          .mean = nullptr,
          .rotate = false,
          .scratch = run.rows_scratch()};
}

QuantizeRows block_of(const Run& run, const Operand& x, std::int64_t b, std::int64_t head, const Rows& rows,
                      std::int64_t block, std::int64_t dim) {
  const std::int64_t first = block * quant_block;
  return rows_of(run, x, b, head, rows, first, std::min<std::int64_t>(quant_block, rows.used - first), dim);
}

QuantizeRows k_rows(const Head& h, std::int64_t block) {
  QuantizeRows rows = block_of(h.run, h.run.p.k, h.b, h.kv_head, h.keys(), block, h.run.p.head_dim_qk);
  rows.mean = h.mean();
  rows.rotate = h.run.recipe.rotate_qk;
  return rows;
}

QuantizeRows v_rows(const Head& h, std::int64_t block) {
  QuantizeRows rows = block_of(h.run, h.run.p.v, h.b, h.kv_head, h.keys(), block, h.run.p.head_dim_v);
  rows.rotate = h.run.recipe.rotate_v;
  return rows;
}

/// K's channel sums over one block, where it has some.
void sum_block(const Head& h, std::int64_t block) {
  if (h.run.stops()) return;
  const Problem& p = h.run.p;
  const MeanKeys keys(h.keys().used, true);
  if (block % keys.step() != 0) return;
  float* const sums = h.at<float>(h.run.layout.sums) + block * p.head_dim_qk;
  std::memset(sums, 0, static_cast<std::size_t>(p.head_dim_qk) * sizeof(float));
  keys.add(h.run.kernels.quantize, block, sums, [&](std::int64_t first, std::int64_t count) {
    return rows_of(h.run, p.k, h.b, h.kv_head, h.keys(), first, count, p.head_dim_qk);
  });
}

/// K's mean over the keys in use, or a sample of them, from the sums of blocks.
void find_mean(const Head& h) {
  const std::int64_t dim = h.run.p.head_dim_qk;
  const std::int64_t used = h.keys().used;
  const MeanKeys keys(used, true);
  const float* const sums = h.at<float>(h.run.layout.sums);
  float* const mean = h.at<float>(h.run.layout.mean);
  for (std::int64_t c = 0; c < dim; ++c) {
    double sum = 0.0;
    for (std::int64_t block = 0; block < blocks_in(used); block += keys.step())
      sum += static_cast<double>(sums[block * dim + c]);
    mean[c] = used > 0 ? static_cast<float>(sum / static_cast<double>(keys.count())) : 0.0F;
  }
}

/// The largest magnitude that a scale of this group is for.
float largest_of(const Run& run, const float* largest, ScaleGroup group, std::int64_t heads, std::int64_t b,
                 std::int64_t head) {
  if (group == ScaleGroup::head) return largest[b * heads + head];
  if (group == ScaleGroup::tensor) return *std::max_element(largest, largest + run.p.batch * heads);
  return 0.0F;
}

/// Caller-supplied scales, of rows from `first` on in a sequence.
struct CallerScales {
  static constexpr float one = 1.0F;
  const float* data = &one;
  std::int64_t stride = 0;         ///< from row to row; a block's rows share one
  std::int64_t stride_blocks = 0;  ///< from a block of rows to the next

  CallerScales(const Scales& s, std::int64_t b, std::int64_t head, const Rows& rows, std::int64_t first) {
    if (s.data == nullptr) return;
    const bool by_row = s.group == ScaleGroup::row;
    const std::int64_t group = by_row ? rows.begin + first : first / quant_block;
    data = s.data + b * s.batch_stride + head / s.heads * s.head_stride + group * s.group_stride;
    stride = by_row ? s.group_stride : 0;
    stride_blocks = by_row ? quant_block * s.group_stride : s.group_stride;
  }
};

/// One block of a quantized tensor, of a KV head, row after row.
void copy_block(const Head& h, const Operand& x, const Scales& scales, std::int64_t block, std::int64_t dim,
                std::uint8_t* to, float* stored) {
  const std::int64_t first = block * quant_block;
  const CallerScales given(scales, h.b, h.kv_head, h.keys(), first);
  const std::int64_t count = std::min<std::int64_t>(quant_block, h.keys().used - first);
  for (std::int64_t i = 0; i < count; ++i) {
    copy_quantized(element<std::uint8_t>(x, h.b, h.keys().begin + first + i, h.kv_head), h.run.recipe.qk, dim,
                   given.data[i * given.stride], to + i * dim, stored[i]);
  }
}

/// A block's quantized rows on their way into tiles.
std::uint8_t* rows_of_tiles(const Run& run) {
  return reinterpret_cast<std::uint8_t*>(run.floats(run.scratch_layout().v));
}

int rows_of_block(const Head& h, std::int64_t block) {
  return static_cast<int>(std::min<std::int64_t>(quant_block, h.keys().used - block * quant_block));
}

void quantize_keys(const Head& h, std::int64_t block) {
  const Run& run = h.run;
  const Problem& p = run.p;
  const Recipe& r = run.recipe;
  const std::int64_t first = block * quant_block;
  auto* const stored =
      h.at<std::uint8_t>(run.layout.k_quantized) + first * key_bytes(p.head_dim_qk, run.plan.on_unit);
  auto* const to = run.plan.on_unit ? rows_of_tiles(run) : stored;
  auto* const scales = h.at<float>(run.layout.k_scales) + first;
  if (p.quantized_inputs()) {
    copy_block(h, p.k, p.k_scale, block, p.head_dim_qk, to, scales);
  } else {
    run.kernels.quantize.quantize(
        k_rows(h, block), {.type = r.qk,
                           .group = r.qk_scales,
                           .largest = largest_of(run, run.k_largest, r.qk_scales, p.heads_kv, h.b, h.kv_head),
                           .out = to,
                           .out_stride = p.head_dim_qk,
                           .scales = scales,
                           .nan_markers = true});
  }
  if (!run.plan.on_unit) return;
  run.kernels.eight_bit.arrange_keys(to, rows_of_block(h, block), static_cast<int>(p.head_dim_qk), stored);
}

void quantize_values(const Head& h, std::int64_t block) {
  const Run& run = h.run;
  const Problem& p = run.p;
  const Recipe& r = run.recipe;
  const std::int64_t first = block * quant_block;
  auto* const stored =
      h.at<std::uint8_t>(run.layout.v_quantized) + first * value_bytes(p.head_dim_v, run.plan.on_unit);
  auto* const to = run.plan.on_unit ? rows_of_tiles(run) : stored;
  float* const scales = h.at<float>(run.layout.v_scales);
  if (p.quantized_inputs()) {
    copy_block(h, p.v, p.v_scale, block, p.head_dim_v, to, scales + first);
  } else {
    const std::int64_t scale = r.v_scales == ScaleGroup::channel ? block * p.head_dim_v : first;
    run.kernels.quantize.quantize(
        v_rows(h, block), {.type = r.pv,
                           .group = r.v_scales,
                           .largest = largest_of(run, run.v_largest, r.v_scales, p.heads_kv, h.b, h.kv_head),
                           .out = to,
                           .out_stride = p.head_dim_v,
                           .scales = scales + scale});
  }
  if (!run.plan.on_unit) return;
  run.kernels.eight_bit.arrange_values(to, rows_of_block(h, block), static_cast<int>(p.head_dim_v),
                                       run.scratch() + run.scratch_layout().scores * sizeof(float), stored);
}

void quantize_block(const Head& h, std::int64_t block) {
  if (h.run.stops()) return;
  quantize_keys(h, block);
  quantize_values(h, block);
}

std::int64_t tiles_of(const Head& h) {
  return (query_rows(h.run.p, h.b).used + h.run.block_q - 1) / h.run.block_q * h.run.p.group();
}

void run_tile(const Head& h, std::int64_t item) {
  const Run& run = h.run;
  if (run.stops()) return;
  const Problem& p = run.p;
  const std::int64_t head = h.kv_head * p.group() + item % p.group();
  const Rows q_rows = query_rows(p, h.b);
  const Rows keys = h.keys();
  EightBitTile tile;
  ForwardTile& t = tile.forward;
  t.dtype = p.q.dtype;
  t.out_dtype = p.out.dtype;
  t.head_dim_qk = static_cast<int>(p.head_dim_qk);
  t.head_dim_v = static_cast<int>(p.head_dim_v);
  t.block_q = run.block_q;
  t.block_k = quant_block;
  t.q = {element(p.q, h.b, q_rows.begin, head), p.q.row_stride, 0};
  t.out = {element(p.out, h.b, q_rows.begin, head), p.out.row_stride, 0};
  t.lse = row_numbers(p.lse, h.b, q_rows.begin, head);
  t.max_logits = row_numbers(p.max_logits, h.b, q_rows.begin, head);
  t.gate = row_numbers(p.gate, h.b, q_rows.begin, head);
  t.v = element(p.v, h.b, keys.begin, h.kv_head);
  t.v_stride = p.v.row_stride;
  t.seqlen_q = q_rows.used;
  t.seqlen_k = keys.used;
  const Window window = window_of(p, h.b);
  t.window_left = window.left;
  t.window_right = window.right;
  static_cast<ScoreOptions&>(t) = p;
  if (p.sink != nullptr) t.sink = p.sink + head * p.sink_stride;
  // The last tile of a causal sequence sees the most keys: it goes first.
  t.first = (tiles_of(h) - 1 - item) / p.group() * run.block_q;
  t.count = static_cast<int>(std::min<std::int64_t>(run.block_q, t.seqlen_q - t.first));
  t.scratch = run.scratch();
  if (run.stop != nullptr) t.stop = {.wanted = Stop::wanted, .context = run.stop};
  tile.recipe = run.recipe;
  tile.on_unit = run.plan.on_unit;
  const CallerScales given(p.q_scale, h.b, head, q_rows, t.first);
  if (p.quantized_inputs()) {
    tile.q_scales = given.data;
    tile.q_scale_stride = given.stride;
    tile.q_scale_stride_blocks = given.stride_blocks;
  }
  tile.q_largest = largest_of(run, run.q_largest, run.recipe.qk_scales, p.heads_q, h.b, head);
  tile.mean = h.mean();
  tile.k_quantized = h.at<const std::uint8_t>(run.layout.k_quantized);
  tile.k_scales = h.at<const float>(run.layout.k_scales);
  tile.v_quantized = h.at<const std::uint8_t>(run.layout.v_quantized);
  tile.v_scales = h.at<const float>(run.layout.v_scales);
  run.kernels.eight_bit.run(tile);
}

/// One KV head on the calling thread alone.
void run_head(const Head& h) {
  const std::int64_t blocks = blocks_in(h.keys().used);
  if (h.run.recipe.smooth_k) {
    for (std::int64_t block = 0; block < blocks; ++block) sum_block(h, block);
    find_mean(h);
  }
  for (std::int64_t block = 0; block < blocks; ++block) quantize_block(h, block);
  for (std::int64_t tile = 0; tile < tiles_of(h); ++tile) run_tile(h, tile);
}

/// One KV head on all threads of the region, which all come here.
void share_head(const Head& h) {
  const std::int64_t blocks = blocks_in(h.keys().used);
  if (h.run.recipe.smooth_k) {
#pragma omp for schedule(static)
    for (std::int64_t block = 0; block < blocks; ++block) sum_block(h, block);
#pragma omp single
    find_mean(h);
  }
#pragma omp for schedule(static)
  for (std::int64_t block = 0; block < blocks; ++block) quantize_block(h, block);
  const std::int64_t tiles = tiles_of(h);
#pragma omp for schedule(dynamic, 1)
  for (std::int64_t tile = 0; tile < tiles; ++tile) run_tile(h, tile);
}

/// The largest magnitudes of one KV head of a sequence and of the query heads that read it.
void find_maxima(const Head& h) {
  const Run& run = h.run;
  const Problem& p = run.p;
  const std::int64_t blocks = blocks_in(h.keys().used);
  if (run.recipe.smooth_k) {
    for (std::int64_t block = 0; block < blocks; ++block) sum_block(h, block);
    find_mean(h);
  }
  float k = 0.0F;
  float v = 0.0F;
  for (std::int64_t block = 0; block < blocks && !run.stops(); ++block) {
    k = std::max(k, run.kernels.quantize.largest(k_rows(h, block)));
    v = std::max(v, run.kernels.quantize.largest(v_rows(h, block)));
  }
  run.k_largest[h.b * p.heads_kv + h.kv_head] = k;
  run.v_largest[h.b * p.heads_kv + h.kv_head] = v;
  const Rows q_rows = query_rows(p, h.b);
  for (std::int64_t head = h.kv_head * p.group(); head < (h.kv_head + 1) * p.group(); ++head) {
    float q = 0.0F;
    for (std::int64_t block = 0; block < blocks_in(q_rows.used); ++block) {
      QuantizeRows rows = block_of(run, p.q, h.b, head, q_rows, block, p.head_dim_qk);
      rows.rotate = run.recipe.rotate_qk;
      q = std::max(q, run.kernels.quantize.largest(rows));
    }
    run.q_largest[h.b * p.heads_q + head] = q;
  }
}

}  // namespace

void eight_bit_forward(const Plan& call, const Problem& p, std::byte* workspace, Stop* stop) {
  const Config& config = call.config;
  const auto& plan = std::get<EightBitPlan>(call.pass);
  std::byte* const base = align_scratch(workspace);
  Run run{.p = p,
          .plan = plan,
          .recipe = config.recipe,
          .kernels = kernels(config.target),
          .layout = plan.store,
          .block_q = config.block_q,
          .tiles = base,
          .shared = plan.whole_heads ? nullptr
                                     : base + static_cast<std::size_t>(config.threads) * plan.thread_bytes,
          .q_largest = nullptr,
          .k_largest = nullptr,
          .v_largest = nullptr,
          .stop = stop};
  if (plan.needs_maxima) {
    run.q_largest = reinterpret_cast<float*>(base + plan.maxima_at);
    run.k_largest = run.q_largest + p.batch * p.heads_q;
    run.v_largest = run.k_largest + p.batch * p.heads_kv;
  }
  const std::int64_t heads = p.batch * p.heads_kv;
  const auto head_at = [&](std::int64_t n) {
    return Head{.run = run, .b = n / p.heads_kv, .kv_head = n % p.heads_kv, .store = run.store()};
  };
  if (plan.needs_maxima) {
    // Where there is one store for all, one thread does it.
#pragma omp parallel for num_threads(plan.whole_heads ? config.threads : 1) schedule(dynamic, 1)
    for (std::int64_t n = 0; n < heads; ++n) find_maxima(head_at(n));
  }

#pragma omp parallel num_threads(config.threads)
  {
    // Before the tiles: should cu_seqlens hold nonsense, unused rows may overlap used ones.
#pragma omp for schedule(static)
    for (std::int64_t b = 0; b <= p.batch; ++b) clear_unused(p, b);
    if (plan.whole_heads) {
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t n = 0; n < heads; ++n) run_head(head_at(n));
    } else {
      for (std::int64_t n = 0; n < heads; ++n) share_head(head_at(n));
    }
  }
}

}  // namespace tandem::cpu
