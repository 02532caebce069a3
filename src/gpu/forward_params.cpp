#include "gpu/forward_params.hpp"

#include <algorithm>

#include "gpu/param_fields.hpp"

namespace tandem::gpu {
namespace {

/// The (batch, query head) pairs whose causal tiles come head by head; those of the others are interleaved.
/// On `sms` SMs of equal speed, the tiles that begin after the last of a sequence's longest should take as
/// long as it does: m_blocks of its work, where a head has m_blocks (m_blocks + 1) / 2. It is twice as many
/// heads, since SMs do not become free all at once.
int heads_in_order(const Problem& p, std::int64_t m_blocks, int sms) {
  const std::int64_t interleaved = std::int64_t{2} * sms / (m_blocks + 1) + 1;
  return as_int(std::max<std::int64_t>(0, p.heads_q * p.batch - interleaved));
}

}  // namespace

TensorMapSpec forward_tensor_map(const Problem& p, const Tiling& tiling, Loaded which) {
  const int padded = which == Loaded::v ? tiling.head_dim_v : tiling.head_dim_qk;
  const int box_rows = which == Loaded::q ? 64
                       : p.pages.given()  ? page_table_of(p.pages, tiling.block_n).box_rows
                                          : tiling.block_n;
  return rows_tensor_map(loaded_tensor(p, which), tiling.element, strip_columns(padded), box_rows,
                         p.out.data);
}

LoadedMaps forward_maps(const Problem& p, const Tiling& tiling) {
  LoadedMaps maps;
  for (const Loaded which : forward_loaded_tensors) {
    maps[index_of(which)] = {.spec = forward_tensor_map(p, tiling, which)};
  }
  return maps;
}

ForwardParams make_forward_params(const Problem& p, const Tiling& tiling, const LoadedMaps& maps,
                                  EncodeTensorMap encode, int sms, unsigned int* tile_counter,
                                  const SplitParts& parts) {
  return {.q = encode(maps[index_of(Loaded::q)]->spec),
          .k = encode(maps[index_of(Loaded::k)]->spec),
          .v = encode(maps[index_of(Loaded::v)]->spec),
          .q_data = p.q.data,
          .k_data = p.k.data,
          .out = p.out.data,
          .lse = static_cast<float*>(p.lse.data),
          .sink = p.sink,
          .q_stride = strides_of(p.q),
          .k_stride = strides_of(p.k),
          .out_stride = strides_of(p.out),
          .lse_stride = strides_of(p.lse),
          .sink_stride = p.sink_stride,
          .cu_seqlens_q = lengths_of(p.cu_seqlens_q),
          .cu_seqlens_k = lengths_of(p.cu_seqlens_k),
          .seqused_q = lengths_of(p.seqused_q),
          .seqused_k = lengths_of(p.seqused_k),
          .tile_counter = tile_counter,
          .batch = as_int(p.batch),
          .heads_q = as_int(p.heads_q),
          .heads_kv = as_int(p.heads_kv),
          .rows_q = as_int(p.rows_q),
          .rows_k = as_int(p.rows_k),
          .head_dim_qk = as_int(p.head_dim_qk),
          .head_dim_v = as_int(p.head_dim_v),
          .m_blocks = as_int(blocks_of(p.rows_q, tiling.block_m)),
          .heads_in_order = heads_in_order(p, blocks_of(p.rows_q, tiling.block_m), sms),
          .window_left = window_of(p.window_left),
          .window_right = window_of(p.window_right),
          .scale = p.scale,
          .softcap = p.softcap,
          .packed_q = p.packed_q,
          .packed_k = p.packed_k,
          .out_vectors = allows_vectors(p.out, p.head_dim_v),
          .pages = page_table_of(p.pages, tiling.block_n),
          .leftpad_k = lengths_of(p.leftpad_k),
          .cache_batch_idx = lengths_of(p.cache_batch_idx),
          .cache_batch = as_int(p.cache_batch),
          .part_out = parts.out,
          .part_lse = parts.lse,
          .split_ctas = parts.ctas};
}

int split_ctas(const Problem& p, const Tiling& tiling, int multiprocessors) {
  const std::int64_t blocks = std::max<std::int64_t>(1, blocks_of(p.rows_k, tiling.block_n));
  const std::int64_t tiles = forward_tile_count(p, tiling);
  return tiles >= multiprocessors ? multiprocessors
                                  : static_cast<int>(std::min<std::int64_t>(tiles * blocks, multiprocessors));
}

std::int64_t forward_tile_count(const Problem& p, const Tiling& tiling) {
  return p.heads_q * tiles_of(p.rows_q, tiling.block_m, p.batch, p.packed_q);
}

}  // namespace tandem::gpu
