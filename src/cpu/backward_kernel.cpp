// The backward pass of one block of queries of one head, compiled for every instruction set.
//
//   P = exp(S - LSE)   dV += P^T dO   dP = dO V^T   dS = scale * slope * P * (dP - delta)   dK += dS^T Q   dQ
//   += dS K
//
// Queries lie in lanes: S^T and dP^T come out of the register tile with one query a lane, so that LSE, delta
// and masks are vectors and nothing is summed across lanes; P^T and dS^T are then the broadcast operands of
// the other three products. Keys are visited in blocks that fit the second-level cache.
// docs/kernels/cpu-backward.md has the arithmetic.
#include "cpu/backward_block.hpp"

#include <sched.h>

#include "cpu/backward_gemm.hpp"
#include "cpu/backward_pack.hpp"
#include "cpu/backward_scratch.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/simd/transpose.hpp"

namespace tandem::cpu::TANDEM_TARGET {
namespace {

TANDEM_INLINE std::int64_t smaller(std::int64_t a, std::int64_t b) {
  return a < b ? a : b;
}
TANDEM_INLINE std::int64_t clamp(std::int64_t x, std::int64_t low, std::int64_t high) {
  return x < low ? low : (x > high ? high : x);
}

struct Range {
  std::int64_t first = 0;
  std::int64_t last = 0;  ///< one past
};

/// Where the sums of dk or dv of a key block are: row r of panel n at data + r * row_step + n * panel_step.
struct Sums {
  float* data = nullptr;
  std::int64_t row_step = 0;
  std::int64_t panel_step = 0;
  std::int64_t columns = 0;
  bool exact = false;  ///< the user's own rows: no column past the last may be written
};

/// Blocks of queries take turns at the sums of a key block, so that the order of additions, and with it every
/// bit of the result, does not depend on threads.
struct Turn {
  std::uint32_t order = 0;
  bool first = false;
  bool last = false;
};

void wait_for(const std::uint32_t* turn, std::uint32_t order) {
  constexpr int spins_before_yield = 256;
  for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != order; ++spins) {
    if (spins >= spins_before_yield) sched_yield();
  }
}

template <typename T>
class QueryBlock {
 public:
  QueryBlock(const BackwardBlock& b, float* scratch)
      : b_(b),
        x_(Scratch::make(b.shape)),
        scratch_(scratch),
        shift_(b.seqlen_k - b.seqlen_q),
        first_query_(b.block * b.shape.block_q),
        queries_(smaller(b.shape.block_q, b.seqlen_q - first_query_)),
        panels_((queries_ + panel_lanes - 1) / panel_lanes) {}

  void run() {
    stage_queries();
    if (b_.dsink != nullptr) add_dsink();
    float* dq = at(x_.dq);
    __builtin_memset(dq, 0, sizeof(float) * static_cast<std::size_t>(b_.shape.block_q * padded(d_qk())));
    const Range keys = visible_keys(first_query_, first_query_ + queries_ - 1);
    const std::int64_t block_k = b_.shape.block_k;
    for (std::int64_t first = keys.first / block_k * block_k; first < keys.last; first += block_k) {
      run_key_block(first);
    }
    write_dq();
  }

 private:
  static constexpr bool paired = has_bf16_dot && __is_same(T, bf16);
  static constexpr std::int64_t pair = paired ? 2 : 1;
  using Scratch = BackwardScratch<paired>;
  using Staged = typename StagedOf<paired>::Type;

  [[nodiscard]] std::int64_t d_qk() const { return b_.shape.head_dim_qk; }
  [[nodiscard]] std::int64_t d_v() const { return b_.shape.head_dim_v; }
  [[nodiscard]] float* at(std::int64_t offset) const { return scratch_ + offset; }
  [[nodiscard]] Staged* staged(std::int64_t offset) const {
    return reinterpret_cast<Staged*>(scratch_ + offset);
  }

  /// Keys that some query of [first, last] sees.
  [[nodiscard]] Range visible_keys(std::int64_t first, std::int64_t last) const {
    Range r{.first = 0, .last = b_.seqlen_k};
    if (b_.window_left >= 0) r.first = clamp(first + shift_ - b_.window_left, 0, b_.seqlen_k);
    if (b_.window_right >= 0) r.last = clamp(last + shift_ + b_.window_right + 1, 0, b_.seqlen_k);
    return r;
  }

  /// Whether query i, which is in use, takes part: it sees a key and its softmax has a sum.
  [[nodiscard]] bool takes_part(std::int64_t i) const {
    const Range keys = visible_keys(i, i);
    return keys.first < keys.last && *row_of<float>(b_.lse, i) != -__builtin_inff();
  }

  /// Packs Q and dO both ways and computes delta. A query that takes no part becomes zeros, whatever its rows
  /// hold.
  void stage_queries() {
    all_finite_ = true;
    for (std::int64_t p = 0; p < panels_; ++p) {
      bool live[panel_lanes];
      bool all_live = true;
      for (std::int64_t lane = 0; lane < panel_lanes; ++lane) {
        const std::int64_t i = first_query_ + p * panel_lanes + lane;
        live[lane] = p * panel_lanes + lane < queries_ && takes_part(i);
        const std::int64_t slot = p * panel_lanes + lane;
        all_live = all_live && live[lane];
        at(x_.live)[slot] = live[lane] ? 1.0F : 0.0F;
        at(x_.lse)[slot] = live[lane] ? *row_of<float>(b_.lse, i) : 0.0F;
        at(x_.delta)[slot] = live[lane] ? delta_of(i) : 0.0F;
      }
      at(x_.panel_live)[p] = all_live ? 1.0F : 0.0F;
      stage_query_panel(b_.q, d_qk(), p, live, at(x_.q_lanes), at(x_.q_panels));
      stage_query_panel(b_.dout, d_v(), p, live, at(x_.dout_lanes), at(x_.dout_panels));
    }
  }

  [[nodiscard]] float delta_of(std::int64_t i) const {
    const float sum = dot_rows(row_of<const T>(b_.dout, i), row_of<const T>(b_.out, i), d_v());
    return b_.dlse.data != nullptr ? sum - *row_of<float>(b_.dlse, i) : sum;
  }

  void stage_query_panel(const HeadRows& src, std::int64_t columns, std::int64_t p, const bool* live,
                         float* lanes, float* panels) {
    Staged* rows = staged(x_.k_rows);  // no keys are staged yet
    const std::int64_t width = padded(columns);
    for (std::int64_t lane = 0; lane < panel_lanes; ++lane) {
      Staged* row = rows + lane * width;
      if (live[lane]) {
        const T* user = row_of<const T>(src, first_query_ + p * panel_lanes + lane);
        stage_row(user, columns, width, row);
        all_finite_ = all_finite_ && all_finite(user, columns);
      } else {
        __builtin_memset(row, 0, static_cast<std::size_t>(width) * sizeof(Staged));
      }
    }
    const std::int64_t words = Scratch::depth(columns);
    transpose(reinterpret_cast<const float*>(rows), width / pair, panel_lanes, static_cast<int>(words),
              lanes + p * panel_lanes * words, panel_lanes);
    to_panels(rows, panel_lanes, width, panels + p * panel_lanes / pair * panel_lanes,
              b_.shape.block_q / pair * panel_lanes);
  }

  /// dsink -= sum over queries of exp(sink - lse) * delta: the sink is a key whose dP is 0.
  void add_dsink() {
    double sum = 0.0;
    for (std::int64_t i = 0; i < queries_; ++i) {
      if (at(x_.live)[i] == 0.0F) continue;
      const float x = (*b_.sink - at(x_.lse)[i]) * log2_e;
      sum += static_cast<double>(hn::GetLane(exp2(broadcast(x)))) * static_cast<double>(at(x_.delta)[i]);
    }
    const std::int64_t blocks = (b_.seqlen_q + b_.shape.block_q - 1) / b_.shape.block_q;
    const auto order = static_cast<std::uint32_t>(b_.group_head * blocks + blocks - 1 - b_.block);
    std::uint32_t* turn =
        b_.turns == nullptr ? nullptr : b_.turns + (b_.seqlen_k + b_.shape.block_k - 1) / b_.shape.block_k;
    if (turn != nullptr) wait_for(turn, order);
    *b_.dsink -= sum;
    if (turn != nullptr) __atomic_store_n(turn, order + 1, __ATOMIC_RELEASE);
  }

  void run_key_block(std::int64_t first_key) {
    first_key_ = first_key;
    keys_ = smaller(b_.shape.block_k, b_.seqlen_k - first_key);
    rows_ = (keys_ + 3) / 4 * 4;
    strips_ = (rows_ + strip_rows - 1) / strip_rows;
    stage_keys();
    masked_ = false;
    for (std::int64_t p = 0; p < panels_; ++p) {
      const Range strips = strips_seen(p);
      for (std::int64_t s = strips.first; s < strips.last; ++s) {
        if (p == 0) prefetch_next_keys(s);
        probabilities(p, s);
      }
      for (std::int64_t s = strips.first; s < strips.last; ++s) score_gradients(p, s);
    }
    // Masked scores count as 0, but 0 times NaN is NaN: only visible pairs may then be multiplied.
    const bool pairwise = masked_ && !(all_finite_ && keys_finite());
    if (!pairwise) add_dq();

    const Turn turn = my_turn();
    std::uint32_t* counter = b_.turns == nullptr ? nullptr : b_.turns + first_key / b_.shape.block_k;
    if (counter != nullptr) wait_for(counter, turn.order);
    const Sums dk = sums(b_.dk_sum, b_.dk, d_qk());
    const Sums dv = sums(b_.dv_sum, b_.dv, d_v());
    if (pairwise) {
      add_pairwise(turn.first, dk, dv);
    } else {
      add_keys(at(x_.p), at(x_.dout_panels), dv, turn.first);
      add_keys(at(x_.ds), at(x_.q_panels), dk, turn.first);
    }
    if (turn.last && b_.dk_sum != nullptr) {
      from_panels<T>(dk.data, dk.panel_step, keys_, d_qk(), b_.dk, first_key);
      from_panels<T>(dv.data, dv.panel_step, keys_, d_v(), b_.dv, first_key);
    }
    if (counter != nullptr) __atomic_store_n(counter, turn.order + 1, __ATOMIC_RELEASE);
  }

  void stage_keys() {
    const std::int64_t k_width = padded(d_qk());
    const std::int64_t v_width = padded(d_v());
    Staged* k = staged(x_.k_rows);
    Staged* v = staged(x_.v_rows);
    for (std::int64_t r = 0; r < keys_; ++r) {
      stage_row(row_of<const T>(b_.k, first_key_ + r), d_qk(), k_width, k + r * k_width);
      stage_row(row_of<const T>(b_.v, first_key_ + r), d_v(), v_width, v + r * v_width);
    }
    const auto rest = static_cast<std::size_t>(rows_ - keys_) * sizeof(Staged);
    __builtin_memset(k + keys_ * k_width, 0, rest * static_cast<std::size_t>(k_width));
    __builtin_memset(v + keys_ * v_width, 0, rest * static_cast<std::size_t>(v_width));
    to_panels(k, rows_, k_width, at(x_.k_panels), b_.shape.block_k / pair * panel_lanes);
  }

  /// Asks for the rows of k and v one key block on, which would otherwise be waited for when they are staged.
  void prefetch_next_keys(std::int64_t s) const {
    const std::int64_t first = first_key_ + b_.shape.block_k + s * strip_rows;
    const std::int64_t last = smaller(first + strip_rows, b_.seqlen_k);
    constexpr auto line = static_cast<std::int64_t>(64 / sizeof(T));
    for (std::int64_t key = first; key < last; ++key) {
      for (std::int64_t c = 0; c < d_qk(); c += line)
        __builtin_prefetch(row_of<const T>(b_.k, key) + c, 0, 2);
      for (std::int64_t c = 0; c < d_v(); c += line) __builtin_prefetch(row_of<const T>(b_.v, key) + c, 0, 2);
    }
  }

  /// Strips of the key block that some query of panel p sees.
  [[nodiscard]] Range strips_seen(std::int64_t p) const {
    const std::int64_t first = first_query_ + p * panel_lanes;
    const Range keys = visible_keys(first, smaller(first + panel_lanes, first_query_ + queries_) - 1);
    const std::int64_t low = clamp(keys.first - first_key_, 0, keys_);
    const std::int64_t high = clamp(keys.last - first_key_, 0, keys_);
    if (low >= high) return {};
    return {.first = low / strip_rows, .last = (high + strip_rows - 1) / strip_rows};
  }

  [[nodiscard]] int rows_of_strip(std::int64_t s) const {
    return static_cast<int>(smaller(strip_rows, rows_ - s * strip_rows));
  }

  /// Whether every lane of panel p takes part and sees every row of strip s.
  [[nodiscard]] bool sees_all(std::int64_t p, std::int64_t s) const {
    const std::int64_t first = first_query_ + p * panel_lanes + shift_;
    const std::int64_t last = first + panel_lanes - 1;
    const std::int64_t first_key = first_key_ + s * strip_rows;
    const std::int64_t last_key = first_key + rows_of_strip(s) - 1;
    if (last_key >= first_key_ + keys_) return false;
    if (b_.window_left >= 0 && first_key < last - b_.window_left) return false;
    if (b_.window_right >= 0 && last_key > first + b_.window_right) return false;
    return at(x_.panel_live)[p] != 0.0F;
  }

  /// Queries of the block, counted from its first one, that see row r of the key block.
  [[nodiscard]] Range queries_seeing(std::int64_t r) const {
    if (r >= keys_) return {};
    const std::int64_t diagonal = first_key_ + r - shift_ - first_query_;
    Range seen{.first = 0, .last = queries_};
    if (b_.window_right >= 0) seen.first = clamp(diagonal - b_.window_right, 0, queries_);
    if (b_.window_left >= 0) seen.last = clamp(diagonal + b_.window_left + 1, 0, queries_);
    return seen;
  }

  /// Lanes of half n of panel p that take part and see row r.
  [[nodiscard]] Mask visible(std::int64_t p, std::int64_t r, int n) const {
    const Range seen = queries_seeing(r);
    const std::int64_t origin = p * panel_lanes + n * vec_lanes;
    const auto lane = hn::Iota(i32_lanes, 0);
    const auto first =
        hn::Set(i32_lanes, static_cast<std::int32_t>(clamp(seen.first - origin, 0, vec_lanes)));
    const auto last = hn::Set(i32_lanes, static_cast<std::int32_t>(clamp(seen.last - origin, 0, vec_lanes)));
    const auto inside = hn::AndNot(hn::Lt(lane, first), hn::Lt(lane, last));
    return hn::And(hn::RebindMask(f32_lanes, inside), hn::Ne(load(at(x_.live) + origin), zero()));
  }

  /// S^T of one strip and panel, then P^T and the weight scale * slope * P that dS needs.
  void probabilities(std::int64_t p, std::int64_t s) {
    const std::int64_t depth = Scratch::depth(d_qk());
    multiply<paired, false>({.a = at(x_.k_rows) + s * strip_rows * Scratch::row_words(d_qk()),
                             .row_step = Scratch::row_words(d_qk()),
                             .step = 1,
                             .b = at(x_.q_lanes) + p * panel_lanes * depth,
                             .depth = depth,
                             .c = at(x_.tile),
                             .c_stride = panel_lanes},
                            rows_of_strip(s));
    const bool masked = !sees_all(p, s);
    masked_ = masked_ || masked;
    if (b_.softcap > 0.0F) {
      masked ? exponentials<true, true>(p, s) : exponentials<true, false>(p, s);
    } else {
      masked ? exponentials<false, true>(p, s) : exponentials<false, false>(p, s);
    }
  }

  template <bool capped, bool masked>
  void exponentials(std::int64_t p, std::int64_t s) {
    const Vec scale = broadcast(b_.scale);
    const Vec cap = broadcast(b_.softcap);
    const Vec inverse_cap = broadcast(capped ? 1.0F / b_.softcap : 0.0F);
    const Vec lse[2] = {load(at(x_.lse) + p * panel_lanes), load(at(x_.lse) + p * panel_lanes + vec_lanes)};
    for (int i = 0; i < rows_of_strip(s); ++i) {
      const std::int64_t r = s * strip_rows + i;
      Vec probability[2];
      for (int n = 0; n < 2; ++n) {
        // Not fused: where one key takes all of a row, lse is this rounded product and the difference is
        // exactly 0.
        Vec logit = hn::Mul(load(at(x_.tile) + i * panel_lanes + n * vec_lanes), scale);
        Vec slope = scale;
        if constexpr (capped) {
          const Vec t = tanh(hn::Mul(logit, inverse_cap));
          logit = hn::Mul(t, cap);
          slope = hn::Mul(scale, hn::NegMulAdd(t, t, broadcast(1.0F)));
        }
        probability[n] = exp2(hn::Mul(hn::Sub(logit, lse[n]), broadcast(log2_e)));
        if constexpr (masked) probability[n] = hn::IfThenElseZero(visible(p, r, n), probability[n]);
        store(hn::Mul(probability[n], slope), at(x_.weight) + r * panel_lanes + n * vec_lanes);
      }
      store_query_row(probability, at(x_.p) + r * x_.p_row + p * panel_lanes / pair);
    }
  }

  /// dP^T of one strip and panel, then dS^T.
  void score_gradients(std::int64_t p, std::int64_t s) {
    const std::int64_t depth = Scratch::depth(d_v());
    multiply<paired, false>({.a = at(x_.v_rows) + s * strip_rows * Scratch::row_words(d_v()),
                             .row_step = Scratch::row_words(d_v()),
                             .step = 1,
                             .b = at(x_.dout_lanes) + p * panel_lanes * depth,
                             .depth = depth,
                             .c = at(x_.tile),
                             .c_stride = panel_lanes},
                            rows_of_strip(s));
    sees_all(p, s) ? differences<false>(p, s) : differences<true>(p, s);
  }

  template <bool masked>
  void differences(std::int64_t p, std::int64_t s) {
    const Vec delta[2] = {load(at(x_.delta) + p * panel_lanes),
                          load(at(x_.delta) + p * panel_lanes + vec_lanes)};
    for (int i = 0; i < rows_of_strip(s); i += pair) {
      const std::int64_t r = s * strip_rows + i;
      Vec ds[pair][2];
      for (int e = 0; e < pair; ++e) {
        for (int n = 0; n < 2; ++n) {
          const Vec dp = load(at(x_.tile) + (i + e) * panel_lanes + n * vec_lanes);
          const Vec weight = load(at(x_.weight) + (r + e) * panel_lanes + n * vec_lanes);
          ds[e][n] = hn::Mul(weight, hn::Sub(dp, delta[n]));
          if constexpr (masked) ds[e][n] = hn::IfThenElseZero(visible(p, r + e, n), ds[e][n]);
        }
        store_query_row(ds[e], at(x_.ds) + (r + e) * x_.p_row + p * panel_lanes / pair);
      }
      if constexpr (paired) {
        for (int n = 0; n < 2; ++n) {
          store(bits_as_f32(pair_bf16(ds[0][n], ds[1][n])),
                at(x_.ds_pairs) + r / 2 * x_.ds_pairs_row + p * panel_lanes + n * vec_lanes);
        }
      }
    }
  }

  /// A panel's queries of one key, as words of P or dS.
  TANDEM_INLINE void store_query_row(const Vec* v, float* words) {
    if constexpr (paired) {
      store(bits_as_f32(join_bf16(v[0], v[1])), words);
    } else {
      store(v[0], words);
      store(v[1], words + vec_lanes);
    }
  }

  void add_dq() {
    const std::int64_t ds_row = paired ? x_.ds_pairs_row : x_.p_row;
    for (std::int64_t n = 0; n < panels_of(d_qk()); ++n) {
      const float* k = at(x_.k_panels) + n * (b_.shape.block_k / pair) * panel_lanes;
      float* dq = at(x_.dq) + n * b_.shape.block_q * panel_lanes;
      for (std::int64_t p = 0; p < panels_; ++p) {
        const Range strips = strips_seen(p);
        const std::int64_t first = strips.first * strip_rows / pair;
        const std::int64_t last = smaller(strips.last * strip_rows, rows_) / pair;
        if (first >= last) continue;
        multiply<paired, true>({.a = at(x_.ds_pairs) + first * ds_row + p * panel_lanes,
                                .row_step = 1,
                                .step = ds_row,
                                .b = k + first * panel_lanes,
                                .depth = last - first,
                                .c = dq + p * panel_lanes * panel_lanes,
                                .c_stride = panel_lanes},
                               panel_lanes);
      }
    }
  }

  [[nodiscard]] Sums sums(float* sum, const HeadRows& user, std::int64_t columns) const {
    if (sum == nullptr) {
      return {.data = row_of<float>(user, first_key_),
              .row_step = user.row_stride,
              .panel_step = panel_lanes,
              .columns = columns,
              .exact = true};
    }
    return {.data = sum + first_key_ * panel_lanes,
            .row_step = panel_lanes,
            .panel_step = b_.sum_rows * panel_lanes,
            .columns = columns};
  }

  [[nodiscard]] Turn my_turn() const {
    const std::int64_t block_q = b_.shape.block_q;
    Range queries{.first = 0, .last = b_.seqlen_q};
    if (b_.window_right >= 0) queries.first = clamp(first_key_ - shift_ - b_.window_right, 0, b_.seqlen_q);
    if (b_.window_left >= 0) {
      queries.last = clamp(first_key_ + keys_ - shift_ + b_.window_left, 0, b_.seqlen_q);
    }
    const std::int64_t first_block = queries.first / block_q;
    const std::int64_t last_block = (queries.last + block_q - 1) / block_q;
    const std::int64_t blocks = last_block - first_block;
    const std::int64_t order = b_.group_head * blocks + last_block - 1 - b_.block;
    return {.order = static_cast<std::uint32_t>(order),
            .first = order == 0,
            .last = order == b_.group * blocks - 1};
  }

  /// sums += A^T B, where A is P or dS and B is dO or Q in panels. The first to come overwrites.
  void add_keys(const float* a, const float* b, const Sums& sums, bool first) {
    for (std::int64_t n = 0; n < panels_of(sums.columns); ++n) {
      const float* panel = b + n * (b_.shape.block_q / pair) * panel_lanes;
      for (std::int64_t s = 0; s < strips_; ++s) {
        const Range seen = panels_seeing(s);
        const std::int64_t first_word = seen.first * panel_lanes / pair;
        const int rows = static_cast<int>(smaller(strip_rows, keys_ - s * strip_rows));
        float* c = sums.data + s * strip_rows * sums.row_step + n * sums.panel_step;
        Product product{.a = a + s * strip_rows * x_.p_row + first_word,
                        .row_step = x_.p_row,
                        .step = 1,
                        .b = panel + first_word * panel_lanes,
                        .depth = (seen.last - seen.first) * panel_lanes / pair,
                        .c = c,
                        .c_stride = sums.row_step};
        const std::int64_t width = smaller(panel_lanes, sums.columns - n * panel_lanes);
        if (sums.exact && width < panel_lanes) {
          product.c = at(x_.tile);
          product.c_stride = panel_lanes;
          multiply<paired, false>(product, rows);
          for (int r = 0; r < rows; ++r) {
            add_edge(at(x_.tile) + r * panel_lanes, width, first, c + r * sums.row_step);
          }
        } else if (first) {
          multiply<paired, false>(product, rows);
        } else if (product.depth > 0) {
          multiply<paired, true>(product, rows);
        }
      }
    }
  }

  static void add_edge(const float* src, std::int64_t width, bool first, float* dst) {
    for (std::int64_t c = 0; c < width; ++c) dst[c] = first ? src[c] : dst[c] + src[c];
  }

  /// Panels that have scores in strip s; they follow one another.
  [[nodiscard]] Range panels_seeing(std::int64_t s) const {
    Range seen;
    for (std::int64_t p = 0; p < panels_; ++p) {
      const Range strips = strips_seen(p);
      if (s < strips.first || s >= strips.last) continue;
      if (seen.last == 0) seen.first = p;
      seen.last = p + 1;
    }
    return seen;
  }

  [[nodiscard]] bool keys_finite() const {
    for (std::int64_t r = 0; r < keys_; ++r) {
      if (!all_finite(row_of<const T>(b_.k, first_key_ + r), d_qk())) return false;
    }
    return true;
  }

  /// P or dS of row r and a query of the block.
  [[nodiscard]] float score(std::int64_t matrix, std::int64_t r, std::int64_t query) const {
    const float* row = at(matrix) + r * x_.p_row;
    if constexpr (paired) {
      bf16 x;
      __builtin_memcpy(&x, reinterpret_cast<const char*>(row) + query * 2, sizeof(x));
      return to_f32(x);
    } else {
      return row[query];
    }
  }

  /// dq, dk and dv of this tile by visible pairs alone: exact where a NaN or infinity lies next to masked
  /// scores.
  void add_pairwise(bool first, const Sums& dk, const Sums& dv) {
    const auto add = [](const T* row, std::int64_t columns, float factor, float* out,
                        std::int64_t panel_step) {
      for (std::int64_t c = 0; c < columns; ++c) {
        out[c / panel_lanes * panel_step + c % panel_lanes] += factor * to_f32(row[c]);
      }
    };
    for (std::int64_t r = 0; r < keys_; ++r) {
      float* dk_row = dk.data + r * dk.row_step;
      float* dv_row = dv.data + r * dv.row_step;
      for (std::int64_t c = 0; first && c < d_qk(); ++c)
        dk_row[c / panel_lanes * dk.panel_step + c % panel_lanes] = 0;
      for (std::int64_t c = 0; first && c < d_v(); ++c)
        dv_row[c / panel_lanes * dv.panel_step + c % panel_lanes] = 0;
      const Range seen = queries_seeing(r);
      for (std::int64_t i = seen.first; i < seen.last; ++i) {
        if (at(x_.live)[i] == 0.0F) continue;
        add(row_of<const T>(b_.dout, first_query_ + i), d_v(), score(x_.p, r, i), dv_row, dv.panel_step);
        const float ds = score(x_.ds, r, i);
        add(row_of<const T>(b_.q, first_query_ + i), d_qk(), ds, dk_row, dk.panel_step);
        add(row_of<const T>(b_.k, first_key_ + r), d_qk(), ds, at(x_.dq) + i * panel_lanes,
            b_.shape.block_q * panel_lanes);
      }
    }
  }

  void write_dq() {
    const std::int64_t panel_step = b_.shape.block_q * panel_lanes;
    for (std::int64_t i = 0; i < queries_; ++i) {
      if (at(x_.live)[i] != 0.0F) continue;
      for (std::int64_t n = 0; n < panels_of(d_qk()); ++n) {
        __builtin_memset(at(x_.dq) + n * panel_step + i * panel_lanes, 0, sizeof(float) * panel_lanes);
      }
    }
    from_panels<T>(at(x_.dq), panel_step, queries_, d_qk(), b_.dq, first_query_);
  }

  const BackwardBlock& b_;
  const Scratch x_;
  float* const scratch_;
  const std::int64_t shift_;  ///< query i stands on the diagonal at key i + shift
  const std::int64_t first_query_;
  const std::int64_t queries_;
  const std::int64_t panels_;
  bool all_finite_ = true;  ///< of the block's q and dout

  // The key block at hand.
  std::int64_t first_key_ = 0;
  std::int64_t keys_ = 0;
  std::int64_t rows_ = 0;  ///< keys_ and the zero rows that fill up the register tile
  std::int64_t strips_ = 0;
  bool masked_ = false;  ///< some strip that was computed has masked scores
};

void run(const BackwardBlock& block, std::byte* scratch) {
  auto* words = reinterpret_cast<float*>(scratch);
  switch (block.shape.dtype) {
    case DType::f32: QueryBlock<float>(block, words).run(); break;
    case DType::f16: QueryBlock<f16>(block, words).run(); break;
    case DType::bf16: QueryBlock<bf16>(block, words).run(); break;
    default: break;
  }
}

std::size_t scratch_bytes(const BackwardShape& shape) {
  const bool paired = has_bf16_dot && shape.dtype == DType::bf16;
  const std::int64_t words =
      paired ? BackwardScratch<true>::make(shape).total : BackwardScratch<false>::make(shape).total;
  return static_cast<std::size_t>(words) * sizeof(float);
}

std::int64_t sum_row(std::int64_t head_dim) {
  return padded(head_dim);
}

}  // namespace

BackwardKernel backward_kernel() {
  return {.panel = panel_lanes,
          .strip = strip_rows,
          .scratch_bytes = scratch_bytes,
          .sum_row = sum_row,
          .run = run};
}

}  // namespace tandem::cpu::TANDEM_TARGET
