// Writes new keys and values into a cache, and embeds queries: one launch for k, v and q. Bound by memory:
// one read and one write of the new rows.
//
// Rows of the cache belong to blocks in runs (append_runs.cuh). Every block looks at all runs, a stretch of
// them or 32 slots at a time, notes those that are its own, and its warps write the new rows in them in the
// order of the tokens. So no two warps write to one row, and of tokens that go to one row the last is kept,
// whole: a lane writes the same columns of both. Where each sequence has an entry of its own no two tokens go
// to one row, and teams of blocks have every so many-th stretch.
#pragma once

#include "ops/cache/common/append_row.cuh"
#include "ptx/barrier.cuh"

namespace tandem {

namespace append_rows {

/// The address of new row `n` of all, which is of `sequence`.
template <Stored type>
TANDEM_DEVICE const u8* new_row(const AppendParams& p, const void* rows, const Strides& stride, int sequence,
                                int n) {
  const i64 batch = p.packed ? 0 : sequence;
  return stored::at<type>(rows, batch * stride.batch + (n - batch * p.rows_new) * stride.row);
}

/// A row that a warp is to write.
struct Work {
  Token token;
  int new_row;  ///< its number among all new rows
  int tensor;   ///< 0: K, 1: V
  i64 entry;
  i64 row;  ///< in the entry
};

/// What the lanes of a warp have found: words that are not 0, in their order, and rows to write.
struct Found {
  int word[2 * warp_size];
  u32 bits[2 * warp_size];
  Work work[warp_size];
};

/// What this warp has of run `bit` of the block's stretch `own`, or of one of 32 slots. False if nothing.
TANDEM_DEVICE bool find_work(const AppendParams& p, const Team& team, int own, int bit, Work& work) {
  const int word = team.word_at(own);
  const Stretch s =
      p.slot_mapping.data != nullptr ? stretch_of_slot(p, word * warp_size + bit) : stretch_at(p, word);
  const int run = p.slot_mapping.data != nullptr ? 0 : bit;
  const WarpPlace place = place_in(s.number + run);
  const int first = s.run_first(p, run);
  const int i = first + static_cast<int>(static_cast<u32>(place.row - s.first_row - first) % row_warps);
  work = {{s.token.sequence, s.token.index + i}, s.new_row + i, place.tensor, s.entry, s.first_row + i};
  return i < s.run_end(p, run) && (place.tensor == 0 || p.v.rows != nullptr);
}

template <AppendConfig C, bool embedded>
TANDEM_DEVICE void write(const AppendParams& p, const AppendTensor& t, const FoundScales& found,
                         const Work& work) {
  u8* const to = stored::at<C.to>(t.cache, work.entry * t.cache_stride.batch + work.row * t.cache_stride.row);
  const u8* const from = new_row<C.from>(p, t.rows, t.row_stride, work.token.sequence, work.new_row);
  if constexpr (C.finds_scales) {
    if (found.data != nullptr) {
      float* const scales = found.data + work.entry * found.stride.batch + work.row * found.stride.row;
      write_scaled_row<C, C.to, embedded>(p, t, work.token, from, to, scales, found.stride.head);
      return;
    }
  }
  write_row<C, C.to, embedded>(p, t, work.token, from, to, p.heads_kv);
}

/// Notes which runs are this block's own, a word of bits for each of its stretches [base, end), or for as
/// many times 32 slots. A lane looks at a stretch; a warp at 32 slots, of which four times as many are under
/// way.
TANDEM_DEVICE void note_runs(const AppendParams& p, const Team& team, u32* noted, int base, int end) {
  const int thread = static_cast<int>(ptx::thread_index());
  if (p.slot_mapping.data == nullptr) {
    for (int word = base + thread; word < end; word += append_threads) {
      const Stretch s = stretch_at(p, team.word_at(word));
      const int runs = s.runs(p);
      u32 bits = 0;
      for (int run = 0; run < runs; ++run) bits |= team.has(word, run, s.number + run) ? 1U << run : 0U;
      ptx::store_shared(noted + word % append_words, bits);
    }
    return;
  }
  constexpr int at_once = 4;
  for (int first = base + thread / warp_size; first < end; first += at_once * warps) {
    i64 slots[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      slots[i] = slot_at(p, (first + i * warps) * warp_size + thread % warp_size);
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const u32 bits = ptx::ballot(slots[i] >= 0 && team.has(slots[i]));
      const int word = first + i * warps;
      if (thread % warp_size == 0 && word < end) ptx::store_shared(noted + word % append_words, bits);
    }
  }
}

/// Writes what this warp has of 32 words, of which each lane has one: its runs are `bits`. The lanes look for
/// their words' rows together. Of words with several runs one run is taken at a time, so that rows are
/// written in the order of the tokens.
template <AppendConfig C>
TANDEM_DEVICE void write_words(const AppendParams& p, const Team& team, Found& found, int word, u32 bits) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  for (u32 some = ptx::ballot(bits != 0); some != 0; some = ptx::ballot(bits != 0)) {
    const bool alone = !ptx::any_lane((bits & (bits - 1)) != 0);
    bool mine = false;
    if (bits != 0 && (alone || lane == ptx::find_first_set(some))) {
      Work work;
      mine = find_work(p, team, word, ptx::find_first_set(bits), work);
      if (mine) ptx::store_shared(found.work + lane, work);
      bits &= bits - 1;
    }
    ptx::sync_warp();
    for (u32 left = ptx::ballot(mine); left != 0; left &= left - 1) {
      const Work work = ptx::load_shared(found.work + ptx::find_first_set(left));
      if (work.tensor == 0) {
        write<C, C.rotary>(p, p.k, p.k_found, work);
      } else {
        write<C, false>(p, p.v, p.v_found, work);
      }
    }
    ptx::sync_warp();
  }
}

/// Writes what is noted and this warp's, in the order of the tokens. Most words are 0: the others are
/// gathered for 32 lanes.
template <AppendConfig C>
TANDEM_DEVICE void write_noted(const AppendParams& p, const Team& team, const u32* noted, Found& found,
                               int base, int end) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  int pending = 0;
  for (int first = base; first < end; first += warp_size) {
    const u32 bits = first + lane < end ? ptx::load_shared(noted + (first + lane) % append_words) : 0U;
    const u32 some = ptx::ballot(bits != 0);
    if (bits != 0) {
      const int at = pending + static_cast<int>(ptx::count_bits(some & ((1U << lane) - 1)));
      ptx::store_shared(found.word + at, first + lane);
      ptx::store_shared(found.bits + at, bits);
    }
    pending += static_cast<int>(ptx::count_bits(some));
    const bool last = first + warp_size >= end;
    while (pending >= warp_size || (last && pending > 0)) {
      ptx::sync_warp();
      const int word = lane < pending ? ptx::load_shared(found.word + lane) : 0;
      const u32 own = lane < pending ? ptx::load_shared(found.bits + lane) : 0U;
      pending = max(pending - warp_size, 0);
      const int rest_word = lane < pending ? ptx::load_shared(found.word + warp_size + lane) : 0;
      const u32 rest_bits = lane < pending ? ptx::load_shared(found.bits + warp_size + lane) : 0U;
      ptx::sync_warp();
      if (lane < pending) {
        ptx::store_shared(found.word + lane, rest_word);
        ptx::store_shared(found.bits + lane, rest_bits);
      }
      write_words<C>(p, team, found, word, own);
    }
  }
}

/// Queries, a token a warp. q_out has 0 in rows of no token in use.
template <AppendConfig C>
TANDEM_DEVICE void embed_queries(const AppendParams& p) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  const i64 step = static_cast<i64>(ptx::grid_size()) * warps;
  const i64 first = static_cast<i64>(ptx::block_index()) * warps + ptx::thread_index() / warp_size;
  for (i64 at = first; at < p.tokens; at += step) {
    const int n = static_cast<int>(at);
    bool used = false;
    const Token token = token_at(p, n, used);
    u8* const to = const_cast<u8*>(new_row<C.from>(p, p.q.cache, p.q.cache_stride, token.sequence, n));
    if (used) {
      write_row<C, C.from, true>(
          p, p.q, token, new_row<C.from>(p, p.q.rows, p.q.row_stride, token.sequence, n), to, p.heads_q);
      continue;
    }
    const float zeros[8] = {};
    const int of_head = ceil_div(p.q.columns, 8);
    for (int i = lane; i < p.heads_q * of_head; i += warp_size) {
      const int head = i / of_head;
      stored::store<C.from, C.vectors>(zeros, stored::at<C.from>(to, head * p.q.cache_stride.head),
                                       (i - head * of_head) * 8, p.q.columns);
    }
  }
}

}  // namespace append_rows

template <AppendConfig C>
TANDEM_KERNEL __launch_bounds__(append_threads, append_blocks_per_sm(C))
    append(const __grid_constant__ AppendParams p) {
  auto* const noted = reinterpret_cast<u32*>(ptx::dynamic_shared());
  auto* const found = reinterpret_cast<append_rows::Found*>(noted + append_words);
  static_assert(sizeof(u32) * append_words + sizeof(append_rows::Found) * append_rows::warps ==
                append_shared_bytes);
  const append_rows::Team team(p);
  const int words = p.heads_kv > 0 ? team.words(p) : 0;
  for (int base = 0; base < words; base += append_words) {
    const int end = min(base + append_words, words);
    append_rows::note_runs(p, team, noted, base, end);
    ptx::sync_block();
    append_rows::write_noted<C>(p, team, noted, found[ptx::thread_index() / warp_size], base, end);
    ptx::sync_block();
  }
  if constexpr (C.rotary) {
    if (p.q.rows != nullptr) append_rows::embed_queries<C>(p);
  }
}

}  // namespace tandem
