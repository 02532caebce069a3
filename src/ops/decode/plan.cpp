#include "ops/decode/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "ops/forward/launch.hpp"
#include "ops/forward/plan.hpp"

namespace tandem {
namespace {

constexpr const char* decoding = "16 rows hold all queries that share keys: reading these bounds the call";
constexpr const char* clustered =
    "the CTAs of a cluster share a tile's keys, and merge what they have in shared memory";
constexpr const char* by_lengths =
    "where lengths are about even clusters share a tile's keys, else all CTAs the keys of all tiles";

/// The largest power of two that is at most x, or 1.
int power_up_to(std::int64_t x) {
  return x < 1 ? 1 : static_cast<int>(std::bit_floor(static_cast<std::uint64_t>(x)));
}

/// How the keys of tiles are shared.
enum class Sharing { none, shares, clusters, either };

/// CTAs of a cluster that share a tile's keys (docs/kernels/decode.md has the numbers, of an H200): as many
/// as give each multiprocessor one, and two where tiles are many. 1: none.
int ctas_of_cluster(const CallFacts& facts, const DecodeConfig& c, std::int64_t tiles) {
  constexpr int most = 8;  // that every GPU with clusters takes
  const int sms = facts.device.multiprocessors;
  if (c.tiling.head_dim_v > 128 || facts.keys < worth_sharing) return 1;
  if (tiles == 0 || tiles >= busy_tiles * sms) return 1;
  const std::int64_t blocks = facts.keys / c.tiling.block_n;
  return std::min({most, std::max(2, power_up_to(sms / tiles)), power_up_to(blocks),
                   power_up_to(c.tiling.head_dim_v / 4)});
}

/// CTAs of a cluster where there are shares, too. Grids of larger clusters leave multiprocessors idle that
/// shares want (one sequence of 32,768 keys took 53 us in clusters of four, 41 without).
constexpr int cluster_beside_shares = 2;

/// Shares of a line of all keys read them at the memory's rate, however long which of them is; a cluster
/// reads a tile's keys at its own. Lengths that only the device knows may be those of one sequence: unless
/// clusters lose less by that than they save, both are there, and the device decides.
Sharing sharing_of(const CallFacts& facts, const DecodeConfig& c, std::int64_t tiles, int ctas) {
  const Problem& p = facts.problem;
  if (ctas == 1) return facts.shares_keys ? Sharing::shares : Sharing::none;
  const int box_rows = p.pages.given() ? gpu::page_box_rows(p, c.tiling.block_n) : 0;
  const double alone = bytes_together / ctas_at_full_rate_of(c.has_byte_keys(), box_rows);
  const auto loses_little = [&](std::int64_t at_once) {
    const auto count = static_cast<double>(at_once);
    const double bytes = count * static_cast<double>(facts.keys * (p.head_dim_qk + p.head_dim_v)) *
                         static_cast<double>(size_of(p.k.dtype));
    return bytes / std::min(count * ctas * alone, bytes_together) <= bytes / bytes_together + sharing_takes;
  };
  if (!facts.mask.varlen) return loses_little(tiles) ? Sharing::clusters : Sharing::shares;
  const std::int64_t of_sequence = tiles / std::max<std::int64_t>(p.batch, 1);
  if (loses_little(of_sequence)) return Sharing::clusters;
  return ctas == cluster_beside_shares ? Sharing::either : Sharing::shares;
}

/// Heads as rows take the mask of causal calls in all, as in the forward kernel. An SM holds two CTAs if two
/// stages fit into half of its memory.
DecodeConfig with_sharing(DecodeConfig c, Sharing sharing, int ctas) {
  c.mask.varlen = true;
  c.mask.causal = c.mask.causal || c.tiling.heads_as_rows;
  c.schedule.split = sharing == Sharing::shares || sharing == Sharing::either;
  c.schedule.cluster = sharing == Sharing::clusters || sharing == Sharing::either ? ctas : 1;
  const int per_sm = ctas_per_sm(c);
  while (c.stages < 8 && ctas_per_sm(c) == per_sm && forward_objection(c).empty()) ++c.stages;
  --c.stages;
  return c;
}

}  // namespace

DecodeConfig choose_decode_config(const CallFacts& facts) {
  const auto c = wanted_of<DecodeConfig>(facts);
  const std::int64_t tiles = gpu::forward_tile_count(facts.problem, c.tiling);
  const int ctas = ctas_of_cluster(facts, c, tiles);
  return with_sharing(c, sharing_of(facts, c, tiles, ctas), ctas);
}

std::vector<DecodeConfig> shipped_decode_configs() {
  std::vector<DecodeConfig> configs;
  for_each_shipped_step<DecodeConfig>([&](DecodeConfig c) {
    for (const bool heads_as_rows : {false, true}) {
      c.tiling.heads_as_rows = heads_as_rows;
      for (const bool causal : {false, true}) {
        c.mask.causal = causal;
        if (heads_as_rows && !causal) continue;
        for (const Sharing each : {Sharing::none, Sharing::shares})
          configs.push_back(with_sharing(c, each, 1));
        if (c.tiling.head_dim_v > 128 || heads_as_rows != causal) continue;
        for (const int ctas : {2, 4, 8}) {
          configs.push_back(with_sharing(c, Sharing::clusters, ctas));
          if (ctas == cluster_beside_shares) configs.push_back(with_sharing(c, Sharing::either, ctas));
        }
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
  const bool in_clusters = c.cluster() > 1;
  const char* const why = !c.schedule.split ? (in_clusters ? clustered : decoding)
                          : in_clusters     ? by_lengths
                                            : shared_keys;
  return explain_tiles(facts, c, why, moves_maxima);
}

}  // namespace tandem
