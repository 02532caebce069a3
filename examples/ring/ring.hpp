// Ring attention (arXiv:2310.01889): each process has some rows of a sequence, and keys and values go around.
#pragma once

#include <tandem/parts.hpp>

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "transport.hpp"

constexpr std::int64_t heads_q = 8, heads_kv = 2, head_dim = 64;

/// Consecutive rows, some heads of head_dim numbers each, in one piece of memory.
using Numbers = std::vector<float>;

/// The rows of a rank: a piece near the start of the sequence and one near its end, one behind the other in
/// memory. Under a causal mask late rows see many keys and early ones few, so that all ranks have equal work.
struct Shard {
  std::array<tandem::Piece, 2> pieces;

  Shard(std::int64_t seqlen, int rank, int ranks) {
    const auto part = [&](std::int64_t i) {
      const std::int64_t begin = seqlen * i / (2 * ranks), end = seqlen * (i + 1) / (2 * ranks);
      return tandem::Piece{begin, end - begin};
    };
    pieces = {part(rank), part(2 * ranks - 1 - rank)};
  }
  std::int64_t rows() const { return pieces[0].count + pieces[1].count; }
  /// The first row in memory of a piece.
  std::int64_t offset(std::size_t piece) const { return piece == 0 ? 0 : pieces[0].count; }
};

/// K and V of a shard, or their gradients: what goes around. V lies behind K.
struct KeysAndValues {
  Numbers numbers;

  explicit KeysAndValues(std::int64_t rows) : numbers(2 * rows * heads_kv * head_dim) {}
  float* k() { return numbers.data(); }
  float* v() { return numbers.data() + numbers.size() / 2; }
};

/// Piece `i` of a shard, of a tensor with its rows.
inline tandem::Tensor piece_of(float* numbers, const Shard& shard, std::size_t i, std::int64_t heads) {
  return {numbers + shard.offset(i) * heads * head_dim,
          tandem::DType::f32,
          {1, shard.pieces[i].count, heads, head_dim}};
}
/// The same of the LSE, (1, heads_q, rows of the shard).
inline tandem::Tensor lse_of(float* numbers, const Shard& shard, std::size_t i) {
  tandem::Tensor t(numbers + shard.offset(i), tandem::DType::f32, {1, heads_q, shard.pieces[i].count});
  t.stride[1] = shard.rows();
  return t;
}

class Ring {
 public:
  Ring(Transport& transport, std::int64_t seqlen, int threads)
      : transport_(transport), seqlen_(seqlen), own_(shard(0)) {
    execution_.threads = threads;
    options_.causal = true;
  }
  const Shard& own() const { return own_; }

  /// Fills out and lse of this rank's rows.
  void forward(Numbers& q, const KeysAndValues& own, Numbers& out, Numbers& lse) {
    out.assign(own_.rows() * heads_q * head_dim, 0.0F);  // attention over no key
    lse.assign(own_.rows() * heads_q, -std::numeric_limits<float>::infinity());
    const auto nothing = [](const Shard&) {};
    around(own, nothing, [&](const Shard& keys, KeysAndValues& kv) {
      for (const auto& [i, j] : pairs) {
        tandem::ForwardPartArgs args;
        set_inputs(args, q, kv, keys, i, j);
        args.out = piece_of(out.data(), own_, i, heads_q);
        args.lse = lse_of(lse.data(), own_, i);
        tandem::forward_part(args, execution_);
      }
    });
  }

  /// Fills the gradients of this rank's rows. Those of keys follow their keys around: each rank adds its
  /// part.
  void backward(Numbers& q, const KeysAndValues& own, Numbers& out, Numbers& lse, Numbers& dout, Numbers& dq,
                KeysAndValues& gradients) {
    dq.assign(q.size(), 0.0F);
    gradients = KeysAndValues(own_.rows());
    const auto follow = [&](const Shard& keys) { gradients = shifted(gradients, keys.rows()); };
    around(own, follow, [&](const Shard& keys, KeysAndValues& kv) {
      for (const auto& [i, j] : pairs) {
        tandem::BackwardPartArgs args;
        set_inputs(args, q, kv, keys, i, j);
        args.out = piece_of(out.data(), own_, i, heads_q);
        args.lse = lse_of(lse.data(), own_, i);
        args.dout = piece_of(dout.data(), own_, i, heads_q);
        args.dq = piece_of(dq.data(), own_, i, heads_q);
        args.dk = piece_of(gradients.k(), keys, j, heads_kv);
        args.dv = piece_of(gradients.v(), keys, j, heads_kv);
        tandem::backward_part(args, execution_);
      }
    });
    gradients = shifted(gradients, own_.rows());  // home
  }

 private:
  static constexpr std::array<std::array<std::size_t, 2>, 4> pairs{{{0, 0}, {0, 1}, {1, 0}, {1, 1}}};

  /// The rows whose keys are here in a step.
  Shard shard(int step) const {
    const int ranks = transport_.ranks();
    return {seqlen_, (transport_.rank() + ranks - step % ranks) % ranks, ranks};
  }

  void set_inputs(tandem::PartInputs& args, Numbers& q, KeysAndValues& kv, const Shard& keys, std::size_t i,
                  std::size_t j) const {
    args.q = piece_of(q.data(), own_, i, heads_q);
    args.k = piece_of(kv.k(), keys, j, heads_kv);
    args.v = piece_of(kv.v(), keys, j, heads_kv);
    args.first_query = own_.pieces[i].first;
    args.first_key = keys.pieces[j].first;
    args.options = options_;
  }

  Shift start(const KeysAndValues& from, KeysAndValues& to) {
    return {transport_, std::as_bytes(std::span(from.numbers)),
            std::as_writable_bytes(std::span(to.numbers))};
  }
  KeysAndValues shifted(const KeysAndValues& from, std::int64_t rows) {
    KeysAndValues to(rows);
    start(from, to).wait();
    return to;
  }

  /// Calls `work` with the keys of each rank, its own first, while those of the next step are on their way.
  /// `arrived` is called before, but for the first step.
  template <typename Arrived, typename Work>
  void around(const KeysAndValues& own, Arrived&& arrived, Work&& work) {
    KeysAndValues here = own;
    for (int step = 0; step < transport_.ranks(); ++step) {
      if (step > 0) arrived(shard(step));
      if (step + 1 == transport_.ranks()) return work(shard(step), here);
      KeysAndValues next(shard(step + 1).rows());
      Shift shift = start(here, next);
      work(shard(step), here);
      shift.wait();
      here = std::move(next);
    }
  }

  Transport& transport_;
  std::int64_t seqlen_;
  Shard own_;
  tandem::PartOptions options_;
  tandem::Execution execution_;
};
