#include "ops/backward/plan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "config/fields.hpp"
#include "gpu/function_source.hpp"
#include "ops/backward/sm80/config.hpp"
#include "plan/padded.hpp"
#include "tandem/error.hpp"

namespace tandem {
namespace {

// Tiles from the model in docs/kernels/backward.md, the lengths from which something pays as measured there.
constexpr BackwardTileLine tiles[] = {
    {64, 32, 32, 128, 128, 1, 2, 1, 1, 512, 2, 256, 384, 1, 0,
     "dK and dV are small, so a block of 128 queries fits the registers"},
    {128, 64, 32, 64, 128, 1, 2, 2, 1, 512, 3, 0, 0, 2048, 0,
     "dK and dV take half of the registers, 64 queries what is left"},
    {192, 64, 64, 64, 64, 1, 2, 2, 1, 0, 0, 0, 0, 1, 0,
     "dK and dV of 64 keys fill a warpgroup each: one makes P and dV, the other dS and dK"},
    {256, 64, 64, 64, 64, 2, 2, 1, 2, 0, 0, 0, 0, 1, 8192,
     "as for 192; dO once and dQ in halves leave shared memory for Q twice"},
};

const BackwardTileLine& line_for(std::int64_t head_dim) {
  for (const BackwardTileLine& line : tiles) {
    if (head_dim <= line.head_dim) return line;
  }
  throw Error(Status::internal, fmt::format("no tile for head dimension {}", head_dim));
}

BackwardConfig with_tile(BackwardConfig c, const BackwardTileLine& line, std::int64_t head_dim_qk,
                         std::int64_t head_dim_v, std::int64_t rows, bool light = true) {
  c.tiling.head_dim_qk = padded(head_dim_qk, line.multiple_qk);
  c.tiling.head_dim_v = padded(head_dim_v, line.multiple_v);
  c.tiling.block_m = line.block_m;
  c.tiling.block_n = line.block_n;
  c.cluster = c.tiling.head_dim_qk % 256 == 0 ? line.cluster : 1;  // a quarter of dQ's columns is a strip
  c.q_stages = line.q_stages;
  c.dout_stages = line.dout_stages;
  c.dq_slices = line.dq_slices;
  // The slope of a softcap beside P, or the values of functions that are not light: 128 queries spill 150 to
  // 300 bytes a thread. ALiBi and softcaps by tanh spill as much at 64 dimensions, and gain more.
  const bool transforms = c.transform != ScoreTransform::raw;
  const bool plain = !transforms && !c.functions.given();
  if (transforms || !light) {
    c.tiling.block_m = 64;
    c.tiling.head_dim_qk =
        padded(head_dim_qk, 64);  // the warpgroups halve dQ's columns, and a half is a strip
  }
  const bool full = !c.mask.causal && !c.mask.local && !c.mask.varlen;
  const bool in_order = line.in_order_from > 0 && rows >= line.in_order_from;
  c.schedule.staggered =
      full && (c.schedule.deterministic ? !in_order : plain && rows >= line.staggered_from);
  // With ping-pong, causal attention at 512 and head dimension 128 takes 1.9 % longer, full attention 0.4 %
  // less (records/history/backward.md, Ping-pong).
  const bool hides = c.mask.causal || c.functions.mask_function;
  const bool has_step = !transforms && !c.functions.dropout && !c.functions.captured_gradients;
  const bool has_registers = light || head_dim_qk <= 64;
  // A fixed order without a mask, and staggered, waits for longer.
  const bool overlaps =
      has_step && !c.functions.given() && !c.mask.varlen && !(full && c.schedule.deterministic);
  const int overlaps_from = hides ? line.overlaps_causal_from : line.overlaps_from;
  c.schedule.overlaps_tiles = overlaps && overlaps_from > 0 && rows >= overlaps_from;
  c.schedule.pingpong = c.schedule.overlaps_tiles || (has_step && has_registers && line.pingpong_from > 0 &&
                                                      rows >= (hides ? 2 : 1) * line.pingpong_from);
  if (c.schedule.pingpong) {
    c.q_stages = 3;
    c.dout_stages = line.pingpong_dout_stages;
  }
  return c;
}

/// From so many queries a sequence on, the L2 does not hold what the CTAs of a group of heads read: their
/// tiles are of unlike lengths, so that they are at different heads.
constexpr std::int64_t turned_from = 16384;

bool can_turn(const BackwardConfig& c) {
  return c.schedule.pingpong && c.tiling.block_m == 64 && c.mask.causal && !c.mask.local &&
         !c.functions.given() && !c.schedule.overlaps_tiles && !c.schedule.deterministic;
}
BackwardConfig turned_if(bool wanted, BackwardConfig c) {
  c.schedule.turned = wanted && can_turn(c);
  return c;
}

/// What is wrong with how the warpgroups divide the work; empty if nothing.
std::string division_objection(const BackwardConfig& c) {
  const bool shares_keys = c.tiling.block_n == 64 && c.tiling.block_m == 64 && c.q_stages >= 2;
  if (!c.owns_keys() && !shares_keys) {
    return fmt::format(
        "block_n {} is neither 64 keys for each of the two warpgroups nor 64 in all, which take block_m 64 "
        "and "
        "two q_stages; there are {} and {}",
        c.tiling.block_n, c.tiling.block_m, c.q_stages);
  }
  if (c.tiling.block_m < 64 || c.tiling.block_m % 64 != 0 ||
      BackwardConfig::consumers % c.tiling.row_groups() != 0) {
    return fmt::format("block_m {} is not a multiple of 64 that {} warpgroups can divide for dQ",
                       c.tiling.block_m, BackwardConfig::consumers);
  }
  if (c.cluster < 1 || c.cluster > 2 || (c.cluster == 2 && (c.owns_keys() || c.tiling.head_dim_qk != 256))) {
    return fmt::format(
        "cluster {} is not 1, or 2 with 64 keys in all and head_dim 256; there are {} keys and head_dim {}",
        c.cluster, c.tiling.block_n, c.tiling.head_dim_qk);
  }
  if (c.dq_columns() % c.strip_qk() != 0) {
    return fmt::format("a warpgroup's {} columns of dQ begin inside a strip of 32", c.dq_columns());
  }
  if (c.dq_slices < 1 || c.dq_columns() % (8 * c.dq_slices) != 0) {
    return fmt::format("dq_slices {} does not divide {} columns by 8", c.dq_slices, c.dq_columns());
  }
  return {};
}

}  // namespace

int backward_registers(const BackwardConfig& c) {
  const int dq = c.dq_columns() / 2;
  if (!c.owns_keys()) {  // dK or dV; dQ, or what of it has not been handed over beside S or dP
    const int gradient = std::max(c.tiling.head_dim_qk, c.tiling.head_dim_v) / 2;
    return gradient + std::max(dq, dq / c.dq_slices + c.tiling.block_m / 2) + backward_other_registers;
  }
  const int scores = c.tiling.block_m;  // S and dP, f32
  const int packed = c.schedule.pingpong ? c.tiling.block_m / 2
                                         : c.tiling.block_m / 4;  // dS that dK reads, and P that dV does
  return (c.tiling.head_dim_qk + c.tiling.head_dim_v) / 2 + std::max(scores, dq + packed) +
         backward_other_registers;
}

std::string backward_objection(const BackwardConfig& c) {
  for (const int head_dim : {c.tiling.head_dim_qk, c.tiling.head_dim_v}) {
    if (head_dim < 32 || head_dim > 256 || head_dim % 32 != 0) {
      return fmt::format("head_dim {} is not a multiple of 32 from 32 to 256", head_dim);
    }
  }
  if (c.schedule.pingpong && (!c.owns_keys() || c.dq_slices != 1 || c.q_stages < 2 || c.dout_stages < 2)) {
    return fmt::format(
        "pingpong needs 64 keys a warpgroup, dq in one part, and two q_stages and dout_stages; there are "
        "{} keys, {} parts, {} and {}",
        c.tiling.block_n, c.dq_slices, c.q_stages, c.dout_stages);
  }
  if (c.schedule.pingpong && (c.functions.dropout || c.functions.captured_gradients)) {
    return fmt::format("pingpong has no step with dropout, which is {}, or captured_gradients, which are {}",
                       c.functions.dropout, c.functions.captured_gradients);
  }
  if (c.schedule.overlaps_tiles && (!c.schedule.pingpong || c.functions.given())) {
    return fmt::format("overlaps_tiles is of pingpong, which is {}, without functions, which are {}",
                       c.schedule.pingpong, c.functions.given() ? "given" : "not given");
  }
  if (c.schedule.turned && !can_turn(c)) {
    return fmt::format(
        "turned is of pingpong with 64 queries a block and a causal mask, without functions, overlapping "
        "tiles "
        "or a fixed order; pingpong is {}, block_m {}, causal {}, local {}, deterministic {}",
        c.schedule.pingpong, c.tiling.block_m, c.mask.causal, c.mask.local, c.schedule.deterministic);
  }
  if (c.schedule.staggered && (c.mask.causal || c.mask.local || c.mask.varlen)) {
    return fmt::format("staggered is for full attention of equal lengths; causal is {}, local {}, varlen {}",
                       c.mask.causal, c.mask.local, c.mask.varlen);
  }
  if (c.functions.block_lists && (!c.functions.mask_function || c.mask.varlen || c.schedule.deterministic)) {
    return fmt::format(
        "block_lists are of a mask function, for equal lengths in any order; mask_function is {}, varlen {}, "
        "deterministic {}",
        c.functions.mask_function, c.mask.varlen, c.schedule.deterministic);
  }
  if (c.functions.captured_gradients && (!c.owns_keys() || c.schedule.deterministic)) {
    return fmt::format(
        "captured_gradients are of 64 keys a warpgroup, in any order; block_n is {}, deterministic {}",
        c.tiling.block_n, c.schedule.deterministic);
  }
  if (c.q_stages < 1 || c.dout_stages < 1) {
    return fmt::format("q_stages {} or dout_stages {} is less than 1", c.q_stages, c.dout_stages);
  }
  if (std::string objection = division_objection(c); !objection.empty()) return objection;
  constexpr int room = hopper_shared_bytes_per_sm - reserved_shared_bytes;
  if (backward_shared_bytes(c) > room) {
    return fmt::format("needs {} bytes of shared memory, a block has {}", backward_shared_bytes(c), room);
  }
  if (backward_registers(c) > BackwardConfig::registers().consumer) {
    return fmt::format("needs {} registers a thread, {} consumer warpgroups have {}", backward_registers(c),
                       BackwardConfig::consumers, BackwardConfig::registers().consumer);
  }
  return {};
}

std::span<const BackwardTileLine> backward_tiles() {
  return tiles;
}

template <typename Config>
Config wanted_backward_of(const CallFacts& facts) {
  const Problem& p = facts.problem;
  Config c;
  c.tiling.element = p.q.dtype == DType::f16 ? Element::f16 : Element::bf16;
  c.mask = facts.mask;
  c.transform = transform_of_any_scale(p);
  c.functions = gpu::functions_config(gpu::functions_of(p));
  c.schedule.deterministic = p.deterministic;
  c.f32_dq = p.f32_dq;
  c.f32_dk_dv = p.f32_dk_dv;
  // In a fixed order of additions each tile's place counts the tiles before it, whatever the mask hides.
  constexpr std::int64_t worth_listing = 512;  // queries and keys: the lists are a launch more
  c.functions.block_lists = c.functions.mask_function && !c.mask.varlen && !p.deterministic &&
                            p.rows_q >= worth_listing && p.rows_k >= worth_listing;
  return c;
}

template Sm80BackwardConfig wanted_backward_of(const CallFacts& facts);

BackwardConfig choose_backward_config(const CallFacts& facts) {
  const Problem& p = facts.problem;
  const auto c = wanted_backward_of<BackwardConfig>(facts);
  const std::int64_t rows = p.packed_q ? p.rows_q / std::max<std::int64_t>(p.batch, 1) : p.rows_q;
  const bool light = gpu::are_light(gpu::operations_of_pairs(gpu::functions_of(p))) && !c.functions.dropout &&
                     !c.functions.captured_gradients;
  return turned_if(p.heads_q > p.heads_kv && rows >= turned_from,
                   with_tile(c, line_for(std::max(p.head_dim_qk, p.head_dim_v)), p.head_dim_qk, p.head_dim_v,
                             rows, light));
}

std::vector<BackwardConfig> shipped_backward_configs() {
  struct Head {
    int qk, v;
    bool usual;  ///< many models have it: with sliding windows, in f16 and in a fixed order too
  };
  constexpr Head heads[] = {
      {64, 64, true}, {96, 96, false}, {128, 128, true}, {192, 128, false}, {256, 256, true}};
  std::vector<BackwardConfig> configs;
  for (const Head& head : heads) {
    const BackwardTileLine& line = line_for(std::max(head.qk, head.v));
    const auto ship = [&](const BackwardConfig& c) {
      for (const int rows : {1, line.overlaps_from, line.overlaps_causal_from, line.pingpong_from,
                             2 * line.pingpong_from, line.staggered_from, line.in_order_from}) {
        for (const bool turned : {false, true}) {
          const auto of_rows = turned_if(turned, with_tile(c, line, head.qk, head.v, rows));
          if (rows > 0 && std::find(configs.begin(), configs.end(), of_rows) == configs.end())
            configs.push_back(of_rows);
        }
      }
    };
    for (const Element element : {Element::bf16, Element::f16}) {
      for (const bool varlen : {false, true}) {
        if (element == Element::f16 && (!head.usual || varlen)) continue;
        for (const bool causal : {false, true}) {
          BackwardConfig c{.tiling = {.element = element}, .mask = {.causal = causal, .varlen = varlen}};
          ship(c);
          if (!head.usual || element == Element::f16) continue;
          BackwardConfig of_ranks = c;  // a rank adds what parts of the keys give (tandem.distributed)
          of_ranks.f32_dk_dv = true;
          ship(of_ranks);
          if (varlen) continue;
          c.schedule.deterministic = true;
          ship(c);
          c.schedule.deterministic = false;
          c.mask.local = true;
          if (causal) ship(c);
        }
      }
    }
  }
  return configs;
}

int backward_local_bytes_allowed(const BackwardConfig& c) {
  // Words of the tile, nearly all stored and read once a tile: records/history/backward.md has the bytes.
  const bool full = !c.mask.causal && !c.mask.local;
  if (c.cluster > 1) return !c.mask.varlen ? (full ? 0 : 36) : full ? 176 : 48;
  if (c.tiling.block_m != 128) return 0;
  if (!c.schedule.pingpong) return !full ? 8 : c.mask.varlen ? 0 : 32;
  if (c.mask.varlen) return 64;
  return full ? 16 : 32;
}

std::string words_of_gradients(const Problem& p) {
  const auto words = [&](bool f32, bool adds) {
    return !f32 ? fmt::format("written in {}", name_of(p.q.dtype))
                : std::string(adds ? "added to what there is, in f32" : "written in f32");
  };
  return fmt::format("dq is {}; dk and dv are {}", words(p.f32_dq, p.adds_dq),
                     words(p.f32_dk_dv, p.adds_dk_dv));
}

std::vector<std::string> explain_backward(const CallFacts& facts, const BackwardConfig& c) {
  const Problem& problem = facts.problem;
  return {
      fmt::format("kernels backward_preprocess, backward, backward_convert: {}, head_dim {} padded to {}, "
                  "head_dim_v {} to {}",
                  name_of(c.tiling.element), problem.head_dim_qk, c.tiling.head_dim_qk, problem.head_dim_v,
                  c.tiling.head_dim_v),
      fmt::format("tile {} keys, {} queries at a time, {} blocks of q and {} of dout in flight: {}",
                  c.tile_keys(), c.tiling.block_m, c.q_stages, c.dout_stages,
                  line_for(std::max(problem.head_dim_qk, problem.head_dim_v)).why),
      c.schedule.overlaps_tiles ? "ping-pong from tile to tile: the arithmetic of one warpgroup runs under "
                                  "the products of the other"
      : c.schedule.pingpong
          ? "ping-pong: the arithmetic of one warpgroup runs under the products of the other"
      : c.cluster > 1 ? "two blocks exchange ds, and each makes half of dq's columns for the keys of both"
                      : "the next scores are issued once dq is there",
      c.schedule.turned      ? "each tile takes a block of queries for all heads of the group, the last first"
      : c.schedule.staggered ? "each tile begins with a block of queries of its own"
                             : "each tile begins with the first queries that see it",
      c.schedule.deterministic ? "dq is added up in a fixed order: deterministic is set"
                               : "dq is added up in any order; deterministic fixes it",
      words_of_gradients(problem),
      fmt::format("{} bytes of shared memory, {} registers a consumer thread", backward_shared_bytes(c),
                  BackwardConfig::registers().consumer),
  };
}

}  // namespace tandem
