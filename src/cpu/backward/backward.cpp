// The backward pass, cut into work items, which threads take in a fixed order.
//
// A work item is one block of queries of one query head. The items of a kv head (of one sequence) are the
// blocks of all query heads that share it, the last block first, since under a causal mask it sees the most
// keys. An item adds to dk and dv of every key it sees, always in the order of items: most kv heads are one
// thread's from start to end; the last few are shared, one item at a time, and there a semaphore for each
// block of keys counts the items that have been added. Results have the same bits for any number of threads,
// and nothing is ever summed twice.
#include "cpu/backward/backward.hpp"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <variant>

#include "cpu/backward/gate.hpp"
#include "cpu/common/operand.hpp"
#include "cpu/common/workspace.hpp"
#include "cpu/cpu.hpp"
#include "cpu/targets/kernels.hpp"

namespace tandem::cpu {

namespace {

HeadRows head_rows(const Operand& x, std::int64_t batch, std::int64_t first_row, std::int64_t head) {
  if (!x.given()) return {};
  return {.data = element(x, batch, first_row, head), .row_stride = x.row_stride};
}

void clear_rows(const Operand& x, std::int64_t batch, std::int64_t first, std::int64_t last,
                std::int64_t head, std::int64_t head_dim) {
  if (!x.given()) return;
  for (std::int64_t row = first; row < last; ++row) {
    std::memset(element(x, batch, row, head), 0, static_cast<std::size_t>(head_dim) * size_of(x.dtype));
  }
}

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

BackwardSchedule make_schedule(const Problem& p, const Config& config, const BackwardShape& shape,
                               std::size_t captured_bytes) {
  const BackwardKernel& kernel = kernels(config.target).backward;
  BackwardSchedule s;
  const std::int64_t threads = config.threads;
  s.heads = p.batch * p.heads_kv;
  // Heads divide evenly among threads only by chance, and threads are never equally fast: share one round
  // more.
  s.shared = threads == 1 ? 0 : std::min(s.heads, threads + s.heads % threads);
  s.whole = s.heads - s.shared;
  s.at_work = std::min(s.whole, threads) + s.shared;

  const auto take = [&s](std::size_t bytes) {
    const std::size_t at = s.total;
    s.total += (bytes + 255) / 256 * 256;
    return at;
  };
  s.scratch_bytes = (kernel.scratch_bytes(shape) + 255) / 256 * 256;
  take(s.scratch_bytes * static_cast<std::size_t>(threads));
  const std::int64_t key_blocks = divide_up(p.rows_k, shape.block_k);
  if (p.q.dtype != DType::f32) {
    s.area_rows = key_blocks * shape.block_k;
    // Packed sequences share the rows of K: an area for each kv head holds the sums of all of them.
    s.areas = p.packed_k ? std::min(s.at_work, p.heads_kv) : s.at_work;
    if (p.dk.given()) s.dk_sum_row = kernel.sum_row(p.head_dim_qk);
    if (p.dv.given()) s.dv_sum_row = kernel.sum_row(p.head_dim_v);
    const std::int64_t sum_floats = s.areas * s.area_rows * (s.dk_sum_row + s.dv_sum_row);
    s.sums_at = take(static_cast<std::size_t>(sum_floats) * sizeof(float));
  }
  s.semaphores = key_blocks + 1;
  s.semaphores_at = take(static_cast<std::size_t>(s.shared * s.semaphores) * sizeof(std::uint32_t));
  s.dsink_at = take(static_cast<std::size_t>(p.dsink != nullptr ? p.batch * p.heads_q : 0) * sizeof(double));
  s.order_at = take(static_cast<std::size_t>(p.batch) * sizeof(std::int64_t));
  s.captured_at = take(captured_bytes);
  return s;
}

class Backward {
 public:
  Backward(const Plan& plan, const Problem& p, const TileFunctions* functions, std::byte* workspace,
           Stop* stop)
      : p_(p),
        functions_(functions),
        kernel_(kernels(plan.config.target).backward),
        shape_(std::get<BackwardPlan>(plan.pass).shape),
        captured_(std::get<BackwardPlan>(plan.pass).captured),
        schedule_(std::get<BackwardPlan>(plan.pass).schedule),
        threads_(plan.config.threads),
        workspace_(workspace),
        stop_(stop),
        semaphores_(reinterpret_cast<std::uint32_t*>(workspace + schedule_.semaphores_at)),
        dsink_(reinterpret_cast<double*>(workspace + schedule_.dsink_at)),
        order_(reinterpret_cast<std::int64_t*>(workspace + schedule_.order_at)) {}

  void run() {
    if (p_.dq.given() || p_.dk.given() || p_.dv.given() || p_.dsink != nullptr) run_main();
    if (p_.wants_captured_gradients()) run_captured();
  }

 private:
  void run_main() {
    prepare();
    std::atomic<std::int64_t> next_head{0};
    std::atomic<std::int64_t> next_item{0};
#pragma omp parallel num_threads(threads_)
    {
#pragma omp for schedule(static)
      for (std::int64_t head = 0; head < schedule_.heads; ++head) clear_unseen(head);  // a barrier follows
      run_whole_heads(next_head);
      run_shared_heads(next_item);
    }
    add_up_dsink(p_, dsink_);
  }

  void run_captured() const {
    auto* const sums = reinterpret_cast<double*>(workspace_ + schedule_.captured_at);
    captured_.clear(p_, sums);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads_)
    for (std::int64_t part = 0; part < captured_.parts(); ++part) {
      const CapturedGradients targets = captured_.targets(p_, part, sums);
      captured_.for_each_block(part, [&](std::int64_t batch, std::int64_t head, std::int64_t block) {
        const Rows q = query_rows(p_, batch);
        if (block * shape_.block_q >= q.used || stops()) return;
        BackwardBlock b = block_of(batch, q, key_rows(p_, batch), head, block);
        b.captured = &targets;
        run_kernel(b);
      });
    }
    captured_.finish(p_, sums);
  }

  struct KvHead {
    std::int64_t batch = 0;
    std::int64_t kv_head = 0;
    Rows q, k;
    std::int64_t query_blocks = 0;
    std::int64_t items = 0;
  };

  [[nodiscard]] KvHead kv_head_at(std::int64_t index) const {
    KvHead h;
    h.batch = order_[index / p_.heads_kv];
    h.kv_head = index % p_.heads_kv;
    h.q = query_rows(p_, h.batch);
    h.k = key_rows(p_, h.batch);
    h.query_blocks = divide_up(h.q.used, shape_.block_q);
    h.items = h.query_blocks * p_.group();
    return h;
  }

  void prepare() {
    std::fill_n(semaphores_, schedule_.shared * schedule_.semaphores, 0U);
    if (p_.dsink != nullptr) std::fill_n(dsink_, p_.batch * p_.heads_q, 0.0);
    place_sums();
    // Long sequences first: the shared kv heads at the end are then the short ones, and threads finish
    // together.
    for (std::int64_t b = 0; b < p_.batch; ++b) order_[b] = b;
    std::sort(order_, order_ + p_.batch, [this](std::int64_t a, std::int64_t b) {
      const std::int64_t work_a = query_rows(p_, a).used * key_rows(p_, a).used;
      const std::int64_t work_b = query_rows(p_, b).used * key_rows(p_, b).used;
      return work_a != work_b ? work_a > work_b : a < b;
    });
    if (p_.packed_q) clear_outside(p_.cu_seqlens_q, p_.rows_q, p_.dq, p_.heads_q, p_.head_dim_qk);
    if (p_.packed_k) clear_outside(p_.cu_seqlens_k, p_.rows_k, p_.dk, p_.heads_kv, p_.head_dim_qk);
    if (p_.packed_k) clear_outside(p_.cu_seqlens_k, p_.rows_k, p_.dv, p_.heads_kv, p_.head_dim_v);
  }

  /// A kv head at work has a slot for its sums, as long as the longest sequence: memory that was just in use
  /// is still in the caches. Where packed lengths differ so much that slots do not fit, a head has the rows
  /// of its sequence in the area of its kv head: no other sequence has those.
  void place_sums() {
    std::int64_t longest = 0;
    for (std::int64_t b = 0; b < p_.batch; ++b) longest = std::max(longest, key_rows(p_, b).used);
    sum_rows_ = divide_up(longest, shape_.block_k) * shape_.block_k;
    slots_fit_ = schedule_.at_work * sum_rows_ <= schedule_.areas * schedule_.area_rows;
    if (!slots_fit_) sum_rows_ = schedule_.area_rows;
  }

  /// Rows of a packed tensor before its first sequence and past its last one.
  void clear_outside(const Lengths& cu_seqlens, std::int64_t rows, const Operand& x, std::int64_t heads,
                     std::int64_t head_dim) const {
    const std::int64_t first = std::clamp<std::int64_t>(cu_seqlens[0], 0, rows);
    const std::int64_t last = std::clamp<std::int64_t>(cu_seqlens[p_.batch], 0, rows);
    for (std::int64_t head = 0; head < heads; ++head) {
      clear_rows(x, 0, 0, first, head, head_dim);
      clear_rows(x, 0, last, rows, head, head_dim);
    }
  }

  /// Rows of a kv head that no item writes: those not in use, and blocks of keys that no query sees.
  void clear_unseen(std::int64_t index) const {
    const KvHead h = kv_head_at(index);
    for (std::int64_t g = 0; g < p_.group(); ++g) {
      clear_rows(p_.dq, h.batch, h.q.begin + h.q.used, h.q.end, h.kv_head * p_.group() + g, p_.head_dim_qk);
    }
    const auto clear_keys = [&](std::int64_t first, std::int64_t last) {
      clear_rows(p_.dk, h.batch, first, last, h.kv_head, p_.head_dim_qk);
      clear_rows(p_.dv, h.batch, first, last, h.kv_head, p_.head_dim_v);
    };
    clear_keys(h.k.begin + h.k.used, h.k.end);
    const std::int64_t shift = h.k.used - h.q.used;
    for (std::int64_t first = 0; first < h.k.used; first += shape_.block_k) {
      const std::int64_t last = std::min(first + shape_.block_k, h.k.used);
      const std::int64_t first_query =
          p_.window_right >= 0 ? std::max<std::int64_t>(0, first - shift - p_.window_right) : 0;
      const std::int64_t last_query =
          p_.window_left >= 0 ? std::min(h.q.used, last - shift + p_.window_left) : h.q.used;
      if (first_query >= last_query) clear_keys(h.k.begin + first, h.k.begin + last);
    }
  }

  [[nodiscard]] bool stops() const {
    return stop_ != nullptr && stop_->wanted();
  }

  void run_whole_heads(std::atomic<std::int64_t>& next) const {
    for (std::int64_t i = next++; i < schedule_.whole; i = next++) {
      const KvHead h = kv_head_at(i);
      const std::int64_t slot = omp_get_thread_num();
      for (std::int64_t t = 0; t < h.items && !stops(); ++t) run_item(h, t, slot, nullptr);
    }
  }

  /// Items go around the shared kv heads, so that threads wait for each other only when heads are few. An
  /// item waits for earlier ones alone, and those have been taken: someone is at work on them, or the call is
  /// to end, which whoever waits asks as well.
  void run_shared_heads(std::atomic<std::int64_t>& next) const {
    if (schedule_.shared == 0) return;
    std::int64_t rounds = 0;
    for (std::int64_t i = 0; i < schedule_.shared; ++i) {
      rounds = std::max(rounds, kv_head_at(schedule_.whole + i).items);
    }
    for (std::int64_t n = next++; n < rounds * schedule_.shared && !stops(); n = next++) {
      const std::int64_t i = n % schedule_.shared;
      const KvHead h = kv_head_at(schedule_.whole + i);
      if (n / schedule_.shared >= h.items) continue;
      const std::int64_t slot = std::min<std::int64_t>(schedule_.whole, threads_) + i;
      run_item(h, n / schedule_.shared, slot, semaphores_ + i * schedule_.semaphores);
    }
  }

  // clang-tidy does not see that the block's `semaphores` are written through.
  // NOLINTNEXTLINE(readability-non-const-parameter)
  void run_item(const KvHead& h, std::int64_t item, std::int64_t slot, std::uint32_t* semaphores) const {
    const std::int64_t group_head = item / h.query_blocks;
    const std::int64_t head = h.kv_head * p_.group() + group_head;
    BackwardBlock b = block_of(h.batch, h.q, h.k, head, h.query_blocks - 1 - item % h.query_blocks);
    b.semaphores = semaphores;
    if (p_.dsink != nullptr) {
      b.sink = p_.sink + head * p_.sink_stride;
      b.dsink = dsink_ + h.batch * p_.heads_q + head;
    }
    if (schedule_.area_rows > 0) {
      const std::int64_t area = slots_fit_ ? slot : h.kv_head;
      b.dk_sum = reinterpret_cast<float*>(workspace_ + schedule_.sums_at) +
                 area * sum_rows_ * (schedule_.dk_sum_row + schedule_.dv_sum_row);
      b.dv_sum = b.dk_sum + sum_rows_ * schedule_.dk_sum_row;
      b.sum_rows = sum_rows_;
      b.first_sum_row = slots_fit_ ? 0 : h.k.begin;
    }
    run_kernel(b);
  }

  void run_kernel(const BackwardBlock& b) const {
    kernel_.run(b, workspace_ + static_cast<std::size_t>(omp_get_thread_num()) * schedule_.scratch_bytes);
  }

  /// Block `block` of the queries of one head, with what does not depend on who adds to dk and dv.
  [[nodiscard]] BackwardBlock block_of(std::int64_t batch, const Rows& q, const Rows& k, std::int64_t head,
                                       std::int64_t block) const {
    const std::int64_t kv_head = head / p_.group();
    const auto of_query = [&](const Operand& x) { return head_rows(x, batch, q.begin, head); };
    const auto of_key = [&](const Operand& x) { return head_rows(x, batch, k.begin, kv_head); };
    BackwardBlock b{.shape = shape_,
                    .score = p_,
                    .window_left = p_.window_left,
                    .window_right = p_.window_right,
                    .seqlen_q = q.used,
                    .seqlen_k = k.used,
                    .q = of_query(p_.q),
                    .k = of_key(p_.k),
                    .v = of_key(p_.v),
                    .out = of_query(p_.out),
                    .dout = of_query(p_.dout),
                    .lse = of_query(p_.lse),
                    .dlse = of_query(p_.dlse),
                    .gated_dout = of_query(gated_dout(p_)),
                    .dq = of_query(p_.dq),
                    .dk = of_key(p_.dk),
                    .dv = of_key(p_.dv),
                    .functions = functions_,
                    .batch = batch,
                    .head = head,
                    .block = block,
                    .group_head = head % p_.group(),
                    .group = p_.group()};
    if (stop_ != nullptr) b.stop = {.wanted = Stop::wanted, .context = stop_};
    return b;
  }

  const Problem& p_;
  const TileFunctions* const functions_;  ///< null: none
  const BackwardKernel& kernel_;
  const BackwardShape& shape_;
  const CapturedSchedule& captured_;
  const BackwardSchedule& schedule_;
  const int threads_;
  std::byte* const workspace_;
  Stop* const stop_;                 ///< may be null
  std::uint32_t* const semaphores_;  ///< by shared kv head
  double* const dsink_;              ///< by (batch, query head)
  std::int64_t* const order_;        ///< batch entries, the most work first
  std::int64_t sum_rows_ = 0;        ///< rows of a slot, or of a kv head's area
  bool slots_fit_ = true;
};

}  // namespace

void add_up_dsink(const Problem& p, const double* parts) {
  for (std::int64_t head = 0; p.dsink != nullptr && head < p.heads_q; ++head) {
    double sum = 0.0;
    for (std::int64_t b = 0; b < p.batch; ++b) sum += parts[b * p.heads_q + head];
    p.dsink[head * p.dsink_stride] = static_cast<float>(sum);
  }
}

BackwardPlan plan_backward(const Problem& p, const Config& config, const CallFunctions* functions) {
  BackwardPlan plan{.shape = {.dtype = p.q.dtype,
                              .dq = p.f32_dq ? DType::f32 : p.q.dtype,
                              .dk_dv = p.f32_dk_dv ? DType::f32 : p.q.dtype,
                              .head_dim_qk = p.head_dim_qk,
                              .head_dim_v = p.head_dim_v,
                              .block_q = config.block_q,
                              .block_k = config.block_k,
                              .functions = functions != nullptr,
                              .function_words = functions != nullptr ? functions->words() : 0,
                              .dropout = p.dropout.on,
                              .captured = p.wants_captured_gradients()},
                    .captured = CapturedSchedule(p, config.block_q)};
  if (p.indices.given()) {  // rows of a block are the heads of one query
    const std::int64_t panel = kernels(config.target).backward.panel;
    plan.shape.block_q = std::min<std::int64_t>(config.block_q, divide_up(p.group(), panel) * panel);
    plan.shape.dk_dv = DType::f32;
    plan.chosen = schedule_chosen(p, config, plan.shape);
    plan.workspace_bytes = plan.chosen.total;
    return plan;
  }
  plan.schedule = make_schedule(p, config, plan.shape, plan.captured.workspace_bytes());
  plan.workspace_bytes = plan.schedule.total;
  return plan;
}

void backward(const Plan& plan, const Problem& problem, std::byte* workspace, Stop* stop) {
  if (problem.indices.given()) return backward_of_chosen(plan, problem, workspace, stop);
  const TileFunctions functions = plan.functions ? plan.functions->of_tiles(problem) : TileFunctions{};
  Backward(plan, problem, plan.functions ? &functions : nullptr, workspace, stop).run();
}

}  // namespace tandem::cpu
