#include "cpu/cache/append.hpp"

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "cpu/common/config.hpp"
#include "cpu/common/operand.hpp"
#include "cpu/targets/kernels.hpp"

namespace tandem::cpu {
namespace {

/// One call: what its threads share.
struct Append {
  const AppendProblem& problem;
  const CacheKernel& kernel;

  /// Row `n` of a tensor of new rows, or of q.
  [[nodiscard]] std::byte* new_row(const Operand& o, std::int64_t n) const {
    return problem.packed ? element(o, 0, n, 0) : element(o, n / problem.rows_new, n % problem.rows_new, 0);
  }

  void embed(AppendRow& row, const NewToken& token) const {
    if (!problem.cos.given()) return;
    const std::int64_t position = position_of(problem, token);
    row.cos = element(problem.cos, 0, position, 0);
    row.sin = element(problem.sin, 0, position, 0);
    row.table_dtype = problem.cos.dtype;
    row.rotary_dim = static_cast<int>(problem.rotary_dim);
    row.interleaved = problem.interleaved;
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
             const Operand& scale_cache, std::int64_t n, const NewToken& token, std::int64_t slot,
             bool embedded) const {
    AppendRow row = row_of(from, cache, problem.heads_kv, dim);
    row.from = new_row(from, n);
    const std::int64_t entry = slot / problem.entry_rows;
    row.to = element(cache, entry, slot % problem.entry_rows, 0);
    if (scale_cache.given()) {
      row.found_scales = reinterpret_cast<float*>(element(scale_cache, entry, slot % problem.entry_rows, 0));
      row.found_stride = scale_cache.head_stride;
    }
    if (embedded) embed(row, token);
    if (scales.data != nullptr) {
      row.scales = scales.data + token.sequence * scales.batch_stride + token.index * scales.group_stride;
      row.scale_stride = scales.head_stride;
    }
    kernel.append(row);
  }

  /// The tokens whose rows belong to thread `me` of `all`: each row of the cache has one writer, so that of
  /// tokens that go to one row the last is kept whole.
  void write_rows_of(int me, int all) const {
    for (std::int64_t n = 0; n < problem.tokens(); ++n) {
      const NewToken token = new_token(problem, n);
      if (!token.used && !problem.packed) {  // nor are those behind it: a large cache may have few in use
        n = (token.sequence + 1) * problem.rows_new - 1;
        continue;
      }
      const std::int64_t slot = slot_of(problem, token);
      if (slot < 0 || slot % all != me) continue;
      write(problem.k_new, problem.k_cache, problem.head_dim_k, problem.k_scale, problem.k_scale_cache, n,
            token, slot, true);
      if (problem.v_new.given()) {
        write(problem.v_new, problem.v_cache, problem.head_dim_v, problem.v_scale, problem.v_scale_cache, n,
              token, slot, false);
      }
    }
  }

  void embed_query(std::int64_t n) const {
    const NewToken token = tandem::new_token(problem, n);
    AppendRow row = row_of(problem.q, problem.q_out, problem.heads_q, problem.head_dim_k);
    row.from = new_row(problem.q, n);
    row.to = new_row(problem.q_out, n);
    if (token.used) {
      embed(row, token);
      kernel.append(row);
      return;
    }
    const std::size_t item = size_of(row.to_dtype);
    for (std::int64_t h = 0; h < problem.heads_q; ++h) {
      std::memset(static_cast<std::byte*>(row.to) + h * row.to_stride * static_cast<std::int64_t>(item), 0,
                  item * static_cast<std::size_t>(problem.head_dim_k));
    }
  }
};

}  // namespace

void append(const AppendProblem& problem, Target target, int wanted_threads) {
  const Append call{.problem = problem, .kernel = kernels(target).cache};
  const bool writes = problem.heads_kv > 0;
  const bool embeds = problem.q.given() && problem.heads_q > 0;
  const std::int64_t tokens =
      writes || embeds ? problem.tokens() : 0;  // of empty tensors they may be any number
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
