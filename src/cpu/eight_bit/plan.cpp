#include <algorithm>

#include "cpu/common/workspace.hpp"
#include "cpu/eight_bit/forward.hpp"
#include "cpu/eight_bit/tile.hpp"

namespace tandem::cpu {
namespace {

std::int64_t blocks_in(std::int64_t rows) {
  return (rows + quant_block - 1) / quant_block;
}

EightBitStore store_layout(const Problem& p, bool on_unit) {
  EightBitStore l;
  const auto take = [&l](std::int64_t bytes) {
    const std::size_t at = l.bytes;
    l.bytes += whole_lines(static_cast<std::size_t>(bytes));
    return at;
  };
  const std::int64_t rows = blocks_in(p.rows_k) * quant_block;
  l.k_quantized = take(rows * key_bytes(p.head_dim_qk, on_unit));
  l.v_quantized = take(rows * value_bytes(p.head_dim_v, on_unit));
  l.k_scales = take(rows * 4);
  l.v_scales = take(std::max(rows, blocks_in(p.rows_k) * p.head_dim_v) * 4);
  l.sums = take(blocks_in(p.rows_k) * p.head_dim_qk * 4);
  l.mean = take(p.head_dim_qk * 4);
  return l;
}

bool needs_maxima(const Recipe& r) {
  return r.qk_scales <= ScaleGroup::head || r.v_scales <= ScaleGroup::head;
}

}  // namespace

EightBitPlan plan_eight_bit(const Problem& p, const Config& config) {
  EightBitPlan plan;
  plan.on_unit = takes_tiles(config.recipe, config.target);
  plan.store = store_layout(p, plan.on_unit);
  plan.whole_heads = p.heads_kv * (p.packed_k ? 1 : p.batch) >= config.threads;
  plan.tile_bytes =
      eight_bit_scratch(p.head_dim_qk, p.head_dim_v, config.block_q, plan.on_unit).floats * sizeof(float);
  plan.thread_bytes = plan.tile_bytes + (plan.whole_heads ? plan.store.bytes : 0);
  plan.maxima_at = static_cast<std::size_t>(config.threads) * plan.thread_bytes +
                   (plan.whole_heads ? 0 : plan.store.bytes);
  plan.needs_maxima = needs_maxima(config.recipe);
  const std::int64_t maxima = plan.needs_maxima ? p.batch * (p.heads_q + 2 * p.heads_kv) : 0;
  plan.workspace_bytes =
      plan.maxima_at + whole_lines(static_cast<std::size_t>(maxima) * sizeof(float)) + scratch_alignment;
  return plan;
}

}  // namespace tandem::cpu
