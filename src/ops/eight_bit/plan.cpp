#include "ops/eight_bit/plan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "config/fields.hpp"
#include "ops/eight_bit/launch.hpp"
#include "ops/quantize/plan.hpp"
#include "plan/padded.hpp"
#include "tandem/error.hpp"

namespace tandem {
namespace {

constexpr const char* exp_bound = "exponentials bound it: three warpgroups keep the product under them";
constexpr const char* three = "three warpgroups, of which one's products run under the others' softmax";
constexpr const char* wide = "two warpgroups, whose registers the output fills: P V follows the scores";

// head_dim_qk, head_dim_v, masked, block_m, stages, q_stages, slices, overlap, pingpong, dynamic, why
constexpr EightBitTileLine tiles[] = {
    {64, 64, false, 192, 3, 2, 1, false, true, true, exp_bound},
    {64, 64, true, 192, 3, 2, 2, true, false, true, exp_bound},
    {256, 128, false, 192, 2, 1, 2, false, false, true, three},
    {256, 128, true, 192, 2, 1, 2, false, false, true, three},
    {256, 192, false, 128, 2, 1, 1, false, false, false, wide},
    {256, 192, true, 128, 2, 1, 1, false, false, true, wide},
    {256, 256, false, 128, 2, 1, 4, false, false, false, wide},
    {256, 256, true, 128, 2, 1, 4, false, false, true, wide},
};

const EightBitTileLine& tile_for(int head_dim_qk, int head_dim_v, bool masked) {
  for (const EightBitTileLine& tile : tiles) {
    if (head_dim_qk <= tile.head_dim_qk && head_dim_v <= tile.head_dim_v && masked == tile.masked)
      return tile;
  }
  throw Error(Status::internal,
              fmt::format("no 8-bit tile for head dimensions {} and {}", head_dim_qk, head_dim_v));
}

EightBitConfig with_recipe(EightBitConfig c, const Recipe& r) {
  c.qk = r.qk;
  c.pv = r.pv;
  c.row_scales = r.qk_scales == ScaleGroup::row;
  c.v_row_scales = r.v_scales == ScaleGroup::row;
  c.rotated_v = r.rotate_v;
  c.linear_exp2 = r.linear_exp2 && c.lazy_rescaling() && c.pv == OperandType::e4m3;
  return c;
}

EightBitConfig with_two_warpgroups(EightBitConfig c) {
  c.tiling.block_m = 128;
  c.stages = 3;
  c.q_stages = 2;
  c.slices = 1;
  c.schedule.overlap = true;
  // Ping-pong costs s8 with scales by block 5 %: without it sums are added under the next products
  // (adds_late).
  c.schedule.pingpong = !(c.mask.causal || c.mask.local) && (c.lazy_rescaling() || c.v_row_scales);
  // Tiles of equal work take the static scheduler: the dynamic one spills 20 bytes at 128.
  c.schedule.dynamic = c.mask.causal || c.mask.local || c.mask.varlen || c.tiling.head_dim_v <= 64;
  return c;
}

/// Values of more than 128 columns whose softmax finds a maximum a tile, which takes registers from P V.
/// `joins`: V's scales by row join P, and take more.
EightBitConfig with_narrow_slices(EightBitConfig c, bool joins, bool masked) {
  const bool s8 = c.pv == OperandType::s8;
  switch (c.tiling.head_dim_v) {
    case 160: c.slices = 2; break;
    case 192: c.slices = s8 && (joins || masked) ? 2 : 3; break;
    case 224: c.slices = 7; break;
    default: c.slices = s8 && (joins || c.mask.varlen || c.mask.local) ? 8 : 4;
  }
  c.schedule.pingpong = c.tiling.head_dim_v <= 192 || (s8 && (joins || masked));
  return c;
}

EightBitConfig with_stages_that_fit(EightBitConfig c) {
  while (c.stages > 1 && eight_bit_shared_bytes(c) > hopper_shared_bytes_per_sm - reserved_shared_bytes)
    --c.stages;
  return c;
}

EightBitConfig with_tile(EightBitConfig c) {
  const EightBitTileLine& tile =
      tile_for(c.tiling.head_dim_qk, c.tiling.head_dim_v, c.mask.causal || c.mask.local);
  c.tiling.block_m = tile.block_m;
  c.stages = tile.stages;
  c.q_stages = tile.q_stages;
  c.schedule.overlap = tile.overlap;
  c.schedule.pingpong = tile.pingpong;
  c.schedule.dynamic =
      tile.dynamic || c.mask.varlen;  // the static scheduler costs varlen tiles 25 moves in the loop
  c.slices = c.tiling.head_dim_v == 96 && tile.slices == 2 ? 3 : tile.slices;  // of 32 columns
  // A maximum a tile takes registers, V's scales by row, lengths and a mask more: what is left holds two
  // warpgroups in place of three, or narrower slices.
  const bool joins = c.v_row_scales;
  const bool masked = c.mask.varlen || c.mask.causal || c.mask.local;
  if (c.tiling.head_dim_v > 64 && c.tiling.head_dim_v <= 128 && c.tiling.block_m == 192 &&
      (!c.lazy_rescaling() || c.mask.local || (c.mask.varlen && c.mask.causal))) {
    c = with_two_warpgroups(c);
  }
  if (c.tiling.block_m == 192 && joins && masked) c = with_two_warpgroups(c);
  if (c.tiling.block_m == 192 && !c.lazy_rescaling() && c.mask.varlen && (c.mask.causal || c.mask.local))
    c = with_two_warpgroups(c);
  if (c.tiling.head_dim_v > 96 && joins) c.slices = std::max(c.slices, 2);
  if (c.tiling.head_dim_v > 128 && !c.lazy_rescaling()) c = with_narrow_slices(c, joins, masked);
  const int group =
      c.tiling.head_dim_v > 128 ? 16 : 32;  // columns that a slice is a multiple of: 224 is 2 x 112
  while (c.tiling.head_dim_v % (group * c.slices) != 0) --c.slices;
  return with_stages_that_fit(c);
}

/// Causal heads of 64 by the keys of a sequence. Where rows see a few blocks, the waits at a tile's ends
/// outweigh the overlap; where they see many, ping-pong is worth what it costs at a tile's ends.
EightBitConfig with_keys(EightBitConfig c, std::int64_t rows_k) {
  if (!c.mask.causal || c.mask.local || c.mask.varlen || c.tiling.head_dim_v > 64 || c.tiling.block_m != 192)
    return c;
  if (rows_k <= 512) {
    c.schedule.overlap = false;
    c.slices = 1;
    c.schedule.pingpong = c.pv == OperandType::s8;
  } else if (rows_k >= 6144 && c.lazy_rescaling()) {
    c.schedule.pingpong = true;
  }
  return c;
}

/// Quantized values of the caller's are read where they are if the kernel can.
EightBitConfig with_callers_values(const EightBitConfig& c, const Problem& p) {
  if (!p.quantized_inputs()) return c;
  const EightBitConfig in_place = eight_bit_in_place(c);
  return eight_bit_objection(in_place).empty() && gpu::can_read_quantized(p, in_place) ? in_place : c;
}

}  // namespace

EightBitConfig eight_bit_in_place(EightBitConfig c) {
  c.in_place = true;
  // CTAs that transpose more of V get fewer tiles: 1 to 3 % from 1024 keys on, -1 % at 512.
  if (c.tiling.head_dim_v == 256) c.schedule.dynamic = true;
  return with_stages_that_fit(c);
}

EightBitConfig choose_eight_bit_config(const CallFacts& facts, const Recipe& recipe) {
  const Problem& p = facts.problem;
  EightBitConfig c = with_recipe(EightBitConfig{}, recipe);
  c.tiling.element = p.out.dtype == DType::f16 ? Element::f16 : Element::bf16;
  c.tiling.max_logits = p.max_logits.given();
  c.tiling.head_dim_qk = padded(p.head_dim_qk, 32);
  c.tiling.head_dim_v = padded(p.head_dim_v, 32);
  c.mask = facts.mask;
  c.transform = transform_of_any_scale(p);
  return with_callers_values(with_keys(with_tile(c), p.rows_k), p);
}

std::string eight_bit_objection(const EightBitConfig& c) {
  if (c.tiling.block_n != quant_block) {
    return fmt::format("block_n {} is not {}, the rows of a scale block", c.tiling.block_n, quant_block);
  }
  if (c.tiling.heads_as_rows) return "heads_as_rows is of 16-bit tiles: scales go by row of q";
  if (c.slices < 1 || c.slice_columns() % 16 != 0) {
    return fmt::format("slices {} do not divide head_dim_v {} into multiples of 16", c.slices,
                       c.tiling.head_dim_v);
  }
  if (c.schedule.pingpong && c.consumers() < 2) return "pingpong takes two warpgroups, block_m 64 has one";
  if (eight_bit_shared_bytes(c) > hopper_shared_bytes_per_sm - reserved_shared_bytes) {
    return fmt::format("needs {} bytes of shared memory, a block has {}", eight_bit_shared_bytes(c),
                       hopper_shared_bytes_per_sm - reserved_shared_bytes);
  }
  if (c.in_place &&
      (c.qk != OperandType::e4m3 || c.pv != OperandType::e4m3 || c.row_scales || c.v_row_scales)) {
    return "values in place are e4m3, with scales by block or larger: others are arranged before";
  }
  if (c.in_place && c.rotated_v) return "V that the kernel transposes is not rotated";
  if (c.tiling.max_logits && c.lazy_rescaling())
    return "max_logits takes the maxima of every block, which P in e4m3 does without";
  if (c.linear_exp2 && (c.pv != OperandType::e4m3 || !c.lazy_rescaling())) {
    return "linear_exp2 takes P in e4m3 and scales of V by block";
  }
  return {};
}

// With three warpgroups of consumers the loader spills up to 32 bytes, away from the products.
int eight_bit_local_bytes_allowed(const EightBitConfig& c) {
  const bool int8 = c.pv == OperandType::s8;
  const bool varlen = c.mask.varlen;
  const bool causal = c.mask.causal;
  if (c.tiling.head_dim_v <= 64) {
    if (varlen && causal && !int8) return c.in_place ? 272 : 212;
    return varlen ? 32 : int8 ? 0 : 16;
  }
  if (c.tiling.head_dim_v <= 128) {
    if (c.tiling.max_logits) return !causal ? (varlen ? 20 : 0) : varlen ? 76 : 32;
    if (int8) return !causal ? 0 : varlen ? 44 : 24;
    return !varlen ? 8 : !c.in_place ? 0 : causal ? 12 : 20;
  }
  return !int8 || varlen ? 0 : 16;
}

std::vector<EightBitConfig> shipped_eight_bit_configs() {
  std::vector<EightBitConfig> configs;
  for (const int head_dim : {64, 128, 256}) {
    for (const Recipe& recipe : {fp8_recipe, int8_recipe}) {
      for (const bool varlen : {false, true}) {
        for (const bool causal : {false, true}) {
          EightBitConfig c = with_recipe(EightBitConfig{}, recipe);
          c.tiling.head_dim_qk = c.tiling.head_dim_v = head_dim;
          c.mask.varlen = varlen;
          c.mask.causal = causal;
          const EightBitConfig tile = with_tile(c);
          for (const std::int64_t keys : {1, 1024, 8192}) {  // of each kind
            EightBitConfig with = with_keys(tile, keys);
            if (std::find(configs.begin(), configs.end(), with) != configs.end()) continue;
            configs.push_back(with);
            if (c.pv != OperandType::s8 || head_dim != 128) continue;
            with.tiling.max_logits = true;  // which gradients in 8 bits take, at this head dimension alone
            configs.push_back(with);
          }
        }
      }
    }
  }
  return configs;
}

std::vector<std::string> explain_eight_bit(const Problem& problem, const Recipe& recipe,
                                           const EightBitConfig& c) {
  const EightBitTileLine& tile =
      tile_for(c.tiling.head_dim_qk, c.tiling.head_dim_v, c.mask.causal || c.mask.local);
  const char* before = c.in_place                   ? ""
                       : problem.quantized_inputs() ? "arrange_quantized and "
                       : recipe.smooth_k            ? "mean_of_keys, quantize and "
                                                    : "quantize and ";
  const char* quantized = c.in_place ? "are read where they are, and V transposed once by the kernel"
                          : problem.quantized_inputs() ? "are copied into the layout that the kernel reads"
                                                       : "are found from 16-bit tensors";
  return {
      fmt::format("kernels {}eight_bit_forward: {}, head_dim {} padded to {}, head_dim_v {} to {}", before,
                  name_of(c.tiling.element), problem.head_dim_qk, c.tiling.head_dim_qk, problem.head_dim_v,
                  c.tiling.head_dim_v),
      fmt::format("quantized values {}", quantized),
      fmt::format("tile {} queries x {} keys, {} stages, P V in {} slice(s), ping-pong {}: {}",
                  c.tiling.block_m, quant_block, c.stages, c.slices, c.schedule.pingpong ? "on" : "off",
                  tile.why),
      fmt::format("{} persistent scheduler", c.schedule.dynamic ? "dynamic" : "static"),
      fmt::format("{} bytes of shared memory, {} registers a consumer thread", eight_bit_shared_bytes(c),
                  c.registers().consumer),
  };
}

}  // namespace tandem
