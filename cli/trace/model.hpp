// When the steps of a recorded CTA would happen: a discrete-event model of one Hopper SM. It is a model and
// no measurement; docs/trace.md says what it leaves out.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "recording.hpp"
#include "trace/timeline.hpp"

namespace tandem::cli::trace {

/// What things take, in cycles where it says no other.
struct Costs {
  std::uint64_t product_rate = 4096;  ///< operations a cycle of 16-bit products; twice as many of 8-bit ones
  std::uint64_t product_queue = 2;    ///< products of a warpgroup that have begun: the next one's issue waits
  std::uint64_t product_issue = 4;    ///< a warp's, for issuing a product
  std::uint64_t special_unit = 8;     ///< the special function unit's, which warps of a quadrant share
  std::uint64_t special = 12;         ///< a warp's, with the addition behind each exponential
  std::uint64_t arithmetic = 5;       ///< a warp's, for any other f32 instruction
  std::uint64_t exchange = 10;        ///< a warp's, for a shuffle or vote
  std::uint64_t shared_access = 8;    ///< a warp's, for a load or store
  std::uint64_t global_latency = 600;  ///< from a load of global memory to the use of what it brings
  std::uint64_t store_rate = 64;       ///< bytes a cycle to global memory, of all warps
  std::uint64_t copy_rate = 32;        ///< bytes a cycle of TMA
  std::uint64_t copy_latency = 700;    ///< from a copy's last byte requested to its barrier
  std::uint64_t barrier = 20;          ///< from what ends a wait to the warp that waited
};

/// A cost by name, with what it means.
struct CostName {
  const char* name;
  std::uint64_t Costs::*cost;
};
std::span<const CostName> cost_names();

/// What a kernel's barriers and products are called.
struct Names {
  struct Barrier {
    std::string name;
    std::string detail = {};
  };
  std::map<std::uint32_t, Barrier> barriers = {};  ///< by offset in shared memory
  std::map<std::uint32_t, std::string> named = {};
  std::string products_of_shared = "product";     ///< A in shared memory
  std::string products_of_registers = "product";  ///< A in registers
};

/// Who the warps are. Warp 0 of each group of four speaks for it.
struct Roles {
  int warps = 0;
  bool producer = false;  ///< the first four warps load; the others are consumer warpgroups
};

/// Throws Error (internal) where the recording cannot be replayed.
Timeline model(const emulator::Recording& recording, const Names& names, const Roles& roles,
               const Costs& costs);

}  // namespace tandem::cli::trace
