// The caller's functions on scores, where logits are made: what their printed text is written in, and its
// place among the scores that a thread holds.
#pragma once

#include "ops/functions/config.hpp"
#include "problem/interval.hpp"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/dropout.cuh"
#include "tile/mask.cuh"
#include "tile/rows.cuh"
#include "tile/softmax.cuh"

namespace tandem::tile {

/// The functions of a digest. The text behind the kernel's source (gpu/function_source) specialises it:
///
///   Row, Key       what depends on a query and its head alone, and on a key alone
///   row(), key()   make them
///   pair()         makes the Logit of a score
///
/// and with a mask function, for lists of blocks:
///
///   row_values, write_row()   the integers (the nearest of 32 bits) and booleans (0 or -1) that it keeps of
///                            a row
///   key_values, write_key()   likewise of a key
///   bounds()                 the range of the mask function over ranges of those
///
/// and where the gradients of what the score function reads are wanted, for each read g of such a tensor:
///
///   gradient_count()         how many there are
///   gradients_read_score()   whether any of them depends on the score
///   gradient_pattern(g)      its ElementPattern
///   gradient()               the ElementSlope of a pair
template <u64 digest>
struct UserFunctions;

/// What functions make of a pair's score. The kernel that does not read a field does not compute it.
struct Logit {
  float value;
  float slope;   ///< the derivative of `value` by the score
  bool visible;  ///< what the mask function says
};

/// An element that a pair reads, where its gradient is, and the derivative of the logit by it.
struct ElementSlope {
  i64 address;
  float value;
};
/// How the elements of one read lie among pairs.
struct ElementPattern {
  bool by_query;  ///< the element depends on the query, or on the pair's score
  bool by_key;
  bool apart;  ///< queries have elements of their own
};

/// A sequence, as functions see it.
struct FunctionSequence {
  const FunctionParams* params;
  i32 batch;
  i32 seqlen_q;
  i32 seqlen_k;
};

// ---- What the printed text is written in. Integers wrap. ----

template <typename Int>
struct UnsignedOf {
  using Type = u32;
};
template <>
struct UnsignedOf<i64> {
  using Type = u64;
};
/// The unsigned type of an Int, which is i32 or i64.
template <typename Int>
using Unsigned = typename UnsignedOf<Int>::Type;

template <typename Int>
TANDEM_DEVICE Int add_wrapped(Int a, Int b) {
  return static_cast<Int>(static_cast<Unsigned<Int>>(a) + static_cast<Unsigned<Int>>(b));
}
template <typename Int>
TANDEM_DEVICE Int subtract_wrapped(Int a, Int b) {
  return static_cast<Int>(static_cast<Unsigned<Int>>(a) - static_cast<Unsigned<Int>>(b));
}
template <typename Int>
TANDEM_DEVICE Int multiply_wrapped(Int a, Int b) {
  return static_cast<Int>(static_cast<Unsigned<Int>>(a) * static_cast<Unsigned<Int>>(b));
}
template <typename Int>
TANDEM_DEVICE Int absolute(Int a) {
  return a < 0 ? subtract_wrapped(Int{0}, a) : a;
}
TANDEM_DEVICE float absolute(float a) {
  return a < 0.0F ? -a : a;
}
/// Towards -infinity; by 0 it is 0.
template <typename Int>
TANDEM_DEVICE Int floor_divide(Int a, Int b) {
  if (b == 0) return 0;
  if (b == -1) return subtract_wrapped(Int{0}, a);
  const Int quotient = a / b;
  return quotient * b != a && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}
/// With the sign of the divisor; by 0 it is 0.
template <typename Int>
TANDEM_DEVICE Int remainder(Int a, Int b) {
  if (b == 0 || b == -1) return 0;
  const Int rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
template <typename Int>
TANDEM_DEVICE Int least(Int a, Int b) {
  return min(a, b);
}
/// A NaN of either argument stays, as in PyTorch's minimum and maximum.
TANDEM_DEVICE float least(float a, float b) {
  return a != a || a < b ? a : b;
}
template <typename Int>
TANDEM_DEVICE Int greatest(Int a, Int b) {
  return max(a, b);
}
TANDEM_DEVICE float greatest(float a, float b) {
  return a != a || b < a ? a : b;
}
/// Towards 0; what is out of range becomes the nearest integer, and NaN 0, as the instruction has it.
TANDEM_DEVICE i32 to_integer(float x) {
  if (!(x > -0x1p31F)) return x != x ? 0 : static_cast<i32>(-0x7fffffff - 1);
  return x < 0x1p31F ? static_cast<i32>(x) : 0x7fffffff;
}
TANDEM_DEVICE i32 to_integer(i64 x) {
  return static_cast<i32>(x);
}
TANDEM_DEVICE i64 to_wide(float x) {
  if (!(x > -0x1p63F)) return x != x ? 0 : -0x7fffffffffffffff - 1;
  return x < 0x1p63F ? static_cast<i64>(x) : 0x7fffffffffffffff;
}
TANDEM_DEVICE i64 to_wide(i32 x) {
  return x;
}
/// The nearest integer of 32 bits.
TANDEM_DEVICE i32 saturated(i64 x) {
  return static_cast<i32>(min(max(x, i64{-0x7fffffff - 1}), i64{0x7fffffff}));
}
TANDEM_DEVICE float exponential(float x) {
  return ptx::exp2(x * log2_e);
}
TANDEM_DEVICE float logarithm(float x) {
  return ptx::log2(x) * ln_2;
}
/// 1 / (1 + e^-x), with e^-x at most 2^126: its reciprocal is then no subnormal number.
TANDEM_DEVICE float sigmoid(float x) {
  return ptx::reciprocal(1.0F + ptx::exp2(least(-x * log2_e, 126.0F)));
}
/// As the softcap has it (tile/logits.cuh): absolute error 1e-7; tanh.approx leaves 5e-4.
TANDEM_DEVICE float tanh_of(float x) {
  return 1.0F - 2.0F * ptx::reciprocal(1.0F + ptx::exp2(x * (2.0F * log2_e)));
}
TANDEM_DEVICE float divide(float a, float b) {
  return a * ptx::reciprocal(b);
}

/// An index as it is used: below 0 it counts from the end, and out of range it is clamped. `positive`: it is
/// known not to be below 0.
template <bool positive>
TANDEM_DEVICE i32 clamped(const CapturedTensor& t, int dimension, i32 index) {
  if constexpr (positive) return min(index, t.last[dimension]);
  return min(max(index < 0 ? index + t.last[dimension] + 1 : index, 0), t.last[dimension]);
}
/// Bytes to it. A stride of 32 bits is one instruction, one of 64 bits four.
template <bool wide>
TANDEM_DEVICE i64 bytes_to(const CapturedTensor& t, int dimension, i32 at) {
  if constexpr (wide) return at * t.strides[dimension];
  return static_cast<i64>(at) * static_cast<i32>(t.strides[dimension]);
}
template <typename T>
TANDEM_DEVICE T element_at(i64 address) {
  return ptx::load_global(reinterpret_cast<const T*>(address));
}
TANDEM_DEVICE float read_f32(i64 address) {
  return element_at<float>(address);
}
template <Element type>
TANDEM_DEVICE float read_half(i64 address) {
  return ptx::unpack<type>(element_at<u16>(address));
}
TANDEM_DEVICE i32 read_i32(i64 address) {
  return element_at<i32>(address);
}
TANDEM_DEVICE i64 read_i64(i64 address) {
  return element_at<i64>(address);
}
TANDEM_DEVICE i32 read_s8(i64 address) {
  return static_cast<signed char>(element_at<u8>(address));
}

// ---- Their place in the forward kernel ----

/// The list of a tile's blocks: its length first.
TANDEM_DEVICE u32* list_at(const BlockLists& lists, int batch, int head, int tile) {
  return lists.data + batch * lists.batch_stride + head * lists.head_stride +
         static_cast<i64>(tile) * lists.stride;
}
TANDEM_DEVICE u32* list_of(const BlockLists& lists, const TileIndex& t) {
  return list_at(lists, t.batch, t.head, t.m);
}
/// A list's length or entry. All lanes of a warp call; the shuffle lets ptxas know that it is uniform.
TANDEM_DEVICE u32 uniform_entry(const u32* entry) {
  return ptx::shuffle(ptx::load_global(entry), 0);
}

/// What functions keep of a thread's two rows for the time of a tile. Nothing without functions.
template <Functions F, bool given = F.given()>
struct FunctionRows : DroppedRows<F.dropout, F.dropout_places> {
  using User = UserFunctions<F.digest>;
  typename User::Row function_rows[2];
  FunctionSequence function_sequence;

  /// `first` is the query that the thread's warpgroup begins with.
  template <Tiling T, typename Params>
  TANDEM_DEVICE void set_rows(const Params& p, const TileIndex& t, int first,
                              const FragmentPosition& position) {
    function_sequence = {&p.functions, t.batch, t.seqlen_q, t.seqlen_k};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const TileRow row = row_at<T>(p, t, first, position.row(h));
      function_rows[h] = User::row(function_sequence, row.head, row.query);
      if constexpr (F.dropout) {
        if (h == this->odd()) this->set_dropped(p.functions.dropout, t.batch, row.head, row.query);
      }
    }
  }

  /// Turns scores into logits, -inf where the mask function hides a pair, unless it hides none of the block
  /// (`full`). `key` is the thread's first one.
  template <int n>
  TANDEM_DEVICE void apply(float (&s)[n], int key, bool full) const {
    if (full && !F.score_function) return;
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const typename User::Key of_key = User::key(function_sequence, key + 8 * j + e);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& score = s[4 * j + 2 * h + e];
          const Logit logit = User::pair(function_sequence, function_rows[h], of_key, score);
          score = full || logit.visible ? logit.value : -ptx::infinity();
        }
      }
    }
  }
};
template <Functions F>
struct FunctionRows<F, false> : DroppedRows<false, false> {};

// ---- Their place in the backward kernels ----

/// What functions keep of a thread's two keys for the time of a tile, and of its `scores` of a query block.
/// Nothing without functions.
template <Functions F, int scores, bool given>
struct FunctionKeys {
  using User = UserFunctions<F.digest>;
  typename User::Key function_keys[2];
  FunctionSequence function_sequence;
  int function_head = 0;                   ///< whose queries pass by
  bool whole_block = false;                ///< the mask function hides none of the block's pairs
  u32 kept_bits[(scores + 31) / 32] = {};  ///< with dropout: the scores that are kept, a bit each

  /// `first` is the warpgroup's first key of the tile.
  template <typename Params, typename Tile>
  TANDEM_DEVICE void set_keys(const Params& p, const Tile& t, int first, const FragmentPosition& position) {
    function_sequence = {&p.functions, t.batch, t.visible.seqlen_q, t.visible.seqlen_k};
#pragma unroll
    for (int h = 0; h < 2; ++h)
      function_keys[h] = User::key(function_sequence, t.first_key + first + position.row(h));
  }

  /// The logit of a query's scaled score with key h.
  TANDEM_DEVICE Logit logit_of(int query, int h, float score) const {
    return User::pair(function_sequence, User::row(function_sequence, function_head, query), function_keys[h],
                      score);
  }
};
template <Functions F, int scores>
struct FunctionKeys<F, scores, false> {};

}  // namespace tandem::tile
