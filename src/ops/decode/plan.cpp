#include "ops/decode/plan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "ops/forward/plan.hpp"

namespace tandem {
namespace {

constexpr const char* decoding = "16 rows hold all queries that share keys: reading these bounds the call";
constexpr const char* clustered =
    "few queries a sequence: the CTAs of a cluster share the keys of a tile, and merge what they have in "
    "shared "
    "memory";

/// `shared`: by CTAs. Else a CTA has whole tiles. Heads as rows take the mask of causal calls in all, as in
/// the forward kernel. An SM holds two CTAs if two stages fit into half of its memory.
DecodeConfig with_stages(DecodeConfig c, bool shared) {
  c.mask.varlen = true;
  c.mask.causal = c.mask.causal || c.tiling.heads_as_rows;
  c.schedule.split = shared;
  const int ctas = ctas_per_sm(c);
  while (c.stages < 8 && ctas_per_sm(c) == ctas && forward_objection(c).empty()) ++c.stages;
  --c.stages;
  return c;
}

}  // namespace

DecodeConfig choose_decode_config(const CallFacts& facts) {
  return with_stages(wanted_of<DecodeConfig>(facts), facts.shares_keys);
}

std::vector<DecodeConfig> shipped_decode_configs() {
  std::vector<DecodeConfig> configs;
  for_each_shipped_step<DecodeConfig>([&](DecodeConfig c) {
    for (const bool heads_as_rows : {false, true}) {
      c.tiling.heads_as_rows = heads_as_rows;
      for (const bool causal : {false, true}) {
        c.mask.causal = causal;
        if (heads_as_rows && !causal) continue;
        for (const bool shared : {false, true}) configs.push_back(with_stages(c, shared));
      }
    }
  });
  return configs;
}

int forward_registers(const DecodeConfig& c) {
  const int scores = c.tiling.block_n / decode_warps;
  return c.tiling.head_dim_v / 2 + scores / 2 + scores / 4 + c.tiling.head_dim_qk / 4 +
         forward_other_registers;
}

int forward_register_limit(const DecodeConfig& c) {
  return std::min(255, 65536 / DecodeConfig::threads() / ctas_per_sm(c) / 8 * 8);
}

std::string forward_objection(const DecodeConfig& c) {
  if (c.tiling.block_m != decode_rows)
    return fmt::format("block_m {} is not {}, the rows of decode", c.tiling.block_m, decode_rows);
  if (c.tiling.block_n % (16 * decode_warps) != 0)
    return fmt::format("block_n {} is not a multiple of {}: each of {} warps takes 16 keys at a time",
                       c.tiling.block_n, 16 * decode_warps, decode_warps);
  if (const int ctas = c.schedule.cluster; ctas != 1) {
    if (ctas < 2 || ctas > 16 || (ctas & (ctas - 1)) != 0)
      return fmt::format("cluster {} is not 1, 2, 4, 8 or 16", ctas);
    if (c.schedule.split) return fmt::format("cluster {} takes no split: its CTAs merge a tile's keys", ctas);
    if (!c.mask.varlen) return fmt::format("cluster {} takes varlen, whose walk knows the lengths", ctas);
    if (c.tiling.head_dim_v % (4 * ctas) != 0)
      return fmt::format("cluster {} takes head dimensions of v that are multiples of {}, not {}", ctas,
                         4 * ctas, c.tiling.head_dim_v);
  }
  if (c.row_scales && c.tiling.block_n > 16 * decode_warps)
    return "scales by row take blocks of 64 keys in decode, half as many a warp as it has lanes";
  return tiles_objection(c);
}

std::vector<std::string> explain_forward(const CallFacts& facts, const DecodeConfig& c) {
  const char* const why = c.schedule.split ? shared_keys : c.cluster() > 1 ? clustered : decoding;
  return explain_tiles(facts, c, why, moves_maxima);
}

}  // namespace tandem
