// The forward pass: cuts a Problem into tiles and runs them on threads, the longest of each head first.
#include <omp.h>

#include <cstring>
#include <limits>

#include "cpu/cpu.hpp"
#include "cpu/forward_kernels.hpp"
#include "cpu/workspace.hpp"

namespace tandem::cpu {
namespace {

/// Element (batch, row, head) of an operand.
template <typename Byte = std::byte>
Byte* element(const Operand& o, std::int64_t batch, std::int64_t row, std::int64_t head) {
  return static_cast<Byte*>(o.data) +
         o.offset(batch, row, head) * static_cast<std::int64_t>(size_of(o.dtype));
}

/// Tiles of one KV head of sequence b.
std::int64_t tiles_of(const Problem& p, const Config& config, std::int64_t b) {
  return (query_rows(p, b).used * p.group() + config.block_q - 1) / config.block_q;
}

/// out 0 and lse -inf for rows [begin, end), which no sequence uses.
void clear_rows(const Problem& p, std::int64_t batch, std::int64_t begin, std::int64_t end) {
  const std::size_t bytes = static_cast<std::size_t>(p.head_dim_v) * size_of(p.out.dtype);
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t head = 0; head < p.heads_q; ++head) {
      std::memset(element(p.out, batch, row, head), 0, bytes);
      if (!p.lse.given()) continue;
      static_cast<float*>(p.lse.data)[p.lse.offset(batch, row, head)] =
          -std::numeric_limits<float>::infinity();
    }
  }
}

/// The unused rows of sequence b; b == batch stands for the packed rows before the first and after the last
/// sequence.
void clear_unused(const Problem& p, std::int64_t b) {
  if (b < p.batch) {
    const Rows rows = query_rows(p, b);
    clear_rows(p, b, rows.begin + rows.used, rows.end);
  } else if (p.packed_q) {
    clear_rows(p, 0, 0, p.batch > 0 ? query_rows(p, 0).begin : p.rows_q);
    if (p.batch > 0) clear_rows(p, 0, query_rows(p, p.batch - 1).end, p.rows_q);
  }
}

/// What all tiles of one KV head of one sequence share.
ForwardTile describe_head(const Problem& p, const Config& config, std::int64_t b, std::int64_t kv_head) {
  const Rows q_rows = query_rows(p, b);
  const Rows k_rows = key_rows(p, b);
  const std::int64_t head = kv_head * p.group();
  ForwardTile t;
  t.dtype = p.q.dtype;
  t.out_dtype = p.out.dtype;
  t.head_dim_qk = static_cast<int>(p.head_dim_qk);
  t.head_dim_v = static_cast<int>(p.head_dim_v);
  t.block_q = config.block_q;
  t.block_k = config.block_k;
  t.q = {element(p.q, b, q_rows.begin, head), p.q.row_stride, p.q.head_stride};
  t.out = {element(p.out, b, q_rows.begin, head), p.out.row_stride, p.out.head_stride};
  if (p.lse.given()) t.lse = {element(p.lse, b, q_rows.begin, head), p.lse.row_stride, p.lse.head_stride};
  t.k = element(p.k, b, k_rows.begin, kv_head);
  t.v = element(p.v, b, k_rows.begin, kv_head);
  t.k_stride = p.k.row_stride;
  t.v_stride = p.v.row_stride;
  t.group = p.group();
  t.seqlen_q = q_rows.used;
  t.seqlen_k = k_rows.used;
  t.window_left = p.window_left;
  t.window_right = p.window_right;
  t.scale = p.scale * p.q_scale.at(b, kv_head) * p.k_scale.at(b, kv_head);
  t.softcap = p.softcap;
  t.v_scale = p.v_scale.at(b, kv_head);
  if (p.sink != nullptr) t.sink = p.sink + head * p.sink_stride;
  t.sink_stride = p.sink_stride;
  return t;
}

std::size_t scratch_bytes(const Problem& p, const Config& config) {
  return forward_scratch(config.block_q, config.block_k, static_cast<int>(p.head_dim_qk),
                         static_cast<int>(p.head_dim_v))
      .bytes;
}

}  // namespace

std::size_t forward_workspace_bytes(const Problem& problem, const Config& config) {
  return static_cast<std::size_t>(config.threads) * scratch_bytes(problem, config) + scratch_alignment;
}

void forward(const Problem& p, const Config& config, std::span<std::byte> workspace) {
  const ForwardKernel& kernel = forward_kernel(config.target);
  const std::size_t scratch = scratch_bytes(p, config);
  std::byte* const base = align_scratch(workspace.data());
  std::int64_t tickets = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) tickets += tiles_of(p, config, b) * p.heads_kv;

#pragma omp parallel num_threads(config.threads)
  {
    // Before the tiles: should cu_seqlens hold nonsense, unused rows may overlap used ones.
#pragma omp for schedule(static)
    for (std::int64_t b = 0; b <= p.batch; ++b) clear_unused(p, b);

    // Tickets count sequences, then KV heads, then tiles. A thread's tickets ascend, so that each thread
    // finds the sequence of its next ticket by walking on from the one before.
    std::int64_t b = 0;
    std::int64_t first_ticket = 0;
    std::int64_t tiles = p.batch > 0 ? tiles_of(p, config, 0) : 0;
#pragma omp for schedule(monotonic : dynamic, 1)
    for (std::int64_t ticket = 0; ticket < tickets; ++ticket) {
      while (ticket >= first_ticket + tiles * p.heads_kv) {
        first_ticket += tiles * p.heads_kv;
        tiles = tiles_of(p, config, ++b);
      }
      const std::int64_t kv_head = (ticket - first_ticket) / tiles;
      // The last tile of a causal sequence sees the most keys: it goes first.
      const std::int64_t tile = tiles - 1 - (ticket - first_ticket) % tiles;
      ForwardTile t = describe_head(p, config, b, kv_head);
      t.first = tile * config.block_q;
      t.count = static_cast<int>(std::min<std::int64_t>(config.block_q, t.seqlen_q * t.group - t.first));
      t.scratch = base + static_cast<std::size_t>(omp_get_thread_num()) * scratch;
      kernel.run(t);
    }
  }
}

}  // namespace tandem::cpu
