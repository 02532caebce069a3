// Which Configs of the forward kernel can exist.
#include <fmt/format.h>

#include "ops/decode/plan.hpp"
#include "ops/forward/plan.hpp"
#include "ops/latent/plan.hpp"

namespace tandem {

int forward_registers(const ForwardConfig& c) {
  return c.tiling.head_dim_v / 2 + c.tiling.block_n / 2 + c.tiling.block_n / 4 + forward_other_registers;
}

int forward_register_limit(const ForwardConfig& c) {
  return c.registers().consumer;
}

template <typename Config>
std::string tiles_objection(const Config& c) {
  for (const int head_dim : {c.tiling.head_dim_qk, c.tiling.head_dim_v}) {
    if (!std::is_same_v<Config, LatentConfig> && (head_dim < 32 || head_dim > 256 || head_dim % 32 != 0)) {
      return fmt::format("head_dim {} is not a multiple of 32 from 32 to 256", head_dim);
    }
  }
  if (c.tiling.block_n < 16 || c.tiling.block_n > 256 || c.tiling.block_n % 16 != 0) {
    return fmt::format("block_n {} is not a multiple of 16 from 16 to 256, as WGMMA takes", c.tiling.block_n);
  }
  if (c.stages < 1) return fmt::format("stages {} is less than 1", c.stages);
  if (c.q_stages < 1) return fmt::format("q_stages {} is less than 1", c.q_stages);
  if (c.schedule.split && !c.mask.varlen) return "split takes varlen, whose walk knows the lengths";
  if (c.mask.by_sequence && !c.mask.causal) return "a mask by sequence takes causal, for those that are";
  if (c.keys != KeySource::rows && !c.mask.varlen) return "keys of a cache take varlen, which reads lengths";
  if (c.row_scales && !c.has_byte_keys()) return "scales by row are of 8-bit keys";
  if (c.has_byte_keys()) {
    if (c.tiling.head_dim_qk % 64 != 0 || c.tiling.head_dim_v % 64 != 0)
      return "8-bit keys take head dimensions that are multiples of 64, a swizzled row";
    if (c.transform == ScoreTransform::raw)
      return "8-bit keys take scaled scores: the sign of their scale is unknown";
  }
  constexpr int room = hopper_shared_bytes_per_sm - reserved_shared_bytes;
  if (forward_shared_bytes(c) > room) {
    return fmt::format("needs {} bytes of shared memory, a CTA has {}", forward_shared_bytes(c), room);
  }
  if (forward_registers(c) > forward_register_limit(c)) {
    return fmt::format("needs {} registers a thread, {} consumer warpgroups have {}", forward_registers(c),
                       c.consumers(), forward_register_limit(c));
  }
  return {};
}
template std::string tiles_objection(const DecodeConfig& config);
template std::string tiles_objection(const LatentConfig& config);

namespace {

/// Which rule of ForwardGatherer a Config breaks; empty if none.
std::string gathering_objection(const ForwardConfig& c) {
  if (!c.schedule.specialised) return "gathered keys take a producer warpgroup, whose threads copy them";
  if (c.has_byte_keys() || c.functions.given() || c.schedule.split || c.schedule.invariant)
    return "gathered keys have 16 bits, whole tiles and no functions";
  if (c.tiling.head_dim_qk % 64 != 0 || c.tiling.head_dim_v % 64 != 0)
    return "gathered keys take head dimensions that are multiples of 64, a swizzled row";
  if (c.consumers() > 2) return "gathered keys take two consumer warpgroups at most, to have registers";
  if (c.tiling.block_n > 32 * gathering_warps)
    return "gathered keys take blocks of 128 at most, one for each thread that looks up pages";
  return {};
}

/// Which rule a Config breaks whose warpgroups are not all in step; empty if none.
std::string apart_objection(const ForwardConfig& c) {
  if (c.teams < 1 || c.teams * c.consumers() > 4)
    return fmt::format("{} teams of {} consumer warpgroups: a CTA has registers for four in all", c.teams,
                       c.consumers());
  if (c.teams > 1) {
    if (!c.schedule.dynamic || c.schedule.pingpong) return "teams take dynamic, and no pingpong";
    if (c.has_byte_keys() || c.gathers() || c.schedule.split || c.schedule.invariant)
      return "teams take whole tiles, and keys of 16 bits that TMA loads";
  }
  if (c.schedule.own_blocks) {
    if (c.schedule.pingpong) return "own_blocks takes no pingpong: its warpgroups are not in step";
    if (c.mask.varlen || c.functions.block_lists)
      return "own_blocks takes neither varlen, where a tile's warpgroups clear the end of V together, nor "
             "lists";
    if (c.stages < 2 || !c.schedule.specialised || !c.schedule.overlap || c.schedule.invariant)
      return "own_blocks takes two stages, specialised, overlap and whole tiles";
  }
  return {};
}

}  // namespace

std::string forward_objection(const ForwardConfig& c) {
  if (c.tiling.block_m < 64 || c.tiling.block_m > 192 || c.tiling.block_m % 64 != 0) {
    return fmt::format("block_m {} is not 64, 128 or 192: one to three warpgroups of 64 rows",
                       c.tiling.block_m);
  }
  if (c.schedule.dynamic && !c.schedule.specialised)
    return "dynamic takes a producer warp, which takes the tiles from the counter";
  if (c.has_byte_keys()) {
    if (c.row_scales && c.tiling.block_n > 32 * converting_warps)
      return "scales by row take blocks of 128 keys at most, one for each thread that converts them";
    if (!c.schedule.specialised)
      return "8-bit keys take a producer warpgroup, behind which another converts them";
    if (c.consumers() > 2)
      return "8-bit keys take one or two consumer warpgroups: there are registers for no more";
    if (c.consumers() == 2 && c.tiling.head_dim_v > converted_head_dim_of_two)
      return "8-bit keys take one consumer warpgroup from a head_dim_v of 129 on: four warpgroups begin with "
             "128 registers a thread, and ptxas refuses wider products";
    if (c.tiling.block_n % 32 != 0)
      return "8-bit keys take blocks of whole 32 rows, as four warps convert them";
  }
  if (c.gathers()) {
    if (std::string why = gathering_objection(c); !why.empty()) return why;
  }
  if (std::string why = apart_objection(c); !why.empty()) return why;
  if (c.schedule.pingpong && c.consumers() < 2) return "pingpong takes two warpgroups, block_m 64 has one";
  return tiles_objection(c);
}

int forward_local_bytes_allowed(const ForwardConfig& c) {
  // Words of a tile, and of the producer's search.
  if (c.teams > 1 && c.mask.varlen) return 16;
  // Words of a tile, stored once and read up to 14 times a tile with two masks, three times without: none in
  // the loops over unmasked blocks, at most one in a loop over masked ones.
  return c.tiling.head_dim_v <= 192 || c.tiling.block_n != 80 || c.mask.varlen ? 0 : c.mask.causal ? 8 : 12;
}

}  // namespace tandem
