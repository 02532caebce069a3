// Where new rows go in a cache, and who writes them:
//
//   run       2^run_shift rows of one entry (or page), aligned; or a slot. It belongs to one block of a team
//             (Team::has); which of the block's warps writes a row of it follows from the row's place
//   stretch   up to 32 runs that are neighbours in one entry, as far as a sequence has new rows for them
//   word      a bit for each run of a stretch, or for each of 32 slots: whether it is the block's own
//   team      blocks that share out the runs of the same words
//
// problem/append_problem.hpp has the same rules for the host, where a new row goes to one sequence even with
// offsets that do not ascend. Here it then goes to each that they give it to.
#pragma once

#include "ops/cache/config.hpp"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace tandem::append_rows {

constexpr int warps = append_threads / warp_size;
/// Warps that write rows of one tensor.
constexpr int row_warps = warps / 2;
static_assert(1 << append_longest_run == row_warps, "a warp has a row of each run");

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

/// How many of a sequence's `rows` new rows are used. Without rows nothing is read: of no sequence there is
/// no number.
TANDEM_DEVICE int used_rows(const AppendParams& p, int sequence, int rows) {
  if (rows <= 0 || p.seqused_new.data == nullptr) return rows;
  return static_cast<int>(clamped(integer_at(p.seqused_new, sequence), 0, rows));
}

/// New rows that go to a stretch of the cache: neighbouring rows of one entry (or page), 32 runs at most.
struct Stretch {
  Token token;    ///< the first
  int new_row;    ///< its row of all new rows
  int rows;       ///< how many; 0 if there is nothing to write
  i64 entry;      ///< (or page) that they go to
  i64 first_row;  ///< in the entry
  i64 number;     ///< that of the run that it begins in, among all entries'

  /// The rows [first, end) of its `run`-th run, counted from first_row.
  TANDEM_DEVICE int run_first(const AppendParams& p, int run) const {
    return max((run << p.run_shift) - before(p), 0);
  }
  TANDEM_DEVICE int run_end(const AppendParams& p, int run) const {
    return min(((run + 1) << p.run_shift) - before(p), rows);
  }
  TANDEM_DEVICE int runs(const AppendParams& p) const {
    return rows > 0 ? ((before(p) + rows - 1) >> p.run_shift) + 1 : 0;
  }

 private:
  /// Rows of the first run that are before first_row.
  TANDEM_DEVICE int before(const AppendParams& p) const {
    return static_cast<int>(first_row) & ((1 << p.run_shift) - 1);
  }
};

/// Number `n` of all stretches that the new rows may lie in. A sequence of so many new rows has as many as
/// they can touch, wherever the first of them goes.
TANDEM_DEVICE Stretch stretch_at(const AppendParams& p, int n) {
  const int length = 1 << p.stretch_shift;
  Stretch s{{0, 0}, 0, 0, 0, 0, 0};
  int number = n;  // in its sequence
  int rows = p.rows_new;
  if (!p.packed) {
    const int stretches = (p.rows_new + 2 * length - 2) >> p.stretch_shift;
    s.token.sequence = n / stretches;
    number = n - s.token.sequence * stretches;
    s.new_row = s.token.sequence * p.rows_new;
  } else {
    const auto begins = [&](int b) {
      return (packed_begin(p, b) + static_cast<i64>(b) * (2 * length - 2)) >> p.stretch_shift;
    };
    s.token.sequence = packed_sequence(p, n, begins);
    s.new_row = packed_begin(p, s.token.sequence);
    number = static_cast<int>(n - begins(s.token.sequence));
    rows = packed_begin(p, s.token.sequence + 1) - s.new_row;
  }
  rows = used_rows(p, s.token.sequence, rows);
  const i64 first = integer_at(p.cache_seqlens, s.token.sequence);
  if (rows <= 0 || first < 0 || first >= p.rows_of_sequence) return s;
  const i64 whole = ((first >> p.stretch_shift) + number) << p.stretch_shift;
  const i64 begin = whole < first ? first : whole;
  i64 end = whole + length;
  if (end > first + rows) end = first + rows;
  if (end > p.rows_of_sequence) end = p.rows_of_sequence;
  if (begin >= end) return s;
  s.token.index = static_cast<int>(begin - first);
  s.new_row += s.token.index;
  s.entry = s.token.sequence;
  s.first_row = begin;
  if (p.page_table.data != nullptr) {
    const i64 page = divided(begin, p.entry_rows);
    s.first_row -= page * p.entry_rows;
    LengthArray pages = p.page_table;
    const i64 bytes = pages.wide ? 8 : 4;
    pages.data = static_cast<const u8*>(pages.data) + s.token.sequence * p.page_table_batch * bytes;
    s.entry = integer_at(pages, page);
  } else if (p.cache_batch_idx.data != nullptr) {
    s.entry = integer_at(p.cache_batch_idx, s.token.sequence);
  }
  if (s.entry < 0 || s.entry >= p.entries) return s;
  s.rows = static_cast<int>(end - begin);
  s.number = s.entry * p.runs_of_entry + (s.first_row >> p.run_shift);
  return s;
}

/// The slot of token `n`; -1 if the cache has none.
TANDEM_DEVICE i64 slot_at(const AppendParams& p, int n) {
  const i64 slot = n < p.tokens ? integer_at(p.slot_mapping, n) : -1;
  return slot >= 0 && slot < p.entries * p.entry_rows ? slot : -1;
}

/// A slot that there is, as a stretch: one row, and a run, whose number is the slot.
TANDEM_DEVICE Stretch stretch_of_slot(const AppendParams& p, int n) {
  const i64 slot = integer_at(p.slot_mapping, n);
  const i64 entry = divided(slot, p.entry_rows);
  return {{0, n}, n, 1, entry, slot - entry * p.entry_rows, slot};
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

/// The hash of a run's number by Fibonacci's method (Knuth, The Art of Computer Programming, volume 3,
/// section 6.4): numbers at even distances, as of one sequence or of all sequences' ends, lie evenly in its
/// upper bits.
TANDEM_DEVICE u32 hash_of(i64 number) {
  constexpr u32 golden = 0x9e3779b9U;  // 2^32 over the golden ratio
  return (static_cast<u32>(number) ^ static_cast<u32>(number >> 32)) * golden;
}
/// This block's team, whose members share out the runs of the team's words.
struct Team {
  int count;   ///< how many teams there are
  int number;  ///< that of this one
  u32 blocks;  ///< in it
  u32 block;   ///< this one's place among them

  explicit TANDEM_DEVICE Team(const AppendParams& p) : count(p.teams) {
    const u32 teams = static_cast<u32>(count);
    block = ptx::block_index() / teams;
    number = static_cast<int>(ptx::block_index() - block * teams);
    blocks = ptx::grid_size() / teams;
  }
  /// How many words the team has, and which of all they are.
  TANDEM_DEVICE int words(const AppendParams& p) const { return (p.words - number + count - 1) / count; }
  TANDEM_DEVICE int word_at(int own) const { return own * count + number; }
  /// Whether run `run` of the team's word `own` belongs to this block. Where there are teams no two tokens go
  /// to one row, and runs are numbered as the team finds them, which shares them out evenly.
  TANDEM_DEVICE bool has(int own, int run, i64 number_in_cache) const {
    return has(count > 1 ? i64{own} * 32 + run : number_in_cache);
  }
  TANDEM_DEVICE bool has(i64 run) const {
    return static_cast<u32>(static_cast<u64>(hash_of(run)) * blocks >> 32) == block;
  }
};
/// Which tensor of a run this warp writes, 0 for K and 1 for V, and which of its rows: those whose place in
/// the entry is `row` more than a multiple of row_warps. Runs of one block differ in how warps are turned.
struct WarpPlace {
  int tensor;
  int row;
};
TANDEM_DEVICE WarpPlace place_in(i64 number) {
  const u32 turned = ptx::thread_index() / warp_size + (hash_of(number) >> 18);
  return {static_cast<int>(turned % 2), static_cast<int>(turned / 2 % row_warps)};
}

}  // namespace tandem::append_rows
