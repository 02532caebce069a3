// The backward pass of one block of queries of one head, compiled for every instruction set.
//
//   P = exp(S - LSE)   dV += P^T dO   dP = dO V^T   dS = scale * slope * P * (dP - delta)   dK += dS^T Q   dQ
//   += dS K
//
// Queries lie in lanes: S^T and dP^T come out of the register tile with one query a lane, so that LSE, delta
// and masks are vectors and nothing is summed across lanes; P^T and dS^T are then the broadcast operands of
// the other three products. Keys are visited in blocks that fit the second-level cache.
// docs/kernels/cpu-backward.md has the arithmetic.
#include <sched.h>

#include "cpu/backward/captured.hpp"
#include "cpu/backward/function.hpp"
#include "cpu/backward/scores.hpp"
#include "cpu/backward/stage.hpp"
#include "cpu/backward/sums.hpp"

namespace tandem::cpu::TANDEM_TARGET {
namespace {

/// The place of a block of queries among those that add to the sums of a key block. It is fixed, so that the
/// order of additions, and with it every bit of the result, does not depend on threads.
struct Order {
  std::uint32_t number = 0;
  bool first = false;
  bool last = false;
};

/// Waits until the semaphore counts `number` additions. False where the call is to end: they may then never
/// come.
bool wait_for(const std::uint32_t* semaphore, std::uint32_t number, const AskToStop& stop) {
  constexpr int spins_before_yield = 256;
  for (int spins = 0; __atomic_load_n(semaphore, __ATOMIC_ACQUIRE) != number; ++spins) {
    if (spins < spins_before_yield) continue;
    if (stop()) return false;
    sched_yield();
  }
  return true;
}

template <typename Tile>
Order order_of(Tile& t) {
  const std::int64_t block_q = t.b.shape.block_q;
  Range queries{.first = 0, .last = t.b.seqlen_q};
  if (t.b.window_right >= 0) queries.first = clamp(t.first_key - t.shift - t.b.window_right, 0, t.b.seqlen_q);
  if (t.b.window_left >= 0) {
    queries.last = clamp(t.first_key + t.keys - t.shift + t.b.window_left, 0, t.b.seqlen_q);
  }
  const std::int64_t first_block = queries.first / block_q;
  const std::int64_t last_block = (queries.last + block_q - 1) / block_q;
  const std::int64_t blocks = last_block - first_block;
  const std::int64_t number = t.b.group_head * blocks + last_block - 1 - t.b.block;
  return {.number = static_cast<std::uint32_t>(number),
          .first = number == 0,
          .last = number == t.b.group * blocks - 1};
}

/// dsink -= sum over queries of exp(sink - lse) * delta: the sink is a key whose dP is 0. A query that sees
/// no key has lse = sink, and of its delta only -dlse.
template <typename Tile>
void add_dsink(Tile& t) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < t.queries; ++i) {
    const std::int64_t query = t.first_query + i;
    const Range seen = t.visible_keys(query, query);
    if (t.b.functions != nullptr && is_empty_row(t, query)) {
      sum -= t.b.dlse.data != nullptr ? static_cast<double>(*row_of<float>(t.b.dlse, query)) : 0.0;
      continue;
    }
    if (seen.first >= seen.last && t.b.dlse.data != nullptr) {
      sum -= static_cast<double>(*row_of<float>(t.b.dlse, query));
    }
    if (t.at(t.x.live)[i] == 0.0F) continue;
    const float x = (*t.b.sink - t.at(t.x.lse)[i]) * log2_e;
    sum += static_cast<double>(hn::GetLane(exp2(broadcast(x)))) * static_cast<double>(t.at(t.x.delta)[i]);
  }
  const std::int64_t blocks = (t.b.seqlen_q + t.b.shape.block_q - 1) / t.b.shape.block_q;
  const auto number = static_cast<std::uint32_t>(t.b.group_head * blocks + blocks - 1 - t.b.block);
  std::uint32_t* semaphore =
      t.b.semaphores == nullptr ? nullptr
                                : t.b.semaphores + (t.b.seqlen_k + t.b.shape.block_k - 1) / t.b.shape.block_k;
  if (semaphore != nullptr && !wait_for(semaphore, number, t.b.stop)) return;
  *t.b.dsink -= sum;
  if (semaphore != nullptr) __atomic_store_n(semaphore, number + 1, __ATOMIC_RELEASE);
}

/// Adds to dk and dv of a key block when all earlier blocks of queries have.
template <typename Tile>
void add_to_keys(Tile& t, std::int64_t first_key, bool pairwise) {
  const Order order = order_of(t);
  std::uint32_t* semaphore =
      t.b.semaphores == nullptr ? nullptr : t.b.semaphores + first_key / t.b.shape.block_k;
  if (semaphore != nullptr && !wait_for(semaphore, order.number, t.b.stop)) return;
  const Sums dk = sums(t, t.b.dk_sum, t.b.dk, t.d_qk());
  const Sums dv = sums(t, t.b.dv_sum, t.b.dv, t.d_v());
  if (pairwise) {
    add_pairwise(t, order.first, dk, dv);
  } else {
    if (dv.wanted()) add_keys(t, t.at(t.x.p), t.at(t.x.dout_panels), dv, order.first);
    if (dk.wanted()) add_keys(t, t.at(t.x.ds), t.at(t.x.q_panels), dk, order.first);
  }
  if (order.last && t.b.dk_sum != nullptr) {
    using Element = typename Tile::Element;
    const auto write = [&](const Sums& sums, const HeadRows& to) {
      if (!sums.wanted()) return;
      from_panels<Element>(t.b.shape.dk_dv, sums.data, sums.panel_step, t.keys, sums.columns, to, first_key);
    };
    write(dk, t.b.dk);
    write(dv, t.b.dv);
  }
  if (semaphore != nullptr) __atomic_store_n(semaphore, order.number + 1, __ATOMIC_RELEASE);
}

template <typename Tile>
void run_key_block(Tile& t, std::int64_t first_key) {
  t.start_key_block(first_key);
  if (t.b.functions != nullptr) see_by_functions(t);
  if (t.b.functions == nullptr || t.masked) stage_keys(t);
  const bool wants_dq = t.b.dq.data != nullptr;
  const bool needs_ds = wants_dq || t.b.dk.data != nullptr;
  for (std::int64_t p = 0; p < t.panels; ++p) {
    const Range strips = t.strips_seen(p);
    if (t.b.functions != nullptr) probabilities_by_functions(t, p, strips);
    for (std::int64_t s = strips.first; t.b.functions == nullptr && s < strips.last; ++s) {
      if (p == 0) prefetch_next_keys(t, s);
      probabilities(t, p, s);
    }
    for (std::int64_t s = strips.first; needs_ds && s < strips.last; ++s) score_gradients(t, p, s);
  }
  // Masked scores count as 0, but 0 times NaN is NaN: only visible pairs may then be multiplied.
  const bool pairwise = t.masked && !(t.all_finite && keys_finite(t));
  if (!pairwise && wants_dq) add_dq(t);
  if (pairwise || t.b.dk.data != nullptr || t.b.dv.data != nullptr) add_to_keys(t, first_key, pairwise);
}

template <typename T>
void run_block(const BackwardBlock& block, float* scratch) {
  BackwardTile<T> t(block, scratch);
  stage_queries(t);
  if (block.functions != nullptr) prepare_functions(t);
  if (block.captured != nullptr) return add_captured_gradients(t);
  if (block.dsink != nullptr) add_dsink(t);
  if (block.dq.data == nullptr && block.dk.data == nullptr && block.dv.data == nullptr) return;
  const std::int64_t dq_words = block.shape.block_q * padded(block.shape.head_dim_qk);
  __builtin_memset(t.at(t.x.dq), 0, sizeof(float) * static_cast<std::size_t>(dq_words));
  const Range keys = t.visible_keys(t.first_query, t.first_query + t.queries - 1);
  const std::int64_t block_k = block.shape.block_k;
  const std::int64_t run = (backward_run_keys + block_k - 1) / block_k * block_k;
  // Sums of rows that see no more than one run have the same bits either way.
  const bool in_runs = keys.first < keys.last && keys.first / run < (keys.last - 1) / run;
  if (in_runs) __builtin_memset(t.at(t.x.dq_total), 0, sizeof(double) * static_cast<std::size_t>(dq_words));
  for (std::int64_t first = keys.first / block_k * block_k; first < keys.last; first += block_k) {
    if (block.stop()) return;
    run_key_block(t, first);
    const bool run_ends = (first + block_k) % run == 0 || first + block_k >= keys.last;
    if (in_runs && run_ends) fold_dq(t, dq_words);
  }
  if (in_runs) close_dq(t, dq_words);
  if (block.dq.data != nullptr) write_dq(t);
}

void run(const BackwardBlock& block, std::byte* scratch) {
  auto* words = reinterpret_cast<float*>(scratch);
  switch (block.shape.dtype) {
    case DType::f32: run_block<float>(block, words); break;
    case DType::f16: run_block<f16>(block, words); break;
    case DType::bf16: {
      const MatrixUnit in_use;
      run_block<bf16>(block, words);
      break;
    }
    default: break;
  }
}

std::size_t scratch_bytes(const BackwardShape& shape) {
  const bool paired = has_bf16_dot && shape.dtype == DType::bf16;
  const std::int64_t words =
      paired ? BackwardScratch<true>::make(shape).total : BackwardScratch<false>::make(shape).total;
  return static_cast<std::size_t>(words) * sizeof(float);
}

std::int64_t sum_row(std::int64_t head_dim) {
  return padded(head_dim);
}

}  // namespace

extern const BackwardKernel backward_kernel;
const BackwardKernel backward_kernel{.panel = panel_lanes,
                                     .strip = strip_rows,
                                     .scratch_bytes = scratch_bytes,
                                     .sum_row = sum_row,
                                     .run = run};

}  // namespace tandem::cpu::TANDEM_TARGET
