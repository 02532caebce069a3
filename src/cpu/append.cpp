#include "cpu/append.hpp"

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "cpu/forward_kernels.hpp"
#include "cpu/operand.hpp"

namespace tandem::cpu {
namespace {

/// One call: what its threads share.
struct Append {
  const AppendJob& job;
  const CacheKernel& kernel;

  /// Row `n` of a tensor of new rows, or of q.
  [[nodiscard]] std::byte* new_row(const Operand& o, std::int64_t n) const {
    return job.packed ? element(o, 0, n, 0) : element(o, n / job.rows_new, n % job.rows_new, 0);
  }

  void embed(AppendRow& row, const NewToken& token) const {
    if (!job.cos.given()) return;
    const std::int64_t position = position_of(job, token);
    row.cos = element(job.cos, 0, position, 0);
    row.sin = element(job.sin, 0, position, 0);
    row.table_dtype = job.cos.dtype;
    row.rotary_dim = static_cast<int>(job.rotary_dim);
    row.interleaved = job.interleaved;
  }

  [[nodiscard]] static AppendRow row_of(const Operand& from, const Operand& to, std::int64_t heads,
                                        std::int64_t dim) {
    return {.from_dtype = from.dtype,
            .from_stride = from.head_stride,
            .to_dtype = to.dtype,
            .to_stride = to.head_stride,
            .heads = static_cast<int>(heads),
            .dim = static_cast<int>(dim)};
  }

  void write(const Operand& from, const Operand& cache, std::int64_t dim, const Scales& scales,
             std::int64_t n, const NewToken& token, std::int64_t slot, bool embedded) const {
    AppendRow row = row_of(from, cache, job.heads_kv, dim);
    row.from = new_row(from, n);
    row.to = element(cache, slot / job.entry_rows, slot % job.entry_rows, 0);
    if (embedded) embed(row, token);
    if (scales.data != nullptr) {
      row.scales = scales.data + token.sequence * scales.batch_stride;
      row.scale_stride = scales.head_stride;
    }
    kernel.append(row);
  }

  /// The tokens whose rows belong to thread `me` of `all`: each row of the cache has one writer, so that of
  /// tokens that go to one row the last is kept whole.
  void write_rows_of(int me, int all) const {
    for (std::int64_t n = 0; n < job.tokens(); ++n) {
      const NewToken token = new_token(job, n);
      const std::int64_t slot = slot_of(job, token);
      if (slot < 0 || slot % all != me) continue;
      write(job.k_new, job.k_cache, job.head_dim_k, job.k_scale, n, token, slot, true);
      if (job.v_new.given()) {
        write(job.v_new, job.v_cache, job.head_dim_v, job.v_scale, n, token, slot, false);
      }
    }
  }

  void embed_query(std::int64_t n) const {
    const NewToken token = tandem::new_token(job, n);
    AppendRow row = row_of(job.q, job.q_out, job.heads_q, job.head_dim_k);
    row.from = new_row(job.q, n);
    row.to = new_row(job.q_out, n);
    if (token.used) {
      embed(row, token);
      kernel.append(row);
      return;
    }
    const std::size_t item = size_of(row.to_dtype);
    for (std::int64_t h = 0; h < job.heads_q; ++h) {
      std::memset(static_cast<std::byte*>(row.to) + h * row.to_stride * static_cast<std::int64_t>(item), 0,
                  item * static_cast<std::size_t>(job.head_dim_k));
    }
  }
};

}  // namespace

void append(const AppendJob& job, Target target, int wanted_threads) {
  const Append call{.job = job, .kernel = cache_kernel(target)};
  const bool writes = job.heads_kv > 0;
  const bool embeds = job.q.given() && job.heads_q > 0;
  const std::int64_t tokens = writes || embeds ? job.tokens() : 0;  // of empty tensors they may be any number
  if (tokens == 0) return;
  const int threads = static_cast<int>(std::min<std::int64_t>(usable_threads(wanted_threads), tokens));
#pragma omp parallel num_threads(threads)
  {
    if (writes) call.write_rows_of(omp_get_thread_num(), omp_get_num_threads());
    if (embeds) {
#pragma omp for schedule(static)
      for (std::int64_t n = 0; n < tokens; ++n) call.embed_query(n);
    }
  }
}

}  // namespace tandem::cpu
