// The backward pass in 8 bits (docs/results/gradients-in-8-bits.md, The recipe): a KV head at a time, by
// tiles of 128 queries and 128 keys. Queries lie in columns, since what is known beforehand is of queries.
//
//   S = Q K^T   P = exp(S - LSE)   dP = dO V^T   dS = P (dP - delta)     in s8
//   dV += P^T dO   dK += dS^T Q   dQ += dS K                             in e4m3
//
// Threads take whole KV heads, and a head adds in one order: results have the same bits for any number of
// threads.
#include "cpu/eight_bit/gradients.hpp"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <variant>

#include "cpu/common/workspace.hpp"
#include "cpu/cpu.hpp"
#include "cpu/eight_bit/gradient_products.hpp"
#include "cpu/eight_bit/gradient_rows.hpp"
#include "cpu/targets/kernels.hpp"
#include "problem/recipe_of.hpp"

namespace tandem::cpu {
namespace {

using namespace gradients;

/// A block of queries and one of keys.
struct Tile {
  std::int64_t first_query, queries, first_key, keys;
};

/// One key of a tile: P and dS of its queries in e4m3, in the place of S and dP without scales. Queries whose
/// [begin[i], end[i]) has n see it; of others P and dS are 0.
TANDEM_WIDE_CLONES void attend_key(const Memory& m, float n, float k_scale, float v_scale, const float* begin,
                                   const float* end) {
  const std::int64_t row = static_cast<std::int64_t>(n) * tile_rows;
  for (std::int64_t i = 0; i < tile_rows; i += gradient_columns) {
    ColumnLanes p = lanes_at(m.p + row + i) * (lanes_at(m.q_factor + i) * k_scale) - lanes_at(m.lse + i);
    exponentiate(p);
    const ColumnLanes dp = lanes_at(m.ds + row + i) * (lanes_at(m.dout.scales + i) * v_scale);
    ColumnLanes ds = p * (dp - lanes_at(m.delta + i)) * lanes_at(m.ds_factor + i);
    p *= lanes_at(m.p_factor + i);
    round_to_e4m3(p);
    round_to_e4m3(ds);
    const auto seen = (lanes_at(begin + i) <= n) & (lanes_at(end + i) > n);
    p = seen ? p : ColumnLanes{};
    ds = seen ? ds : ColumnLanes{};
    std::memcpy(m.p + row + i, &p, sizeof p);
    std::memcpy(m.ds + row + i, &ds, sizeof ds);
  }
}

/// P and dS of the tile, in e4m3.
void probabilities(const Head& h, const Tile& t) {
  const Memory& m = h.m;
  const float* const k = m.k.values + t.first_key * m.qk_columns;
  const float* const v = m.v.values + t.first_key * m.v_columns;
  multiply(k, m.qk_columns, 1, m.q_in_columns, tile_rows, m.qk_columns, false, m.p);
  multiply(v, m.v_columns, 1, m.dout_in_columns, tile_rows, m.v_columns, false, m.ds);
  const Window window = window_of(h.p, h.batch);
  float begin[tile_rows];
  float end[tile_rows];
  for (std::int64_t i = 0; i < tile_rows; ++i) {
    const KeyRange seen = visible_keys(window, t.first_query + i, h.queries.used, h.keys.used);
    const auto in_tile = [&](std::int64_t key) {
      return static_cast<float>(std::clamp<std::int64_t>(key - t.first_key, 0, t.keys));
    };
    begin[i] = in_tile(seen.first);
    end[i] = m.root[i] > 0.0F ? in_tile(seen.last) : 0.0F;
  }
  for (int n = 0; n < tile_rows; ++n)
    attend_key(m, static_cast<float>(n), m.k.scales[t.first_key + n], m.v.scales[t.first_key + n], begin,
               end);
}

bool stops(Stop* stop) {
  return stop != nullptr && stop->wanted();
}

void add_to_gradients(const Head& h, const Tile& t) {
  const Memory& m = h.m;
  if (h.p.dv.given())
    multiply(m.p, tile_rows, 1, m.dout_e4m3, m.v_columns, tile_rows, true, m.dv + t.first_key * m.v_columns);
  if (h.p.dk.given())
    multiply(m.ds, tile_rows, 1, m.q_e4m3, m.qk_columns, tile_rows, true, m.dk + t.first_key * m.qk_columns);
  if (h.p.dq.given()) {
    multiply(m.ds, 1, tile_rows, m.k_e4m3 + t.first_key * m.qk_columns, m.qk_columns, tile_rows, true, m.dq);
  }
}

void run_queries(const Head& h, std::int64_t head, std::int64_t first, Stop* stop) {
  const Memory& m = h.m;
  const std::int64_t count = std::min(tile_rows, h.queries.used - first);
  stage_queries(h, head, first, count);
  const Window window = window_of(h.p, h.batch);
  const std::int64_t begin = visible_keys(window, first, h.queries.used, h.keys.used).first;
  const std::int64_t end = visible_keys(window, first + count - 1, h.queries.used, h.keys.used).last;
  for (std::int64_t key = begin / tile_rows * tile_rows; key < end; key += tile_rows) {
    if (stops(stop)) return;
    const Tile tile{.first_query = first,
                    .queries = count,
                    .first_key = key,
                    .keys = std::min(tile_rows, h.keys.used - key)};
    probabilities(h, tile);
    add_to_gradients(h, tile);
  }
  for (std::int64_t i = 0; h.p.dq.given() && i < count; ++i) {
    // Rows of dS add up to 0, so that K's mean is missed by no gradient but that of the LSE.
    const bool more = h.recipe.smooth_k && h.p.dlse.given() && m.root[i] > 0.0F;
    write_row(h.p.dq, h.batch, h.queries.begin + first + i, head, h.p.head_dim_qk, m.dq + i * m.qk_columns,
              m.root[i] * m.ds_scale[i] / ds_unit * h.p.scale, more ? m.mean : nullptr,
              more ? h.p.scale * row_statistic(h.p.dlse, h, first + i, head) : 0.0F);
  }
}

void run_head(Head h, Stop* stop) {
  if (stops(stop)) return;
  const Memory& m = h.m;
  quantize_keys(h);
  h.units = find_units(h);
  const std::int64_t rows = whole_blocks(h.keys.used);
  std::memset(m.dk, 0, static_cast<std::size_t>(rows * m.qk_columns) * sizeof(float));
  std::memset(m.dv, 0, static_cast<std::size_t>(rows * m.v_columns) * sizeof(float));
  for (std::int64_t head = h.kv_head * h.p.group(); head < (h.kv_head + 1) * h.p.group(); ++head) {
    for (std::int64_t first = 0; first < h.queries.used; first += tile_rows) {
      run_queries(h, head, first, stop);
    }
  }
  if (stops(stop)) return;
  const float of_dk = static_cast<float>(h.units.q) / ds_unit * h.p.scale;
  const float of_dv = static_cast<float>(h.units.dout) / e4m3_p_range;
  for (std::int64_t i = 0; i < h.keys.used; ++i) {
    const std::int64_t row = h.keys.begin + i;
    if (h.p.dk.given())
      write_row(h.p.dk, h.batch, row, h.kv_head, h.p.head_dim_qk, m.dk + i * m.qk_columns, of_dk);
    if (h.p.dv.given())
      write_row(h.p.dv, h.batch, row, h.kv_head, h.p.head_dim_v, m.dv + i * m.v_columns, of_dv);
  }
}

/// Zeros, which rows keep that no sequence uses.
void clear(const Operand& x, bool packed, std::int64_t batch, std::int64_t rows, std::int64_t heads,
           std::int64_t dim, int threads) {
  if (!x.given()) return;
  const std::int64_t entries = packed ? 1 : batch;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t n = 0; n < entries * rows; ++n) {
    for (std::int64_t head = 0; head < heads; ++head) {
      std::memset(element(x, n / rows, n % rows, head), 0, static_cast<std::size_t>(dim) * size_of(x.dtype));
    }
  }
}

/// A thread's memory is for all rows of K; packed sequences share them, and follow one another in a thread.
int threads_of(const Problem& p, const Config& config) {
  return static_cast<int>(
      std::clamp<std::int64_t>(p.heads_kv * (p.packed_k ? 1 : p.batch), 1, config.threads));
}

}  // namespace

EightBitPlan plan_eight_bit_gradients(const Problem& p, const Config& config) {
  EightBitPlan plan;
  plan.whole_heads = true;
  plan.thread_bytes = Memory(p, nullptr).bytes;
  plan.workspace_bytes =
      static_cast<std::size_t>(threads_of(p, config)) * plan.thread_bytes + scratch_alignment;
  return plan;
}

void eight_bit_gradients(const Plan& call, const Problem& p, std::byte* workspace, Stop* stop) {
  const std::size_t thread_bytes = std::get<EightBitPlan>(call.pass).thread_bytes;
  const int threads = threads_of(p, call.config);
  const Recipe recipe = recipe_of(p.backward_precision, p.strict);
  const QuantizeKernel& kernel = kernels(call.config.target).quantize;
  std::byte* const base = align_scratch(workspace);
  clear(p.dq, p.packed_q, p.batch, p.rows_q, p.heads_q, p.head_dim_qk, threads);
  clear(p.dk, p.packed_k, p.batch, p.rows_k, p.heads_kv, p.head_dim_qk, threads);
  clear(p.dv, p.packed_k, p.batch, p.rows_k, p.heads_kv, p.head_dim_v, threads);
  const std::int64_t apart = p.packed_k ? 1 : p.batch;
  const std::int64_t in_turn = p.packed_k ? p.batch : 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (std::int64_t n = 0; n < apart * p.heads_kv; ++n) {
    const Memory memory(p, base + static_cast<std::size_t>(omp_get_thread_num()) * thread_bytes);
    for (std::int64_t i = 0; i < in_turn; ++i) {
      const std::int64_t batch = p.packed_k ? i : n / p.heads_kv;
      run_head({.p = p,
                .recipe = recipe,
                .kernel = kernel,
                .m = memory,
                .batch = batch,
                .kv_head = n % p.heads_kv,
                .queries = query_rows(p, batch),
                .keys = key_rows(p, batch),
                .units = {}},
               stop);
    }
  }
}

}  // namespace tandem::cpu
