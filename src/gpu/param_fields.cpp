#include "gpu/param_fields.hpp"

namespace tandem::gpu {

LoadedTensor loaded_tensor(const Problem& p, Loaded which) {
  const bool keys = which == Loaded::k || which == Loaded::v;
  const bool values = which == Loaded::v || which == Loaded::dout;
  return {.operand = operand_of(p, which),
          .head_dim = values ? p.head_dim_v : p.head_dim_qk,
          .rows = !keys             ? p.rows_q
                  : p.pages.given() ? p.pages.page_size
                                    : p.rows_k,
          .heads = keys ? p.heads_kv : p.heads_q,
          .batch = (keys ? p.packed_k : p.packed_q) ? 1
                   : keys && p.of_cache()           ? p.cache_batch
                                                    : p.batch};
}

TensorMapSpec rows_tensor_map(const LoadedTensor& tensor, Element element, int strip, int box_rows,
                              const void* nearby) {
  const Operand& o = tensor.operand;
  const bool empty = tensor.empty();
  const auto near = reinterpret_cast<std::uintptr_t>(nearby) / 16 * 16;
  TensorMapSpec spec;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): rounding an address down takes the way through an integer
  spec.base = empty ? reinterpret_cast<const void*>(near) : o.data;
  spec.rank = 4;
  spec.element = element;
  spec.element_bytes = is_eight_bit(o.dtype) ? 1 : 2;
  const auto at_least_one = [](std::int64_t n) { return std::max<std::int64_t>(n, 1); };
  spec.dims = {tensor.head_dim, at_least_one(tensor.rows), at_least_one(tensor.heads),
               at_least_one(tensor.batch)};
  spec.box = {strip, box_rows, 1, 1};
  spec.swizzle = strip * spec.element_bytes == 128 ? Swizzle::b128 : Swizzle::b64;
  const std::array<std::int64_t, 3> strides = {o.row_stride, o.head_stride, o.batch_stride};
  for (std::size_t i = 0; i < strides.size(); ++i) {
    // The stride of a dimension of one element is never used and may be anything; TMA wants a
    // multiple of 16.
    spec.strides[i] = empty || spec.dims[i + 1] == 1 ? (tensor.head_dim * spec.element_bytes + 15) / 16 * 16
                                                     : strides[i] * spec.element_bytes;
  }
  return spec;
}

void place(LoadedMaps& maps, const Workspace& workspace, char* memory) {
  for (auto& map : maps) {
    if (map && map->region != Region::none) map->spec.base = workspace.at(map->region, memory);
  }
}

}  // namespace tandem::gpu
