// s8 attention on a matrix unit: sums of products are 32-bit integers, as on a GPU.
//
//   S^T = K Q^T      32 keys x 32 rows at a time, 64 channels a product
//   P^T              four keys a word, unsigned
//   V^T P^T          32 columns x 32 rows, 64 keys a product, added to O^T in f32 block by block
//
// Tiles are those of forward/tile_products.hpp; four channels or keys are a word where bf16 has two.
#pragma once

#include "cpu/eight_bit/softmax.hpp"
#include "cpu/eight_bit/work.hpp"

#if defined(TANDEM_MATRIX_UNIT)

#include "cpu/simd/transpose.hpp"

namespace tandem::cpu::TANDEM_TARGET::eight_bit {

/// What a block against a stripe needs, in the memory of Scratch::scores.
struct UnitScratch {
  float* products;         ///< [quant_block][stripe_lanes], S^T; then up to 128 columns of V^T P^T
  std::uint32_t* weights;  ///< [quant_block / 4][stripe_lanes], P^T

  explicit UnitScratch(const Work& w)
      : products(w.s.scores),
        weights(reinterpret_cast<std::uint32_t*>(w.s.scores + quant_block * stripe_lanes)) {}
};

TANDEM_INLINE IVec load_whole(const float* at) {
  return hn::LoadU(i32_lanes, reinterpret_cast<const std::int32_t*>(at));
}

/// Whole numbers from 0 to 255, lane by lane, of four keys in a word. Numbers are added to 2^23, whose bits
/// above the lowest byte cancel.
TANDEM_INLINE UVec join_weights(Vec x0, Vec x1, Vec x2, Vec x3) {
  const auto bits = [](Vec x) { return f32_as_bits(x).raw; };
  const __m512i three = _mm512_ternarylogic_epi32(bits(x0), _mm512_slli_epi32(bits(x1), 8),
                                                  _mm512_slli_epi32(bits(x2), 16), 0x96);
  return UVec{
      _mm512_ternarylogic_epi32(three, _mm512_slli_epi32(bits(x3), 24), _mm512_set1_epi32(0x4B000000), 0x96)};
}

/// Sums of products of a block's keys, the last 32 of which may reach past them.
template <int vecs>
[[gnu::noinline]] void score_on_unit(const Work& w, const KeyBlock& b, const float* q, float* products) {
  const std::int64_t bytes = key_bytes(w.t.head_dim_qk, true);
  const std::uint8_t* const k = w.tile.k_quantized + b.begin * bytes;
  for (int j = 0; j < b.count; j += 32) {
    clear_sums<16 * vecs>();
    const TileRows keys{.tiles = k + j * bytes, .stride = 16, .below = 4 * bytes, .step = 256};
    add_products_of_tiles<16 * vecs, TileOperands::s8>(keys, q, stripe_lanes, bytes / 64);
    store_sums<16 * vecs>(products + j * stripe_lanes, stripe_lanes);
  }
}

/// O^T = O^T * growth + factor * V^T P^T, 32 columns at a time. Products are added to O two steps later, when
/// what the unit has stored can be loaded.
template <int vecs, bool by_column>
[[gnu::noinline]] void accumulate_on_unit(const Work& w, const Stripe& stripe, const KeyBlock& b,
                                          const UnitScratch& s) {
  const int dims = w.t.head_dim_v;
  const std::int64_t wide = value_bytes(dims, true);
  const std::uint8_t* const values = w.tile.v_quantized + b.begin * wide;
  float* const out = w.s.out + static_cast<std::int64_t>(stripe.index) * dims * stripe_lanes;
  const float* const units = w.tile.v_scales + b.begin / quant_block * dims;
  const float unit = w.tile.recipe.v_scales == ScaleGroup::row ? 1.0F : w.tile.v_scales[b.begin];
  // Copies, so that no store is taken for one to them.
  float* const products = s.products;
  const int row = stripe.index * stripe_lanes;
  Vec growth[vecs];
  Vec factor[vecs];
  for (int v = 0; v < vecs; ++v) {
    growth[v] = load(w.s.growth + row + v * vec_lanes);
    factor[v] = load(w.s.factor + row + v * vec_lanes);
    if constexpr (!by_column) factor[v] = hn::Mul(factor[v], broadcast(unit));
  }
  const auto add = [=](int first) {
    const float* from = products + first % quant_block * stripe_lanes;
    float* to = out + first * stripe_lanes;
    const int columns = dims - first < 32 ? dims - first : 32;
#pragma GCC unroll 4
    for (int c = 0; c < columns; ++c, from += stripe_lanes, to += stripe_lanes) {
      for (int v = 0; v < vecs; ++v) {
        const Vec made = hn::ConvertTo(f32_lanes, load_whole(from + v * vec_lanes));
        Vec scale = factor[v];
        if constexpr (by_column) scale = hn::Mul(scale, broadcast(units[first + c]));
        float* const sum = to + v * vec_lanes;
        store(hn::MulAdd(made, scale, hn::Mul(load(sum), growth[v])), sum);
      }
    }
  };
  constexpr int lag = 64;
  for (int c = 0; c < dims; c += 32) {
    clear_sums<16 * vecs>();
    const TileRows columns{.tiles = values + c * 64, .stride = 16, .below = 256, .step = wide * 16};
    add_products_of_tiles<16 * vecs, TileOperands::s8_u8>(columns, s.weights, stripe_lanes,
                                                          (b.count + 63) / 64);
    store_sums<16 * vecs>(products + c % quant_block * stripe_lanes, stripe_lanes);
    if (c >= lag) add(c - lag);
  }
  for (int c = dims > lag ? (dims - 1) / 32 * 32 - lag + 32 : 0; c < dims; c += 32) add(c);
}

/// Beyond this a fused exponent errs by as much as a 255th of P.
constexpr float far_logit = 0x1p12F;

/// soften() for a block whose keys have one scale, without what logits may go through: from sums of products
/// to words of four weights. False, and nothing is done, if some row's logits are far.
template <bool masked>
[[gnu::noinline]] bool soften_plain(const Work& w, const Stripe& stripe, const KeyBlock& b, int lane,
                                    const UnitScratch& s) {
  const int row = stripe.index * stripe_lanes + lane;
  const Vec scale = hn::Mul(load(w.s.q_scale + row), broadcast(w.tile.k_scales[b.begin]));
  const SeenKeys seen = seen_keys(stripe, b, lane);
  const int end = (b.count + 3) / 4 * 4;
  const float* const products = s.products + lane;
  std::uint32_t* const weights = s.weights + lane;
  const IVec none = hn::Set(i32_lanes, -0x7FFFFFFF - 1);
  IVec largest[4];
  for (IVec& l : largest) l = none;
  for (int j = 0; j < end; j += 4) {
    for (int i = 0; i < 4; ++i) {
      IVec x = load_whole(products + (j + i) * stripe_lanes);
      if constexpr (masked) x = hn::IfThenElse(hn::RebindMask(i32_lanes, seen.at(j + i)), x, none);
      largest[i] = hn::Max(x, largest[i]);
    }
  }
  const IVec top = hn::Max(hn::Max(largest[0], largest[1]), hn::Max(largest[2], largest[3]));
  Vec in_tile = hn::Mul(hn::ConvertTo(f32_lanes, top), scale);
  if (!hn::AllFalse(f32_lanes, hn::Gt(hn::Abs(in_tile), broadcast(far_logit)))) {
    in_tile =
        hn::IfThenElse(hn::RebindMask(f32_lanes, hn::Eq(top, none)), broadcast(negative_infinity), in_tile);
    const auto far = hn::And(hn::Gt(hn::Abs(in_tile), broadcast(far_logit)),
                             hn::Lt(hn::Abs(in_tile), broadcast(__builtin_inff())));
    if (!hn::AllFalse(f32_lanes, far)) return false;
  }
  // A row of NaN has no largest logit, as elsewhere; its sum is NaN.
  in_tile = hn::IfThenElse(hn::Eq(in_tile, in_tile), in_tile, broadcast(negative_infinity));
  const Rescaling r = rescale(w, row, in_tile);
  Vec sum = zero();
  for (int j = 0; j < end; j += 4) {
    Vec p[4];
    for (int i = 0; i < 4; ++i) {
      const Vec x = hn::ConvertTo(f32_lanes, load_whole(products + (j + i) * stripe_lanes));
      p[i] = exp2(hn::MulSub(x, scale, r.base));
      if constexpr (masked) p[i] = hn::IfThenElseZero(seen.at(j + i), p[i]);
    }
    sum = hn::Add(sum, hn::Add(hn::Add(p[0], p[1]), hn::Add(p[2], p[3])));
    for (Vec& x : p) x = hn::MulAdd(x, broadcast(u8_p_range), broadcast(0x1p23F));
    hn::StoreU(join_weights(p[0], p[1], p[2], p[3]), u32_lanes, weights + j / 4 * stripe_lanes);
  }
  add_block(w, row, r, sum, broadcast(1.0F / u8_p_range));
  return true;
}

/// Rounded P, as soften() leaves it, to words of four weights.
[[gnu::noinline]] inline void join_rounded(const KeyBlock& b, int lane, const UnitScratch& s) {
  for (int j = 0; j < b.count; j += 4) {
    Vec p[4];
    for (int i = 0; i < 4; ++i) {
      const Vec x = j + i < b.count ? load(s.products + (j + i) * stripe_lanes + lane) : zero();
      p[i] = hn::Add(x, broadcast(0x1p23F));
    }
    hn::StoreU(join_weights(p[0], p[1], p[2], p[3]), u32_lanes, s.weights + j / 4 * stripe_lanes + lane);
  }
}

/// Whether `count` keys have one scale, and none is marked.
TANDEM_INLINE bool have_one_scale(const float* scales, int count) {
  std::uint32_t bits[quant_block];
  __builtin_memcpy(bits, scales, static_cast<std::size_t>(count) * sizeof(float));
  std::uint32_t differ = 0;
  for (int j = 0; j < count; ++j) differ |= bits[j] ^ bits[0];
  return differ == 0 && (bits[0] >> 31) == 0;
}

/// A block's P: from sums of products to words of four weights.
template <int vecs>
void soften_on_unit(const Work& w, const Stripe& stripe, const KeyBlock& b, const UnitScratch& s) {
  const bool plain = w.t.softcap == 0.0F && w.t.scale >= 0.0F && w.tile.recipe.v_scales != ScaleGroup::row &&
                     have_one_scale(w.tile.k_scales + b.begin, b.count);
  const bool masked = b.begin < stripe.all_begin || b.begin + b.count > stripe.all_end;
  const bool whole = !masked && b.count % 4 == 0;
  for (int lane = 0; lane < vecs * vec_lanes; lane += vec_lanes) {
    if (plain &&
        (whole ? soften_plain<false>(w, stripe, b, lane, s) : soften_plain<true>(w, stripe, b, lane, s))) {
      continue;
    }
    soften(w, stripe, b, lane, masked, s.products);
    join_rounded(b, lane, s);
  }
  for (int quad = (b.count + 3) / 4; quad < (b.count + 63) / 64 * 16; ++quad)
    __builtin_memset(s.weights + quad * stripe_lanes, 0, vecs * vec_lanes * sizeof(std::uint32_t));
}

/// Blocks of keys [begin, end) against one stripe.
template <int vecs>
void attend_blocks_on_unit(const Work& w, const Stripe& stripe, std::int64_t begin, std::int64_t end) {
  const float* const q = w.s.q + stripe.index * key_bytes(w.t.head_dim_qk, true) / 4 * stripe_lanes;
  const UnitScratch s(w);
  for (std::int64_t key = begin; key < end; key += quant_block) {
    const int count = end - key < quant_block ? static_cast<int>(end - key) : quant_block;
    const KeyBlock b{.begin = key, .count = count, .opens = true, .closes = true};
    score_on_unit<vecs>(w, b, q, s.products);
    soften_on_unit<vecs>(w, stripe, b, s);
    if (w.tile.recipe.v_scales == ScaleGroup::channel) {
      accumulate_on_unit<vecs, true>(w, stripe, b, s);
    } else {
      accumulate_on_unit<vecs, false>(w, stripe, b, s);
    }
  }
}

/// Keys [begin, end) of a run against one stripe.
inline void attend_run_on_unit(const Work& w, const Stripe& stripe, std::int64_t begin, std::int64_t end) {
  if (stripe.begin > begin) begin = stripe.begin / quant_block * quant_block;
  if (stripe.end < end) end = stripe.end;
  if (begin >= end) return;
  if (stripe.count > vec_lanes) {
    attend_blocks_on_unit<2>(w, stripe, begin, end);
  } else {
    attend_blocks_on_unit<1>(w, stripe, begin, end);
  }
}

/// EightBitKernel::arrange_keys.
inline void arrange_keys(const std::uint8_t* rows, int count, int channels, std::uint8_t* to) {
  const auto bytes = static_cast<int>(key_bytes(channels, true));
  for (int key = 0; key < quant_block; ++key) {
    for (int c = 0; c < bytes; c += 64) {
      const int valid = key >= count ? 0 : channels - c < 64 ? channels - c : 64;
      const __mmask64 some = valid == 64 ? ~__mmask64{0} : (__mmask64{1} << valid) - 1;
      _mm512_store_si512(to + key / 16 * 16 * bytes + c * 16 + key % 16 * 64,
                         _mm512_maskz_loadu_epi8(some, rows + key * channels + c));
    }
  }
}

/// EightBitKernel::arrange_values.
inline void arrange_values(const std::uint8_t* rows, int count, int columns, std::byte* scratch,
                           std::uint8_t* to) {
  auto* const words = reinterpret_cast<std::uint32_t*>(scratch);  // [quadruple of keys][columns]
  static constexpr std::uint8_t zeros[16] = {};
  for (int quad = 0; quad < quant_block / 4; ++quad) {
    const auto row = [&](int i) { return 4 * quad + i < count ? rows + (4 * quad + i) * columns : nullptr; };
    int c = 0;
    for (; c + 16 <= columns; c += 16) {
      const auto bytes = [&](int i) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row(i) != nullptr ? row(i) + c : zeros));
      };
      auto* const out = reinterpret_cast<__m128i*>(words + quad * columns + c);
      const __m128i low01 = _mm_unpacklo_epi8(bytes(0), bytes(1));
      const __m128i high01 = _mm_unpackhi_epi8(bytes(0), bytes(1));
      const __m128i low23 = _mm_unpacklo_epi8(bytes(2), bytes(3));
      const __m128i high23 = _mm_unpackhi_epi8(bytes(2), bytes(3));
      _mm_storeu_si128(out, _mm_unpacklo_epi16(low01, low23));
      _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(low01, low23));
      _mm_storeu_si128(out + 2, _mm_unpacklo_epi16(high01, high23));
      _mm_storeu_si128(out + 3, _mm_unpackhi_epi16(high01, high23));
    }
    for (; c < columns; ++c) {
      std::uint32_t word = 0;
      for (int i = 0; i < 4; ++i)
        word |= row(i) != nullptr ? static_cast<std::uint32_t>(row(i)[c]) << (8 * i) : 0U;
      words[quad * columns + c] = word;
    }
  }
  const int wide = in_tiles(columns);
  for (int quad = 0; quad < quant_block / 4; quad += 16, to += wide * 64) {
    transpose(reinterpret_cast<const float*>(words + quad * columns), columns, 16, columns,
              reinterpret_cast<float*>(to), 16);
    __builtin_memset(to + columns * 64, 0, static_cast<std::size_t>(wide - columns) * 64);
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET::eight_bit

#endif
