#include "plan/forward_plan.hpp"

#include <fmt/format.h>

#include "kernels/config_fields.hpp"
#include "tandem/error.hpp"

namespace tandem {
namespace {

constexpr const char* exp_bound = "softmax and products take the same time: three warpgroups keep both busy";
constexpr const char* widest = "the widest key block that two stages of shared memory and 232 registers hold";
constexpr const char* diagonal = "square tiles waste least along the diagonal";
constexpr const char* output_bound = "the output accumulator leaves registers for no wider key block";

// Tiles as FlashAttention-3's (the paper's appendix), with P always in registers.
constexpr ForwardTile tiles[] = {
    // head_dim_qk, head_dim_v, masked, block_m, block_n, stages, q_stages, dynamic, pingpong, why
    {64, 64, false, 192, 128, 2, 2, false, true, exp_bound},
    {64, 64, true, 192, 128, 2, 2, false, true, exp_bound},
    {128, 128, false, 128, 176, 2, 1, false, true, widest},
    {128, 128, true, 128, 128, 2, 2, false, true, diagonal},
    {192, 128, false, 128, 128, 2, 1, false, false, widest},
    {192, 128, true, 128, 128, 2, 1, false, false, widest},
    {192, 192, false, 128, 112, 2, 1, false, false, widest},
    {192, 192, true, 128, 112, 2, 1, false, false, widest},
    {256, 256, false, 128, 80, 2, 1, false, false, output_bound},
    {256, 256, true, 128, 80, 2, 1, false, false, output_bound},
};

/// Shipped Configs that keep a few values in local memory.
struct ForwardSpill {
  int block_m;
  bool ragged;
  int bytes;
};

// Three warpgroups leave a thread 160 registers, and the place of a tile in its sequence takes ten more than
// a dense one. The assembler keeps them in local memory: reloaded once a tile and one word a masked block,
// none in the loop over the blocks that need no mask. 112 keys a block would still leave 8 bytes there, and
// cost a seventh more turns.
constexpr ForwardSpill spills[] = {{192, true, 64}};

int padded(std::int64_t head_dim) {
  return static_cast<int>((head_dim + 31) / 32 * 32);
}

ForwardConfig with_tile(ForwardConfig c) {
  const ForwardTile& tile = forward_tile(c.head_dim_qk, c.head_dim_v, c.causal || c.local);
  c.block_m = tile.block_m;
  c.block_n = tile.block_n;
  c.stages = tile.stages;
  c.q_stages = tile.q_stages;
  c.dynamic = tile.dynamic;
  c.pingpong = tile.pingpong;
  return c;
}

}  // namespace

int forward_registers(const ForwardConfig& c) {
  return c.head_dim_v / 2 + c.block_n / 2 + c.block_n / 4 + forward_other_registers;
}

int forward_register_limit(const ForwardConfig& c) {
  return c.registers().consumer;
}

std::string forward_objection(const ForwardConfig& c) {
  for (const int head_dim : {c.head_dim_qk, c.head_dim_v}) {
    if (head_dim < 32 || head_dim > 256 || head_dim % 32 != 0) {
      return fmt::format("head_dim {} is not a multiple of 32 from 32 to 256", head_dim);
    }
  }
  if (c.block_m < 64 || c.block_m > 192 || c.block_m % 64 != 0) {
    return fmt::format("block_m {} is not 64, 128 or 192: one to three warpgroups of 64 rows", c.block_m);
  }
  if (c.block_n < 16 || c.block_n > 256 || c.block_n % 16 != 0) {
    return fmt::format("block_n {} is not a multiple of 16 from 16 to 256, as WGMMA takes", c.block_n);
  }
  if (c.stages < 1) return fmt::format("stages {} is less than 1", c.stages);
  if (c.q_stages < 1) return fmt::format("q_stages {} is less than 1", c.q_stages);
  if (c.pingpong && c.consumers() < 2) return "pingpong takes two warpgroups, block_m 64 has one";
  if (c.blocks_per_sm < 1 || c.threads() * c.blocks_per_sm > 2048) {
    return fmt::format("blocks_per_sm {} of {} threads: a processor holds 1 block to 2048 threads",
                       c.blocks_per_sm, c.threads());
  }
  const int room = hopper_shared_bytes_per_sm / c.blocks_per_sm - reserved_shared_bytes;
  if (forward_shared_bytes(c) > room) {
    return fmt::format("needs {} bytes of shared memory, {} blocks an SM have {} each",
                       forward_shared_bytes(c), c.blocks_per_sm, room);
  }
  if (forward_registers(c) > forward_register_limit(c)) {
    return fmt::format("needs {} registers a thread, {} consumer warpgroups have {}", forward_registers(c),
                       c.consumers(), forward_register_limit(c));
  }
  return {};
}

std::span<const ForwardTile> forward_tiles() {
  return tiles;
}

const ForwardTile& forward_tile(int head_dim_qk, int head_dim_v, bool masked) {
  for (const ForwardTile& tile : tiles) {
    if (head_dim_qk <= tile.head_dim_qk && head_dim_v <= tile.head_dim_v && masked == tile.masked)
      return tile;
  }
  throw Error(Status::internal,
              fmt::format("no tile for head dimensions {} and {}", head_dim_qk, head_dim_v));
}

ForwardConfig choose_forward_config(const Problem& p) {
  ForwardConfig c;
  c.element = p.q.dtype == DType::f16 ? Element::f16 : Element::bf16;
  c.head_dim_qk = padded(p.head_dim_qk);
  c.head_dim_v = padded(p.head_dim_v);
  // Query 0 sees rows_k - rows_q + window_right at most, the last one rows_k - 1 - window_left at least: a
  // bound that not even they feel needs no mask (a causal call with one query is a full one).
  c.causal = p.window_right >= 0 && p.window_right < p.rows_q - 1;
  c.local = p.window_left >= 0 && p.window_left < p.rows_k - 1;
  c.transform = p.softcap > 0.0F ? ScoreTransform::softcap
                : p.scale > 0.0F ? ScoreTransform::raw
                                 : ScoreTransform::scaled;
  c.ragged = p.cu_seqlens_q.given() || p.cu_seqlens_k.given() || p.seqused_q.given() || p.seqused_k.given();
  return with_tile(c);
}

std::vector<ForwardConfig> shipped_forward_configs() {
  struct Head {
    int qk, v;
    bool windows;  ///< models of this head dimension use sliding windows
  };
  constexpr Head heads[] = {
      {64, 64, true}, {96, 96, false}, {128, 128, true}, {192, 128, false}, {256, 256, false}};
  std::vector<ForwardConfig> configs;
  for (const Head& head : heads) {
    for (const bool ragged : {false, true}) {
      for (const Element element : {Element::f16, Element::bf16}) {
        ForwardConfig c;
        c.element = element;
        c.head_dim_qk = head.qk;
        c.head_dim_v = head.v;
        c.ragged = ragged;
        configs.push_back(with_tile(c));
        c.causal = true;
        configs.push_back(with_tile(c));
        c.local = true;
        if (head.windows) configs.push_back(with_tile(c));
      }
    }
  }
  return configs;
}

int forward_local_bytes_allowed(const ForwardConfig& c) {
  for (const ForwardSpill& spill : spills) {
    if (c.block_m == spill.block_m && c.ragged == spill.ragged) return spill.bytes;
  }
  return 0;
}

std::vector<std::string> explain_forward(const Problem& problem, const ForwardConfig& c) {
  const ForwardTile& tile = forward_tile(c.head_dim_qk, c.head_dim_v, c.causal || c.local);
  return {
      fmt::format("backend cuda: the tensors are on cuda:{}", problem.device.index),
      fmt::format("kernel forward: {}, head_dim {} padded to {}, head_dim_v {} to {}", name_of(c.element),
                  problem.head_dim_qk, c.head_dim_qk, problem.head_dim_v, c.head_dim_v),
      fmt::format("tile {} queries x {} keys, {} stages, ping-pong {}: {}", c.block_m, c.block_n, c.stages,
                  c.pingpong ? "on" : "off", tile.why),
      fmt::format("{} bytes of shared memory, {} registers a consumer thread", forward_shared_bytes(c),
                  c.registers().consumer),
  };
}

}  // namespace tandem
