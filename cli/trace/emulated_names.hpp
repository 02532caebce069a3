// Compiles forward kernels for the emulator, and finds their barriers' names.
#pragma once

#include <fmt/core.h>

#include <array>
#include <cstddef>

#include "ops/forward/sm90/forward.cuh"
#include "trace/emulated.hpp"

namespace tandem::cli::trace {

/// A full buffer is what its reader waits for, a free one what its writer waits for.
template <int stages>
void add_ring(Names& names, std::size_t offset, const char* tensor, const char* of = "") {
  using Ring = tile::Ring<stages>;
  for (int s = 0; s < stages; ++s) {
    const std::string detail = fmt::format("{}buffer {}", of, s);
    const auto at = [&](std::size_t array) {
      return static_cast<std::uint32_t>(offset + array + sizeof(ptx::Mbarrier) * static_cast<std::size_t>(s));
    };
    names.barriers[at(offsetof(Ring, full))] = {fmt::format("{} full", tensor), detail};
    names.barriers[at(offsetof(Ring, empty))] = {fmt::format("{} free", tensor), detail};
  }
}

template <ForwardConfig C>
Names forward_names() {
  using Shared = ForwardShared<C>;
  Names names{.products_of_shared = "S = Q K", .products_of_registers = "O += P V"};
  add_ring<C.stages>(names, offsetof(Shared, k_ring), "K");
  add_ring<C.stages>(names, offsetof(Shared, v_ring), "V");
  for (int w = 0; w < C.consumers(); ++w) {
    const std::size_t offset =
        offsetof(Shared, q_ring) + sizeof(tile::Ring<C.q_stages>) * static_cast<std::size_t>(w);
    add_ring<C.q_stages>(names, offset, "Q", fmt::format("warpgroup {}, ", w).c_str());
  }
  add_ring<2>(names, offsetof(Shared, tiles), "tile");
  names.named[0] = "block";
  for (int w = 0; w < C.consumers(); ++w) {
    names.named[static_cast<std::uint32_t>(tile::barrier_pingpong + w)] = "ping-pong";
  }
  names.named[tile::barrier_consumers] = "consumers";
  return names;
}

template <ForwardConfig... configs>
constexpr std::array<EmulatedKernel, sizeof...(configs)> emulate() {
  return {EmulatedKernel{configs, &tandem::forward<configs>, &forward_names<configs>}...};
}

}  // namespace tandem::cli::trace
