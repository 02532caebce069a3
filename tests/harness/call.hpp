// One attention problem as a test describes it (Case), and the same with memory (Call).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "box.hpp"
#include "problem/problem.hpp"
#include "tandem/attention.hpp"

namespace tandem::harness {

class Random;

/// A tensor that functions of a Case read: normal numbers, or integers in [low, high].
struct Captured {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape = {};
  Layout layout = {};
  std::int64_t low = 0;
  std::int64_t high = 0;
  std::vector<double> values = {};  ///< if given, these instead of random ones
};

struct Case {
  std::uint64_t seed = 1;
  DType dtype = DType::f32;
  DType out_dtype = DType::f32;    ///< only for e4m3 inputs; else it is dtype
  bool f32_out = false;            ///< out is f32, beside a q of 16 bits; forward alone
  std::optional<DType> key_dtype;  ///< of k and v, e4m3 or s8, beside a q in another dtype; not given: dtype

  std::int64_t batch = 1;
  std::int64_t heads_q = 1;
  std::int64_t heads_kv = 1;
  std::int64_t head_dim_qk = 64;
  std::int64_t head_dim_v = 64;
  std::int64_t seqlen_q = 64;  ///< rows of a batch entry; unused where packed
  std::int64_t seqlen_k = 64;  ///< of a cache: the rows that one sequence can have

  bool packed_q = false;
  bool packed_k = false;
  std::vector<std::int64_t> lengths_q;  ///< packed: rows of every sequence
  std::vector<std::int64_t> lengths_k;
  std::int64_t slack_q = 0;  ///< packed: rows past the last sequence
  std::int64_t slack_k = 0;
  std::vector<std::int64_t> used_q;  ///< seqused; empty is not given
  std::vector<std::int64_t> used_k;
  DType metadata = DType::i32;
  /// k and v are a cache in pages of so many rows, in a random order. 0: they are not.
  std::int64_t page_size = 0;
  /// v is the first head_dim_v columns of k, in k's memory, as in a cache of latent vectors.
  bool v_in_k = false;
  std::vector<std::int64_t> leftpad;  ///< leftpad_k; empty is not given
  /// cache_batch_idx; empty is not given. k and v then have `cache_batch` entries.
  std::vector<std::int64_t> cache_index;
  std::int64_t cache_batch = 0;
  std::vector<std::int64_t> causal_by_sequence;  ///< empty is not given; forward alone
  /// indices: so many numbers of each query, some twice and some that no key has. 0: not given. Keys that
  /// none names are NaN.
  std::int64_t topk = 0;
  bool topk_by_head = false;  ///< each KV head has its own
  bool topk_lengths = false;  ///< topk_length is given
  Layout indices;

  AttentionOptions options;
  /// Functions as text (docs/functions.md); empty is not given. Both may read `captured`.
  std::string score_function;
  std::string mask_function;
  std::vector<Captured> captured;
  std::vector<int> differentiated;  ///< of `captured`, those whose gradients are asked for
  /// dropout_places: four of each batch entry; empty is not given.
  std::vector<std::int64_t> dropout_places;
  bool sink = false;
  bool gate = false;
  bool lse = true;
  bool dlse = false;
  unsigned unwanted = 0;  ///< backward: gradients not asked for; 1 dq, 2 dk, 4 dv, 8 dgate
  int scales = 0;       ///< 8 bits: 0 none, 1 one scale a tensor, 2 one a (batch, kv head), 3 k and v by row
  Layout scale_layout;  ///< of those by row: (entries or pages, kv heads, rows)
  /// Gradients in f32 beside a q of 16 bits, and of them those that are added to what there is; 1 dq, 2 dk
  /// and dv.
  unsigned f32_gradients = 0;
  unsigned added = 0;
  double amplitude = 1.0;  ///< standard deviation of q and k; v and gradients have 1

  Layout q, k, v, out, dout, dq, dk, dv, lse_layout;
  Layout gate_layout;  ///< of gate and dgate
  int threads = 1;
  bool workspace = true;  ///< pass a (poisoned) workspace of the size asked for

  [[nodiscard]] std::int64_t rows_q() const;
  [[nodiscard]] std::int64_t rows_k() const;
  /// Whether there is a backward of such a call.
  [[nodiscard]] bool has_gradients() const {
    return dtype != DType::e4m3 && !of_cache() && !key_dtype && !f32_out && causal_by_sequence.empty();
  }
  [[nodiscard]] bool of_cache() const { return page_size > 0 || !leftpad.empty() || !cache_index.empty(); }
  /// Rows of sequence `b` in a cache, padding included, and those of them that are padding.
  [[nodiscard]] std::int64_t cache_rows(std::int64_t b) const;
  [[nodiscard]] std::int64_t cache_padding(std::int64_t b) const;
  /// Pages that one sequence can have; the cache has two more than all of them together.
  [[nodiscard]] std::int64_t pages_per_sequence() const { return (seqlen_k + page_size - 1) / page_size; }
  [[nodiscard]] DType result_dtype() const {
    return dtype == DType::e4m3 ? out_dtype : f32_out ? DType::f32 : dtype;
  }
  /// Of gradients named by these bits.
  [[nodiscard]] DType gradient_dtype(unsigned which) const {
    return (f32_gradients & which) != 0 ? DType::f32 : dtype;
  }
  /// Everything needed to write the case down again.
  [[nodiscard]] std::string describe() const;
};

/// A Case with memory: random inputs, NaN wherever nothing may be read, poisoned outputs.
struct Call {
  explicit Call(const Case& spec_);

  Case spec;
  Box q, k, v, sink, q_scale, k_scale, v_scale;
  Box cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  Box page_table, leftpad_k, cache_batch_idx, causal_by_sequence, dropout_places;
  Box indices, topk_length, gate;
  std::vector<Box> captured;
  std::optional<Function> score_function, mask_function;
  Box out, lse;
  Box max_logits;  ///< where ask_for_max_logits() made one
  Box dout, dlse, dq, dk, dv, dsink, dgate;
  bool rows_overlap =
      false;  ///< lengths make no sense: a row may be of several sequences, each of which writes it
  std::vector<Box> captured_gradients;  ///< by the numbers of `captured`; not given: not asked for
  std::vector<Tensor> captured_gradient_views;

  [[nodiscard]] ForwardArgs forward_args() const;
  [[nodiscard]] BackwardArgs backward_args() const;
  /// The same as a Problem, made without the library's argument checks: what the oracle reads.
  [[nodiscard]] Problem problem() const;

  [[nodiscard]] std::vector<Box*> inputs();
  /// Null of those not given.
  [[nodiscard]] const Function* score_of() const { return score_function ? &*score_function : nullptr; }
  [[nodiscard]] const Function* mask_of() const { return mask_function ? &*mask_function : nullptr; }
  [[nodiscard]] std::vector<Box*> outputs(Pass pass);
  [[nodiscard]] Dropout dropout() const;
  /// Whether a pass adds to what a gradient holds: before(n), as prepare() leaves it.
  [[nodiscard]] bool adds_to(const Box& box) const;
  static double before(std::int64_t n) { return 0.25 * static_cast<double>(n % 7 - 3); }
  /// Row `row` of sequence `b` as an entry of k and v and a row of it, for a cache.
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> cache_place(std::int64_t b, std::int64_t row) const;

  /// From now on forward calls have max_logits. Those whose gradients are in 8 bits have them anyway.
  void ask_for_max_logits();
  /// Poisons the outputs of a pass and remembers the memory around and in all tensors.
  void prepare(Pass pass);

 private:
  void make_cache(Random& random);
  void make_indices(Random& random);
  [[nodiscard]] Indices indices_of_problem() const;
  /// And the places of dropout.
  void make_functions(Random& random);
  /// Which rows of the entries of k and v, counted over all, some sequence reads.
  [[nodiscard]] std::vector<bool> used_cache_rows() const;
  void poison_cache(Box& box, const Layout& layout) const;
  /// Scales by row of `keys`, NaN where no row takes part.
  [[nodiscard]] Box row_scales(const Box& keys, Random& random) const;
  /// `scale` is read where scales are by row.
  [[nodiscard]] Box dense_keys(const Box& cache, const Box& scale) const;
  [[nodiscard]] Box scaled_keys(const Box& keys, const Box& scale) const;

  /// The rows of a cache that take part as a dense k and v with their lengths: what the oracle reads, so that
  /// it knows nothing of caches.
  mutable Box dense_k_, dense_v_, dense_used_;
};

/// Random numbers for tests; small, seeded, the same on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15U + 0x1234567U) {}
  std::uint64_t bits();
  /// Uniform in [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high);
  bool chance(double probability) { return uniform() < probability; }
  double uniform();
  double normal();
  std::vector<double> normals(std::int64_t count);
  template <typename T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[between(0, static_cast<std::int64_t>(choices.size()) - 1)];
  }

 private:
  std::uint64_t state_;
};

/// Standard deviation of s8 values, which are integers: few normal numbers are then beyond 127.
constexpr double s8_deviation = 25.0;

/// Fills every element with normal numbers of standard deviation `amplitude`.
void fill(Box& box, Random& random, double amplitude);

/// Integers where an access out of bounds faults.
Box vector_box(DType dtype, const std::vector<double>& values);

/// Calls f(batch, row in the tensor, takes part) for every row of q (or k) that exists.
using RowVisitor = std::function<void(std::int64_t batch, std::int64_t row, bool used)>;
void for_each_query_row(const Case& spec, const RowVisitor& f);
void for_each_key_row(const Case& spec, const RowVisitor& f);

/// A random Case with all features crossed; `size` scales the sequence lengths (about `size` at most).
Case random_case(std::uint64_t seed, std::int64_t size);

/// How many random cases a test draws: `count`, times TANDEM_TEST_EFFORT (a factor, default 1; the sanitizer
/// build takes less), at least 1.
int effort(int count);

/// A random layout for a tensor of `rank`; `input` allows stride 0.
Layout random_layout(Random& random, int rank, bool input);

}  // namespace tandem::harness
