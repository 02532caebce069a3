#include "gpu/forward.hpp"

#include <algorithm>

#include "gpu/forward_params.hpp"
#include "gpu/kernel_name.hpp"
#include "gpu/launch.hpp"
#include "gpu/packing.hpp"
#include "gpu/tensor_map.hpp"

namespace tandem::gpu {
namespace {

/// The tensors of `problem` that TMA cannot read. Calls f with each.
template <typename F>
void for_each_packing(Problem& p, const ForwardConfig& config, F&& f) {
  for (const Loaded which : loaded_tensors) {
    if (tma_can_read(forward_tensor_map(p, config.tiling(), which))) continue;
    const bool is_q = which == Loaded::q;
    const std::int64_t head_dim = which == Loaded::v ? p.head_dim_v : p.head_dim_qk;
    f(Packing{.operand = is_q                 ? &p.q
                         : which == Loaded::k ? &p.k
                                              : &p.v,
              .batch = (is_q ? p.packed_q : p.packed_k) ? 1 : p.batch,
              .rows = is_q ? p.rows_q : p.rows_k,
              .heads = is_q ? p.heads_q : p.heads_kv,
              .head_dim = head_dim});
  }
}

/// CTAs that are launched at most: one an SM.
std::int64_t most_blocks(int device) {
  return properties(device).multiprocessors;
}

/// Whether CTAs take tiles from a counter, which must be cleared first: 2 us of the host's time, and scratch
/// memory. A grid with a CTA for every tile needs none.
bool needs_counter(const Problem& p, const ForwardConfig& config) {
  return config.dynamic && forward_tile_count(p, config.tiling()) > most_blocks(p.device.index);
}

}  // namespace

std::size_t forward_workspace_bytes(const Problem& problem, const ForwardConfig& config) {
  Problem p = problem;
  std::size_t bytes = needs_counter(problem, config) ? scratch_alignment : 0;
  for_each_packing(p, config, [&](const Packing& t) { bytes += t.bytes(); });
  return bytes;
}

void load_forward(int device, const ForwardConfig& config) {
  loaded_kernel(device, Kernel::forward, config);
}

void forward(const Problem& problem, const ForwardConfig& config, void* stream_handle, void* workspace) {
  const std::int64_t tiles = forward_tile_count(problem, config.tiling());
  if (tiles == 0) return;
  const int device = problem.device.index;
  const auto stream = static_cast<abi::Stream>(stream_handle);
  const LoadedKernel kernel = loaded_kernel(device, Kernel::forward, config);
  const ContextGuard guard(device);

  Problem p = problem;
  const Scratch scratch(workspace, workspace != nullptr ? 0 : forward_workspace_bytes(problem, config),
                        stream);
  char* free = scratch.data();
  unsigned int* tile_counter = nullptr;
  if (needs_counter(problem, config)) {
    tile_counter = reinterpret_cast<unsigned int*>(free);
    check(driver().memset_d8_async(reinterpret_cast<abi::DevicePointer>(free), 0, sizeof(*tile_counter),
                                   stream),
          "cuMemsetD8Async");
    free += scratch_alignment;
  }
  for_each_packing(p, config, [&](const Packing& t) {
    pack(t, free, device, stream);
    free += t.bytes();
  });
  const ForwardParams params = make_forward_params(p, config.tiling(), encode_tensor_map,
                                                   properties(device).multiprocessors, tile_counter);
  launch(kernel,
         {.grid = static_cast<unsigned int>(std::min(tiles, most_blocks(device))),
          .threads = static_cast<unsigned int>(config.threads()),
          .stream = stream},
         &params);
}

}  // namespace tandem::gpu
