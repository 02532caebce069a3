// Random problems with all features crossed.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "call.hpp"

namespace tandem::harness {
namespace {

/// Lengths around the edges of tiles are where kernels go wrong: draw them more often than others.
std::int64_t random_length(Random& random, std::int64_t size) {
  const std::int64_t edge = random.pick<std::int64_t>({1, 2, 16, 32, 64, 128, 256});
  const std::int64_t length = random.chance(0.5) ? random.between(1, size) : edge + random.between(-1, 1);
  return std::clamp<std::int64_t>(length, 0, size);
}

std::vector<std::int64_t> random_lengths(Random& random, std::int64_t count, std::int64_t size) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t b = 0; b < count; ++b)
    lengths.push_back(random.chance(0.15) ? 0 : random_length(random, size));
  return lengths;
}

std::vector<std::int64_t> random_used(Random& random, const Case& c, bool packed,
                                      const std::vector<std::int64_t>& lengths, std::int64_t seqlen) {
  std::vector<std::int64_t> used;
  for (std::int64_t b = 0; b < c.batch; ++b) {
    const std::int64_t length = packed ? lengths[static_cast<std::size_t>(b)] : seqlen;
    used.push_back(random.chance(0.3) ? length : random.between(0, length));
  }
  return used;
}

void random_options(Random& random, Case& c) {
  c.options.causal = random.chance(0.4);
  if (random.chance(0.35)) {
    c.options.window_left = random.between(-1, 80);
    c.options.window_right = random.between(-1, 80);
  }
  if (random.chance(0.25)) c.options.softcap = static_cast<float>(random.pick({0.5, 2.0, 15.0, 50.0}));
  if (random.chance(0.3)) c.options.scale = static_cast<float>(random.pick({0.0, -0.125, 1.0, 0.05, 0.3}));
  c.options.deterministic = random.chance(0.5);
  c.options.check = random.chance(0.5);
  c.sink = random.chance(0.25);
  c.dlse = random.chance(0.4);
}

}  // namespace

int effort(int count) {
  const char* factor = std::getenv("TANDEM_TEST_EFFORT");
  return std::max(1, static_cast<int>(count * (factor != nullptr ? std::atof(factor) : 1.0)));
}

Layout random_layout(Random& random, int rank, bool input) {
  Layout layout;
  if (rank == 4) {
    layout.order =
        random.pick<std::vector<int>>({{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 2, 1, 3}, {1, 0, 2, 3}, {2, 0, 1, 3}});
  } else if (rank == 3) {
    layout.order = random.pick<std::vector<int>>({{0, 1, 2}, {0, 1, 2}, {1, 0, 2}});
  }
  if (random.chance(0.25)) layout.pad = random.between(1, 40);
  if (random.chance(0.25)) {
    layout.slices = 3;
    layout.slice = random.between(0, 2);
  }
  if (random.chance(0.4)) layout.base_offset = random.between(0, 17);
  layout.ends_at_guard = random.chance(0.3);
  layout.odd_unit_strides = random.chance(0.3);
  if (input && rank >= 3 && random.chance(0.15)) layout.expanded = 1U << random.between(0, rank - 2);
  return layout;
}

Case random_case(std::uint64_t seed, std::int64_t size) {
  Random random(seed);
  Case c;
  c.seed = seed;
  c.dtype =
      random.pick({DType::f32, DType::f32, DType::bf16, DType::bf16, DType::bf16, DType::f16, DType::e4m3});
  // Named, for else GCC 12 for 64-bit Arm warns that the list may be uninitialized.
  static constexpr std::initializer_list<DType> results = {DType::f32, DType::f16, DType::bf16};
  c.out_dtype = c.dtype == DType::e4m3 ? random.pick(results) : c.dtype;
  if (c.dtype == DType::e4m3) c.scales = static_cast<int>(random.between(0, 2));
  c.batch = random.between(1, 4);
  c.heads_kv = random.between(1, 3);
  c.heads_q = c.heads_kv * random.pick<std::int64_t>({1, 1, 2, 3, 8});
  c.head_dim_qk = 8 * random.pick<std::int64_t>({1, 2, 4, 5, 8, 8, 12, 13, 16, 16, 24, 31, 32});
  c.head_dim_v = random.chance(0.6) ? c.head_dim_qk : 8 * random.between(1, 32);
  c.packed_q = random.chance(0.4);
  c.packed_k = c.packed_q ? random.chance(0.8) : random.chance(0.1);
  c.metadata = random.chance(0.3) ? DType::i64 : DType::i32;

  c.seqlen_q = random_length(random, size);
  c.seqlen_k = random.chance(0.4) ? c.seqlen_q : random_length(random, size);
  if (c.packed_q) {
    c.lengths_q = random_lengths(random, c.batch, size);
    c.slack_q = random.chance(0.3) ? random.between(1, 9) : 0;
  }
  if (c.packed_k) {
    c.lengths_k = c.packed_q && random.chance(0.5) ? c.lengths_q : random_lengths(random, c.batch, size);
    c.slack_k = random.chance(0.3) ? random.between(1, 9) : 0;
  }
  if (random.chance(0.2)) c.used_q = random_used(random, c, c.packed_q, c.lengths_q, c.seqlen_q);
  if (random.chance(0.25)) c.used_k = random_used(random, c, c.packed_k, c.lengths_k, c.seqlen_k);
  random_options(random, c);

  const int rank_q = c.packed_q ? 3 : 4;
  const int rank_k = c.packed_k ? 3 : 4;
  c.q = random_layout(random, rank_q, true);
  c.k = random_layout(random, rank_k, true);
  c.v = random_layout(random, rank_k, true);
  c.dout = random_layout(random, rank_q, true);
  c.out = random_layout(random, rank_q, false);
  c.dq = random_layout(random, rank_q, false);
  c.dk = random_layout(random, rank_k, false);
  c.dv = random_layout(random, rank_k, false);
  // Logits beyond about 16 cost fp32 results more than 1e-5 whatever the algorithm: from there on their last
  // bit is worth 2e-6, and a dot product rounds once a term. 16-bit results are measured against PyTorch's
  // own errors.
  const bool large = random.chance(0.15);
  if (c.result_dtype() != DType::f32) {
    if (large) c.amplitude = 4.0;
  } else if (c.options.scale &&
             std::abs(*c.options.scale) * std::sqrt(static_cast<float>(c.head_dim_qk)) > 2.0F) {
    c.options.scale.reset();
  }
  c.threads = static_cast<int>(random.between(1, 2));
  c.workspace = random.chance(0.7);
  if (random.chance(0.25)) c.unwanted = static_cast<unsigned>(random.between(1, 6));
  if (random.chance(0.2)) c.options.split_size = random.pick<std::int64_t>({128, 256, 1024});
  return c;
}

}  // namespace tandem::harness
