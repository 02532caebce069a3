// Writes new keys and values into a cache, and embeds queries: one launch for k, v and q. Bound by memory:
// one read and one write of the new rows.
//
// Rows of the cache belong to blocks in runs: 2^run_shift rows, aligned, of one entry (or page). The hash of
// a run's number says to which block, and a row's place which of its warps writes K and which V. Every block
// looks at all runs, a stretch of them or 32 slots at a time, notes those that are its own, and its warps
// write the new rows in them in the order of the tokens. So no two warps write to one row, and of tokens that
// go to one row the last is kept, whole: a lane writes the same columns of both.
#pragma once

#include "kernels/common/append_row.cuh"
#include "kernels/ptx/barrier.cuh"

namespace tandem {

namespace append_rows {

/// The address of new row `n` of all, which is of `sequence`.
template <Stored type>
TANDEM_DEVICE const u8* new_row(const AppendParams& p, const void* rows, const Strides& stride, int sequence,
                                int n) {
  const i64 batch = p.packed ? 0 : sequence;
  return stored::at<type>(rows, batch * stride.batch + (n - batch * p.rows_new) * stride.row);
}

/// Writes row `i` of a stretch.
template <AppendConfig C, bool embedded>
TANDEM_DEVICE void write_row_of(const AppendParams& p, const AppendTensor& t, const FoundScales& found,
                                const Stretch& s, int i) {
  const Token token{s.token.sequence, s.token.index + i};
  const i64 row = s.first_row + i;
  u8* const to = stored::at<C.to>(t.cache, s.entry * t.cache_stride.batch + row * t.cache_stride.row);
  const u8* const from = new_row<C.from>(p, t.rows, t.row_stride, token.sequence, s.new_row + i);
  if constexpr (C.finds_scales) {
    if (found.data != nullptr) {
      float* const scales = found.data + s.entry * found.stride.batch + row * found.stride.row;
      write_scaled_row<C, C.to, embedded>(p, t, token, from, to, scales, found.stride.head);
      return;
    }
  }
  write_row<C, C.to, embedded>(p, t, token, from, to, p.heads_kv);
}

/// Notes which runs are this block's own, a word of bits for each of `count` stretches, or for 32 slots, from
/// `base` on. A lane looks at a stretch; a warp at 32 slots, of which four times as many are under way.
TANDEM_DEVICE void note_runs(const AppendParams& p, u32* noted, int base, int count) {
  const int thread = static_cast<int>(ptx::thread_index());
  if (p.slot_mapping.data == nullptr) {
    for (int word = thread; word < count; word += append_threads) {
      const Stretch s = stretch_at(p, base + word);
      const int runs = s.runs(p);
      u32 bits = 0;
      for (int run = 0; run < runs; ++run) bits |= is_own(s.number + run) ? 1U << run : 0U;
      ptx::store_shared(noted + word, bits);
    }
    return;
  }
  constexpr int at_once = 4;
  for (int first = thread / warp_size; first < count; first += at_once * warps) {
    i64 slots[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      slots[i] = slot_at(p, (base + first + i * warps) * warp_size + thread % warp_size);
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const u32 bits = ptx::ballot(slots[i] >= 0 && is_own(slots[i]));
      const int word = first + i * warps;
      if (thread % warp_size == 0 && word < count) ptx::store_shared(noted + word, bits);
    }
  }
}

/// Writes this warp's rows of a stretch, or of 32 slots, of which `own` are noted. A lane looks at a run, or
/// at a slot.
template <AppendConfig C>
TANDEM_DEVICE void write_word(const AppendParams& p, u32 own, int word) {
  const bool slots = p.slot_mapping.data != nullptr;
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  const bool noted = (own >> lane & 1U) != 0;
  Stretch s{};
  int row = 0;  // that is this warp's, of the lane's run
  bool exists = false;
  if (slots) {
    if (noted) s = stretch_of_slot(p, word * warp_size + lane);
    exists = noted && static_cast<int>(s.first_row % row_warps) == place_in(s.number).row;
  } else {
    s = stretch_at(p, word);
    row = s.run_first(p, lane);
    row += static_cast<int>(static_cast<u32>(place_in(s.number + lane).row - s.first_row - row) % row_warps);
    exists = noted && row < s.run_end(p, lane);
  }
  for (u32 mine = ptx::ballot(exists); mine != 0; mine &= mine - 1) {
    const int of = ptx::find_first_set(mine);
    const int i = static_cast<int>(ptx::shuffle(static_cast<u32>(row), of));
    if (slots) s = stretch_of_slot(p, word * warp_size + of);
    const int tensor = place_in(s.number + (slots ? 0 : of)).tensor;
    if (tensor == 0) {
      write_row_of<C, C.rotary>(p, p.k, p.k_found, s, i);
    } else if (p.v.rows != nullptr) {
      write_row_of<C, false>(p, p.v, p.v_found, s, i);
    }
  }
}

/// Writes what is noted and this warp's, in the order of the tokens.
template <AppendConfig C>
TANDEM_DEVICE void write_noted(const AppendParams& p, const u32* noted, int base, int count) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  for (int first = 0; first < count; first += warp_size) {
    const u32 bits = first + lane < count ? ptx::load_shared(noted + first + lane) : 0U;
    for (u32 some = ptx::ballot(bits != 0); some != 0; some &= some - 1) {
      const int of = ptx::find_first_set(some);
      write_word<C>(p, ptx::shuffle(bits, of), base + first + of);
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
    const int sequence = p.packed ? 0 : token.sequence;
    u8* const to = const_cast<u8*>(new_row<C.from>(p, p.q.cache, p.q.cache_stride, sequence, n));
    if (used) {
      write_row<C, C.from, true>(p, p.q, token, new_row<C.from>(p, p.q.rows, p.q.row_stride, sequence, n), to,
                                 p.heads_q);
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
  for (int base = 0; base < p.words && p.heads_kv > 0; base += append_words) {
    const int count = min(append_words, p.words - base);
    append_rows::note_runs(p, noted, base, count);
    ptx::sync_block();
    append_rows::write_noted<C>(p, noted, base, count);
    ptx::sync_block();
  }
  if constexpr (C.rotary) {
    if (p.q.rows != nullptr) append_rows::embed_queries<C>(p);
  }
}

}  // namespace tandem
