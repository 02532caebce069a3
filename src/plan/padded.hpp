// Head dimensions as kernels have them.
#pragma once

#include <cstdint>

namespace tandem {

/// `head_dim` in whole units.
constexpr int padded(std::int64_t head_dim, int unit) {
  return static_cast<int>((head_dim + unit - 1) / unit * unit);
}

}  // namespace tandem
