#include "gpu/packing.hpp"

#include <algorithm>

#include "gpu/kernel_name.hpp"
#include "gpu/launch.hpp"
#include "gpu/param_fields.hpp"

namespace tandem::gpu {

Scratch::Scratch(void* given, std::size_t bytes, abi::Stream stream) : stream_(stream) {
  address_ = reinterpret_cast<abi::DevicePointer>(given);
  if (given != nullptr || bytes == 0) return;
  check(driver().memory_alloc_async(&address_, bytes, stream), "cuMemAllocAsync");
  owned_ = true;
}

Scratch::~Scratch() {
  if (owned_) driver().memory_free_async(address_, stream_);
}

void pack(const Packing& t, char* target, int device, abi::Stream stream) {
  const Operand& o = *t.operand;
  const bool paired = reinterpret_cast<std::uintptr_t>(o.data) % 4 == 0 && t.head_dim % 2 == 0 &&
                      o.row_stride % 2 == 0 && o.head_stride % 2 == 0 && o.batch_stride % 2 == 0;
  const PackParams params{.source = o.data,
                          .stride = strides_of(o),
                          .target = target,
                          .batch = as_int(t.batch),
                          .rows = as_int(t.rows),
                          .heads = as_int(t.heads),
                          .head_dim = as_int(t.head_dim),
                          .pitch = as_int(t.pitch())};
  const std::int64_t units = t.batch * t.rows * t.heads * t.pitch() / 8;
  // Eight blocks of 256 threads fill a multiprocessor.
  const std::int64_t grid = std::min<std::int64_t>((units + pack_threads - 1) / pack_threads,
                                                   std::int64_t{8} * properties(device).multiprocessors);
  launch(loaded_kernel(device, Kernel::pack, PackConfig{.paired = paired}),
         {.grid = static_cast<unsigned int>(grid), .threads = pack_threads, .stream = stream}, &params);
  t.operand->data = target;
  t.operand->head_stride = t.pitch();
  t.operand->row_stride = t.pitch() * t.heads;
  t.operand->batch_stride = t.pitch() * t.heads * t.rows;
}

}  // namespace tandem::gpu
