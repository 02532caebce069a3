// Writes new keys and values into a cache, and embeds queries: one launch for k, v and q. Bound by memory:
// one read and one write of the new rows.
//
// A row of the cache belongs to one warp: the hash of its number says to which. Every thread block looks at
// all tokens, append_batch at a time, notes the rows that are its own, and its warps write theirs in the
// order of the tokens. So no two warps write to one row, and of tokens that go to one row the last is kept,
// whole: a lane writes the same columns of both. problem/append_problem.hpp has the same rules for the host.
#pragma once

#include "kernels/common/stored_rows.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/warp.cuh"

namespace tandem {

namespace append_rows {

constexpr int warps = append_threads / warp_size;

TANDEM_DEVICE i64 integer_at(const LengthArray& a, i64 i) {
  if (a.wide) return ptx::load_global(static_cast<const i64*>(a.data) + i * a.stride);
  return ptx::load_global(static_cast<const i32*>(a.data) + i * a.stride);
}

TANDEM_DEVICE i64 clamped(i64 x, i64 low, i64 high) {
  return x < low ? low : (x > high ? high : x);
}

struct Token {
  int sequence;
  int index;  ///< in its sequence; with slots its number
  bool used;
};

/// The token in new row `n`.
TANDEM_DEVICE Token token_at(const AppendParams& p, int n) {
  if (p.slot_mapping.data != nullptr) return {0, n, true};
  Token t{0, 0, false};
  if (!p.packed) {
    t = {n / p.rows_new, n % p.rows_new, true};
  } else if (p.batch > 0) {
    int past = p.batch;
    while (past - t.sequence > 1) {
      const int middle = t.sequence + (past - t.sequence) / 2;
      (integer_at(p.cu_seqlens_new, middle) <= n ? t.sequence : past) = middle;
    }
    const i64 begin = clamped(integer_at(p.cu_seqlens_new, t.sequence), 0, p.rows_new);
    const i64 end = clamped(integer_at(p.cu_seqlens_new, t.sequence + 1), begin, p.rows_new);
    t.index = static_cast<int>(n - begin);
    t.used = begin <= n && n < end;
  }
  if (t.used && p.seqused_new.data != nullptr) t.used = t.index < integer_at(p.seqused_new, t.sequence);
  return t;
}

/// The row of the cache, counted over all entries, that a token goes to; -1 if there is none.
TANDEM_DEVICE i64 slot_of(const AppendParams& p, const Token& token) {
  if (!token.used) return -1;
  if (p.slot_mapping.data != nullptr) {
    const i64 slot = integer_at(p.slot_mapping, token.index);
    return slot >= 0 && slot < p.entries * p.entry_rows ? slot : -1;
  }
  const i64 first = integer_at(p.cache_seqlens, token.sequence);
  if (first < 0 || first >= p.rows_of_sequence - token.index) return -1;
  i64 row = first + token.index;
  i64 entry = token.sequence;
  if (p.page_table.data != nullptr) {
    const i64 page = row / p.entry_rows;
    row -= page * p.entry_rows;
    LengthArray pages = p.page_table;
    const i64 bytes = pages.wide ? 8 : 4;
    pages.data = static_cast<const u8*>(pages.data) + token.sequence * p.page_table_batch * bytes;
    entry = integer_at(pages, page);
  } else if (p.cache_batch_idx.data != nullptr) {
    entry = integer_at(p.cache_batch_idx, token.sequence);
  }
  return entry >= 0 && entry < p.entries ? entry * p.entry_rows + row : -1;
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

/// Which of all warps writes a row of the cache: its block, and its place there.
TANDEM_DEVICE u32 hash_of(i64 slot) {
  return static_cast<u32>(slot) ^ static_cast<u32>(slot >> 32);
}
TANDEM_DEVICE u32 block_of(i64 slot) {
  return hash_of(slot) % ptx::grid_size();
}
TANDEM_DEVICE u32 warp_of(i64 slot) {
  return hash_of(slot) / ptx::grid_size() % warps;
}

/// What is copied at once: 16 bytes, or an element.
template <int bytes, bool vectors>
struct PieceOf {
  using Type = ptx::Vec4;
};
template <>
struct PieceOf<1, false> {
  using Type = u8;
};
template <>
struct PieceOf<2, false> {
  using Type = u16;
};
template <>
struct PieceOf<4, false> {
  using Type = u32;
};

/// Copies elements of `bytes` bytes: all heads of a row, four accesses under way at a time.
template <int bytes, bool vectors>
TANDEM_DEVICE void copy_row(const u8* from, i64 from_head, u8* to, i64 to_head, int heads, int columns) {
  using Piece = typename PieceOf<bytes, vectors>::Type;
  constexpr int width = static_cast<int>(sizeof(Piece)) / bytes;
  constexpr int at_once = 4;
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  const int of_head = columns / width;
  const int pieces = heads * of_head;
  for (int first = lane; first < pieces; first += at_once * warp_size) {
    Piece piece[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int n = first + i * warp_size;
      if (n >= pieces) continue;
      const int head = n / of_head;
      piece[i] = ptx::load_global(reinterpret_cast<const Piece*>(from + head * from_head * bytes) +
                                  (n - head * of_head));
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int n = first + i * warp_size;
      if (n >= pieces) continue;
      const int head = n / of_head;
      ptx::store_global(reinterpret_cast<Piece*>(to + head * to_head * bytes) + (n - head * of_head),
                        piece[i]);
    }
  }
}

/// Eight channels from `col` on after the embedding, of a head's row that begins at `row`. Products are
/// rounded before they are added, as on the CPU.
template <AppendConfig C>
TANDEM_DEVICE void embed(float (&x)[8], const AppendParams& p, i64 position, const u8* row, int col,
                         int columns) {
  if (col >= p.rotary_dim) return;
  constexpr Stored table = C.f32_tables ? Stored::f32 : C.from;
  const u8* const cos = stored::at<table>(p.cos, position * p.cos_stride);
  const u8* const sin = stored::at<table>(p.sin, position * p.sin_stride);
  const int half = p.rotary_dim / 2;
  if constexpr (C.interleaved) {
    float c[4];
    float s[4];
    stored::load<table, C.vectors>(c, cos, col / 2, half);
    stored::load<table, C.vectors>(s, sin, col / 2, half);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = x[2 * i];
      const float b = x[2 * i + 1];
      x[2 * i] = ptx::multiply(a, c[i]) - ptx::multiply(b, s[i]);
      x[2 * i + 1] = ptx::multiply(b, c[i]) + ptx::multiply(a, s[i]);
    }
  } else {
    const bool second = col >= half;
    const int pair = second ? col - half : col;
    float c[8];
    float s[8];
    float other[8];
    stored::load<table, C.vectors>(c, cos, pair, half);
    stored::load<table, C.vectors>(s, sin, pair, half);
    stored::load<C.from, C.vectors>(other, row, second ? pair : col + half, columns);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float straight = ptx::multiply(x[i], c[i]);
      const float across = ptx::multiply(other[i], s[i]);
      x[i] = second ? straight + across : straight - across;
    }
  }
}

/// All heads of a row from `from` to `to`, of element type `target`.
template <AppendConfig C, Stored target, bool embedded>
TANDEM_DEVICE void write_row(const AppendParams& p, const AppendTensor& t, const Token& token, const u8* from,
                             u8* to, int heads) {
  if constexpr (C.from == target && !embedded) {
    copy_row<stored_bytes(C.from), C.vectors>(from, t.row_stride.head, to, t.cache_stride.head, heads,
                                              t.columns);
  } else {
    const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
    const int of_head = ceil_div(t.columns, 8);
    const i64 position = embedded ? position_of(p, token) : 0;
    for (int n = lane; n < heads * of_head; n += warp_size) {
      const int head = n / of_head;
      const int col = (n - head * of_head) * 8;
      const u8* const row = stored::at<C.from>(from, head * t.row_stride.head);
      u8* const out = stored::at<target>(to, head * t.cache_stride.head);
      float x[8];
      stored::load<C.from, C.vectors>(x, row, col, t.columns);
      if constexpr (embedded) embed<C>(x, p, position, row, col, t.columns);
      if constexpr (target == Stored::e4m3 || target == Stored::s8) {
        float scale = 1.0F;
        if (t.scales != nullptr) {
          scale = ptx::load_global(t.scales + token.sequence * t.scale_batch + head * t.scale_head);
        }
        stored::store_codes<target, C.vectors>(x, scale, out, col, t.columns);
      } else {
        stored::store<target, C.vectors>(x, out, col, t.columns);
      }
    }
  }
}

/// The same to codes with a scale for each head, which is found and written to `scales`. Heads stand side by
/// side in the warp, each with lanes for all of its columns or with all lanes. A row is read twice, the
/// second time from L1.
template <AppendConfig C, Stored target, bool embedded>
TANDEM_DEVICE void write_scaled_row(const AppendParams& p, const AppendTensor& t, const Token& token,
                                    const u8* from, u8* to, float* scales, i64 scale_head) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  const int of_head = ceil_div(t.columns, 8);
  int lanes = 1;
  while (lanes < of_head && lanes < warp_size) lanes *= 2;
  const int unit = lane % lanes;
  const i64 position = embedded ? position_of(p, token) : 0;
  for (int first = 0; first < p.heads_kv; first += warp_size / lanes) {
    const int head = first + lane / lanes;
    const int units = head < p.heads_kv ? of_head : 0;
    const u8* const row = stored::at<C.from>(from, head * t.row_stride.head);
    auto load = [&](float(&x)[8], int col) {
      stored::load<C.from, C.vectors>(x, row, col, t.columns);
      if constexpr (embedded) embed<C>(x, p, position, row, col, t.columns);
    };
    float x[8];
    stored::Magnitude magnitude;
    for (int n = unit; n < units; n += lanes) {
      load(x, 8 * n);
#pragma unroll
      for (int i = 0; i < 8; ++i) magnitude.take(x[i]);
    }
    magnitude.share(lanes);
    const stored::RowScale scale = stored::scale_of<target>(magnitude);
    for (int n = unit; n < units; n += lanes) {
      load(x, 8 * n);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = stored::product(x[i], scale.inverse);
      stored::store_quotients<target, C.vectors>(x, stored::at<target>(to, head * t.cache_stride.head), 8 * n,
                                                 t.columns);
    }
    if (unit == 0 && units > 0) ptx::store_global(scales + head * scale_head, scale.stored);
  }
}

/// The address of new row `n`.
template <Stored type>
TANDEM_DEVICE const u8* new_row(const AppendParams& p, const void* rows, const Strides& stride, int n) {
  const i64 batch = p.packed ? 0 : n / p.rows_new;
  return stored::at<type>(rows, batch * stride.batch + (n - batch * p.rows_new) * stride.row);
}

template <AppendConfig C, bool embedded>
TANDEM_DEVICE void write_token(const AppendParams& p, const AppendTensor& t, const FoundScales& found,
                               const Token& token, int n, i64 slot) {
  const i64 entry = slot / p.entry_rows;
  u8* const to = stored::at<C.to>(
      t.cache, entry * t.cache_stride.batch + (slot - entry * p.entry_rows) * t.cache_stride.row);
  const u8* const from = new_row<C.from>(p, t.rows, t.row_stride, n);
  if constexpr (C.finds_scales) {
    if (found.data != nullptr) {
      float* const scales =
          found.data + entry * found.stride.batch + (slot - entry * p.entry_rows) * found.stride.row;
      write_scaled_row<C, C.to, embedded>(p, t, token, from, to, scales, found.stride.head);
      return;
    }
  }
  write_row<C, C.to, embedded>(p, t, token, from, to, p.heads_kv);
}

/// Writes the tokens from `base` on whose rows this block has noted.
template <AppendConfig C>
TANDEM_DEVICE void write_noted(const AppendParams& p, const i64* slots, int base, int count) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  const u32 warp = ptx::thread_index() / warp_size;
  for (int first = 0; first < count; first += warp_size) {
    const i64 slot = first + lane < count ? ptx::load_shared(slots + first + lane) : -1;
    u32 mine = ptx::ballot(slot >= 0 && warp_of(slot) == warp);
    for (; mine != 0; mine &= mine - 1) {
      const int i = first + ptx::find_first_set(mine);
      const i64 to = ptx::load_shared(slots + i);
      const Token token = token_at(p, base + i);
      write_token<C, C.rotary>(p, p.k, p.k_found, token, base + i, to);
      if (p.v.rows != nullptr) write_token<C, false>(p, p.v, p.v_found, token, base + i, to);
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
    const Token token = token_at(p, n);
    u8* const to = const_cast<u8*>(new_row<C.from>(p, p.q.cache, p.q.cache_stride, n));
    if (token.used) {
      write_row<C, C.from, true>(p, p.q, token, new_row<C.from>(p, p.q.rows, p.q.row_stride, n), to,
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

/// Three blocks an SM: ptxas would spill to make room for five.
template <AppendConfig C>
TANDEM_KERNEL __launch_bounds__(append_threads, 3) append(const __grid_constant__ AppendParams p) {
  auto* const slots = reinterpret_cast<i64*>(ptx::dynamic_shared());
  const int thread = static_cast<int>(ptx::thread_index());
  for (int base = 0; base < p.tokens && p.heads_kv > 0; base += append_batch) {
    const int count = min(append_batch, p.tokens - base);
    for (int i = thread; i < count; i += append_threads) {
      const i64 slot = append_rows::slot_of(p, append_rows::token_at(p, base + i));
      const bool own = slot >= 0 && append_rows::block_of(slot) == ptx::block_index();
      ptx::store_shared(slots + i, own ? slot : i64{-1});
    }
    ptx::sync_block();
    append_rows::write_noted<C>(p, slots, base, count);
    ptx::sync_block();
  }
  if constexpr (C.rotary) {
    if (p.q.rows != nullptr) append_rows::embed_queries<C>(p);
  }
}

}  // namespace tandem
