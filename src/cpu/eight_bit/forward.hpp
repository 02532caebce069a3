// The forward pass in 8 bits, and what it decides once a call.
#pragma once

#include <cstddef>

#include "cpu/common/config.hpp"
#include "cpu/common/stop.hpp"
#include "problem/problem.hpp"

namespace tandem::cpu {

struct Plan;

/// Quantized values, scales and mean of one KV head of one sequence, as offsets in bytes.
struct EightBitStore {
  std::size_t k_quantized = 0;
  std::size_t v_quantized = 0;
  std::size_t k_scales = 0;
  std::size_t v_scales = 0;
  std::size_t sums = 0;  ///< K's channel sums, by block
  std::size_t mean = 0;
  std::size_t bytes = 0;
};

struct EightBitPlan {
  EightBitStore store;
  bool on_unit = false;  ///< products are those of a matrix unit
  /// Whether every thread takes whole KV heads, which needs no waiting; else all threads share one head at a
  /// time. The stores of all threads together are then never larger than the quantized values of all of K
  /// and V.
  bool whole_heads = false;
  bool needs_maxima = false;     ///< largest magnitudes by (batch, head), for scales of a head or the tensor
  std::size_t tile_bytes = 0;    ///< scratch of a tile
  std::size_t thread_bytes = 0;  ///< the same, and a store where threads take whole heads
  std::size_t maxima_at = 0;
  std::size_t workspace_bytes = 0;  ///< linear in seqlen; alignment included
};

EightBitPlan plan_eight_bit(const Problem& problem, const Config& config);
/// `problem` is that of the plan, with all addresses.
void eight_bit_forward(const Plan& plan, const Problem& problem, std::byte* workspace, Stop* stop);

}  // namespace tandem::cpu
