// One new row, by one warp: copied, embedded, rounded to codes, or made of them.
#pragma once

#include "ops/cache/common/append_runs.cuh"
#include "ops/cache/common/stored_rows.cuh"

namespace tandem::append_rows {

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

/// A lane's share of the vectors of a row, `per_head` of each head: every 32nd. Divides once a row.
struct RowVectors {
  int per_head;
  int head_step, vector_step;
  int head, vector;

  TANDEM_DEVICE explicit RowVectors(int vectors_of_head) : per_head(max(vectors_of_head, 1)) {
    const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
    head_step = warp_size / per_head;
    vector_step = warp_size - head_step * per_head;
    head = lane / per_head;
    vector = lane - head * per_head;
  }
  TANDEM_DEVICE void advance() {
    vector += vector_step;
    const bool next_head = vector >= per_head;
    vector -= next_head ? per_head : 0;
    head += head_step + (next_head ? 1 : 0);
  }
};

/// Copies `count` pieces at even distances in bytes, `at_once` of them under way.
template <typename Piece, int at_once>
TANDEM_DEVICE void copy_pieces(const u8* from, i64 from_step, u8* to, i64 to_step, int count) {
  for (; count > 0; count -= at_once) {
    Piece piece[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (i < count) piece[i] = ptx::load_global(reinterpret_cast<const Piece*>(from + i * from_step));
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (i < count) ptx::store_global(reinterpret_cast<Piece*>(to + i * to_step), piece[i]);
    }
    from += at_once * from_step;
    to += at_once * to_step;
  }
}

/// Copies elements of `bytes` bytes: all heads of a row. Where heads are neighbours in both, a lane has every
/// 32nd piece of them together, and otherwise its pieces of each.
template <int bytes, bool vectors, int at_once>
TANDEM_DEVICE void copy_row(const u8* from, i64 from_head, u8* to, i64 to_head, int heads, int columns) {
  using Piece = typename PieceOf<bytes, vectors>::Type;
  constexpr int size = static_cast<int>(sizeof(Piece));
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  const int of_head = columns * bytes / size;
  const bool neighbours = from_head == columns && to_head == columns;
  const int span = neighbours ? warp_size : of_head;
  const int count = neighbours ? (heads * of_head - lane + warp_size - 1) / warp_size : heads;
  const i64 from_step = neighbours ? i64{warp_size} * size : from_head * bytes;
  const i64 to_step = neighbours ? i64{warp_size} * size : to_head * bytes;
#pragma unroll 1
  for (int n = lane; n < span; n += warp_size) {
    copy_pieces<Piece, at_once>(from + n * size, from_step, to + n * size, to_step, count);
  }
}

/// A channel after the embedding, `second` in its pair or first. Products are rounded before they are added,
/// as on the CPU.
TANDEM_DEVICE float turned(float x, float other, float cos, float sin, bool second) {
  const float straight = ptx::multiply(x, cos);
  const float across = ptx::multiply(other, sin);
  return second ? straight + across : straight - across;
}

/// Embeds a pair of channels.
TANDEM_DEVICE void embed_pair(float& first, float& second, float cos, float sin) {
  const float x = first;
  first = turned(x, second, cos, sin, false);
  second = turned(second, x, cos, sin, true);
}

/// `count` values of the embedding's tables from pair `pair` on.
template <AppendConfig C, int count>
TANDEM_DEVICE void load_angles(float (&cos)[count], float (&sin)[count], const AppendParams& p, i64 position,
                               int pair) {
  constexpr Stored table = C.f32_tables ? Stored::f32 : C.from;
  const int pairs = p.rotary_dim / 2;
  stored::load<table, C.vectors>(cos, stored::at<table>(p.cos, position * p.cos_stride), pair, pairs);
  stored::load<table, C.vectors>(sin, stored::at<table>(p.sin, position * p.sin_stride), pair, pairs);
}

/// Eight channels from `col` on after the embedding, of a head's row that begins at `row`.
template <AppendConfig C>
TANDEM_DEVICE void embed(float (&x)[8], const AppendParams& p, i64 position, const u8* row, int col,
                         int columns) {
  if (col >= p.rotary_dim) return;
  if constexpr (C.interleaved) {
    float c[4];
    float s[4];
    load_angles<C>(c, s, p, position, col / 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) embed_pair(x[2 * i], x[2 * i + 1], c[i], s[i]);
  } else {
    const int half = p.rotary_dim / 2;
    const bool second = col >= half;
    const int pair = second ? col - half : col;
    float c[8];
    float s[8];
    float other[8];
    load_angles<C>(c, s, p, position, pair);
    stored::load<C.from, C.vectors>(other, row, second ? pair : col + half, columns);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = turned(x[i], other[i], c[i], s[i], second);
  }
}

/// Eight elements of a head's row to the cache, or to q_out, which are lost. `of_16_bits`: as new rows have
/// them.
template <AppendConfig C, Stored target, bool of_16_bits>
TANDEM_DEVICE void store_vector(float (&x)[8], const AppendTensor& t, const Token& token, u8* to, int head,
                                int col) {
  u8* const out = stored::at<target>(to, head * t.cache_stride.head);
  float scale = 1.0F;
  if constexpr (stored::is_code(target) || stored::is_code(C.from)) {
    if (t.scales != nullptr) {
      const float* scales = t.scales + token.sequence * t.scale_batch + head * t.scale_head;
      if constexpr (stored::is_code(C.from)) scales += token.index * t.scale_row;
      scale = ptx::load_global(scales);
    }
  }
  if constexpr (stored::is_code(target)) {
    stored::store_codes<target, C.vectors, of_16_bits>(x, scale, out, col, t.columns);
  } else {
    if constexpr (stored::is_code(C.from)) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = ptx::multiply(x[i], scale);
    }
    stored::store<target, C.vectors>(x, out, col, t.columns);
  }
}

/// All heads of a row with an embedding. Where pairs are of both halves of the embedded channels, a lane has
/// eight of both.
template <AppendConfig C, Stored target>
TANDEM_DEVICE void write_embedded_row(const AppendParams& p, const AppendTensor& t, const Token& token,
                                      const u8* from, u8* to, int heads) {
  const i64 position = position_of(p, token);
  const int half = C.interleaved ? 0 : p.rotary_dim / 2;
  for (RowVectors at(half / 8 + ceil_div(t.columns - 2 * half, 8)); at.head < heads; at.advance()) {
    const u8* const row = stored::at<C.from>(from, at.head * t.row_stride.head);
    const bool pairs = at.vector < half / 8;
    const int col = pairs ? 8 * at.vector : half + 8 * at.vector;
    float x[8];
    stored::load<C.from, C.vectors>(x, row, col, t.columns);
    if (pairs) {
      float y[8];
      stored::load<C.from, C.vectors>(y, row, col + half, t.columns);
#pragma unroll
      for (int first = 0; first < 8; first += 4) {
        float c[4];
        float s[4];
        load_angles<C>(c, s, p, position, col + first);
#pragma unroll
        for (int i = 0; i < 4; ++i) embed_pair(x[first + i], y[first + i], c[i], s[i]);
      }
      store_vector<C, target, false>(y, t, token, to, at.head, col + half);
    }
    if constexpr (C.interleaved) embed<C>(x, p, position, row, col, t.columns);
    store_vector<C, target, false>(x, t, token, to, at.head, col);
  }
}

/// All heads of a row from `from` to `to`, of element type `target`.
template <AppendConfig C, Stored target, bool embedded>
TANDEM_DEVICE void write_row(const AppendParams& p, const AppendTensor& t, const Token& token, const u8* from,
                             u8* to, int heads) {
  if constexpr (embedded) {
    write_embedded_row<C, target>(p, t, token, from, to, heads);
  } else if constexpr (C.from == target) {
    // Beside an embedding there are no registers for more.
    constexpr int at_once = C.rotary ? 2 : 4;
    copy_row<stored_bytes(C.from), C.vectors, at_once>(from, t.row_stride.head, to, t.cache_stride.head,
                                                       heads, t.columns);
  } else {
    constexpr int at_once = C.vectors && !C.finds_scales ? 2 : 1;
    RowVectors at(ceil_div(t.columns, 8));
    while (at.head < heads) {
      float x[at_once][8];
      int heads_of[at_once];
      int vectors_of[at_once];
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        heads_of[i] = at.head;
        vectors_of[i] = at.vector;
        if (at.head < heads) {
          stored::load<C.from, C.vectors>(x[i], stored::at<C.from>(from, at.head * t.row_stride.head),
                                          8 * at.vector, t.columns);
        }
        at.advance();
      }
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        if (heads_of[i] < heads)
          store_vector<C, target, C.from != Stored::f32>(x[i], t, token, to, heads_of[i], 8 * vectors_of[i]);
      }
    }
  }
}

/// Writes a row as codes with a scale for each head, which is found and written to `scales`. Heads stand
/// side by side in the warp, each with lanes for all of its columns or with all lanes. Of a row of more
/// than 256 columns those behind are read twice, the second time from L1.
template <AppendConfig C, Stored target, bool embedded>
TANDEM_DEVICE void write_scaled_row(const AppendParams& p, const AppendTensor& t, const Token& token,
                                    const u8* from, u8* to, float* scales, i64 scale_head) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  const int of_head = ceil_div(t.columns, 8);
  int lanes = 1;
  while (lanes < of_head && lanes < warp_size) lanes *= 2;
  const int vector = lane % lanes;
  const i64 position = embedded ? position_of(p, token) : 0;
  for (int first = 0; first < p.heads_kv; first += warp_size / lanes) {
    const int head = first + lane / lanes;
    const int vectors = head < p.heads_kv ? of_head : 0;
    const u8* const row = stored::at<C.from>(from, head * t.row_stride.head);
    auto load = [&](float(&x)[8], int col) {
      stored::load<C.from, C.vectors>(x, row, col, t.columns);
      if constexpr (embedded) embed<C>(x, p, position, row, col, t.columns);
    };
    float mine[8];  // a lane's first columns, mostly all of them
    float x[8];
    const auto each_other = [&](const auto& use) {
      for (int n = vector + lanes; n < vectors; n += lanes) {
        load(x, 8 * n);
        use(x, 8 * n);
      }
    };
    const auto largest = [&](const auto& add) {
      stored::Magnitude magnitude;
      if (vector < vectors) add(magnitude, mine);
      each_other([&](float(&y)[8], int) { add(magnitude, y); });
      magnitude.share(lanes);
      return magnitude;
    };
    if (vector < vectors) load(mine, 8 * vector);
    stored::Magnitude magnitude = largest([](stored::Magnitude& m, const float(&y)[8]) { m.add(y); });
    const bool finite = magnitude.finite();
    const bool all_finite = !ptx::any_lane(!finite);
    if (!all_finite) magnitude = largest([](stored::Magnitude& m, const float(&y)[8]) { m.add_finite(y); });
    const stored::RowScale scale = stored::scale_of<target>(magnitude, finite);
    const auto store = [&](float(&y)[8], int col) {
#pragma unroll
      for (int i = 0; i < 8 && all_finite; ++i) y[i] = ptx::multiply(y[i], scale.inverse);
#pragma unroll
      for (int i = 0; i < 8 && !all_finite; ++i) y[i] = stored::product(y[i], scale.inverse);
      stored::store_quotients<target, C.vectors>(y, stored::at<target>(to, head * t.cache_stride.head), col,
                                                 t.columns);
    };
    if (vector < vectors) store(mine, 8 * vector);
    each_other(store);
    if (vector == 0 && vectors > 0) ptx::store_global(scales + head * scale_head, scale.stored);
  }
}
}  // namespace tandem::append_rows
