// Functions of the user's own in the forward pass: before a block of keys is staged, which pairs of it are
// visible; after its products, logits out of scores.
#pragma once

#include "cpu/forward/finish_row.hpp"
#include "cpu/forward/softmax.hpp"
#include "cpu/functions/bounds.hpp"
#include "cpu/functions/lanes.hpp"
#include "cpu/simd/philox.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// What one register of rows sees of a block: nothing outside keys [begin, end), in whole chunks of keys.
/// Lanes of each key are in FunctionScratch::seen unless all of the block is.
struct MaskedRows {
  int begin;
  int end;
  int all;
  int unused;
};
static_assert(sizeof(MaskedRows) == masked_rows_bytes);

/// Where the MaskedRows and lanes of register `vec` of stripe `stripe` are, and a program's memory.
template <typename Math>
struct FunctionMemory {
  [[gnu::always_inline]] static FunctionMemory at(const ForwardTile& t, const ForwardScratch& layout,
                                                  int stripe, int vec) {
    const FunctionScratch s = function_scratch(t.functions->words, t.block_q, t.block_k);
    std::byte* const base = t.scratch + layout.bytes;
    const int index = stripe * stripe_vecs<Math> + vec;
    return {reinterpret_cast<float*>(base + s.memory), reinterpret_cast<MaskedRows*>(base + s.rows) + index,
            reinterpret_cast<std::uint16_t*>(base + s.seen) + index * seen_stride(t.block_k)};
  }
  float* values;
  MaskedRows* masked;
  std::uint16_t* seen;
};

/// The place of a register of rows that starts at stacked row `first`.
TANDEM_INLINE FunctionPlace place_of(const ForwardTile& t, std::int64_t first) {
  FunctionPlace place;
  place.batch = static_cast<std::int32_t>(t.batch);
  place.seqlen_q = static_cast<std::int32_t>(t.seqlen_q);
  place.seqlen_k = static_cast<std::int32_t>(t.seqlen_k);
  std::int64_t row = first / t.group;
  std::int64_t head = first % t.group;
  for (int i = 0; i < vec_lanes; ++i) {
    place.query[i] = static_cast<std::int32_t>(row);
    place.head[i] = static_cast<std::int32_t>(t.head + head);
    if (++head == t.group) {
      head = 0;
      ++row;
    }
  }
  return place;
}

/// Before the blocks of keys of a tile: what programs compute once for all of it.
template <typename Math>
TANDEM_INLINE void prepare_functions(const ForwardTile& t, const ForwardScratch& layout) {
  float* const memory = FunctionMemory<Math>::at(t, layout, 0, 0).values;
  const FunctionPlace place = place_of(t, t.first);
  for (const FunctionProgram* program : {t.functions->score, t.functions->mask}) {
    if (program != nullptr) evaluate_uniform(*program, place, memory);
  }
}

/// What the mask function says of stacked rows [first_row, first_row + rows) and keys [begin, begin + count).
TANDEM_INLINE Visible visible_to_rows(const ForwardTile& t, std::int64_t first_row, int rows,
                                      std::int64_t begin, int count) {
  if (t.functions->mask == nullptr) return Visible::all;
  return visible_of(*t.functions->mask,
                    {.batch = t.batch,
                     .seqlen_q = t.seqlen_q,
                     .seqlen_k = t.seqlen_k,
                     .head = {.low = t.head, .high = t.head + t.group - 1},
                     .query = {.low = first_row / t.group, .high = (first_row + rows - 1) / t.group},
                     .key = {.low = begin, .high = begin + count - 1}});
}

/// Keys that a mask is asked about at a time: beside its edge most of them are seen by all rows of a
/// register, or by none.
constexpr int mask_keys = 32;

/// Which keys [begin, begin + count) a register of rows sees; whether it sees any. Without a mask it sees all
/// that the window leaves.
template <typename Math>
bool see_by_register(const ForwardTile& t, const FunctionProgram* mask, const FunctionMemory<Math>& memory,
                     const Stripe<Math>& s, std::int64_t first_row, int vec, std::int64_t begin, int count) {
  Block<Math> block{};
  block.begin = begin;
  block.count = count;
  const bool whole = begin >= s.all_begin && begin + count <= s.all_end;
  const LaneKeys range = whole ? all_keys(count) : lane_keys(s, block, vec);
  if (mask == nullptr && whole) {
    *memory.masked = {.begin = 0, .end = count, .all = 1, .unused = 0};
    return true;
  }
  const int lanes = s.count - vec * vec_lanes < vec_lanes ? s.count - vec * vec_lanes : vec_lanes;
  const auto rows = static_cast<std::uint16_t>((1U << lanes) - 1U);
  __builtin_memset(memory.seen, 0, static_cast<unsigned long>(count) * sizeof(std::uint16_t));
  SeenLanes seen;
  FunctionPlace place = place_of(t, first_row + vec * vec_lanes);
  const bool asks = mask != nullptr && mask->by_range;
  const int most = asks ? mask_keys : function_keys;
  for (int key = range.begin; key < range.end; key += most) {
    place.first_key = static_cast<std::int32_t>(begin + key);
    place.keys = range.end - key < most ? range.end - key : most;
    Visible said = mask == nullptr ? Visible::all : Visible::some;
    if (asks) said = visible_to_rows(t, first_row + vec * vec_lanes, lanes, place.first_key, place.keys);
    if (said == Visible::none) {
      seen.always = 0;
      continue;
    }
    const FunctionSource visible = evaluate_mask(said == Visible::all ? nullptr : mask, place, memory.values);
    const auto window = [&](int j) __attribute__((always_inline)) {
      const IVec at = hn::Set(i32_lanes, key + j);
      return hn::VecFromMask(i32_lanes, hn::AndNot(hn::Lt(at, range.first), hn::Lt(at, range.last)));
    };
    write_lanes(visible, place.keys, rows, !range.partial, window, key, memory.seen + key, seen);
  }
  MaskedRows& masked = *memory.masked;
  masked.all = range.begin == 0 && range.end == count && seen.always == rows ? 1 : 0;
  constexpr int chunk = Math::key_chunk;
  masked.begin = seen.first / chunk * chunk;
  const int end = (seen.last + chunk - 1) / chunk * chunk;
  masked.end = end < count ? end : count;
  if (seen.last == 0) masked.begin = masked.end = 0;
  return seen.last > 0;
}

/// Finds what all rows of a tile see of a block of keys; whether any sees any.
template <typename Math>
bool see_by_functions(const ForwardTile& t, const ForwardScratch& layout, const Stripes<Math>& stripes,
                      std::int64_t begin, int count) {
  // Most blocks of sparse masks are hidden from all of a tile, which is then asked about once.
  const Visible of_tile = visible_to_rows(t, t.first, t.count, begin, count);
  if (of_tile == Visible::none) return false;
  bool any = false;
  for (int i = 0; i < stripes.count; ++i) {
    const Stripe<Math>& s = stripes.of[i];
    if (begin >= s.end || begin + count <= s.begin) continue;
    const std::int64_t first_row = t.first + static_cast<std::int64_t>(i) * stripe_lanes<Math>;
    const Visible visible =
        of_tile == Visible::all ? of_tile : visible_to_rows(t, first_row, s.count, begin, count);
    const FunctionProgram* const mask = visible == Visible::all ? nullptr : t.functions->mask;
    for (int v = 0; v < s.vecs; ++v) {
      const FunctionMemory<Math> memory = FunctionMemory<Math>::at(t, layout, i, v);
      if (visible == Visible::none) {
        *memory.masked = {.begin = 0, .end = 0, .all = 0, .unused = 0};
      } else {
        any |= see_by_register(t, mask, memory, s, first_row, v, begin, count);
      }
    }
  }
  return any;
}

/// The rows of a stripe, for functions.
template <typename Math>
struct FunctionRows {
  FunctionRows(const ForwardTile& tile, const ForwardScratch& scratch, const Logits& logits_, int stripe_,
               std::int64_t begin_)
      : t(tile),
        layout(scratch),
        logits(logits_),
        plain(logits_.without_transform()),
        stripe(stripe_),
        begin(begin_) {}

  const ForwardTile& t;
  const ForwardScratch& layout;
  const Logits& logits;
  Logits plain;  ///< scales what make_logits leaves
  int stripe;
  std::int64_t begin;  ///< the block's first key

  [[nodiscard]] LaneKeys keys(int vec, int count) const {
    const MaskedRows& masked = *FunctionMemory<Math>::at(t, layout, stripe, vec).masked;
    LaneKeys k = all_keys(count);
    k.begin = masked.begin < masked.end ? masked.begin : count;
    k.end = masked.begin < masked.end ? masked.end : 0;
    return k;
  }

  /// Scores of a register's keys become logits, -inf where they are not visible. Returns the keys, which need
  /// no other mask.
  LaneKeys make_logits(int vec, LaneKeys keys, float* scores) const {
    const FunctionMemory<Math> memory = FunctionMemory<Math>::at(t, layout, stripe, vec);
    float* const of_lane = scores + vec * vec_lanes;
    const bool all = memory.masked->all != 0;
    const auto finish = [&](Vec logit, int key) __attribute__((always_inline)) {
      if (!all) logit = hn::IfThenElse(mask_of(memory.seen + key), logit, broadcast(negative_infinity));
      store(logit, of_lane + key * stripe_lanes<Math>);
    };
    if (t.functions->score != nullptr) {
      const std::int64_t first_row = t.first + static_cast<std::int64_t>(stripe) * stripe_lanes<Math>;
      FunctionPlace place = place_of(t, first_row + vec * vec_lanes);
      for (int key = keys.begin; key < keys.end; key += function_keys) {
        place.first_key = static_cast<std::int32_t>(begin + key);
        place.keys = keys.end - key < function_keys ? keys.end - key : function_keys;
        place.scores = of_lane + key * stripe_lanes<Math>;
        place.score_step = stripe_lanes<Math>;
        // So few keys at a time that the first-level cache keeps them from one loop to the next.
        scale_and_cap(place.scores, place.keys);
        evaluate(*t.functions->score, place, memory.values);
        const ProgramValue& made = t.functions->score->value;
        if (made.is_score && all) continue;
        const FunctionSource value = source_of(made, place, memory.values);
        for (int j = 0; j < place.keys; ++j) finish(fetch(value, j), key + j);
      }
    } else {
      scale_and_cap(of_lane + keys.begin * stripe_lanes<Math>, keys.end - keys.begin);
      for (int key = keys.begin; !all && key < keys.end; ++key)
        finish(load(of_lane + key * stripe_lanes<Math>), key);
    }
    keys.partial = false;
    return keys;
  }

  /// Clears the exponentials of a register that dropout does not keep, once they are in the softmax's sum.
  /// What is kept is scaled with the row.
  void drop(int vec, const LaneKeys& keys, float* scores) const {
    if (t.functions->dropout == nullptr) return;
    FunctionPlace place =
        place_of(t, t.first + static_cast<std::int64_t>(stripe) * stripe_lanes<Math> + vec * vec_lanes);
    for (int key = keys.begin; key < keys.end; key += function_keys) {
      std::uint16_t kept[function_keys + 8] = {};  // lanes are read eight bytes at a time
      place.first_key = static_cast<std::int32_t>(begin + key);
      place.keys = keys.end - key < function_keys ? keys.end - key : function_keys;
      write_kept(*t.functions->dropout, place, kept);
      for (int j = 0; j < place.keys; j += Math::elements_per_word) {
        float* const word =
            scores + vec * vec_lanes + (key + j) / Math::elements_per_word * stripe_lanes<Math>;
        if constexpr (Math::elements_per_word == 1) {
          store(hn::IfThenElseZero(mask_of(kept + j), load(word)), word);
        } else {
          const UVec low = hn::IfThenElseZero(bits_mask(kept + j), hn::Set(u32_lanes, 0xFFFFU));
          const UVec high = hn::IfThenElseZero(bits_mask(kept + j + 1), hn::Set(u32_lanes, 0xFFFF0000U));
          store(bits_as_f32(hn::And(f32_as_bits(load(word)), hn::Or(low, high))), word);
        }
      }
    }
  }

 private:
  static auto bits_mask(const std::uint16_t* lanes) { return hn::RebindMask(u32_lanes, mask_of(lanes)); }

  /// What a function sees, out of raw products: the scaled score, softcapped.
  void scale_and_cap(float* scores, int count) const {
    const bool transforms = logits.transforms();
    if (!transforms && (t.functions->score == nullptr || logits.cap_in == 1.0F)) return;
    for (int key = 0; key < count; ++key) {
      float* const s = scores + key * stripe_lanes<Math>;
      store(transforms ? logits.transform(load(s)) : hn::Mul(load(s), broadcast(logits.cap_in)), s);
    }
  }
};

}  // namespace tandem::cpu::TANDEM_TARGET
