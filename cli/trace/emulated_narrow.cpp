// Head dimension 64: three warpgroups, exponentials and products take the same time.
#include "trace/emulated_names.hpp"

namespace tandem::cli::trace {

std::span<const EmulatedKernel> narrow_kernels() {
  constexpr Tiling tiling{.head_dim_qk = 64, .head_dim_v = 64, .block_m = 192, .block_n = 128};
  static constexpr auto kernels =
      emulate<ForwardConfig{.tiling = tiling, .stages = 4},
              ForwardConfig{.tiling = tiling, .stages = 4, .schedule = {.pingpong = false}}>();
  return kernels;
}

}  // namespace tandem::cli::trace
