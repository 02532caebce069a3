// Where the rows of a pass lie, and their copies to shared memory, a pass ahead.
#pragma once

#include "ops/quantize/common/quantize_rows.cuh"

namespace tandem::quantizer {

/// The key of a work item whose row of V the thread has: threads have the keys in the order in which they are
/// stored.
template <int threads>
TANDEM_DEVICE int key_of_thread(int thread) {
  return thread / (16 * threads) * 16 + v_key_of(thread / threads % 16);
}

/// A row of a pass, as one thread has it.
template <QuantizeConfig C>
struct ThreadRow {
  const Pass* pass;
  int row;      ///< in its head
  int segment;  ///< the row's head among those of the pass
  bool used;

  /// `row_of_pass` counts the rows of all segments.
  TANDEM_DEVICE ThreadRow(const Pass* pass_, int row_of_pass)
      : pass(pass_), row(in_segment(row_of_pass)), segment(0) {
    if constexpr (C.varlen) segment = row_of_pass >> ptx::load_shared(&pass->segment_log2);
    used = segment < heads() && row < ptx::load_shared(&pass->rows);
  }
  TANDEM_DEVICE int segment_rows() const {
    return C.varlen ? 1 << ptx::load_shared(&pass->segment_log2) : quant_block;
  }
  TANDEM_DEVICE int in_segment(int row_of_pass) const { return row_of_pass & (segment_rows() - 1); }
  TANDEM_DEVICE int heads() const { return C.varlen ? ptx::load_shared(&pass->heads) : 1; }
  TANDEM_DEVICE int batch() const { return ptx::load_shared(&pass->batch); }
  TANDEM_DEVICE int head() const { return ptx::load_shared(&pass->head) + segment; }
  TANDEM_DEVICE int first() const { return ptx::load_shared(&pass->first); }
  TANDEM_DEVICE u8* quantized(const Strides& s) const {
    return ptx::load_shared(&pass->quantized) + row * s.row + of_head(s.head);
  }
  TANDEM_DEVICE float* scales(const ScaleStrides& s) const {
    return ptx::load_shared(&pass->scales) + of_head(s.head);
  }
  TANDEM_DEVICE float* shift(const ScaleStrides& s) const {
    return ptx::load_shared(&pass->shift) + row * s.group + of_head(s.head);
  }

 private:
  TANDEM_DEVICE i64 of_head(i64 stride) const { return C.varlen ? segment * stride : 0; }
};

/// Whether K's mean is removed from the keys of the pass's sequence.
TANDEM_DEVICE bool has_mean(const Pass* pass) {
  return ptx::warp_uniform(static_cast<int>(ptx::load_shared(&pass->mean) != nullptr)) != 0;
}

/// Whether a pass has anything to do.
TANDEM_DEVICE bool has_work(const Pass* pass) {
  return ptx::warp_uniform(ptx::load_shared(&pass->rows)) >= 0;
}

/// The thread's row of a pass. It is computed again wherever it is needed: what is kept during the arithmetic
/// on a row's values takes registers that they need.
template <QuantizeConfig C, Which which>
TANDEM_DEVICE int row_of_thread() {
  const int thread = static_cast<int>(ptx::thread_index_anew());
  return which == Which::v ? key_of_thread<C.row_threads()>(thread) : thread / C.row_threads();
}
template <QuantizeConfig C, Which which>
TANDEM_DEVICE ThreadRow<C> thread_row(const Tables& table, int pass_at) {
  return {table.pass(pass_at), row_of_thread<C, which>()};
}

/// Starts copying channel `c` of a head's mean.
template <QuantizeConfig C>
TANDEM_DEVICE void fetch_mean(float* to, const float* mean, int c) {
  if (c < C.head_dim_qk) {
    ptx::copy_async(to, mean + c);
  } else {
    ptx::store_shared(to, 0.0F);
  }
}

/// The rows of a pass as `fetch` wants them, without another look at the pass.
template <QuantizeConfig C>
class FetchedRows {
 public:
  TANDEM_DEVICE FetchedRows(const Pass* pass, const Strides& stride)
      : source_(ptx::load_shared(&pass->source)), stride_(stride), rows_(ptx::load_shared(&pass->rows)) {
    if constexpr (C.varlen) {
      segment_log2_ = ptx::load_shared(&pass->segment_log2);
      heads_ = ptx::load_shared(&pass->heads);
    }
  }
  /// `row` counts the rows of all segments.
  [[nodiscard]] TANDEM_DEVICE bool is_used(int row) const {
    if constexpr (!C.varlen) return row < rows_;
    return row >> segment_log2_ < heads_ && in_segment(row) < rows_;
  }
  [[nodiscard]] TANDEM_DEVICE const u16* at(int row) const {
    if constexpr (!C.varlen) return source_ + row * stride_.row;
    return source_ + in_segment(row) * stride_.row + (row >> segment_log2_) * stride_.head;
  }

 private:
  [[nodiscard]] TANDEM_DEVICE int in_segment(int row) const { return row & ((1 << segment_log2_) - 1); }

  const u16* source_;
  const Strides& stride_;
  int rows_;
  int segment_log2_ = 0;
  int heads_ = 1;
};

/// Starts copying a pass's rows, and the means that it needs.
template <QuantizeConfig C, Which which>
TANDEM_DEVICE void fetch(const QuantizeParams& p, const Tables& table, int pass_at) {
  const Pass* const pass = table.pass(pass_at);
  if (!has_work(pass)) return;
  const int thread = static_cast<int>(ptx::thread_index_anew());
  constexpr int head_dim = which == Which::v ? C.head_dim_v : C.head_dim_qk;
  constexpr int in_row = row_vectors<head_dim>;
  constexpr int count = in_row / C.row_threads();
  const FetchedRows<C> rows(pass, tensor<which>(p).stride);
  // Neighbouring threads copy neighbouring vectors of a row, whichever thread will read them.
  if constexpr (!C.varlen && C.threads() % in_row == 0) {
    // The thread's vectors have one place in their rows, which are so many apart.
    constexpr int step = C.threads() / in_row;
    static_assert(step % 4 == 0, "vector_at permutes these rows' vectors alike");
    const int row = thread / in_row, vector = thread % in_row;
    ptx::Vec4* const to = vector_at<head_dim, C.row_threads()>(table, row, vector, pass_at);
    const u16* from = rows.at(row);
    const i64 apart = step * tensor<which>(p).stride.row;
#pragma unroll
    for (int j = 0; j < count; ++j, from += apart) {
      fetch_vector<C.vectors, head_dim>(to + j * step * in_row, from, 8 * vector,
                                        rows.is_used(row + j * step));
    }
  } else {
#pragma unroll
    for (int j = 0; j < count; ++j) {
      const int row = (j * C.threads() + thread) / in_row, vector = (j * C.threads() + thread) % in_row;
      fetch_vector<C.vectors, head_dim>(vector_at<head_dim, C.row_threads()>(table, row, vector, pass_at),
                                        rows.at(row), 8 * vector, rows.is_used(row));
    }
  }
  if constexpr (C.smooth_k && which != Which::v) {
    if (!has_mean(pass)) return;
    ptx::wait_for_previous_grid();
    const float* const means = ptx::load_shared(&pass->mean);
    if constexpr (C.varlen) {
      for (int i = thread; i < ptx::load_shared(&pass->heads) * table.channels; i += C.threads()) {
        const int head = ptx::load_shared(&pass->head) + i / table.channels;
        const int mean_head = which == Which::q ? head / p.group : head;
        fetch_mean<C>(table.mean(pass_at) + i, means + mean_head * p.mean_stride.head, i % table.channels);
      }
    } else if (thread < table.channels) {
      fetch_mean<C>(table.mean(pass_at) + thread, means, thread);
    }
  }
}

}  // namespace tandem::quantizer
