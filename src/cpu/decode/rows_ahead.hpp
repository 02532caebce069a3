// The rows of K and V of a block of keys, and those of the next block on their way into the caches.
#pragma once

#include "cpu/forward/key_rows.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// Keys between two looks at the maximum: 8 heads of two such blocks, 256 KiB in 16 bits, are at home in a
/// second-level cache. Processors with a matrix unit, which are Intel's, read memory faster in smaller steps,
/// but for 64 keys on that unit. short_block is the most of them.
#if defined(TANDEM_MATRIX_UNIT)
constexpr int vector_block = 16;
constexpr int short_block = 64;
#else
constexpr int vector_block = 32;
constexpr int short_block = vector_block;
#endif
/// Rows that share the loads of K and V, and keys scored together: 16 accumulators, 8 on 16 registers.
constexpr int rows_together = vec_registers == 32 ? 4 : 2;
constexpr int keys_together = 4;

/// Rows of K and V of one block. The list goes on with the last row up to a multiple of `whole`.
template <typename K>
struct BlockRows {
  const K* k[short_block];
  const K* v[short_block];
  int count = 0;
  int whole = keys_together;
  bool missing = false;  ///< some lie in no page

  [[nodiscard]] int listed() const { return (count + whole - 1) / whole * whole; }
  /// Makes it the list for a head whose K and V lie at these offsets from it: a row in no page does not move.
  void keep_missing(std::int64_t k_offset, std::int64_t v_offset) {
    for (int j = 0; j < listed(); ++j) {
      if (k[j] == missing_row<K>()) k[j] -= k_offset;
      if (v[j] == missing_row<K>()) v[j] -= v_offset;
    }
  }
};

template <typename K>
TANDEM_INLINE void list_rows(const ForwardTile& t, std::int64_t begin, int count, BlockRows<K>& rows) {
  rows.missing = false;
  for_each_run<K>(t, begin, count, [&](int first, const KeyRun<K>& run) {
    rows.missing |= run.k == missing_row<K>();
    for (int j = 0; j < run.count; ++j) {
      rows.k[first + j] = run.k + j * t.k_stride;
      rows.v[first + j] = run.v + j * t.v_stride;
    }
  });
  rows.count = count;
  for (int j = count; j < rows.listed(); ++j) {
    rows.k[j] = rows.k[count - 1];
    rows.v[j] = rows.v[count - 1];
  }
}

/// Fetches the first line of each row. A row may be on a page of its own whose address is looked up first,
/// which takes as long as reading an eighth of the page: all at once they are looked up side by side, and the
/// lines that follow find their page known. Decoding from memory is a third slower without it.
template <typename K>
TANDEM_INLINE void touch_rows(const BlockRows<K>& rows) {
  for (int j = 0; j < rows.count; ++j) {
    __builtin_prefetch(rows.k[j], 0, 2);
    __builtin_prefetch(rows.v[j], 0, 2);
  }
}

#if defined(TANDEM_MATRIX_UNIT)
/// Rows between one that is fetched and one that is touched: 16 KB of 8 heads in 16 bits.
constexpr int touched_ahead = 8;

/// The rows of K or of V of a block, of all heads in the order of memory, line by line.
template <typename K>
class Lines {
 public:
  Lines(const K* const* rows, int count, int heads, std::int64_t head_stride, int columns, bool touches)
      : rows_(rows), count_(count), stride_(head_stride), touches_(touches) {
    const bool together = heads > 1 && head_stride == columns;  // a row of all heads is one piece
    heads_ = together ? 1 : heads;
    bytes_ = columns * static_cast<int>(sizeof(K)) * (together ? heads : 1);
    if (count_ > 0) open_piece();
  }

  [[nodiscard]] bool any() const { return next_ < end_; }
  /// Two lines at a time, of which one may lie past a row: a loop of fixed length is predicted.
  [[gnu::always_inline]] void fetch(int lines) {
    for (; lines > 0 && any(); lines -= 2) {
      __builtin_prefetch(next_, 0, 2);
      __builtin_prefetch(next_ + 64, 0, 2);
      next_ += 128;
      if (!any()) next_piece();
    }
  }

 private:
  void next_piece() {
    if (++head_ == heads_) {
      head_ = 0;
      if (++row_ == count_) return;
    }
    open_piece();
  }
  [[gnu::always_inline]] void open_piece() {
    const int later = row_ + touched_ahead;
    if (touches_ && head_ == 0 && later < count_) __builtin_prefetch(rows_[later], 0, 2);
    next_ = reinterpret_cast<const char*>(rows_[row_] + head_ * stride_);
    end_ = next_ + bytes_;
  }

  const char* next_ = nullptr;  ///< not before end_: all are fetched
  const char* end_ = nullptr;
  const K* const* rows_;
  int count_;
  std::int64_t stride_;
  bool touches_;
  int heads_;
  int bytes_;
  int row_ = 0;
  int head_ = 0;
};

/// The next block's rows on their way into the second-level cache, spread over the work on this one: those of
/// K and of V side by side, which Intel's processors follow better than one after the other.
template <typename K>
class RowsAhead {
 public:
  /// With `touches` rows are touched as they come near, which makes touch_rows() needless.
  RowsAhead(const ForwardTile& t, const BlockRows<K>& rows, int heads, std::int64_t k_head_stride,
            std::int64_t v_head_stride, bool touches)
      : k_(rows.k, rows.count, heads, k_head_stride, t.head_dim_qk, touches),
        v_(rows.v, rows.count, heads, v_head_stride, t.head_dim_v, touches),
        row_lines_((t.head_dim_qk * static_cast<int>(sizeof(K)) + 63) / 64) {}

  /// Fetches as many lines as `rows` rows of one head of K have.
  [[gnu::always_inline]] void fetch(int rows) {
    const int lines = rows * row_lines_;
    k_.fetch((lines + 1) / 2);
    v_.fetch((lines + 1) / 2);
  }
  void fetch_all() {
    while (k_.any() || v_.any()) fetch(1);
  }

 private:
  Lines<K> k_;
  Lines<K> v_;
  int row_lines_;
};
#else
/// The next block's rows on their way into the second-level cache, spread over the work on this one: those of
/// K, then those of V, of all heads in the order of memory, which the processor's own prefetching follows.
template <typename K>
class RowsAhead {
 public:
  RowsAhead(const ForwardTile& t, const BlockRows<K>& rows, int heads, std::int64_t k_head_stride,
            std::int64_t v_head_stride, bool)
      : rows_(&rows), heads_(heads), left_(2 * heads * rows.count) {
    stride_[0] = k_head_stride;
    stride_[1] = v_head_stride;
    bytes_[0] = t.head_dim_qk * static_cast<int>(sizeof(K));
    bytes_[1] = t.head_dim_v * static_cast<int>(sizeof(K));
    if (left_ > 0) open_row();
  }

  /// Fetches `rows` rows of one head.
  [[gnu::always_inline]] void fetch(int rows) {
    for (; rows > 0 && left_ > 0; --rows) {
      for (const char* p = next_; p < end_; p += 64) __builtin_prefetch(p, 0, 2);
      next_row();
    }
  }
  void fetch_all() {
    while (left_ > 0) fetch(1);
  }

 private:
  [[gnu::always_inline]] void next_row() {
    if (--left_ == 0) return;
    if (++head_ == heads_) {
      head_ = 0;
      if (++row_ == rows_->count) {
        row_ = 0;
        of_v_ = 1;
      }
    }
    open_row();
  }
  [[gnu::always_inline]] void open_row() {
    const K* const first = (of_v_ != 0 ? rows_->v[row_] : rows_->k[row_]) + head_ * stride_[of_v_];
    next_ = reinterpret_cast<const char*>(first);
    end_ = next_ + bytes_[of_v_];
  }

  const char* next_ = nullptr;
  const char* end_ = nullptr;
  const BlockRows<K>* rows_;
  std::int64_t stride_[2];
  int bytes_[2];
  int heads_;
  int left_;  ///< rows of heads
  int row_ = 0;
  int head_ = 0;
  int of_v_ = 0;
};
#endif

}  // namespace tandem::cpu::TANDEM_TARGET
