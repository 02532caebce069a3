// Random calls to append_kv with all features crossed.
#include <algorithm>
#include <numeric>

#include "append_call.hpp"

namespace tandem::harness {

AppendCase random_append(std::uint64_t seed) {
  Random random(seed);
  AppendCase c;
  c.seed = seed;
  c.dtype = random.pick({DType::f32, DType::f16, DType::bf16, DType::bf16});
  c.cache_dtype = random.pick({c.dtype, c.dtype, DType::e4m3, DType::s8});
  if (c.cache_dtype != c.dtype) {
    c.scales = static_cast<int>(random.between(0, 3));
  } else if (random.chance(0.1)) {
    c.dtype = c.cache_dtype = random.pick({DType::e4m3, DType::s8});
  } else if (random.chance(0.3)) {
    c.dtype = random.pick({DType::e4m3, DType::s8, DType::bf16, DType::f16, DType::f32});
    c.cache_dtype = random.pick({DType::bf16, DType::f16, DType::f32});
    c.scales = c.dtype == DType::e4m3 || c.dtype == DType::s8 ? static_cast<int>(random.between(0, 2)) : 0;
  }
  const bool codes = c.dtype == DType::e4m3 || c.dtype == DType::s8;
  c.batch = random.between(1, 5);
  c.heads_kv = random.between(1, 4);
  c.head_dim = random.chance(0.7) ? 8 * random.between(2, 24) : random.between(16, 200);
  c.head_dim_v = random.chance(0.6) ? c.head_dim : random.between(0, 200);
  c.metadata = random.pick({DType::i32, DType::i64});
  c.entry_rows = random.pick<std::int64_t>({1, 3, 16, 24, 64});
  c.seqlen_new = random.pick<std::int64_t>({0, 1, 1, 2, 17, 40});
  c.threads = static_cast<int>(random.between(1, 3));
  const bool slots = random.chance(0.3);
  if (slots) {
    c.batch = 1;
    c.entries = random.between(1, 9);
    std::vector<std::int64_t> all(static_cast<std::size_t>(c.entries * c.entry_rows));
    std::iota(all.begin(), all.end(), 0);
    for (std::size_t n = all.size(); n-- > 1;) {
      std::swap(all[n], all[static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(n)))]);
    }
    all.resize(static_cast<std::size_t>(random.between(1, static_cast<std::int64_t>(all.size()))));
    for (std::int64_t& slot : all) {
      if (random.chance(0.2)) slot = random.pick<std::int64_t>({-1, -100});
    }
    c.slots = all;
  } else {
    if (random.chance(0.5)) {
      for (std::int64_t b = 0; b < c.batch; ++b) c.lengths.push_back(random.between(0, 20));
      c.slack = random.chance(0.5) ? random.between(1, 5) : 0;
    }
    c.max_pages = random.chance(0.6) ? random.between(1, 5) : 0;
    for (std::int64_t b = 0; b < c.batch; ++b) {
      c.before.push_back(random.between(-1, std::max<std::int64_t>(1, c.max_pages) * c.entry_rows));
      if (c.max_pages == 0 && random.chance(0.5)) c.entries = c.batch + 2;
    }
    if (c.entries > 0) {
      for (std::int64_t b = 0; b < c.batch; ++b) c.index.push_back((b + 1) % c.entries);
    }
    if (random.chance(0.3)) {
      for (std::int64_t b = 0; b < c.batch; ++b) c.used.push_back(random.between(-1, 12));
    }
  }
  if (!codes && random.chance(0.6)) {
    c.rotary_dim = 16 * random.between(1, c.head_dim / 16);
    c.interleaved = random.chance(0.5);
    c.table_dtype = random.chance(0.5) ? DType::f32 : c.dtype;
    c.heads_q = random.pick<std::int64_t>({0, 1, 4});
    c.positions = random.between(20, 400);
    if (slots || random.chance(0.4)) {
      const std::int64_t count = slots ? c.rows() : c.batch;
      for (std::int64_t n = 0; n < count; ++n) c.offsets.push_back(random.between(-2, 60));
    }
  }
  if (codes && c.scales > 0 && !c.packed() && random.chance(0.5)) c.scales = 4;
  const int rank = c.packed() ? 3 : 4;
  c.k_new = random_layout(random, rank, true);
  c.v_new = random_layout(random, rank, true);
  c.q = random_layout(random, rank, true);
  c.q_out = random_layout(random, rank, false);
  c.k_cache = random_layout(random, 4, false);
  c.v_cache = random_layout(random, 4, false);
  if (c.scales == 3 && random.chance(0.5)) c.scale_cache.order = {0, 2, 1};  // heads innermost
  if (c.scales == 3 && random.chance(0.5)) c.scale_cache.pad = 3;
  return c;
}

}  // namespace tandem::harness
