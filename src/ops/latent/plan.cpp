#include "ops/latent/plan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "ops/forward/plan.hpp"
#include "plan/padded.hpp"

namespace tandem {
namespace {

constexpr const char* halves =
    "one warpgroup scores 64 rows, and two have half of the columns of v each: one has no registers for all";
constexpr const char* one_tile =
    "one warpgroup scores 64 rows, and two have half of the columns of v each; v is the first columns of k, "
    "and one copy serves both products";

/// Whether clusters of two CTAs take two tiles of heads that share keys. Each key then crosses from the L2
/// once for both, and is there earlier (docs/kernels/wide-heads.md).
bool takes_pairs(const LatentConfig& c, const CallFacts& facts) {
  if (!c.v_in_k || !c.schedule.split || c.schedule.invariant || !c.tiling.heads_as_rows) return false;
  const Problem& p = facts.problem;
  return facts.head_rows.tile_heads(p) / p.heads_kv % 2 == 0;
}

/// Products take 64 columns at a time, and a warpgroup half of those of V, which K's tile has to hold where V
/// is in it. Blocks have 64 keys and move their rows' maxima in any case: with a fixed split size nothing
/// else changes.
LatentConfig with_heads(LatentConfig c, const CallFacts& facts, bool shared) {
  const Problem& p = facts.problem;
  c.v_in_k = facts.values_in_keys;
  c.tiling.head_dim_qk = padded(p.head_dim_qk, 64);
  c.tiling.head_dim_v = padded(p.head_dim_v, 64 * latent_slices);
  if (c.v_in_k) c.tiling.head_dim_qk = std::max(c.tiling.head_dim_qk, c.tiling.head_dim_v);
  c.mask.varlen = c.mask.varlen || shared || c.tiling.heads_as_rows;
  c.mask.causal = c.mask.causal || c.tiling.heads_as_rows;
  const bool unequal = (c.mask.causal || c.mask.local) && !c.tiling.heads_as_rows;
  c.schedule = {.dynamic = !shared && unequal, .split = shared, .invariant = p.split_size > 0};
  c.pairs = takes_pairs(c, facts);
  return with_most_stages(c, c.v_in_k ? 2 : 1, 4);
}

}  // namespace

LatentConfig choose_latent_config(const CallFacts& facts) {
  return with_heads(wanted_of<LatentConfig>(facts), facts, facts.shares_keys);
}

// Latent attention of DeepSeek's dimensions, in bf16: query heads are rows, and V is in K. 128 of them are
// pairs of tiles, which calls that share keys take; 64, of several queries, are not.
std::vector<LatentConfig> shipped_latent_configs() {
  std::vector<LatentConfig> configs;
  struct Kind {
    int heads;
    bool shared;
  };
  for (const KeySource keys : {KeySource::rows, KeySource::pages}) {
    for (const Kind& kind : {Kind{64, false}, Kind{64, true}, Kind{128, true}}) {
      LatentConfig c;
      c.keys = keys;
      c.mask.varlen = true;
      c.tiling.heads_as_rows = true;
      Problem p;
      p.heads_q = kind.heads;
      p.heads_kv = 1;
      p.rows_q = 1;
      p.head_dim_qk = max_gpu_wide_head_dim_qk;
      p.head_dim_v = max_gpu_wide_head_dim_v;
      configs.push_back(with_heads(c, CallFacts(p), kind.shared));
    }
  }
  return configs;
}

int forward_registers(const LatentConfig& c) {
  return c.tiling.head_dim_v / latent_slices / 2 +
         forward_other_registers;  // other warpgroups have the scores
}

int forward_register_limit(const LatentConfig& /*c*/) {
  return LatentConfig::registers().consumer;
}

std::string forward_objection(const LatentConfig& c) {
  if (c.tiling.head_dim_qk % 64 != 0 || c.tiling.head_dim_v % (64 * latent_slices) != 0) {
    return fmt::format(
        "head dimensions {} and {} are not multiples of 64 and {}: warpgroups divide the columns "
        "of v by 64",
        c.tiling.head_dim_qk, c.tiling.head_dim_v, 64 * latent_slices);
  }
  if (c.tiling.head_dim_v / latent_slices > 256)
    return fmt::format("head_dim_v {} is more than {}, of which two warpgroups have half each",
                       c.tiling.head_dim_v, 256 * latent_slices);
  if (c.v_in_k && (c.stages < 2 || c.tiling.head_dim_v > c.tiling.head_dim_qk))
    return "v_in_k takes two stages, and a v no wider than k";
  if (c.pairs && (!c.v_in_k || !c.schedule.split || c.schedule.invariant || !c.tiling.heads_as_rows))
    return "pairs of tiles take v_in_k, heads as rows, and split without a split size";
  if (c.tiling.block_m != 64 || c.tiling.block_n % (16 * latent_slices) != 0 || c.tiling.block_n > 64)
    return fmt::format("a tile of {} x {} is not of 64 rows and 32 or 64 keys", c.tiling.block_m,
                       c.tiling.block_n);
  return tiles_objection(c);
}

std::vector<std::string> explain_forward(const CallFacts& facts, const LatentConfig& c) {
  std::vector<std::string> lines = explain_tiles(facts, c, c.v_in_k ? one_tile : halves, moves_maxima);
  if (c.schedule.split || c.schedule.invariant) {
    lines.emplace_back(!c.schedule.invariant ? shared_keys : c.schedule.split ? fixed_parts : fixed_tiles);
  }
  if (c.pairs) {
    lines.emplace_back(
        "two tiles of heads that share keys have a cluster of two CTAs, each of which loads half of the keys "
        "for both");
  }
  return lines;
}

}  // namespace tandem
