// Dropout: which entries of P a call keeps. Plain numbers, for kernels of any instruction set.
#pragma once

#include <cstdint>

namespace tandem {

/// Entry (batch, head, query, key), positions counted in its sequence, is kept where word key % 4 of
///   Philox4x32-10(counter = {key / 4, query, batch * heads + head, offset}, key)
/// is at least `threshold` (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Counter and
/// key are taken modulo 2^32. What is kept is multiplied by `scale`.
struct Dropout {
  bool on = false;
  float p = 0.0F;
  std::uint32_t threshold = 0;
  float scale = 1.0F;  ///< 1 / (1 - p)
  std::uint32_t key[2] = {0, 0};
  std::uint32_t offset = 0;
  std::uint32_t heads = 1;  ///< query heads
};

/// `p` is in [0, 1). The seed is the key; the high half of the offset changes it.
constexpr Dropout make_dropout(float p, std::uint64_t seed, std::uint64_t offset, std::int64_t heads) {
  if (p <= 0.0F) return {};
  return {.on = true,
          .p = p,
          .threshold = static_cast<std::uint32_t>(static_cast<double>(p) * 4294967296.0),
          .scale = 1.0F / (1.0F - p),
          .key = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>((seed ^ offset) >> 32U)},
          .offset = static_cast<std::uint32_t>(offset),
          .heads = static_cast<std::uint32_t>(heads)};
}

}  // namespace tandem
