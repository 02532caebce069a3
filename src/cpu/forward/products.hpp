// The two products of a tile: a block of keys against a stripe of queries, which lie in the lanes.
#pragma once

#include "cpu/forward/ahead.hpp"
#include "cpu/forward/stripe.hpp"
#include "cpu/forward/tile_products.hpp"
#include "cpu/simd/product.hpp"

namespace tandem::cpu::TANDEM_TARGET {

template <typename Math, int rows, int vecs>
TANDEM_INLINE void score_rows(const typename Math::Word* k, std::int64_t k_stride,
                              const typename Math::Word* q, int depth, float* scores) {
  Vec acc[rows][vecs];
  for (auto& row : acc) {
    for (Vec& a : row) a = zero();
  }
  multiply_tile<Math, rows, vecs>(acc, k, k_stride, 1, q, stripe_lanes<Math>, depth);
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vecs; ++v) store(acc[r][v], scores + r * stripe_lanes<Math> + v * vec_lanes);
  }
}

/// Calls f<rows>(first) for tiles of rows that make up `count`.
template <int vecs, typename Function>
TANDEM_INLINE void for_row_tiles(int count, const Function& f) {
  constexpr int most = tile_rows(vecs);
  int r = 0;
  // Eight rows are two tiles of four, not one of six and two of one.
  while (count - r >= most && (most != 6 || count - r != 8)) {
    f.template operator()<most>(r);
    r += most;
  }
  if constexpr (most > 4) {
    for (; r + 4 <= count; r += 4) f.template operator()<4>(r);
  }
  for (; r < count; ++r) f.template operator()<1>(r);
}

/// S^T = K Q^T for `count` keys.
template <typename Math, int vecs>
requires(!on_tiles<Math>)
    [[gnu::noinline]] void score(const typename Math::Word* k, std::int64_t k_stride, int count,
                                 const typename Math::Word* q, int depth, float* scores, Ahead& ahead) {
  for_row_tiles<vecs>(
      count, [&]<int rows>(int j) __attribute__((always_inline)) {
        ahead.fetch_share();
        score_rows<Math, rows, vecs>(k + j * k_stride, k_stride, q, depth, scores + j * stripe_lanes<Math>);
      });
}

template <typename Math, int rows, int vecs>
TANDEM_INLINE void accumulate_rows(const typename Math::Word* v, std::int64_t v_stride,
                                   const typename Math::Word* p, int depth, float* out) {
  Vec acc[rows][vecs];
  for (auto& row : acc) {
    for (Vec& a : row) a = zero();
  }
  multiply_tile<Math, rows, vecs>(acc, v, 1, v_stride, p, stripe_lanes<Math>, depth);
  for (int r = 0; r < rows; ++r) {
    for (int i = 0; i < vecs; ++i) {
      float* const sum = out + r * stripe_lanes<Math> + i * vec_lanes;
      store(hn::Add(load(sum), acc[r][i]), sum);
    }
  }
}

/// O^T += V^T P^T over `depth` words of keys, for `dims` columns of V. The block has a sum of its own, which
/// is then added (lane_totals.hpp says why).
template <typename Math, int vecs>
requires(!on_tiles<Math>)
    [[gnu::noinline]] void accumulate(const typename Math::Word* v, std::int64_t v_stride, int dims,
                                      const typename Math::Word* p, int depth, float* out) {
  for_row_tiles<vecs>(
      dims, [&]<int rows>(int c) __attribute__((always_inline)) {
        accumulate_rows<Math, rows, vecs>(v + c, v_stride, p, depth, out + c * stripe_lanes<Math>);
      });
}

/// Calls f with the number of registers as a constant.
template <typename Math, typename Function>
TANDEM_INLINE void with_vecs(int vecs, Function f) {
  if (vecs == 1) return f.template operator()<1>();
  if constexpr (stripe_vecs < Math >> 2) {
    if (vecs == 2) return f.template operator()<2>();
  }
  if constexpr (stripe_vecs < Math >> 3) {
    if (vecs == 3) return f.template operator()<3>();
  }
  f.template operator()<stripe_vecs<Math>>();
}

}  // namespace tandem::cpu::TANDEM_TARGET
