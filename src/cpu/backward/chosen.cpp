// The backward pass of queries that choose their keys: each is a sequence of its own.
//
// A work item is one query and one KV head. Its query heads are the rows of the kernel, and the rows of K and
// V that it sees are copied side by side, where the kernel reads keys. What an item adds to dk and dv is
// added in the order of queries, one after the other for each KV head: results have the same bits for any
// number of threads. Adding takes topk * head_dim additions where the item's products take 10 * heads times
// as many operations, so that threads hardly wait.
#include "cpu/backward/chosen.hpp"

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <variant>

#include "cpu/backward/backward.hpp"
#include "cpu/backward/gate.hpp"
#include "cpu/common/chosen_keys.hpp"
#include "cpu/common/convert.hpp"
#include "cpu/common/operand.hpp"
#include "cpu/cpu.hpp"
#include "cpu/targets/kernels.hpp"

namespace tandem::cpu {
namespace {

std::size_t floats(std::int64_t count) {
  return static_cast<std::size_t>(count) * sizeof(float);
}

/// Rows of k in all batch entries.
std::int64_t all_rows(const Problem& p) {
  return (p.packed_k ? 1 : p.batch) * p.rows_k;
}

/// Whether a gradient of k or v needs sums beside it.
bool needs_sums(const Operand& gradient) {
  return gradient.given() && gradient.dtype != DType::f32;
}

class ChosenBackward {
 public:
  ChosenBackward(const Plan& plan, const Problem& p, std::byte* workspace, Stop* stop)
      : p_(p),
        kernel_(kernels(plan.config.target).backward),
        shape_(std::get<BackwardPlan>(plan.pass).shape),
        s_(std::get<BackwardPlan>(plan.pass).chosen),
        threads_(plan.config.threads),
        workspace_(workspace),
        stop_(stop),
        dk_(sums_of(p.dk, s_.dk_all_at, p.head_dim_qk)),
        dv_(sums_of(p.dv, s_.dv_all_at, p.head_dim_v)),
        added_(reinterpret_cast<std::int64_t*>(workspace + s_.added_at)),
        dsink_(reinterpret_cast<double*>(workspace + s_.dsink_at)) {}

  void run() {
    std::int64_t items = 0;
    for (std::int64_t b = 0; b < p_.batch; ++b) items += query_rows(p_, b).used * p_.heads_kv;
    std::fill_n(added_, p_.batch * p_.heads_kv, std::int64_t{0});
#pragma omp parallel num_threads(threads_)
    {
      clear(p_.dq, p_.packed_q, p_.rows_q, p_.heads_q, p_.head_dim_qk);
      clear(dk_, p_.packed_k, p_.rows_k, p_.heads_kv, p_.head_dim_qk);
      clear(dv_, p_.packed_k, p_.rows_k, p_.heads_kv, p_.head_dim_v);
      if (p_.dq.given() || dk_.given() || dv_.given()) attend(items);
      if (needs_sums(p_.dk)) round(dk_, p_.dk, p_.head_dim_qk);
      if (needs_sums(p_.dv)) round(dv_, p_.dv, p_.head_dim_v);
      if (p_.dsink != nullptr) attend_sinks();
    }
    add_up_dsink(p_, dsink_);
  }

 private:
  /// The gradient itself where it is f32, else f32 sums of its shape.
  Operand sums_of(const Operand& gradient, std::size_t at, std::int64_t head_dim) const {
    if (!needs_sums(gradient)) return gradient;
    const std::int64_t row = p_.heads_kv * head_dim;
    return {.data = workspace_ + at,
            .dtype = DType::f32,
            .batch_stride = p_.packed_k ? 0 : p_.rows_k * row,
            .row_stride = row,
            .head_stride = head_dim};
  }

  void clear(const Operand& x, bool packed, std::int64_t rows, std::int64_t heads, std::int64_t dim) const {
    if (!x.given()) return;
#pragma omp for schedule(static)
    for (std::int64_t n = 0; n < (packed ? 1 : p_.batch) * rows; ++n) {
      for (std::int64_t head = 0; head < heads; ++head) {
        std::memset(element(x, n / rows, n % rows, head), 0,
                    static_cast<std::size_t>(dim) * size_of(x.dtype));
      }
    }
  }

  void round(const Operand& sums, const Operand& gradient, std::int64_t dim) const {
#pragma omp for schedule(static)
    for (std::int64_t n = 0; n < all_rows(p_); ++n) {
      for (std::int64_t head = 0; head < p_.heads_kv; ++head) {
        const auto* const from =
            reinterpret_cast<const float*>(element(sums, n / p_.rows_k, n % p_.rows_k, head));
        auto* const to = element(gradient, n / p_.rows_k, n % p_.rows_k, head);
        for (std::int64_t c = 0; c < dim; ++c) store_from_f32(to, gradient.dtype, c, from[c]);
      }
    }
  }

  [[nodiscard]] bool stops() const {
    return stop_ != nullptr && stop_->wanted();
  }

  /// Items count sequences, then queries, then KV heads, so that neighbouring ones seldom wait for one
  /// another.
  void attend(std::int64_t items) const {
    std::int64_t first = 0;
    std::int64_t b = 0;
#pragma omp for schedule(monotonic : dynamic, 1)
    for (std::int64_t item = 0; item < items; ++item) {
      std::int64_t of_sequence = query_rows(p_, b).used * p_.heads_kv;
      while (item >= first + of_sequence) {
        first += of_sequence;
        of_sequence = query_rows(p_, ++b).used * p_.heads_kv;
      }
      if (!stops()) run_item(b, (item - first) / p_.heads_kv, (item - first) % p_.heads_kv);
    }
  }

  void run_item(std::int64_t b, std::int64_t query, std::int64_t kv_head) const {
    const Rows k = key_rows(p_, b);
    std::byte* const memory = of_thread();
    auto* const keys = reinterpret_cast<std::int64_t*>(memory + s_.keys_at);
    const std::int64_t count = list_chosen_keys(p_, b, query_rows(p_, b), k, query, kv_head, keys);
    BackwardBlock block = block_of(b, query, kv_head * p_.group(), p_.group(), count);
    block.k = gather(p_.k, p_.head_dim_qk, b, k.begin, kv_head, keys, count, memory + s_.k_at);
    block.v = gather(p_.v, p_.head_dim_v, b, k.begin, kv_head, keys, count, memory + s_.v_at);
    block.dq = rows_of(p_.dq, b, query_rows(p_, b).begin + query, kv_head * p_.group());
    if (dk_.given()) block.dk = {.data = memory + s_.dk_at, .row_stride = p_.head_dim_qk};
    if (dv_.given()) block.dv = {.data = memory + s_.dv_at, .row_stride = p_.head_dim_v};
    if (s_.sum_rows > 0) {
      block.dk_sum = reinterpret_cast<float*>(memory + s_.sums_at);
      block.dv_sum = block.dk_sum + s_.sum_rows * s_.dk_sum_row;
      block.sum_rows = s_.sum_rows;
    }
    const std::int64_t blocks = (p_.group() + shape_.block_q - 1) / shape_.block_q;
    for (block.block = blocks - 1; block.block >= 0; --block.block) kernel_.run(block, memory);

    std::int64_t* const added = added_ + b * p_.heads_kv + kv_head;
    if (!wait_for(added, query)) return;
    add(dk_, p_.head_dim_qk, b, k.begin, kv_head, keys, count, memory + s_.dk_at);
    add(dv_, p_.head_dim_v, b, k.begin, kv_head, keys, count, memory + s_.dv_at);
    __atomic_store_n(added, query + 1, __ATOMIC_RELEASE);
  }

  /// Waits until the queries before this one have been added. False where the call is to end.
  bool wait_for(const std::int64_t* added, std::int64_t query) const {
    while (__atomic_load_n(added, __ATOMIC_ACQUIRE) != query) {
      if (stops()) return false;
      sched_yield();
    }
    return true;
  }

  /// The sink's gradient needs no keys but for their number.
  void attend_sinks() const {
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t n = 0; n < p_.batch * p_.heads_q; ++n) {
      const std::int64_t b = n / p_.heads_q;
      const std::int64_t head = n % p_.heads_q;
      const Rows q = query_rows(p_, b);
      auto* const keys = reinterpret_cast<std::int64_t*>(of_thread() + s_.keys_at);
      dsink_[n] = 0.0;
      for (std::int64_t query = 0; query < q.used && !stops(); ++query) {
        const std::int64_t count =
            list_chosen_keys(p_, b, q, key_rows(p_, b), query, head / p_.group(), keys);
        BackwardBlock block = block_of(b, query, head, 1, count);
        block.sink = p_.sink + head * p_.sink_stride;
        block.dsink = dsink_ + n;
        kernel_.run(block, of_thread());
      }
    }
  }

  [[nodiscard]] std::byte* of_thread() const {
    return workspace_ + static_cast<std::size_t>(omp_get_thread_num()) * s_.thread_bytes;
  }

  /// Heads from `head` on of one row of q, as rows.
  static HeadRows rows_of(const Operand& x, std::int64_t b, std::int64_t row, std::int64_t head) {
    if (!x.given()) return {};
    return {.data = element(x, b, row, head), .row_stride = x.head_stride};
  }

  /// `heads` query heads from `head` on of one query, which sees `count` keys.
  [[nodiscard]] BackwardBlock block_of(std::int64_t b, std::int64_t query, std::int64_t head,
                                       std::int64_t heads, std::int64_t count) const {
    const auto of_query = [&](const Operand& x) {
      return rows_of(x, b, query_rows(p_, b).begin + query, head);
    };
    BackwardBlock block{.shape = shape_,
                        .score = p_,
                        .seqlen_q = heads,
                        .seqlen_k = count,
                        .q = of_query(p_.q),
                        .k = {},
                        .v = {},
                        .out = of_query(p_.out),
                        .dout = of_query(p_.dout),
                        .lse = of_query(p_.lse),
                        .dlse = of_query(p_.dlse),
                        .gated_dout = of_query(gated_dout(p_)),
                        .dq = {},
                        .dk = {},
                        .dv = {}};
    if (stop_ != nullptr) block.stop = {.wanted = Stop::wanted, .context = stop_};
    return block;
  }

  static HeadRows gather(const Operand& x, std::int64_t dim, std::int64_t b, std::int64_t begin,
                         std::int64_t kv_head, const std::int64_t* keys, std::int64_t count, std::byte* to) {
    const std::size_t bytes = static_cast<std::size_t>(dim) * size_of(x.dtype);
    for (std::int64_t n = 0; n < count; ++n) {
      std::memcpy(to + static_cast<std::size_t>(n) * bytes, element(x, b, begin + keys[n], kv_head), bytes);
    }
    return {.data = to, .row_stride = dim};
  }

  static void add(const Operand& sums, std::int64_t dim, std::int64_t b, std::int64_t begin,
                  std::int64_t kv_head, const std::int64_t* keys, std::int64_t count, const std::byte* from) {
    if (!sums.given()) return;
    const auto* part = reinterpret_cast<const float*>(from);
    for (std::int64_t n = 0; n < count; ++n, part += dim) {
      auto* const sum = reinterpret_cast<float*>(element(sums, b, begin + keys[n], kv_head));
      for (std::int64_t c = 0; c < dim; ++c) sum[c] += part[c];
    }
  }

  const Problem& p_;
  const BackwardKernel& kernel_;
  const BackwardShape& shape_;
  const ChosenSchedule& s_;
  const int threads_;
  std::byte* const workspace_;
  Stop* const stop_;           ///< may be null
  const Operand dk_, dv_;      ///< f32
  std::int64_t* const added_;  ///< by (batch, KV head): queries that have been added
  double* const dsink_;        ///< by (batch, query head)
};

}  // namespace

ChosenSchedule schedule_chosen(const Problem& p, const Config& config, const BackwardShape& shape) {
  const BackwardKernel& kernel = kernels(config.target).backward;
  ChosenSchedule s;
  const auto take = [](std::size_t& total, std::size_t bytes) {
    const std::size_t at = total;
    total += (bytes + 255) / 256 * 256;
    return at;
  };
  const std::int64_t count = p.indices.count;
  take(s.thread_bytes, kernel.scratch_bytes(shape));
  s.keys_at = take(s.thread_bytes, static_cast<std::size_t>(count) * sizeof(std::int64_t));
  s.k_at = take(s.thread_bytes, static_cast<std::size_t>(count * p.head_dim_qk) * size_of(p.k.dtype));
  s.v_at = take(s.thread_bytes, static_cast<std::size_t>(count * p.head_dim_v) * size_of(p.v.dtype));
  s.dk_at = take(s.thread_bytes, floats(p.dk.given() ? count * p.head_dim_qk : 0));
  s.dv_at = take(s.thread_bytes, floats(p.dv.given() ? count * p.head_dim_v : 0));
  if (p.q.dtype != DType::f32) {
    s.sum_rows = (count + shape.block_k - 1) / shape.block_k * shape.block_k;
    if (p.dk.given()) s.dk_sum_row = kernel.sum_row(p.head_dim_qk);
    if (p.dv.given()) s.dv_sum_row = kernel.sum_row(p.head_dim_v);
    s.sums_at = take(s.thread_bytes, floats(s.sum_rows * (s.dk_sum_row + s.dv_sum_row)));
  }
  take(s.total, s.thread_bytes * static_cast<std::size_t>(config.threads));
  const std::int64_t rows = all_rows(p) * p.heads_kv;
  s.dk_all_at = take(s.total, floats(needs_sums(p.dk) ? rows * p.head_dim_qk : 0));
  s.dv_all_at = take(s.total, floats(needs_sums(p.dv) ? rows * p.head_dim_v : 0));
  s.added_at = take(s.total, static_cast<std::size_t>(p.batch * p.heads_kv) * sizeof(std::int64_t));
  s.dsink_at =
      take(s.total, static_cast<std::size_t>(p.dsink != nullptr ? p.batch * p.heads_q : 0) * sizeof(double));
  return s;
}

void backward_of_chosen(const Plan& plan, const Problem& problem, std::byte* workspace, Stop* stop) {
  ChosenBackward(plan, problem, workspace, stop).run();
}

}  // namespace tandem::cpu
