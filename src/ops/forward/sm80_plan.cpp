#include "ops/forward/sm80_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "config/fields.hpp"
#include "ops/forward/plan.hpp"
#include "plan/padded.hpp"
#include "tandem/error.hpp"

namespace tandem {
namespace {

constexpr const char* two_ctas = "two CTAs an SM: one multiplies while the other computes exponentials";
constexpr const char* few_registers = "as many keys as two CTAs have registers for with every mask";
constexpr const char* few_keys = "few keys a block, so that O and S of two units fit registers";
constexpr const char* eight_warps =
    "128 queries share what is loaded: eight warps, since one unit's O fills registers";
constexpr const char* one_cta = "what shared memory holds of such wide heads";

constexpr Sm80ForwardTileLine tiles[] = {
    // head_dim_qk, head_dim_v, shared_kilobytes, block_m, block_n, why
    {64, 64, 228, 128, 128, two_ctas},     {64, 64, 164, 128, 112, few_registers},
    {64, 64, 100, 128, 128, two_ctas},     {128, 128, 164, 128, 64, two_ctas},
    {128, 128, 100, 128, 32, few_keys},    {192, 128, 100, 128, 32, few_keys},
    {192, 192, 100, 128, 64, eight_warps}, {256, 256, 228, 64, 64, two_ctas},
    {256, 256, 164, 128, 64, eight_warps}, {256, 256, 100, 64, 64, one_cta},
};

constexpr const char* few_rows = "few queries a sequence, of heads that share keys";

/// CTAs that an SM holds at once: what its registers and its shared memory have room for.
int ctas_at_once(const Sm80ForwardConfig& c, int shared_bytes_per_sm) {
  return std::min(ctas_per_sm(c), shared_bytes_per_sm / (forward_shared_bytes(c) + reserved_shared_bytes));
}

/// More K and V in flight hide the latency of global memory, where an SM holds as many CTAs with them.
Sm80ForwardConfig with_stages(Sm80ForwardConfig c, int most, int shared_bytes_per_sm) {
  const int ctas = ctas_at_once(c, shared_bytes_per_sm);
  while (c.stages < most) {
    ++c.stages;
    if (ctas_at_once(c, shared_bytes_per_sm) == ctas) continue;
    --c.stages;
    break;
  }
  return c;
}

const Sm80ForwardTileLine& tile_of(const Sm80ForwardConfig& c, int shared_bytes_per_sm) {
  for (const Sm80ForwardTileLine& tile : tiles) {
    if (c.tiling.head_dim_qk <= tile.head_dim_qk && c.tiling.head_dim_v <= tile.head_dim_v &&
        shared_bytes_per_sm >= tile.shared_kilobytes * 1024) {
      return tile;
    }
  }
  throw Error(Status::internal, fmt::format("no tile for head dimensions {} and {}", c.tiling.head_dim_qk,
                                            c.tiling.head_dim_v));
}

constexpr int most_stages = 2;
/// Stages, at most, for tiles of few queries, which wait for memory.
constexpr int most_stages_of_few = 4;

/// Keys of a block beside functions, whose values take registers, at most.
constexpr int most_keys_with_functions = 64;

Sm80ForwardConfig with_tile(Sm80ForwardConfig c, int shared_bytes_per_sm, bool functions = false) {
  const Sm80ForwardTileLine& tile = tile_of(c, shared_bytes_per_sm);
  c.tiling.block_m = tile.block_m;
  c.tiling.block_n = functions ? std::min(tile.block_n, most_keys_with_functions) : tile.block_n;
  return with_stages(c, most_stages, shared_bytes_per_sm);
}

/// Tiles of 64 rows, whose blocks have keys by the head dimension alone: with a split size a row's bits
/// depend on them. Without one, heads of 64 have the keys of tiles of many queries: which of both a call
/// takes, its mean length decides, and sequences of length 0 are in that mean but must not change a bit. As
/// in the plan for Hopper, heads as rows take the mask of causal calls in all.
Sm80ForwardConfig with_few_queries(Sm80ForwardConfig c, const Sm80ForwardSchedule& schedule,
                                   int shared_bytes_per_sm, bool functions = false) {
  const bool narrow = std::max(c.tiling.head_dim_qk, c.tiling.head_dim_v) <= 64;
  c.tiling.block_n = c.tiling.head_dim_v > 192 ? 32 : 64;
  if (narrow && !schedule.invariant)
    c.tiling.block_n = with_tile(c, shared_bytes_per_sm, functions).tiling.block_n;
  c.tiling.block_m = few;
  c.mask.varlen = true;
  c.mask.causal = c.mask.causal || c.tiling.heads_as_rows;
  c.schedule = schedule;
  return with_stages(c, most_stages_of_few, shared_bytes_per_sm);
}

}  // namespace

std::span<const Sm80ForwardTileLine> sm80_forward_tiles() {
  return tiles;
}

std::string forward_objection(const Sm80ForwardConfig& c, int shared_bytes_per_sm) {
  for (const int head_dim : {c.tiling.head_dim_qk, c.tiling.head_dim_v}) {
    if (head_dim < 32 || head_dim > 256 || head_dim % 32 != 0) {
      return fmt::format("head_dim {} is not a multiple of 32 from 32 to 256", head_dim);
    }
  }
  if (c.tiling.block_m != 64 && c.tiling.block_m != 128)
    return fmt::format("block_m {} is not 64 or 128", c.tiling.block_m);
  if (c.tiling.block_n % 16 != 0 || c.tiling.block_n < 16 || c.tiling.block_n > 128)
    return fmt::format("block_n {} is not a multiple of 16 from 16 to 128", c.tiling.block_n);
  if (c.stages < 1) return "a tile of K and one of V take a stage";
  if (c.functions.block_lists && (!c.functions.mask_function || c.mask.varlen)) {
    return fmt::format(
        "block_lists are of a mask function, for equal lengths; mask_function is {}, varlen {}",
        c.functions.mask_function, c.mask.varlen);
  }
  if (c.schedule.split && !c.mask.varlen) return "splits take lengths by sequence (varlen)";
  if (c.keys != KeySource::rows && !c.mask.varlen) return "a cache takes lengths by sequence (varlen)";
  const int room = shared_bytes_per_sm - reserved_shared_bytes;
  if (forward_shared_bytes(c) > room)
    return fmt::format("needs {} bytes of shared memory, a CTA has {}", forward_shared_bytes(c), room);
  return {};
}

Sm80ForwardConfig choose_sm80_forward_config(const CallFacts& facts) {
  const Problem& p = facts.problem;
  const int room = facts.device.shared_bytes_per_sm;
  const bool shared = facts.shares_keys;
  auto c = wanted_of<Sm80ForwardConfig>(facts);
  c.tiling.head_dim_qk = padded(p.head_dim_qk, 32);
  c.tiling.head_dim_v = padded(p.head_dim_v, 32);
  if (p.split_size > 0) return with_few_queries(c, {.split = shared, .invariant = true}, room);
  if (shared || c.tiling.heads_as_rows) return with_few_queries(c, {.split = shared}, room, p.has_function());
  return with_tile(c, room, p.has_function());
}

std::vector<Sm80ForwardConfig> sm80_forward_configs(int shared_bytes_per_sm) {
  std::vector<Sm80ForwardConfig> configs;
  for (const auto& [qk, v] : {std::pair{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}}) {
    Sm80ForwardConfig c;
    c.tiling.head_dim_qk = qk;
    c.tiling.head_dim_v = v;
    configs.push_back(with_tile(c, shared_bytes_per_sm));
    c.mask.causal = true;
    configs.push_back(with_tile(c, shared_bytes_per_sm));
    c.mask.varlen = true;
    configs.push_back(with_tile(c, shared_bytes_per_sm));
    c.tiling.heads_as_rows = true;
    configs.push_back(with_few_queries(c, {}, shared_bytes_per_sm));
    c.tiling.heads_as_rows = false;
    c.keys = KeySource::pages;
    c.tiling.element = Element::f16;
    configs.push_back(with_few_queries(c, {.split = true}, shared_bytes_per_sm));
  }
  return configs;
}

std::vector<std::string> explain_forward(const CallFacts& facts, const Sm80ForwardConfig& c) {
  const Problem& problem = facts.problem;
  const int room = facts.device.shared_bytes_per_sm;
  const char* const why = c.schedule.invariant     ? (c.schedule.split ? fixed_parts : fixed_tiles)
                          : c.schedule.split       ? shared_keys
                          : c.tiling.heads_as_rows ? few_rows
                                                   : tile_of(c, room).why;
  const int ctas = ctas_at_once(c, room);
  return {
      fmt::format("kernels sm80: {}; {} is what they are compiled for", why_family(facts),
                  gpu::architecture_of(*facts.device.properties)),
      fmt::format("kernel sm80_forward: {}, head_dim {} padded to {}, head_dim_v {} to {}",
                  name_of(c.tiling.element), problem.head_dim_qk, c.tiling.head_dim_qk, problem.head_dim_v,
                  c.tiling.head_dim_v),
      fmt::format("tile {} x {} keys, {} stages, {} warps of {} x 16 rows: {}",
                  words_of_rows(problem, c.tiling), c.tiling.block_n, c.stages, c.threads() / 32,
                  c.units_a_warp(), why),
      fmt::format("{} bytes of shared memory of {} an SM: {} {} at once", forward_shared_bytes(c), room, ctas,
                  ctas == 1 ? "CTA" : "CTAs"),
  };
}

}  // namespace tandem
