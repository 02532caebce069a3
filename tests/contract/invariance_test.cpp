// Contract line 16: with a split size, a sequence's bits depend on nothing but the sequence.
#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

/// Consecutive queries of a sequence, as a call has them: the keys end with the last one's. Queries are
/// numbered from the first that the whole call has.
struct Piece {
  std::int64_t first = 0;
  std::int64_t count = 1;
  bool other = false;  ///< of a sequence of random numbers, which stands in the batch beside ours
};

/// A sequence, computed in one call, and calls that compute pieces of it.
class Sequence {
 public:
  explicit Sequence(const Case& model) : whole_(model) {}

  const Case& spec() const { return whole_.spec; }
  Call& whole() { return whole_; }

  /// A call of such pieces, each a sequence of a cache: in pages, or, with page_size 0, at even distances.
  /// Queries are packed, or padded to the longest piece. A sequence has room for `spare` more keys.
  Call of(const std::vector<Piece>& pieces, std::int64_t page_size, bool packed, std::int64_t spare) const {
    Case c = whole_.spec;
    c.seed += 77;
    change(c, {.batch = static_cast<std::int64_t>(pieces.size()), .seqlen_q = 0});
    change(c, {.seqlen_k = whole_.spec.seqlen_k + spare, .packed_q = packed, .page_size = page_size});
    for (const Piece& piece : pieces) {
      c.lengths_q.push_back(piece.count);
      c.seqlen_q = std::max(c.seqlen_q, piece.count);
      c.used_k.push_back(keys_of(piece));
    }
    if (!packed) c.used_q = c.lengths_q;
    if (!packed) c.lengths_q.clear();
    Call call(c);
    if (call.sink.given()) copy(whole_.sink, call.sink);
    std::int64_t row = 0;
    for (std::size_t b = 0; b < pieces.size(); ++b) {
      const Piece& piece = pieces[b];
      if (!packed) row = static_cast<std::int64_t>(b) * c.seqlen_q;
      if (!piece.other) fill(call, static_cast<std::int64_t>(b), row, piece);
      row += piece.count;
    }
    return call;
  }

  /// That the pieces' rows of `call` have the bits of the whole sequence's.
  void expect_same(const Call& call, const std::vector<Piece>& pieces) const {
    const Case& c = call.spec;
    const std::int64_t width = c.heads_q * c.head_dim_v;
    std::int64_t row = 0;
    for (std::size_t b = 0; b < pieces.size(); ++b) {
      const Piece& piece = pieces[b];
      if (!c.packed_q) row = static_cast<std::int64_t>(b) * c.seqlen_q;
      for (std::int64_t i = 0; i < piece.count && !piece.other; ++i) {
        ASSERT_TRUE(same_bits(part(call.out, (row + i) * width, width),
                              part(whole_.out, (piece.first + i) * width, width)))
            << "out, query " << piece.first + i << ", sequence " << b;
        for (std::int64_t h = 0; h < c.heads_q; ++h) {
          const std::int64_t entry = static_cast<std::int64_t>(b) * c.heads_q;
          const std::int64_t at = c.packed_q ? h * c.rows_q() + row + i : (entry + h) * c.seqlen_q + i;
          ASSERT_TRUE(same_bits(part(call.lse, at, 1),
                                part(whole_.lse, h * whole_.spec.seqlen_q + piece.first + i, 1)))
              << "lse, query " << piece.first + i << ", head " << h << ", sequence " << b;
        }
      }
      row += piece.count;
    }
  }

  /// Runs `pieces` on one runner and compares.
  void expect_same(Runner& runner, const std::vector<Piece>& pieces, std::int64_t page_size, bool packed,
                   int threads = 1, std::int64_t spare = 40) const {
    Call call = of(pieces, page_size, packed, spare);
    call.spec.threads = threads;
    SCOPED_TRACE(call.spec.describe());
    call.prepare(Pass::forward);
    runner.forward(call);
    expect_same(call, pieces);
  }

 private:
  std::int64_t keys_of(const Piece& piece) const {
    return whole_.spec.seqlen_k - whole_.spec.seqlen_q + piece.first + piece.count;
  }
  void fill(Call& call, std::int64_t b, std::int64_t row, const Piece& piece) const {
    const Case& c = call.spec;
    const std::int64_t of_q = c.heads_q * c.head_dim_qk;
    copy(whole_.q, call.q, piece.first * of_q, row * of_q, piece.count * of_q);
    for (std::int64_t key = 0; key < keys_of(piece); ++key) {
      const auto [entry, at] = call.cache_place(b, key);
      const std::int64_t place = entry * (c.page_size > 0 ? c.page_size : c.seqlen_k) + at;
      const std::int64_t of_k = c.heads_kv * c.head_dim_qk;
      const std::int64_t of_v = c.heads_kv * c.head_dim_v;
      copy(whole_.k, call.k, key * of_k, place * of_k, of_k);
      copy(whole_.v, call.v, key * of_v, place * of_v, of_v);
    }
  }

  Call whole_;
};

Case model_case(DType dtype) {
  Case c = with({}, {.dtype = dtype, .heads_q = 2});
  c.seqlen_q = c.seqlen_k = 270;  // three splits
  change(c, {.causal = true, .split_size = 128});
  return c;
}

/// Whole, in chunks and step by step: from a contiguous cache and from pages.
void expect_pieces_of_any_size(const Case& model) {
  on_every_runner(model, [&](Runner& runner) {
    Sequence sequence(model);
    run(runner, sequence.whole(), false);
    for (const std::vector<Piece>& pieces : {std::vector<Piece>{{0, 1}},
                                             {{0, 129}},
                                             {{100, 100}},
                                             {{127, 1}},
                                             {{128, 2}},
                                             {{129, 141}},
                                             {{262, 8}},
                                             {{269, 1}}}) {
      sequence.expect_same(runner, pieces, 0, false);
      sequence.expect_same(runner, pieces, pieces[0].first % 2 == 0 ? 16 : 6, true);
    }
  });
}

TEST(Contract16_BatchInvariance, PrefillChunksAndStepsGiveTheSameBits) {
  for (const DType dtype : float_dtypes) expect_pieces_of_any_size(model_case(dtype));
}

TEST(Contract16_BatchInvariance, WithAWindow) {
  for (const DType dtype : float_dtypes) {
    Case c = model_case(dtype);
    for (const std::int64_t left : {0, 60, 150}) {
      c.options.window_left = left;
      expect_pieces_of_any_size(c);
    }
  }
}

TEST(Contract16_BatchInvariance, WithASinkAndGroupedHeads) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t heads : {1, 3}) {
      Case c = with(model_case(dtype), {.heads_q = 3, .heads_kv = 3 / heads, .head_dim_v = 32});
      change(c, {.seqlen = 200, .split_size = 128, .sink = true});
      on_every_runner(c, [&](Runner& runner) {
        Sequence sequence(c);
        run(runner, sequence.whole(), false);
        for (const Piece piece : {Piece{0, 7}, Piece{120, 20}, Piece{199, 1}}) {
          sequence.expect_same(runner, {piece}, 0, true);
          sequence.expect_same(runner, {piece}, 48, false);
        }
      });
    }
  }
}

TEST(Contract16_BatchInvariance, WithASoftcapAndWideHeads) {
  for (const DType dtype : float_dtypes) {
    Case c = with(model_case(dtype), {.heads_q = 1, .softcap = 5.0F});
    expect_pieces_of_any_size(c);
    change(c, {.head_dim = 200, .softcap = 0.0F});
    expect_pieces_of_any_size(c);
  }
}

/// Of 12 heads that share latent keys; with more the emulator would take too long.
TEST(Contract16_BatchInvariance, OfWideHeads) {
  for (const DType dtype : float_dtypes) {
    Case c = with(model_case(dtype), {.heads_q = 12, .head_dim_qk = 576, .head_dim_v = 512, .seqlen = 200});
    on_every_runner(c, [&](Runner& runner) {
      Sequence sequence(c);
      run(runner, sequence.whole(), false);
      for (const Piece piece : {Piece{0, 7}, Piece{120, 20}, Piece{199, 1}}) {
        sequence.expect_same(runner, {piece}, 0, true, 2);
        sequence.expect_same(runner, {piece}, 48, false);
      }
    });
  }
}

/// A request beside a prefill of 129 tokens and other steps, at any place of the batch, on any threads.
TEST(Contract16_BatchInvariance, NothingDependsOnTheRestOfTheBatch) {
  for (const DType dtype : float_dtypes) {
    const Case model = model_case(dtype);
    on_every_runner(model, [&](Runner& runner) {
      Sequence sequence(model);
      run(runner, sequence.whole(), false);
      const Piece prefill{.first = 0, .count = 129, .other = true};
      const Piece step{.first = 269, .count = 1, .other = true};
      for (const bool packed : {false, true}) {
        for (const std::int64_t page_size : {0, 16}) {
          for (const int threads : {1, 2, 3}) {
            sequence.expect_same(runner, {prefill, {269, 1}}, page_size, packed, threads);
            sequence.expect_same(runner, {{130, 4}, step, {269, 1}}, page_size, packed, threads);
          }
          sequence.expect_same(runner, {step, {5, 1}, step, {250, 16}, {128, 1}, {40, 60}}, page_size,
                               packed);
        }
      }
    });
  }
}

/// So many splits that they are merged by groups, and groups of these: in a call whose splits have no places
/// in the workspace one by one, and in caches of any capacity.
TEST(Contract16_BatchInvariance, SequencesOfManySplits) {
  for (const DType dtype : float_dtypes) {
    Case model = with(model_case(dtype), {.heads_q = 1, .head_dim = 32, .seqlen_q = 66});
    change(model, {.window_left = 33'000, .sink = true});
    for (const std::int64_t keys : {2'200, 33'100}) {
      model.seqlen_k = keys;
      on_every_runner(model, [&](Runner& runner) {
        Sequence sequence(model);
        run(runner, sequence.whole(), false);
        const Piece step{.first = 65, .count = 1};
        const Piece other{.first = 30, .count = 1, .other = true};
        sequence.expect_same(runner, {step}, 0, true);
        sequence.expect_same(runner, {step}, 16, true, 2, 50'000);
        sequence.expect_same(runner, {{0, 3}, {62, 4}}, 0, false, 3, 2'000);
        // Ten sequences of 259 splits are more than a GPU of 132 SMs has places for.
        sequence.expect_same(runner, {other, other, other, other, {1, 1}, other, other, other, other, step},
                             16, true);
      });
    }
  }
}

/// Extreme logits beside ordinary ones: the maximum of a row is its own, and so is every rescaling.
TEST(Contract16_BatchInvariance, WhateverTheOtherRowsOfATileHold) {
  for (const DType dtype : float_dtypes) {
    Case model = with(model_case(dtype), {.amplitude = 4.0});
    on_every_runner(model, [&](Runner& runner) {
      Sequence sequence(model);
      Box& q = sequence.whole().q;
      const std::int64_t width = model.heads_q * model.head_dim_qk;
      for (std::int64_t row = 0; row < model.seqlen_q; ++row) {
        if (row % 5 == 0) continue;
        const auto factor = static_cast<double>(1 + row % 40);
        for (std::int64_t n = row * width; n < (row + 1) * width; ++n) q.set(n, q.get(n) * factor);
      }
      run(runner, sequence.whole(), false);
      for (const Piece piece :
           {Piece{100, 1}, Piece{130, 1}, Piece{265, 1}, Piece{131, 60}, Piece{260, 10}}) {
        sequence.expect_same(runner, {piece}, 0, true);
      }
    });
  }
}

/// The same of caches of 8 bits: whole, in chunks and step by step, contiguous and in pages.
TEST(Contract16_BatchInvariance, KeysOfEightBits) {
  for (const auto& [queries, keys] :
       {std::pair{DType::bf16, DType::e4m3}, {DType::bf16, DType::s8}, {DType::e4m3, DType::e4m3}}) {
    Case model = with(model_case(queries), {.out_dtype = DType::bf16, .key_dtype = keys});
    on_every_runner(model, [&](Runner& runner) {
      Sequence sequence(model);
      run(runner, sequence.whole(), false);
      const Piece other{.first = 0, .count = 129, .other = true};
      for (const std::int64_t page_size : {0, 16}) {
        sequence.expect_same(runner, {{0, 130}}, page_size, true);
        sequence.expect_same(runner, {other, {130, 4}, {269, 1}}, page_size, true);
      }
    });
  }
}

/// The results themselves, against the oracle, at every size of split.
TEST(Contract16_BatchInvariance, SplitsOfAnySizeAreAccurate) {
  for (const DType dtype : float_dtypes) {
    for (const std::int64_t split_size : {128, 384, 1024}) {
      for (const std::int64_t seqlen_q : {1, 5, 70}) {
        Case c = with(plain_case(dtype), {.seqlen_q = seqlen_q, .seqlen_k = 560, .used_k = {560, 129}});
        change(c, {.causal = seqlen_q != 5, .split_size = split_size, .sink = seqlen_q == 5, .threads = 2});
        run_everywhere(c);
      }
    }
  }
}

}  // namespace
}  // namespace tandem::harness
