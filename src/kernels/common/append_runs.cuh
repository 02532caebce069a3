// Where new rows go in a cache: in runs of rows, and each run's block and warps. problem/append_problem.hpp
// has the same rules for the host.
#pragma once

#include "kernels/config/append.hpp"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/warp.cuh"

namespace tandem::append_rows {

constexpr int warps = append_threads / warp_size;

TANDEM_DEVICE i64 integer_at(const LengthArray& a, i64 i) {
  if (a.wide) return ptx::load_global(static_cast<const i64*>(a.data) + i * a.stride);
  return ptx::load_global(static_cast<const i32*>(a.data) + i * a.stride);
}

TANDEM_DEVICE i64 clamped(i64 x, i64 low, i64 high) {
  return x < low ? low : (x > high ? high : x);
}

/// a / b of numbers that are not negative.
TANDEM_DEVICE i64 divided(i64 a, i64 b) {
  if (((a | b) >> 32) == 0) return static_cast<u32>(a) / static_cast<u32>(b);
  return a / b;
}

struct Token {
  int sequence;
  int index;  ///< in its sequence; with slots its number
};

/// Where the new rows of a packed sequence begin; those before it end there.
TANDEM_DEVICE int packed_begin(const AppendParams& p, int sequence) {
  return static_cast<int>(clamped(integer_at(p.cu_seqlens_new, sequence), 0, p.rows_new));
}

/// The last sequence that `begins` at `at` or before, of the packed ones.
template <typename Begin>
TANDEM_DEVICE int packed_sequence(const AppendParams& p, i64 at, Begin begins) {
  int sequence = 0;
  int past = p.batch;
  while (past - sequence > 1) {
    const int middle = sequence + (past - sequence) / 2;
    (begins(middle) <= at ? sequence : past) = middle;
  }
  return sequence;
}

/// How many new rows of a sequence are used.
TANDEM_DEVICE int used_rows(const AppendParams& p, int sequence, int rows) {
  if (p.seqused_new.data == nullptr) return rows;
  return static_cast<int>(clamped(integer_at(p.seqused_new, sequence), 0, rows));
}

/// New rows that go to one run of the cache.
struct Run {
  Token token;    ///< the first
  int new_row;    ///< its row of all new rows
  int rows;       ///< how many; 0 if there is nothing to write
  i64 entry;      ///< (or page) that they go to
  i64 first_row;  ///< of the entry
  i64 number;     ///< of the run, of all entries'
};

/// Whether the cache has a row `slot`.
TANDEM_DEVICE bool exists(const AppendParams& p, i64 slot) {
  return slot >= 0 && slot < p.entries * p.entry_rows;
}

/// The run that token `n` of a slot mapping goes to: a row, whose number is the slot.
TANDEM_DEVICE Run run_of_slot(const AppendParams& p, int n) {
  const i64 slot = integer_at(p.slot_mapping, n);
  Run run{{0, n}, n, 0, 0, 0, slot};
  if (!exists(p, slot)) return run;
  run.rows = 1;
  run.entry = divided(slot, p.entry_rows);
  run.first_row = slot - run.entry * p.entry_rows;
  return run;
}

/// Number `n` of all runs that the new rows may lie in. A sequence of so many new rows has as many as they
/// can touch, wherever the first of them goes.
TANDEM_DEVICE Run run_at(const AppendParams& p, int n) {
  if (p.slot_mapping.data != nullptr) return run_of_slot(p, n);
  const int length = 1 << p.run_shift;
  Run run{{0, 0}, 0, 0, 0, 0, 0};
  int number = n;  // in its sequence
  int rows = p.rows_new;
  if (!p.packed) {
    const int runs = (p.rows_new + 2 * length - 2) >> p.run_shift;
    run.token.sequence = n / runs;
    number = n - run.token.sequence * runs;
    run.new_row = run.token.sequence * p.rows_new;
  } else {
    const auto begins = [&](int b) {
      return (packed_begin(p, b) + static_cast<i64>(b) * (2 * length - 2)) >> p.run_shift;
    };
    run.token.sequence = packed_sequence(p, n, begins);
    run.new_row = packed_begin(p, run.token.sequence);
    number = static_cast<int>(n - begins(run.token.sequence));
    rows = packed_begin(p, run.token.sequence + 1) - run.new_row;
  }
  rows = used_rows(p, run.token.sequence, rows);
  const i64 first = integer_at(p.cache_seqlens, run.token.sequence);
  if (rows <= 0 || first < 0 || first >= p.rows_of_sequence) return run;
  const i64 run_begin = ((first >> p.run_shift) + number) << p.run_shift;
  const i64 begin = run_begin < first ? first : run_begin;
  i64 end = run_begin + length;
  if (end > first + rows) end = first + rows;
  if (end > p.rows_of_sequence) end = p.rows_of_sequence;
  if (begin >= end) return run;
  run.token.index = static_cast<int>(begin - first);
  run.new_row += run.token.index;
  run.entry = run.token.sequence;
  run.first_row = begin;
  if (p.page_table.data != nullptr) {
    const i64 page = divided(begin, p.entry_rows);
    run.first_row -= page * p.entry_rows;
    LengthArray pages = p.page_table;
    const i64 bytes = pages.wide ? 8 : 4;
    pages.data = static_cast<const u8*>(pages.data) + run.token.sequence * p.page_table_batch * bytes;
    run.entry = integer_at(pages, page);
  } else if (p.cache_batch_idx.data != nullptr) {
    run.entry = integer_at(p.cache_batch_idx, run.token.sequence);
  }
  if (run.entry >= 0 && run.entry < p.entries) run.rows = static_cast<int>(end - begin);
  run.number = run.entry * p.runs_of_entry + (run.first_row >> p.run_shift);
  return run;
}

/// The token in new row `n`, and in `used` whether it is one that may be appended.
TANDEM_DEVICE Token token_at(const AppendParams& p, int n, bool& used) {
  used = true;
  if (p.slot_mapping.data != nullptr) return {0, n};
  Token token{0, 0};
  int rows = p.rows_new;
  if (!p.packed) {
    token = {n / p.rows_new, n % p.rows_new};
  } else {
    rows = 0;
    if (p.batch > 0) {
      token.sequence = packed_sequence(p, n, [&](int b) { return integer_at(p.cu_seqlens_new, b); });
      const int begin = packed_begin(p, token.sequence);
      token.index = n - begin;
      rows = packed_begin(p, token.sequence + 1) - begin;
    }
  }
  used = token.index >= 0 && token.index < used_rows(p, token.sequence, rows > 0 ? rows : 0);
  return token;
}

/// The row of the rotary embedding's tables that a token takes.
TANDEM_DEVICE i64 position_of(const AppendParams& p, const Token& token) {
  constexpr i64 far = i64{1} << 62;
  if (p.slot_mapping.data != nullptr) {
    return clamped(integer_at(p.rotary_offsets, token.index), 0, p.positions - 1);
  }
  const LengthArray& offsets = p.rotary_offsets.data != nullptr ? p.rotary_offsets : p.cache_seqlens;
  const i64 first = clamped(integer_at(offsets, token.sequence), -far, far - 1);
  return clamped(first + token.index, 0, p.positions - 1);
}

/// The hash of a run by Fibonacci's method (Knuth, The Art of Computer Programming, volume 3, section 6.4):
/// numbers at even distances, as of one sequence or of all sequences' ends, lie evenly in its upper bits.
TANDEM_DEVICE u32 hash_of(i64 number) {
  constexpr u32 golden = 0x9e3779b9U;  // 2^32 over the golden ratio
  return (static_cast<u32>(number) ^ static_cast<u32>(number >> 32)) * golden;
}
/// The block that a run belongs to.
TANDEM_DEVICE u32 block_of(u32 hash) {
  return static_cast<u32>(static_cast<u64>(hash) * ptx::grid_size() >> 32);
}
/// By how many warps its rows are turned: bits that runs of one block differ in.
TANDEM_DEVICE int turn_of(u32 hash) {
  return static_cast<int>(hash >> 18) & (warps - 1);
}
}  // namespace tandem::append_rows
