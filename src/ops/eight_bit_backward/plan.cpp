#include "ops/eight_bit_backward/plan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "gpu/param_fields.hpp"
#include "ops/backward/plan.hpp"
#include "ops/quantize/plan.hpp"
#include "problem/recipe.hpp"

namespace tandem {
namespace {

/// Queries from which a staggered start pays in full attention, as of the 16-bit kernel.
constexpr std::int64_t staggered_from = 2048;

bool is_full(const Mask& mask) {
  return !mask.causal && !mask.local && !mask.varlen;
}

}  // namespace

EightBitBackwardConfig choose_eight_bit_backward_config(const CallFacts& facts) {
  const Problem& p = facts.problem;
  EightBitBackwardConfig c;
  c.tiling.element = p.q.dtype == DType::f16 ? Element::f16 : Element::bf16;
  c.tiling.head_dim_qk = gpu::as_int(p.head_dim_qk);
  c.tiling.head_dim_v = gpu::as_int(p.head_dim_v);
  c.tiling.block_m = gradient_queries(c.tiling.head_dim_qk);
  c.mask = facts.mask;
  c.schedule.deterministic = p.deterministic;
  c.schedule.staggered = is_full(c.mask) && (p.deterministic || p.rows_q >= staggered_from);
  c.f32_dq = p.f32_dq;
  c.f32_dk_dv = p.f32_dk_dv;
  return c;
}

QuantizeConfig choose_gradient_quantizer(const CallFacts& facts, const Recipe& recipe) {
  const Problem& p = facts.problem;
  QuantizeConfig c = choose_quantize_config(facts, recipe);
  c.vectors =
      c.vectors && gpu::allows_vectors(p.out, p.head_dim_v) && gpu::allows_vectors(p.dout, p.head_dim_v);
  return c;
}

QuantizeConfig gradient_quantizer_of(const EightBitBackwardConfig& config) {
  QuantizeConfig c = with_recipe(QuantizeConfig{}, int8_recipe);
  c.element = config.tiling.element;
  c.head_dim_qk = config.tiling.head_dim_qk;
  c.head_dim_v = config.tiling.head_dim_v;
  c.varlen = config.mask.varlen;
  return c;
}

std::string eight_bit_backward_objection(const EightBitBackwardConfig& c) {
  const BackwardTiling& t = c.tiling;
  const bool fits = (t.head_dim_qk == 64 || t.head_dim_qk == 128) && t.head_dim_v == t.head_dim_qk;
  if (!fits || t.block_m != gradient_queries(t.head_dim_qk) || t.block_n != 128) {
    return fmt::format(
        "the tile is 128 keys and 64 queries of 128 and 128 dimensions, or 128 and 128 of 64 and 64; it has "
        "{} and {} of {} and {}",
        t.block_n, t.block_m, t.head_dim_qk, t.head_dim_v);
  }
  if (c.schedule.staggered && !is_full(c.mask)) {
    return fmt::format("staggered is for full attention of equal lengths; causal is {}, local {}, varlen {}",
                       c.mask.causal, c.mask.local, c.mask.varlen);
  }
  if (c.q_stages < 2) {
    return fmt::format("q_stages {} is less than 2: dK and dV are a block behind S", c.q_stages);
  }
  constexpr int room = hopper_shared_bytes_per_sm - reserved_shared_bytes;
  if (backward_shared_bytes(c) > room) {
    return fmt::format("needs {} bytes of shared memory, a block has {}", backward_shared_bytes(c), room);
  }
  return {};
}

int eight_bit_backward_local_bytes_allowed(const EightBitBackwardConfig& c) {
  if (c.tiling.head_dim_qk == 64) return c.mask.causal && c.mask.varlen ? 12 : 0;
  if (c.schedule.staggered) return 12;
  if (c.mask.causal) return c.mask.varlen ? 176 : 136;
  return c.mask.varlen ? 108 : 56;
}

std::vector<EightBitBackwardConfig> shipped_eight_bit_backward_configs() {
  std::vector<EightBitBackwardConfig> configs(4);
  configs[1].schedule.staggered = true;
  configs[2].mask.causal = true;
  configs[3].mask.causal = configs[3].mask.varlen = true;
  return configs;
}

std::vector<std::string> explain_eight_bit_backward(const CallFacts& facts, const EightBitBackwardConfig& c) {
  return {
      fmt::format("kernels mean_of_keys, quantize_keys, quantize_queries, eight_bit_backward, "
                  "eight_bit_convert: s8 for S and dP, e4m3 for dV, dK and dQ; gradients in {}",
                  c.tiling.element == Element::f16 ? "f16" : "bf16"),
      fmt::format("tile {} keys, {} queries at a time, {} blocks of q and dout in flight", c.tile_keys(),
                  c.tiling.block_m, c.q_stages),
      "ping-pong: the arithmetic of one warpgroup runs under the products of the other",
      c.schedule.staggered ? "each tile begins with a block of queries of its own"
                           : "each tile begins with the first queries that see it",
      c.schedule.deterministic ? "dq is added up in a fixed order: deterministic is set"
                               : "dq is added up in any order; deterministic fixes it",
      words_of_gradients(facts.problem),
      fmt::format("{} bytes of shared memory, {} registers a consumer thread", backward_shared_bytes(c),
                  c.registers().consumer),
  };
}

}  // namespace tandem
