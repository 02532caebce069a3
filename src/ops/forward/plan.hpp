// The forward kernel's Config for a problem: a table of tiles, and the rules that say which Configs can
// exist.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "ops/forward/config.hpp"
#include "plan/facts.hpp"

namespace tandem {

/// The largest pages whose rows threads gather. TMA starts a box a page and strip of columns, one after
/// another; of larger pages these are few.
constexpr int most_gathered_page = 32;

/// Registers a consumer thread needs beside accumulators and probabilities (addresses, row statistics, loop
/// state). With fewer left over ptxas spills or serialises the products; found by compiling, see
/// tests/plan.
constexpr int forward_other_registers = 32;

/// The widest O that two consumer warpgroups have beside a converting one.
constexpr int converted_head_dim_of_two = 128;

/// Registers that a consumer thread holds at the widest point of the loop: output and scores as f32,
/// probabilities in pairs of 16 bits, and the rest.
int forward_registers(const ForwardConfig& config);

/// Registers that setmaxnreg leaves to a consumer thread.
int forward_register_limit(const ForwardConfig& config);

/// Why a Config cannot exist, with the number that breaks the rule; empty if it can.
std::string forward_objection(const ForwardConfig& config);

/// A value of ForwardTileLine::varlen_from: no varlen call takes the line.
constexpr int never = std::numeric_limits<int>::max();

/// One line of the heuristics: the tile for head dimensions up to these.
struct ForwardTileLine {
  int head_dim_qk;
  int head_dim_v;
  bool masked;      ///< causal or window; the other line serves full attention
  int from_keys;    ///< the fewest keys a sequence has
  int varlen_from;  ///< the same where lengths differ, on average; `never` where another line is faster
  int block_m;
  int block_n;
  int stages;
  int q_stages;
  bool dynamic;
  bool pingpong;
  bool output_late;
  bool own_blocks;
  int teams;
  const char* why;
};

/// The heuristics, narrowest head dimensions and most keys first. A problem takes the first line it fits.
std::span<const ForwardTileLine> forward_tiles();

/// The line that serves these (padded) head dimensions and sequences of `keys` keys, on average if `varlen`.
/// `in_step`: with varlen or functions, where own_blocks is not heeded. `one_team`: of lines without teams.
const ForwardTileLine& forward_tile(int head_dim_qk, int head_dim_v, bool masked, std::int64_t keys,
                                    bool in_step, bool one_team = false);

/// The line that serves a Config of whole tiles. The device alone knows lengths that differ; the host knows
/// the mean of sequences that follow each other, and of others (`seqused`) no more than the most there can
/// be. Functions take the line of short masked ones: their values need registers that larger tiles do not
/// leave.
const ForwardTileLine& forward_tile(const CallFacts& facts, const ForwardConfig& config);

/// What a call says of any Config: element, padded head dimensions, masks, transform, where keys lie. Here
/// and below, Config is that of any kernel that gpu::visit_forward knows.
template <typename Config>
Config wanted_of(const CallFacts& facts);

/// Which rule that tiles of K and V follow in shared memory a Config breaks; empty if none.
template <typename Config>
std::string tiles_objection(const Config& config);

/// A Config with as many stages as shared memory holds: what is in flight hides the latency of global memory.
template <typename Config>
Config with_most_stages(Config c, int least = 1, int most = 8) {
  c.stages = least;
  while (c.stages < most && forward_objection(c).empty()) ++c.stages;
  if (!forward_objection(c).empty()) --c.stages;
  return c;
}

/// Calls f with Configs of steps of generation that are shipped: from rows and from pages, of 16 bits and of
/// e4m3, without heads as rows.
template <typename Config, typename F>
void for_each_shipped_step(F&& f) {
  for (const int qk : {64, 128, 192, 256}) {
    for (const Element element : {Element::bf16, Element::f16}) {
      if (qk == 192 && element == Element::f16) continue;
      for (const KeySource keys : {KeySource::rows, KeySource::pages}) {
        Config c;
        c.tiling.element = element;
        c.tiling.head_dim_qk = qk;
        c.tiling.head_dim_v = qk == 192 ? 128 : qk;
        c.keys = keys;
        c.mask.varlen = true;
        f(c);
        if (qk > 128) continue;
        c.key_type = OperandType::e4m3;
        c.transform = ScoreTransform::scaled;
        f(c);
      }
    }
  }
}

/// The Config of Hopper's kernel for a forward problem of 16 bits, or with head dimensions up to 256 and k
/// and v alone of 8, that the kernel `decode` does not serve.
ForwardConfig choose_forward_config(const CallFacts& facts);

/// Configs that are compiled into the library: what choose_forward_config gives for the usual models.
std::vector<ForwardConfig> shipped_forward_configs();

/// Bytes of local memory that ptxas gives a shipped Config: 0, but for those that forward/plan.cpp
/// names with the reason.
int forward_local_bytes_allowed(const ForwardConfig& config);

/// The choice in words, a line each.
std::vector<std::string> explain_forward(const CallFacts& facts, const ForwardConfig& config);
/// What of it a kernel has in common with others: `why` its tile, and how blocks find `maxima`.
template <typename Config>
std::vector<std::string> explain_tiles(const CallFacts& facts, const Config& config, const char* why,
                                       const char* maxima);
constexpr const char* moves_maxima = "every block moves its rows' maxima";

/// Why keys are shared, or split at fixed places, in words.
constexpr const char* shared_keys =
    "few queries a sequence: CTAs share the key blocks of all tiles evenly, and combine merges the parts";
constexpr const char* fixed_parts =
    "a fixed split size and few queries: CTAs share the splits of all tiles, and combine merges them in "
    "order";
constexpr const char* fixed_tiles =
    "a fixed split size: a CTA computes the splits of a tile one by one, and merges them in order";

/// What the rows of a tile are, in words.
std::string words_of_rows(const Problem& problem, const Tiling& tiling);

}  // namespace tandem
