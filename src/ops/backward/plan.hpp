// The backward kernels' Config for a problem: a table of tiles, and the rules that say which Configs can
// exist.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "ops/backward/config.hpp"
#include "plan/facts.hpp"

namespace tandem {

/// Registers a consumer thread needs beside accumulators and operands (addresses, the tile, loop state).
constexpr int backward_other_registers = 28;

/// Registers that a consumer thread holds at the widest points of the loop: dK, dV and S with dP, or dQ with
/// packed dS (and P, with ping-pong); and the rest.
int backward_registers(const BackwardConfig& config);

/// Why a Config cannot exist, with the number that breaks the rule; empty if it can.
std::string backward_objection(const BackwardConfig& config);

/// One line of the heuristics: the tile for head dimensions up to these. Each is padded to a multiple of its
/// unit, so that the warpgroups' columns begin where strips of shared memory do.
struct BackwardTileLine {
  int head_dim;  ///< the larger of the two
  int multiple_qk;
  int multiple_v;
  int block_m;
  int block_n;
  int cluster;
  int q_stages;
  int dout_stages;
  int dq_slices;
  int pingpong_from;         ///< queries a sequence from which it pays, twice as many if causal; 0: from none
  int pingpong_dout_stages;  ///< with it; of q there are three
  int overlaps_from;         ///< queries from which ping-pong from tile to tile pays; 0: from none
  int overlaps_causal_from;  ///< queries of a causal call from which it does
  int staggered_from;        ///< queries from which a staggered start pays in full attention, in any order of
                             ///< additions
  int in_order_from;  ///< queries from which a fixed order is that of the tiles, not staggered; 0: from none
  const char* why;
};

/// The heuristics, narrowest head dimensions first. A problem takes the first line it fits.
std::span<const BackwardTileLine> backward_tiles();

/// What a call asks of any Config: element, masks, softcap, functions, order.
template <typename Config>
Config wanted_backward_of(const CallFacts& facts);

/// The Config of Hopper's kernels for a 16-bit backward call with head dimensions up to 256.
BackwardConfig choose_backward_config(const CallFacts& facts);

/// Configs that are compiled into the library: what choose_backward_config gives for the usual models.
std::vector<BackwardConfig> shipped_backward_configs();

/// Bytes of local memory that ptxas gives a shipped Config: 0, but for those that backward/plan.cpp
/// names with the reason.
int backward_local_bytes_allowed(const BackwardConfig& config);

/// How a call's gradients are written.
std::string words_of_gradients(const Problem& problem);

/// The choice in words, a line each.
std::vector<std::string> explain_backward(const CallFacts& facts, const BackwardConfig& config);

}  // namespace tandem
