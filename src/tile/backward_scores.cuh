// What the threads of the main backward kernel do with scores that are in their registers, on every GPU: from
// S^T to P^T and dS^T, and dK and dV to global memory. How products are made and tiles loaded is the
// family's.
#pragma once

#include "ops/backward/config.hpp"
#include "ptx/math.cuh"
#include "tile/backward_tiles.cuh"
#include "tile/captured_gradients.cuh"
#include "tile/functions.cuh"
#include "tile/logits.cuh"
#include "tile/pipeline.cuh"
#include "tile/select.cuh"
#include "tile/softmax.cuh"
#include "tile/store_rows.cuh"

namespace tandem {

namespace tile {

/// How many scores of a query block a thread has.
template <auto C>
constexpr int scores_of_thread = C.tiling.block_m / (C.halves_queries() ? 4 : 2);

/// Which of the units of 64 keys is worked on.
template <int units>
struct KeyUnit {
  int key_unit = 0;
  TANDEM_DEVICE void select_unit(int unit) { key_unit = unit; }
};
template <>
struct KeyUnit<1> {
  static constexpr int key_unit = 0;
  static TANDEM_DEVICE void select_unit(int /*unit*/) {}
};

/// A thread of the warps that compute, four of which are a warpgroup. `SharedType` has the rows' LSE and
/// delta by stage.
template <auto C, typename SharedType>
struct BackwardScores : FunctionKeys<C.functions, scores_of_thread<C>, C.functions.given()>,
                        KeyUnit<C.key_units()> {
  using QPosition = typename Ring<C.q_stages>::Position;
  using DoutPosition = typename Ring<C.dout_stages>::Position;
  static constexpr int scores = scores_of_thread<C>;
  static constexpr int slopes = C.sloped() ? scores / 2 : 1;
  static constexpr int threads = C.consumers * warpgroup_size;
  /// A mask hides keys inside a sequence.
  static constexpr bool hides = C.mask.causal || C.mask.local || C.functions.given();
  /// Blocks that a list says are whole go without the mask function.
  template <bool masked>
  static constexpr bool unmasked = C.functions.block_lists && !masked;
  /// P of a hidden pair. -0 marks it where P is read again, beside a dP that may be NaN.
  static constexpr float hidden_probability = C.functions.captured_gradients ? -0.0F : 0.0F;

  const BackwardKernelParams<C>& p;
  SharedType& shared;
  const int warpgroup;
  const int thread;  ///< in the warpgroup
  const FragmentPosition position;
  const float scale_log2;  ///< the scale itself where a score function takes the scaled score
  const int group;         ///< query heads of a KV head
  typename Ring<C.key_stages()>::Position k_at;  ///< family sm90
  Ring<1>::Position v_at;
  QPosition q_at;  ///< the stages that are read
  DoutPosition dout_at;

  TANDEM_DEVICE BackwardScores(const BackwardKernelParams<C>& params, SharedType& s, int warpgroup_,
                               int thread_)
      : p(params),
        shared(s),
        warpgroup(warpgroup_),
        thread(thread_),
        position(thread_),
        scale_log2(C.functions.score_function ? params.score.scale : params.score.scale * log2_e),
        group(params.heads_q / params.heads_kv) {}

  /// This warpgroup's first key of the tile, or of the unit of keys.
  TANDEM_DEVICE int key_at() const { return C.owns_keys() ? warpgroup * 64 : this->key_unit * 64; }
  /// This warpgroup's first query of a block.
  TANDEM_DEVICE int query_at() const { return C.halves_queries() ? warpgroup * 2 * scores : 0; }
  /// The thread's first query, where the block's first is `at`.
  template <typename T>
  TANDEM_DEVICE T from_first_query(T at) const {
    if constexpr (C.halves_queries()) return at + query_at() + position.first_col;
    return at + position.first_col;
  }
  /// The buffer of this block's LSE.
  TANDEM_DEVICE int lse_stage() const {
    if constexpr (C.schedule.overlaps_tiles) return dout_at.stage;
    return q_at.stage;
  }
  TANDEM_DEVICE int dq_row_group() const { return warpgroup % C.tiling.row_groups(); }
  TANDEM_DEVICE int dq_column_at() const { return warpgroup / C.tiling.row_groups() * C.dq_columns(); }

  /// The queries that see a key, counted from `query`: from `first` on, and before `end` where a window says
  /// so. Queries past the end have an LSE of +inf.
  TANDEM_DEVICE void find_queries(const BackwardTile& t, int key, int query, int& first, int& end) const {
    first = key < t.visible.seqlen_k ? t.visible.first_query(key) - query : C.tiling.block_m;
    end = C.mask.local ? t.visible.end_query(key) - query : C.tiling.block_m;
  }

  /// Computes P^T of query block m from S^T, packed as the product for dV reads it. With a softcap or a
  /// score function `sloped` is P^T times the slope. Where P is kept in f32, it takes S's place and is packed
  /// later: there are not enough registers for both beside dP, dK and dV. What the mask hides is set to 0
  /// after the exponential, so that neither a NaN nor scale 0 matters.
  template <bool masked>
  TANDEM_DEVICE void probabilities(const BackwardTile& t, int m, float (&s)[scores],
                                   u32 (&packed)[scores / 2], u32 (&sloped)[slopes]) const {
    const float* lse = from_first_query<const float*>(shared.lse_log2[lse_stage()]);
    const int query = from_first_query(m * C.tiling.block_m);
    float scale[2];
    int first[2];
    int end[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = key_at() + position.row(h);
      scale[h] = hides ? ptx::load_shared(shared.key_scale_log2 + row) : scale_log2;
      find_queries(t, t.first_key + row, query, first[h], end[h]);
    }
#pragma unroll
    for (int j = 0; j < scores / 4; ++j) {
      const auto [x, y] = ptx::load_shared(reinterpret_cast<const ptx::Float2*>(lse + 8 * j));
      const float subtract[2] = {x, y};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float p_each[2];
        float slope[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float score = s[4 * j + 2 * h + e];
          if constexpr (C.functions.given() && !(unmasked<masked> && !C.functions.score_function)) {
            // `m` counts from where the tile starts, if that is staggered.
            const int at = from_first_query(BackwardTiles<C>::passing(t, m) * C.tiling.block_m);
            p_each[e] = function_probability<unmasked<masked>>(at + 8 * j + e, h, score, subtract[e],
                                                               scale[h], slope[e]);
          } else {
            p_each[e] = probability(score, subtract[e], scale[h], slope[e]);
          }
          if constexpr (masked) {
            if (8 * j + e < first[h] || (C.mask.local && 8 * j + e >= end[h])) {
              p_each[e] = hidden_probability;
              slope[e] = 0.0F;
            }
          }
        }
        if constexpr (C.keeps_p()) {
          s[4 * j + 2 * h] = p_each[0];
          s[4 * j + 2 * h + 1] = p_each[1];
        } else {
          packed[2 * j + h] = pack<C.tiling.element>(p_each[0], p_each[1]);
        }
        if constexpr (C.sloped()) {
          sloped[2 * j + h] = pack<C.tiling.element>(p_each[0] * slope[0], p_each[1] * slope[1]);
        }
      }
    }
  }

  TANDEM_DEVICE float probability(float score, float lse_log2, float scale, float& slope) const {
    if constexpr (C.functions.dropout) slope = 1.0F;
    return probability_of<C.transform>(score, lse_log2, scale, p.score, slope);
  }

  /// What the score function takes: the scaled score, and its slope where that is capped.
  TANDEM_DEVICE float function_input(float score, float scale, float& slope) const {
    constexpr ScoreTransform transform = C.functions.score_function ? C.transform : ScoreTransform::raw;
    return transformed_score<transform>(score, scale, p.score, slope);
  }

  /// P of the thread's key h and a query, through the caller's functions. `seen`: the mask function
  /// hides nothing.
  template <bool seen>
  TANDEM_DEVICE float function_probability(int query, int h, float score, float lse_log2, float scale,
                                           float& slope) const {
    const float x = function_input(score, scale, slope);
    const Logit logit = this->logit_of(query, h, x);
    bool hidden = (!seen && !logit.visible) || lse_log2 == ptx::infinity();
    float probability_of = 0.0F;
    if constexpr (C.functions.score_function) {
      hidden = hidden || logit.value == -ptx::infinity();
      slope *= logit.slope;
      probability_of = ptx::exp2(ptx::fma(logit.value, log2_e, -lse_log2));
    } else {
      probability_of = probability(score, lse_log2, scale, slope);
    }
    if (hidden) slope = 0.0F;
    return hidden ? hidden_probability : probability_of;
  }

  /// Computes dS^T = P^T (dP^T - delta), packed for dK and dQ. `p_of` is P^T in f32 or packed, or P^T times
  /// the slope.
  template <typename P, int n>
  TANDEM_DEVICE void score_gradients(u32 (&packed)[scores / 2], const P (&p_of)[n],
                                     const float (&dp)[scores]) const {
    const auto low = [&](int i) {
      if constexpr (n == scores) return p_of[2 * i];
      return unpack_low<C.tiling.element>(static_cast<u32>(p_of[i]));
    };
    const auto high = [&](int i) {
      if constexpr (n == scores) return p_of[2 * i + 1];
      return unpack_high<C.tiling.element>(static_cast<u32>(p_of[i]));
    };
    const float* delta = from_first_query<const float*>(shared.delta[dout_at.stage]);
#pragma unroll
    for (int j = 0; j < scores / 4; ++j) {
      const auto [x, y] = ptx::load_shared(reinterpret_cast<const ptx::Float2*>(delta + 8 * j));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = 2 * j + h;
        packed[i] = pack<C.tiling.element>(low(i) * (dp[2 * i] - x), high(i) * (dp[2 * i + 1] - y));
      }
    }
  }
  /// Computes dS^T from P^T in f32, which `p_packed` then has.
  TANDEM_DEVICE void score_gradients(u32 (&packed)[scores / 2], u32 (&p_packed)[scores / 2],
                                     const float (&p_f32)[scores], const float (&dp)[scores]) const {
    score_gradients(packed, p_f32, dp);
    convert<C.tiling.element>(p_packed, p_f32);
  }
  /// Computes dS^T, if there may be a slope.
  TANDEM_DEVICE void score_gradients(u32 (&packed)[scores / 2], const u32 (&packed_p)[scores / 2],
                                     const u32 (&sloped)[slopes], const float (&dp)[scores]) const {
    if constexpr (C.sloped()) return score_gradients(packed, sloped, dp);
    score_gradients(packed, packed_p, dp);
  }

  // ---- Gradients of captured tensors ----

  /// Keeps what the score function takes until dP is there, if a gradient depends on it: in 16 bits, as the
  /// scores of a product of that type are, since for 32 there are not enough registers.
  static constexpr int kept_inputs = C.functions.captured_gradients ? scores / 2 : 1;
  TANDEM_DEVICE void keep_inputs(const float (&s)[scores], u32 (&inputs)[kept_inputs]) const {
    if (!UserFunctions<C.functions.digest>::gradients_read_score()) return;
#pragma unroll
    for (int i = 0; i < kept_inputs; ++i) {
      const float scale = ptx::load_shared(shared.key_scale_log2 + key_at() + position.row(i % 2));
      float slope[2];
      const float low = function_input(s[2 * i], scale, slope[0]);
      const float high = function_input(s[2 * i + 1], scale, slope[1]);
      inputs[i] = pack<C.tiling.element>(saturated(low), saturated(high));
    }
  }
  static TANDEM_DEVICE float saturated(float x) {
    constexpr float largest = 65504.0F;
    if constexpr (C.tiling.element == Element::bf16) return x;
    return least(greatest(x, -largest), largest);
  }

  /// P before dropout, which these gradients take: kept where dropout clears entries of it.
  static constexpr int whole_p = C.functions.dropout && C.functions.captured_gradients ? scores / 2 : 1;
  TANDEM_DEVICE void keep_whole(u32 (&whole)[whole_p], const u32 (&packed)[scores / 2]) const {
    if constexpr (whole_p > 1) copy(whole, packed);
  }
  TANDEM_DEVICE void add_captured_gradients(const BackwardTile& t, int m, const u32 (&inputs)[kept_inputs],
                                            const u32 (&whole)[whole_p], const u32 (&packed)[scores / 2],
                                            float (&dp)[scores]) const {
    if constexpr (whole_p > 1) {
      add_captured_gradients(t, m, inputs, whole, dp);
    } else if constexpr (C.functions.captured_gradients) {
      add_captured_gradients(t, m, inputs, packed, dp);
    }
  }
  /// Adds what the pairs of query block m owe to the elements that they read. `whole` is P^T before dropout,
  /// `dp` dP^T behind it, which this overwrites. All lanes of a warp call.
  TANDEM_DEVICE void add_captured_gradients(const BackwardTile& t, int m, const u32 (&inputs)[scores / 2],
                                            const u32 (&whole)[scores / 2], float (&dp)[scores]) const {
    const float* delta = from_first_query<const float*>(shared.delta[dout_at.stage]);
#pragma unroll
    for (int i = 0; i < scores; ++i) {
      const u32 bits = whole[i / 2] >> (i % 2 * 16) & 0xffffU;
      const float subtract = ptx::load_shared(delta + i / 4 * 8 + i % 2);
      dp[i] =
          bits == 0x8000U ? 0.0F : ptx::unpack<C.tiling.element>(static_cast<u16>(bits)) * (dp[i] - subtract);
    }
    const int query = ptx::forgotten(from_first_query(BackwardTiles<C>::passing(t, m) * C.tiling.block_m));
    const auto input = [&](int i) {
      return i % 2 == 0 ? unpack_low<C.tiling.element>(inputs[i / 2])
                        : unpack_high<C.tiling.element>(inputs[i / 2]);
    };
    tile::add_captured_gradients<C.functions>(*this, p.gradients, query, dp, input);
  }

  // ---- Dropout ----

  /// Finds what is kept of query block m, for `drop`. All lanes of a warp call.
  TANDEM_DEVICE void draw(const BackwardTile& t, int m) {
    const DropoutParams& d = p.functions.dropout;
    const int query = from_first_query(BackwardTiles<C>::passing(t, m) * C.tiling.block_m);
    const int row = position.first_row % 8;
    constexpr int of_word = scores < 32 ? scores : 32;
#pragma unroll
    for (int word = 0; word < scores / of_word; ++word) {
      this->kept_bits[word] = kept_scores<of_word, C.functions.dropout_places>(
          d, query + 2 * of_word * word, t.first_key + key_at() + position.first_row - row, row, t.batch,
          this->function_head);
    }
  }
  TANDEM_DEVICE bool keeps(int score) const {
    return (this->kept_bits[score / 32] >> score % 32 & 1U) != 0;
  }
  /// Clears entries of P, once dS no longer needs them. The kept ones are scaled with dV.
  TANDEM_DEVICE void drop(u32 (&packed)[scores / 2]) const {
#pragma unroll
    for (int i = 0; i < scores / 2; ++i)
      packed[i] &= (keeps(2 * i) ? 0xffffU : 0U) | (keeps(2 * i + 1) ? 0xffff0000U : 0U);
  }
  /// Clears entries of dP, and scales the others.
  TANDEM_DEVICE void drop(float (&dp)[scores]) const {
#pragma unroll
    for (int i = 0; i < scores; ++i) dp[i] = keeps(i) ? dp[i] * p.functions.dropout.scale : 0.0F;
  }

  TANDEM_DEVICE bool needs_mask(const BackwardTile& t, int m) const {
    const bool edge = m < t.blocks.inner_first || (C.mask.local && m >= t.blocks.inner_end);
    if constexpr (C.functions.block_lists) return edge || !this->whole_block;
    return edge;
  }

  /// The query blocks that follow are those of head g of the group.
  TANDEM_DEVICE void begin_head(const BackwardTile& t, int g) {
    if constexpr (C.functions.given()) this->function_head = t.head_kv * group + g;
  }
  /// All lanes of a warp call its functions.
  TANDEM_DEVICE QueryVisits<C, true> visits(const BackwardTile& t) const {
    if constexpr (C.functions.given()) return {p, t, this->function_head};
    return {p, t, 0};
  }
  /// The query block of a visit; with lists, needs_mask then answers for it.
  TANDEM_DEVICE int begin_visit(const BackwardTile& t, int visit) {
    const auto [block, whole] = visits(t).at(visit);
    if constexpr (C.functions.block_lists) this->whole_block = whole;
    return block;
  }

  using KeyGradientElement = typename Select<C.f32_dk_dv, float, u16>::type;
  /// Writes dK of the tile's keys that this warpgroup has, from column `first_col` on.
  template <int n>
  TANDEM_DEVICE void store_keys(const BackwardTile& t, const float (&dk)[n], int first_col = 0) {
    const int batch = p.packed_k ? 0 : t.batch;
    RowsOf<KeyGradientElement> rows{static_cast<KeyGradientElement*>(p.dk) + batch * p.dk_stride.batch +
                                        t.head_kv * p.dk_stride.head +
                                        static_cast<i64>(t.begin_k) * p.dk_stride.row,
                                    p.dk_stride.row, p.head_dim_qk, p.dk_vectors};
    if constexpr (C.f32_dk_dv) rows.added = (p.added & added_dk) != 0;
    store_rows<C.tiling.element>(rows, dk, p.score.scale, t.first_key + key_at(), first_col,
                                 t.visible.seqlen_k, t.end_k, thread);
  }
  /// Writes dV of the tile's keys that this warpgroup has, from column `first_col` on.
  template <int n>
  TANDEM_DEVICE void store_values(const BackwardTile& t, const float (&dv)[n], int first_col = 0) {
    const int batch = p.packed_k ? 0 : t.batch;
    RowsOf<KeyGradientElement> rows{static_cast<KeyGradientElement*>(p.dv) + batch * p.dv_stride.batch +
                                        t.head_kv * p.dv_stride.head +
                                        static_cast<i64>(t.begin_k) * p.dv_stride.row,
                                    p.dv_stride.row, p.head_dim_v, p.dv_vectors};
    if constexpr (C.f32_dk_dv) rows.added = (p.added & added_dv) != 0;
    float scale = 1.0F;
    if constexpr (C.functions.dropout) scale = p.functions.dropout.scale;
    store_rows<C.tiling.element>(rows, dv, scale, t.first_key + key_at(), first_col, t.visible.seqlen_k,
                                 t.end_k, thread);
  }
};

}  // namespace tile

}  // namespace tandem
