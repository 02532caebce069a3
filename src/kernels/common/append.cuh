// Writes new keys and values into a cache, and embeds queries: one launch for k, v and q. Bound by memory:
// one read and one write of the new rows.
//
// Rows of the cache belong to blocks in runs: 2^run_shift rows, aligned, of one entry (or page). The hash of
// a run's number says to which block, and a row's place which of its warps writes K and which V. Every block
// looks at the runs of all sequences, append_batch at a time, notes those that are its own, and its warps
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

/// Writes those rows of a run whose warp for this tensor this one is: every fourth from `first` on.
template <AppendConfig C, bool embedded>
TANDEM_DEVICE void write_rows(const AppendParams& p, const AppendTensor& t, const FoundScales& found,
                              const Run& run, int first) {
  for (int i = first; i < run.rows; i += warps / 2) {
    const Token token{run.token.sequence, run.token.index + i};
    const i64 row = run.first_row + i;
    u8* const to = stored::at<C.to>(t.cache, run.entry * t.cache_stride.batch + row * t.cache_stride.row);
    const u8* const from = new_row<C.from>(p, t.rows, t.row_stride, token.sequence, run.new_row + i);
    if constexpr (C.finds_scales) {
      if (found.data != nullptr) {
        float* const scales = found.data + run.entry * found.stride.batch + row * found.stride.row;
        write_scaled_row<C, C.to, embedded>(p, t, token, from, to, scales, found.stride.head);
        continue;
      }
    }
    write_row<C, C.to, embedded>(p, t, token, from, to, p.heads_kv);
  }
}

/// Notes those of `count` runs from `base` on that are this block's own: a bit each. A warp looks at 32 runs
/// at a time; slots, which are many and found by one load, are under way four times.
TANDEM_DEVICE void note_runs(const AppendParams& p, u32* noted, int base, int count) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  const int words = ceil_div(count, warp_size);
  const auto note = [&](int word, bool own) {
    const u32 bits = ptx::ballot(own);
    if (lane == 0 && word < words) ptx::store_shared(noted + word, bits);
  };
  const auto is_own = [](const Run& run) {
    return run.rows > 0 && block_of(hash_of(run.number)) == ptx::block_index();
  };
  const int warp = static_cast<int>(ptx::thread_index()) / warp_size;
  if (p.slot_mapping.data == nullptr) {
    for (int word = warp; word < words; word += warps) {
      const int n = word * warp_size + lane;
      note(word, n < count && is_own(run_at(p, base + n)));
    }
    return;
  }
  constexpr int at_once = 4;
  for (int first = warp; first < words; first += at_once * warps) {
    i64 slots[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int n = (first + i * warps) * warp_size + lane;
      slots[i] = n < count ? integer_at(p.slot_mapping, base + n) : -1;
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      note(first + i * warps, exists(p, slots[i]) && block_of(hash_of(slots[i])) == ptx::block_index());
    }
  }
}

/// Writes what the noted runs have for this warp. Half of the warps write K, the others V, in turn from run
/// to run.
template <AppendConfig C>
TANDEM_DEVICE void write_noted(const AppendParams& p, const u32* noted, int base, int count) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  const int warp = static_cast<int>(ptx::thread_index()) / warp_size;
  const int words = ceil_div(count, warp_size);
  for (int first = 0; first < words; first += warp_size) {
    const u32 bits = first + lane < words ? ptx::load_shared(noted + first + lane) : 0U;
    for (u32 some = ptx::ballot(bits != 0); some != 0; some &= some - 1) {
      const int of = ptx::find_first_set(some);
      for (u32 mine = ptx::shuffle(bits, of); mine != 0; mine &= mine - 1) {
        const Run run = run_at(p, base + (first + of) * warp_size + ptx::find_first_set(mine));
        const int place = (warp + turn_of(hash_of(run.number))) % warps;
        const int row = static_cast<int>(static_cast<u32>(place / 2 - run.first_row) % (warps / 2));
        if (row >= run.rows) continue;
        if (place % 2 == 0) {
          write_rows<C, C.rotary>(p, p.k, p.k_found, run, row);
        } else if (p.v.rows != nullptr) {
          write_rows<C, false>(p, p.v, p.v_found, run, row);
        }
      }
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
  for (int base = 0; base < p.runs && p.heads_kv > 0; base += append_batch) {
    const int count = min(append_batch, p.runs - base);
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
