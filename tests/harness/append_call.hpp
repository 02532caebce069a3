// A call to append_kv as a test describes it (AppendCase), and the same with memory (AppendCall).
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "box.hpp"
#include "call.hpp"
#include "tandem/cache.hpp"

namespace tandem::harness {

struct AppendCase {
  std::uint64_t seed = 1;
  DType dtype = DType::bf16;
  DType cache_dtype = DType::bf16;
  std::int64_t batch = 1;
  std::int64_t heads_kv = 2;
  std::int64_t heads_q = 0;  ///< 0: no q
  std::int64_t head_dim = 64;
  std::int64_t head_dim_v = 64;       ///< 0: no v
  std::int64_t seqlen_new = 1;        ///< rows of a batch entry; unused where packed
  std::vector<std::int64_t> lengths;  ///< packed: new tokens of every sequence; empty: not packed
  std::int64_t slack = 0;             ///< packed: rows past the last sequence
  std::vector<std::int64_t> used;     ///< seqused_new; empty is not given
  std::vector<std::int64_t> before;   ///< cache_seqlens
  std::int64_t entry_rows = 32;       ///< rows of an entry or page
  std::int64_t entries = 0;         ///< entries, where slots or an index choose them; else as the rest needs
  std::int64_t max_pages = 0;       ///< pages a sequence, in a random order; 0: no table
  std::vector<std::int64_t> index;  ///< cache_batch_idx; empty is not given
  std::vector<std::int64_t> slots;  ///< slot_mapping; empty: none
  std::vector<std::int64_t> leftpad;  ///< leftpad_k; empty is not given
  /// Scales of codes: 0 none, 1 of the tensor, 2 of each (batch, head), 3 found by row and head, 4 given by
  /// new row and head, of codes that are not packed.
  int scales = 0;
  std::int64_t rotary_dim = 0;  ///< 0: no embedding
  bool interleaved = false;
  std::int64_t positions = 64;
  DType table_dtype = DType::f32;
  std::vector<std::int64_t> offsets;  ///< rotary_offsets; empty is not given
  DType metadata = DType::i32;
  bool check = false;
  int threads = 2;
  Layout k_new, v_new, k_cache, v_cache, q, q_out, scale_cache;

  [[nodiscard]] bool packed() const { return !lengths.empty() || !slots.empty(); }
  [[nodiscard]] std::int64_t rows() const;
  [[nodiscard]] std::string describe() const;
};

/// One token that is appended: its row among the new ones, its sequence and place there.
struct AppendedToken {
  std::int64_t row = 0;
  std::int64_t sequence = 0;
  std::int64_t index = 0;
};

class AppendCall {
 public:
  explicit AppendCall(const AppendCase& c);

  [[nodiscard]] AppendArgs args() const;
  /// Calls f(name of the field in AppendArgs, box) for every tensor.
  template <typename F>
  void for_each_tensor(AppendArgs& args, const F& f) const {
    f(args.k_new, k_new), f(args.v_new, v_new), f(args.cu_seqlens_new, cu_seqlens_new);
    f(args.seqused_new, seqused_new), f(args.k_cache, k_cache), f(args.v_cache, v_cache);
    f(args.page_table, page_table), f(args.cache_batch_idx, cache_batch_idx), f(args.leftpad_k, leftpad_k);
    f(args.cache_seqlens, cache_seqlens), f(args.slot_mapping, slot_mapping), f(args.k_scale, k_scale);
    f(args.v_scale, v_scale), f(args.rotary_cos, rotary_cos), f(args.rotary_sin, rotary_sin);
    f(args.rotary_offsets, rotary_offsets), f(args.q, q), f(args.q_out, q_out);
    f(args.k_scale_cache, k_scale_cache), f(args.v_scale_cache, v_scale_cache);
  }

  /// The caches and their scales hold random bytes, q_out NaN, and everything is remembered for `correct`.
  void prepare();
  /// Success if the caches and q_out hold what the definition says, bit for bit, and nothing else changed.
  [[nodiscard]] testing::AssertionResult correct() const;

  AppendCase spec;
  Box k_new, v_new, cu_seqlens_new, seqused_new, k_cache, v_cache, page_table, cache_batch_idx, leftpad_k,
      cache_seqlens, slot_mapping, k_scale, v_scale, rotary_cos, rotary_sin, rotary_offsets, q, q_out,
      k_scale_cache, v_scale_cache;

 private:
  /// A tensor with a row for each new token.
  [[nodiscard]] Box new_rows(std::int64_t heads, std::int64_t dim, const Layout& layout, bool output) const;
  void make_page_table(Random& random);
  void make_scales(Random& random);
  void make_rotary(Random& random);
  /// Element index -> value, of what is written.
  using Written = std::map<std::int64_t, double>;

  [[nodiscard]] std::vector<AppendedToken> tokens() const;
  /// The row of the cache, over all entries, of a token; -1 if none.
  [[nodiscard]] std::int64_t slot(const AppendedToken& token) const;
  /// Row `row` of `box`, head `head`, embedded where there is an embedding.
  [[nodiscard]] std::vector<double> row_of(const Box& box, const AppendedToken& token, std::int64_t heads,
                                           std::int64_t head, std::int64_t dim, bool embedded) const;
  /// Of a cache, and of its scales where they are found.
  struct WrittenRows {
    Written cache;
    Written scales;
  };
  [[nodiscard]] WrittenRows expected(const Box& rows, const Box& cache, const Box& scale, std::int64_t dim,
                                     bool embedded) const;
  [[nodiscard]] testing::AssertionResult cache_is_correct(const char* name, const Box& rows, const Box& cache,
                                                          const Box& scale, const Box& found,
                                                          bool embedded) const;
  [[nodiscard]] Written expected_queries() const;

  /// By the addresses of the boxes.
  std::map<const Box*, std::vector<std::byte>> before_;
};

/// A random case with all features crossed.
AppendCase random_append(std::uint64_t seed);

}  // namespace tandem::harness
