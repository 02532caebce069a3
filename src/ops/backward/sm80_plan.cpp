#include "ops/backward/sm80_plan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "config/fields.hpp"
#include "ops/backward/plan.hpp"
#include "plan/padded.hpp"
#include "tandem/error.hpp"

namespace tandem {
namespace {

/// One line of the heuristics: the tile for head dimensions up to this, where an SM has so much shared
/// memory.
struct TileLine {
  int head_dim;          ///< the larger of the two
  int shared_kilobytes;  ///< what an SM has, at least
  int multiple_qk;       ///< head_dim of q and k is padded to a multiple of it
  int multiple_v;
  int block_m;
  int block_n;
  int q_stages;  ///< blocks of q in flight, and of dout
  int dout_stages;
  bool ds_in_dout;
  bool halved;  ///< Sm80BackwardConfig::halved, where head dimensions are multiples of 64, without functions
  const char* why;
};

/// Narrowest heads and most shared memory first. A problem takes the first line it fits.
constexpr TileLine tiles[] = {
    // head_dim, shared_kilobytes, multiple_qk, multiple_v, block_m, block_n, q_stages, dout_stages,
    // ds_in_dout, halved, why
    {64, 164, 32, 32, 128, 128, 2, 2, false, true,
     "dK and dV are small, so a block of 128 queries fits the registers"},
    {64, 100, 32, 32, 128, 128, 1, 1, false, false,
     "a block of 128 queries fits the registers, one of each shared memory"},
    {128, 164, 64, 32, 64, 128, 2, 2, false, true,
     "dK and dV take half of the registers, 64 queries what is left"},
    {128, 100, 64, 32, 64, 128, 1, 1, true, false,
     "dS in dO's place, so that K, V and a block of Q fit shared memory"},
    {192, 164, 64, 64, 64, 64, 2, 2, false, false,
     "registers hold dK and dV of 64 keys, whose columns are halved"},
    {192, 100, 64, 64, 32, 64, 2, 1, false, false,
     "blocks of 32 queries, so that Q of the next one fits too"},
    {256, 228, 64, 64, 64, 64, 2, 2, false, false,
     "registers hold dK and dV of 64 keys, whose columns are halved"},
    {256, 164, 64, 64, 64, 64, 1, 1, false, false,
     "shared memory holds K, V and a block of each of Q and dO"},
    {256, 100, 64, 64, 32, 64, 1, 1, true, false,
     "dS in dO's place and P in halves, so that K, V and 32 queries fit shared memory"},
};

const TileLine& tile_of(int head_dim, int shared_bytes_per_sm) {
  for (const TileLine& tile : tiles) {
    if (head_dim <= tile.head_dim && shared_bytes_per_sm >= tile.shared_kilobytes * 1024) return tile;
  }
  throw Error(Status::internal, fmt::format("no tile for head dimension {}", head_dim));
}

Sm80BackwardConfig with_tile(Sm80BackwardConfig c, std::int64_t head_dim_qk, std::int64_t head_dim_v,
                             int shared_bytes_per_sm) {
  const auto widest = static_cast<int>(std::max(head_dim_qk, head_dim_v));
  const TileLine& tile = tile_of(widest, shared_bytes_per_sm);
  // With gradients of captured tensors a thread has P, dP and what a score function takes of its scores at
  // once: of 128 queries they do not fit its registers.
  const bool fewer = c.functions.captured_gradients && tile.block_m == 128;
  c.tiling.head_dim_qk = padded(head_dim_qk, fewer ? 64 : tile.multiple_qk);
  c.tiling.head_dim_v = padded(head_dim_v, tile.multiple_v);
  c.tiling.block_m = fewer ? 64 : tile.block_m;
  c.tiling.block_n = tile.block_n;
  c.q_stages = tile.q_stages;
  c.dout_stages = tile.dout_stages;
  c.ds_in_dout = tile.ds_in_dout;
  c.halved =
      tile.halved && !c.functions.given() && c.tiling.head_dim_qk % 64 == 0 && c.tiling.head_dim_v % 64 == 0;
  return c;
}

}  // namespace

std::string backward_objection(const Sm80BackwardConfig& c, int shared_bytes_per_sm) {
  const bool halved = c.halves_queries();
  if (c.tiling.block_n != 128 && c.tiling.block_n != 64)
    return fmt::format("block_n {} is not 128 or 64", c.tiling.block_n);
  const int multiple_qk = halved || c.tiling.block_m == 64 ? 64 : 32;
  const int most = c.tiling.block_n == 64 ? max_sm80_backward_head_dim : 128;
  for (const auto& [name, head_dim, unit] :
       {std::tuple{"head_dim", c.tiling.head_dim_qk, multiple_qk},
        std::tuple{"head_dim_v", c.tiling.head_dim_v, halved ? 64 : 32}}) {
    if (head_dim < unit || head_dim > most || head_dim % unit != 0)
      return fmt::format("{} {} is not a multiple of {} up to {}", name, head_dim, unit, most);
  }
  const int fewest = c.tiling.block_n == 64 ? 32 : 64;
  if (c.tiling.block_m != fewest && c.tiling.block_m != 2 * fewest)
    return fmt::format("block_m {} is not {} or {}", c.tiling.block_m, fewest, 2 * fewest);
  if (c.key_units() > 1 && (c.functions.given() || c.ds_in_dout))
    return "two units of keys a warp take no functions, and dS a place of its own";
  if (c.functions.block_lists && (!c.functions.mask_function || c.mask.varlen || c.schedule.deterministic)) {
    return fmt::format(
        "block_lists are of a mask function, for equal lengths in any order; mask_function is {}, varlen {}, "
        "deterministic {}",
        c.functions.mask_function, c.mask.varlen, c.schedule.deterministic);
  }
  for (const int stages : {c.q_stages, c.dout_stages}) {
    if (stages != 1 && stages != 2) return fmt::format("{} stages are not 1 or 2", stages);
  }
  if (c.ds_in_dout && c.dout_stages != 1) return "ds_in_dout takes one dout_stages";
  const int room = shared_bytes_per_sm - reserved_shared_bytes;
  if (backward_shared_bytes(c) > room)
    return fmt::format("needs {} bytes of shared memory, a CTA has {}", backward_shared_bytes(c), room);
  return {};
}

Sm80BackwardConfig choose_sm80_backward_config(const CallFacts& facts) {
  return with_tile(wanted_backward_of<Sm80BackwardConfig>(facts), facts.problem.head_dim_qk,
                   facts.problem.head_dim_v, facts.device.shared_bytes_per_sm);
}

std::vector<Sm80BackwardConfig> sm80_backward_configs(int shared_bytes_per_sm) {
  std::vector<Sm80BackwardConfig> configs;
  for (const int head_dim : {64, 128, 192, 256}) {
    const auto add = [&](const Sm80BackwardConfig& c) {
      configs.push_back(with_tile(c, head_dim, head_dim, shared_bytes_per_sm));
    };
    Sm80BackwardConfig c;
    add(c);
    c.mask.causal = true;
    add(c);
    c.tiling.element = Element::f16;
    c.mask.local = c.mask.varlen = c.schedule.deterministic = true;
    c.transform = ScoreTransform::softcap;
    add(c);
  }
  return configs;
}

std::vector<std::string> explain_backward(const CallFacts& facts, const Sm80BackwardConfig& c) {
  const Problem& problem = facts.problem;
  const int room = facts.device.shared_bytes_per_sm;
  return {
      fmt::format("kernels sm80: {}; {} is what they are compiled for", why_family(facts),
                  gpu::architecture_of(*facts.device.properties)),
      fmt::format(
          "kernels backward_preprocess, sm80_backward, backward_convert: {}, head_dim {} padded to {}, "
          "head_dim_v {} to {}",
          name_of(c.tiling.element), problem.head_dim_qk, c.tiling.head_dim_qk, problem.head_dim_v,
          c.tiling.head_dim_v),
      fmt::format("tile {} keys, {} queries at a time, {} blocks of q and {} of dout in flight: {}",
                  c.tile_keys(), c.tiling.block_m, c.q_stages, c.dout_stages,
                  tile_of(std::max(c.tiling.head_dim_qk, c.tiling.head_dim_v), room).why),
      c.schedule.deterministic ? "dq is added up in a fixed order: deterministic is set"
                               : "dq is added up in any order; deterministic fixes it",
      words_of_gradients(problem),
      fmt::format("{} bytes of shared memory of {} an SM", backward_shared_bytes(c), room),
  };
}

}  // namespace tandem
