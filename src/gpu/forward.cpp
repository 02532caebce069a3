#include "gpu/forward.hpp"

#include <algorithm>

#include "gpu/forward_params.hpp"
#include "gpu/kernel_name.hpp"
#include "gpu/launch.hpp"
#include "gpu/tensor_map.hpp"

namespace tandem::gpu {
namespace {

constexpr std::size_t alignment = 256;

/// One tensor to be packed, and its extents.
struct Packing {
  Operand* operand;
  std::int64_t batch, rows, heads, head_dim, pitch;

  [[nodiscard]] std::size_t bytes() const {
    return (static_cast<std::size_t>(batch * rows * heads * pitch) * 2 + alignment - 1) / alignment *
           alignment;
  }
};

/// The tensors of `problem` that the copy engine cannot read. Calls f with each.
template <typename F>
void for_each_packing(Problem& p, const ForwardConfig& config, F&& f) {
  for (const Loaded which : loaded_tensors) {
    if (copy_engine_can_read(forward_tensor_map(p, config, which))) continue;
    const bool is_q = which == Loaded::q;
    const std::int64_t head_dim = which == Loaded::v ? p.head_dim_v : p.head_dim_qk;
    f(Packing{.operand = is_q                 ? &p.q
                         : which == Loaded::k ? &p.k
                                              : &p.v,
              .batch = (is_q ? p.packed_q : p.packed_k) ? 1 : p.batch,
              .rows = is_q ? p.rows_q : p.rows_k,
              .heads = is_q ? p.heads_q : p.heads_kv,
              .head_dim = head_dim,
              .pitch = (head_dim + 7) / 8 * 8});
  }
}

/// Scratch memory in stream order, or the caller's.
class Scratch {
 public:
  Scratch(void* given, std::size_t bytes, abi::Stream stream) : stream_(stream) {
    address_ = reinterpret_cast<abi::DevicePointer>(given);
    if (given != nullptr || bytes == 0) return;
    check(driver().memory_alloc_async(&address_, bytes, stream), "cuMemAllocAsync");
    owned_ = true;
  }
  ~Scratch() {
    if (owned_) driver().memory_free_async(address_, stream_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  [[nodiscard]] char* data() const { return reinterpret_cast<char*>(address_); }

 private:
  abi::DevicePointer address_ = 0;
  abi::Stream stream_;
  bool owned_ = false;
};

LoadedKernel pack_kernel(int device, const PackConfig& config) {
  static KernelTable<PackConfig> table;
  return table.get(device, config,
                   [](int d, const PackConfig& c) { return load_kernel(d, kernel_name(c), 0); });
}

LoadedKernel forward_kernel(int device, const ForwardConfig& config) {
  static KernelTable<ForwardConfig> table;
  return table.get(device, config, [](int d, const ForwardConfig& c) {
    return load_kernel(d, kernel_name(c), forward_shared_bytes(c));
  });
}

/// Copies the tensor to `target` and points its operand there.
void pack(const Packing& t, char* target, int device, abi::Stream stream) {
  const Operand& o = *t.operand;
  const bool paired = reinterpret_cast<std::uintptr_t>(o.data) % 4 == 0 && t.head_dim % 2 == 0 &&
                      o.row_stride % 2 == 0 && o.head_stride % 2 == 0 && o.batch_stride % 2 == 0;
  const PackParams params{.source = o.data,
                          .stride = {.batch = o.batch_stride, .row = o.row_stride, .head = o.head_stride},
                          .target = target,
                          .batch = static_cast<int>(t.batch),
                          .rows = static_cast<int>(t.rows),
                          .heads = static_cast<int>(t.heads),
                          .head_dim = static_cast<int>(t.head_dim),
                          .pitch = static_cast<int>(t.pitch)};
  const std::int64_t units = t.batch * t.rows * t.heads * t.pitch / 8;
  // Eight blocks of 256 threads fill a multiprocessor.
  const std::int64_t grid = std::min<std::int64_t>((units + pack_threads - 1) / pack_threads,
                                                   std::int64_t{8} * properties(device).multiprocessors);
  launch(pack_kernel(device, {.paired = paired}),
         {.grid = static_cast<unsigned int>(grid), .threads = pack_threads, .stream = stream}, &params);
  t.operand->data = target;
  t.operand->head_stride = t.pitch;
  t.operand->row_stride = t.pitch * t.heads;
  t.operand->batch_stride = t.pitch * t.heads * t.rows;
}

}  // namespace

std::size_t forward_workspace_bytes(const Problem& problem, const ForwardConfig& config) {
  Problem p = problem;
  std::size_t bytes = config.dynamic ? alignment : 0;
  for_each_packing(p, config, [&](const Packing& t) { bytes += t.bytes(); });
  return bytes;
}

void forward(const Problem& problem, const ForwardConfig& config, void* stream_handle, void* workspace) {
  const std::int64_t tiles = forward_tile_count(problem, config);
  if (tiles == 0) return;
  const int device = problem.device.index;
  const auto stream = static_cast<abi::Stream>(stream_handle);
  const LoadedKernel kernel = forward_kernel(device, config);
  const DeviceProperties& limits = properties(device);
  const ContextGuard guard(device);

  Problem p = problem;
  const Scratch scratch(workspace, workspace != nullptr ? 0 : forward_workspace_bytes(problem, config),
                        stream);
  char* free = scratch.data();
  unsigned int* tile_counter = nullptr;
  if (config.dynamic) {
    tile_counter = reinterpret_cast<unsigned int*>(free);
    check(driver().memset_d8_async(reinterpret_cast<abi::DevicePointer>(free), 0, sizeof(*tile_counter),
                                   stream),
          "cuMemsetD8Async");
    free += alignment;
  }
  for_each_packing(p, config, [&](const Packing& t) {
    pack(t, free, device, stream);
    free += t.bytes();
  });
  const ForwardParams params =
      make_forward_params(p, config, encode_tensor_map, limits.l2_bytes, tile_counter);
  const auto grid =
      std::min<std::int64_t>(tiles, std::int64_t{limits.multiprocessors} * config.blocks_per_sm);
  launch(kernel,
         {.grid = static_cast<unsigned int>(grid),
          .threads = static_cast<unsigned int>(config.threads()),
          .stream = stream},
         &params);
}

}  // namespace tandem::gpu
