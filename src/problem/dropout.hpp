// Dropout: which entries of P a call keeps. Plain numbers, for kernels of any instruction set.
#pragma once

#include <cstdint>

namespace tandem {

/// A batch entry among the whole: its head h is head `first_head` + h of all batch entries, and its row i is
/// row `query` + i * step of a sequence for q, and `key` + i * step for k. As a call is given them, four i32
/// in this order.
struct DropoutPlace {
  std::uint32_t first_head = 0;
  std::uint32_t query = 0;
  std::uint32_t key = 0;
  std::uint32_t step = 1;
};

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
  /// Where batch entries lie in sequences of which the call has rows: four numbers each, `place_stride` from
  /// one entry's to the next's. Null: they are whole. On the device of the call.
  const std::int32_t* places = nullptr;
  std::int64_t place_stride = 0;

  [[nodiscard]] DropoutPlace place_of(std::int64_t batch) const {
    if (places == nullptr) return {.first_head = static_cast<std::uint32_t>(batch) * heads};
    const std::int32_t* const four = places + batch * place_stride;
    const auto word = [four](int i) { return static_cast<std::uint32_t>(four[i]); };
    return {.first_head = word(0), .query = word(1), .key = word(2), .step = word(3)};
  }
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
