#include "ops/forward/plan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "ops/decode/config.hpp"
#include "ops/forward/sm80/config.hpp"
#include "ops/latent/config.hpp"
#include "plan/padded.hpp"
#include "problem/mixed.hpp"
#include "tandem/error.hpp"

namespace tandem {
namespace {

constexpr const char* exp_bound = "softmax and products take the same time: three warpgroups keep both busy";
constexpr const char* widest = "the widest key block that two stages of shared memory and 232 registers hold";
constexpr const char* widest_late = "the widest key block with registers to wait late for the output";
constexpr const char* three_blocks = "three key blocks in flight, and registers to wait late for the output";
constexpr const char* diagonal = "square tiles waste least along the diagonal";
constexpr const char* two_blocks = "two key blocks a tile: the next tile's Q comes in meanwhile";
constexpr const char* short_tiles = "few key blocks a tile: ping-pong, and a short first softmax";
constexpr const char* two_teams = "two tiles at a time: where one begins or ends the other computes";
constexpr const char* three_warpgroups =
    "three warpgroups keep the tensor cores busier than two on wider blocks";
constexpr const char* apart = "three warpgroups, each on the key blocks that its own queries see";
constexpr const char* output_bound = "the output accumulator leaves registers for no wider key block";

// Measured on an H100 and an H200: docs/kernels/forward.md has the alternatives and their numbers.
constexpr ForwardTileLine tiles[] = {
    // head_dim_qk, head_dim_v, masked, from_keys, varlen_from,
    //     block_m, block_n, stages, q_stages, dynamic, pingpong, output_late, own_blocks, teams, why
    {64, 64, false, 6144, 6144, 192, 128, 4, 2, false, true, false, false, 1, exp_bound},
    {64, 64, false, 0, 0, 128, 64, 4, 2, true, false, false, false, 2, two_teams},
    {64, 64, true, 0, 0, 128, 64, 4, 2, true, false, false, true, 2, two_teams},
    {64, 64, true, 0, 0, 128, 128, 4, 2, true, true, false, false, 1, diagonal},
    {96, 96, false, 1536, never, 192, 96, 3, 2, true, false, false, false, 1, three_warpgroups},
    {96, 96, true, 1536, never, 192, 96, 3, 2, true, false, false, true, 1, apart},
    {128, 128, false, 1536, never, 192, 64, 4, 2, true, false, true, false, 1, three_warpgroups},
    {128, 128, false, 0, 0, 128, 128, 3, 1, false, true, true, false, 1, three_blocks},
    {128, 128, true, 384, never, 192, 64, 4, 2, true, false, true, true, 1, apart},
    {128, 128, true, 0, never, 128, 128, 2, 2, true, true, false, false, 1, two_blocks},
    {128, 128, true, never, 0, 128, 128, 3, 1, true, true, true, false, 1, diagonal},
    {192, 128, false, 0, 0, 128, 128, 2, 1, false, false, true, false, 1, widest_late},
    {192, 128, true, 0, 0, 128, 128, 2, 1, true, false, true, false, 1, widest_late},
    {160, 160, false, 0, 0, 128, 128, 2, 1, false, false, true, false, 1, widest_late},
    {160, 160, true, 0, 0, 128, 128, 2, 1, true, false, true, true, 1, widest_late},
    {192, 192, false, 0, 0, 128, 112, 2, 1, false, false, false, false, 1, widest},
    {192, 192, true, 0, 0, 128, 112, 2, 1, true, false, false, true, 1, widest},
    {256, 128, false, 0, 0, 128, 96, 2, 1, false, false, true, false, 1, widest_late},
    {256, 128, true, 0, 0, 128, 96, 2, 1, true, false, true, false, 1, widest_late},
    {256, 256, false, 3072, 0, 128, 80, 2, 1, false, false, false, false, 1, output_bound},
    {256, 256, false, 768, never, 128, 80, 2, 1, false, true, false, false, 1, output_bound},
    {256, 256, false, 0, never, 128, 64, 2, 1, false, true, false, false, 1, short_tiles},
    {256, 256, true, 0, 0, 128, 64, 2, 1, true, false, false, true, 1, diagonal},
};

/// Narrow windows take the line of so many keys, which was the fastest for those of 128.
constexpr std::int64_t narrow_window_keys = 512;

/// Head dimensions of 8-bit keys are padded to 64, or to 128 where they are in pages of single rows: the keys
/// of a block are to be as many in both cases.
constexpr int converted_unit = 128;

/// `shared`: by CTAs. Else a CTA has whole tiles. Heads as rows take the mask of causal calls in all: one
/// kernel serves both, and the mask costs nothing where no query feels it. `block_n`: 0: as many keys as are
/// fastest.
ForwardConfig with_few_queries(ForwardConfig c, bool shared, int block_n = 0) {
  const int unit = c.has_byte_keys() ? converted_unit : 1;
  const int fastest =
      padded(c.tiling.head_dim_qk, unit) + padded(c.tiling.head_dim_v, unit) <= 256 ? 128 : 64;
  c.tiling.block_m = few;
  c.tiling.block_n = block_n > 0 ? block_n : fastest;
  c.mask.varlen = true;
  c.mask.causal = c.mask.causal || c.tiling.heads_as_rows;
  c.schedule = {.pingpong = false, .split = shared};
  return with_most_stages(c);
}

/// With a fixed split size: what bits depend on follows from the head dimensions alone, rounded as for any
/// place of the keys. Which CTA computes what is free, since parts are merged by the same operations.
ForwardConfig with_fixed_splits(ForwardConfig c, const CallFacts& facts) {
  const Problem& p = facts.problem;
  const int unit = c.has_byte_keys() ? converted_unit : 64;
  c.tiling.block_n = padded(p.head_dim_qk, unit) + padded(p.head_dim_v, unit) <= 256 ? 128 : 64;
  c.schedule = {.dynamic = c.mask.causal || c.mask.local, .invariant = true};
  if (c.has_byte_keys() && c.tiling.head_dim_v > converted_head_dim_of_two) {
    c.tiling.block_m = 64;
    c.schedule.pingpong = false;
  }
  if (facts.shares_keys) {
    c.tiling.block_m = few;
    c.mask.varlen = true;
    c.schedule = {.pingpong = false, .split = true, .invariant = true};
  }
  return with_most_stages(c);
}

/// Whole tiles on 8-bit keys.
ForwardConfig with_converted_keys(ForwardConfig c, const CallFacts& facts) {
  const bool one_warpgroup = facts.has_few_queries || c.tiling.head_dim_v > converted_head_dim_of_two;
  c = with_few_queries(c, false);
  c.mask.varlen = facts.mask.varlen;
  c.tiling.block_m = one_warpgroup ? 64 : 128;
  c.schedule = {.dynamic = c.mask.causal || c.mask.local, .pingpong = !one_warpgroup};
  return with_most_stages(c);
}

/// A multiple of 32, of 64 for 8-bit keys, whose tiles are swizzled by 64 bytes at least. Twice that where
/// single rows of pages are loaded, since TMA writes to multiples of 128 bytes.
int padded_for(const Problem& p, std::int64_t head_dim) {
  const bool single_rows = p.pages.given() && (p.pages.page_size % 2 != 0 || p.leftpad_k.given());
  return padded(head_dim, (p.mixed() ? 64 : 32) * (single_rows ? 2 : 1));
}

/// `in_step`: all warpgroups of a tile compute the same blocks.
ForwardConfig with_tile(ForwardConfig c, const ForwardTileLine& tile, bool in_step) {
  c.tiling.block_m = tile.block_m;
  c.tiling.block_n = tile.block_n;
  c.stages = tile.stages;
  c.q_stages = tile.q_stages;
  c.schedule.dynamic = tile.dynamic;
  c.schedule.pingpong = tile.pingpong;
  c.schedule.output_late = tile.output_late;
  c.schedule.own_blocks = tile.own_blocks && !in_step;
  c.teams = tile.teams;
  return c;
}

/// Whole tiles on small pages: threads copy their rows, 16 bytes at a time, where the kernel has room for it.
/// Two warpgroups of consumers leave registers for that, three do not. Blocks have as many keys as those of
/// keys in order, and so the same bits.
bool may_gather(const ForwardConfig& c, const Problem& p) {
  const bool small = (c.keys == KeySource::pages || c.gathers()) && p.pages.page_size <= most_gathered_page;
  return small && !p.has_function() && p.head_dim_qk % 8 == 0 && p.head_dim_v % 8 == 0;
}
ForwardConfig with_gathered_pages(ForwardConfig c, const Problem& p) {
  if (!may_gather(c, p)) return c;
  ForwardConfig gathered = c;
  gathered.keys = KeySource::gathered_pages;
  gathered.tiling.block_m = std::min(c.tiling.block_m, 128);
  gathered.teams = 1;
  return forward_objection(gathered).empty() ? gathered : c;
}

/// With varlen all of a tile's warpgroups clear what follows the keys in V, and lists are of whole tiles.
bool is_in_step(const CallFacts& facts, const ForwardConfig& c) {
  return c.mask.varlen || facts.problem.has_function();
}

}  // namespace

std::span<const ForwardTileLine> forward_tiles() {
  return tiles;
}

const ForwardTileLine& forward_tile(int head_dim_qk, int head_dim_v, bool masked, std::int64_t keys,
                                    bool in_step, bool one_team) {
  for (const ForwardTileLine& tile : tiles) {
    if (one_team && tile.teams > 1) continue;
    if (head_dim_qk <= tile.head_dim_qk && head_dim_v <= tile.head_dim_v && masked == tile.masked &&
        keys >= (in_step ? tile.varlen_from : tile.from_keys)) {
      return tile;
    }
  }
  throw Error(Status::internal,
              fmt::format("no tile for head dimensions {} and {}", head_dim_qk, head_dim_v));
}

const ForwardTileLine& forward_tile(const CallFacts& facts, const ForwardConfig& c) {
  const Problem& p = facts.problem;
  const bool masked = c.mask.causal || c.mask.local || p.has_function();
  const bool known = !p.has_function() && (!c.mask.varlen || p.packed_k);
  constexpr std::int64_t some = 512;  // of which nothing is known
  std::int64_t keys = known ? facts.keys : some;
  // Masked lines are chosen by causal sequences, whose queries see half of the keys on average.
  if (p.window_left >= 0 && p.window_right >= 0) {
    keys = std::min(keys, std::max(narrow_window_keys, 2 * (p.window_left + p.window_right + 1)));
  }
  // Functions leave no registers for four warpgroups. Without a mask they have the tile of the longest
  // sequences.
  const bool one_team = p.has_function();
  if (one_team && !masked) keys = never - 1;
  return forward_tile(c.tiling.head_dim_qk, c.tiling.head_dim_v, masked, keys, is_in_step(facts, c),
                      one_team);
}

template <typename Config>
Config wanted_of(const CallFacts& facts) {
  const Problem& p = facts.problem;
  Config c;
  c.tiling.element = p.q.dtype == DType::f16 ? Element::f16 : Element::bf16;
  c.tiling.head_dim_qk = padded_for(p, p.head_dim_qk);
  c.tiling.head_dim_v = padded_for(p, p.head_dim_v);
  c.mask = facts.mask;
  c.transform = transform_of(p);
  if constexpr (requires { c.row_scales = true; }) {
    if (p.mixed()) {
      c.key_type = p.k.dtype == DType::e4m3 ? OperandType::e4m3 : OperandType::s8;
      c.row_scales = has_row_scales(p);
      // The scale of K, which the device knows, may have any sign.
      if (c.transform == ScoreTransform::raw) c.transform = ScoreTransform::scaled;
    }
  }
  c.keys = p.pages.given() ? (p.leftpad_k.given() ? KeySource::padded_pages : KeySource::pages)
           : p.of_cache()  ? KeySource::entries
                           : KeySource::rows;
  c.tiling.heads_as_rows = facts.heads_as_rows;
  c.tiling.f32_out = p.out.dtype == DType::f32;
  c.tiling.max_logits = p.max_logits.given();
  c.tiling.gate = p.gate.given();
  return c;
}
template ForwardConfig wanted_of(const CallFacts& facts);
template DecodeConfig wanted_of(const CallFacts& facts);
template LatentConfig wanted_of(const CallFacts& facts);
template Sm80ForwardConfig wanted_of(const CallFacts& facts);

ForwardConfig choose_forward_config(const CallFacts& facts) {
  const auto c = wanted_of<ForwardConfig>(facts);
  const bool shared = facts.shares_keys;
  if (facts.problem.split_size > 0) return with_fixed_splits(c, facts);
  if (shared || c.tiling.heads_as_rows) {
    // Whether packed sequences have few queries, their mean says, in which sequences of length 0 are: these
    // must not change a bit of the others, which follow from the keys of a block.
    const Problem& p = facts.problem;
    const bool packed = p.packed_q && p.packed_k && !shared;
    return with_few_queries(c, shared, packed ? forward_tile(facts, c).block_n : 0);
  }
  if (c.has_byte_keys()) return with_converted_keys(c, facts);
  return with_gathered_pages(with_tile(c, forward_tile(facts, c), is_in_step(facts, c)), facts.problem);
}

std::vector<ForwardConfig> shipped_forward_configs() {
  struct Head {
    int qk, v;
    bool usual;  ///< many models have it: with sliding windows, and in f16 too
  };
  constexpr Head heads[] = {{64, 64, true},    {96, 96, false},   {128, 128, true},
                            {192, 128, false}, {192, 192, false}, {256, 256, true}};
  std::vector<ForwardConfig> configs;
  const auto add_once = [&](const ForwardConfig& c) {
    if (std::find(configs.begin(), configs.end(), c) == configs.end()) configs.push_back(c);
  };
  auto add = [&](const Head& head, const ForwardTileLine& tile, Element element, bool varlen) {
    ForwardConfig c;
    c.tiling.element = element;
    c.tiling.head_dim_qk = head.qk;
    c.tiling.head_dim_v = head.v;
    c.mask.varlen = varlen;
    c.mask.causal = tile.masked;
    add_once(with_tile(c, tile, varlen));
    c.mask.local = true;
    const bool of_windows =
        tile.masked && &tile == &forward_tile(head.qk, head.v, true, narrow_window_keys, varlen);
    if (head.usual && of_windows) add_once(with_tile(c, tile, varlen));
  };
  for (const Head& head : heads) {
    for (const ForwardTileLine& tile : tiles) {
      const auto chosen = [&](bool varlen) {
        const int from = varlen ? tile.varlen_from : tile.from_keys;
        return from != never && &tile == &forward_tile(head.qk, head.v, tile.masked, from, varlen);
      };
      for (const Element element : {Element::bf16, Element::f16}) {
        if (element == Element::f16 && !head.usual) continue;
        if (chosen(false)) add(head, tile, element, false);
        if (chosen(true)) add(head, tile, element, true);
      }
    }
  }
  for_each_shipped_step<ForwardConfig>([&](ForwardConfig c) {
    if (c.tiling.head_dim_qk == 256) return;
    for (const bool causal : {false, true}) {
      c.mask.causal = causal;
      configs.push_back(with_few_queries(c, true));
    }
    c.tiling.heads_as_rows = true;
    for (const bool shared : {false, true}) configs.push_back(with_few_queries(c, shared));
  });
  return configs;
}

}  // namespace tandem
