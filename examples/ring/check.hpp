// Attention of one sequence in a ring of processes, checked against one call over the whole sequence.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <thread>
#include <utility>

#include "ring.hpp"

/// Number `n` of a tensor of generated values, the same in every process: uniform in -1 to 1.
inline float generated(std::uint64_t tensor, std::int64_t n) {
  std::uint64_t x = (static_cast<std::uint64_t>(n) + 1) * 0x9E3779B97F4A7C15U + tensor * 0xD1B54A32D192ED03U;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
  x = (x ^ x >> 27) * 0x94D049BB133111EBU;
  return static_cast<float>(x >> 40) / (1 << 23) - 1.0F;
}

/// Copies a shard's rows, of `width` numbers, out of those of the whole sequence.
inline void take(const Shard& shard, const Numbers& whole, std::int64_t width, float* rows) {
  for (const tandem::Piece& piece : shard.pieces) {
    const auto first = whole.begin() + piece.first * width;
    rows = std::copy(first, first + piece.count * width, rows);
  }
}

/// The whole sequence: inputs, and what forward and backward over it give in one process.
struct Whole {
  std::int64_t seqlen;
  Numbers q, k, v, dout, out, lse, dq, dk, dv;

  explicit Whole(std::int64_t seqlen_) : seqlen(seqlen_) {
    std::uint64_t tensor = 0;
    for (auto [numbers, heads] : {std::pair{&q, heads_q}, {&k, heads_kv}, {&v, heads_kv}, {&dout, heads_q}}) {
      numbers->resize(seqlen * heads * head_dim);
      for (std::size_t n = 0; n < numbers->size(); ++n) (*numbers)[n] = generated(tensor, n);
      ++tensor;
    }
  }

  void compute(int threads) {
    const auto view = [&](Numbers& numbers, std::int64_t heads) {
      numbers.resize(seqlen * heads * head_dim);
      return tandem::Tensor(numbers.data(), tandem::DType::f32, {1, seqlen, heads, head_dim});
    };
    lse.resize(heads_q * seqlen);
    tandem::ForwardArgs f;
    f.q = view(q, heads_q);
    f.k = view(k, heads_kv);
    f.v = view(v, heads_kv);
    f.out = view(out, heads_q);
    f.lse = {lse.data(), tandem::DType::f32, {1, heads_q, seqlen}};
    f.options.causal = true;
    tandem::Execution execution;
    execution.threads = threads;
    tandem::forward(f, execution);
    tandem::BackwardArgs b;
    static_cast<tandem::AttentionInputs&>(b) = f;
    b.options = f.options;
    b.out = f.out;
    b.lse = f.lse;
    b.dout = view(dout, heads_q);
    b.dq = view(dq, heads_q);
    b.dk = view(dk, heads_kv);
    b.dv = view(dv, heads_kv);
    tandem::backward(b, execution);
  }
};

/// The largest difference between a rank's rows and those of the whole, as a share of the largest number.
inline double difference(const Shard& shard, const float* rows, const Numbers& whole, std::int64_t heads) {
  Numbers expected(shard.rows() * heads * head_dim);
  take(shard, whole, heads * head_dim, expected.data());
  double largest = 0.0, apart = 0.0;
  for (const float x : whole) largest = std::max(largest, std::abs(static_cast<double>(x)));
  for (std::size_t n = 0; n < expected.size(); ++n) {
    const double error = std::abs(static_cast<double>(rows[n]) - expected[n]);
    apart = std::isnan(error) ? error : std::max(apart, error);
    if (std::isnan(apart)) break;
  }
  return apart == 0.0 ? 0.0 : apart / largest;  // a sequence of one row has no gradient of q
}

/// The largest number of all ranks; NaN is larger than any.
inline double largest_of_all(Transport& transport, double number) {
  double all = number, passing = number;
  for (int step = 1; step < transport.ranks(); ++step) {
    double received = 0.0;
    Shift shift(transport, std::as_bytes(std::span(&passing, 1)),
                std::as_writable_bytes(std::span(&received, 1)));
    shift.wait();
    if (std::isnan(received) || received > all) all = received;
    passing = received;
  }
  return all;
}

/// Computes and checks as this rank of a ring; 0 if all ranks are right. Both results are in f32 with errors
/// of 1e-5 at most (docs/numerics.md), so that they differ by twice that at most.
inline int compute_and_check(Transport& transport, std::int64_t seqlen) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const int threads = std::max(1, cores / transport.ranks());
  Ring ring(transport, seqlen, threads);
  const Shard& own = ring.own();
  Whole whole(seqlen);  // a real program has its own rows alone

  Numbers q(own.rows() * heads_q * head_dim), dout(q.size()), out, lse, dq;
  KeysAndValues kv(own.rows()), gradients(0);
  take(own, whole.q, heads_q * head_dim, q.data());
  take(own, whole.dout, heads_q * head_dim, dout.data());
  take(own, whole.k, heads_kv * head_dim, kv.k());
  take(own, whole.v, heads_kv * head_dim, kv.v());
  ring.forward(q, kv, out, lse);
  ring.backward(q, kv, out, lse, dout, dq, gradients);

  whole.compute(threads);
  const double differences[] = {
      difference(own, out.data(), whole.out, heads_q), difference(own, dq.data(), whole.dq, heads_q),
      difference(own, gradients.k(), whole.dk, heads_kv), difference(own, gradients.v(), whole.dv, heads_kv)};
  constexpr const char* names[] = {"out", "dq", "dk", "dv"};
  bool right = true;
  if (transport.rank() == 0) {
    std::printf("%lld rows in %d processes; largest difference to one process:",
                static_cast<long long>(seqlen), transport.ranks());
  }
  for (int i = 0; i < 4; ++i) {
    const double all = largest_of_all(transport, differences[i]);
    if (transport.rank() == 0) std::printf(" %s %.1e", names[i], all);
    right = right && all <= 2e-5;
  }
  if (transport.rank() == 0) std::printf("; %s\n", right ? "right" : "wrong");
  return right ? 0 : 1;
}

/// The argument that says how many; 0 if it is no positive number.
inline std::int64_t number_of(const char* text) {
  char* end = nullptr;
  const long long number = std::strtoll(text, &end, 10);
  return end != text && *end == '\0' && number > 0 ? number : 0;
}
