// Head dimension 256: O leaves registers for short blocks of keys only.
#include "trace/emulated_names.hpp"

namespace tandem::cli::trace {

std::span<const EmulatedKernel> widest_kernels() {
  static constexpr auto kernels =
      emulate<ForwardConfig{.tiling = {.head_dim_qk = 256, .head_dim_v = 256, .block_n = 80},
                            .schedule = {.pingpong = false}},
              ForwardConfig{.tiling = {.head_dim_qk = 256, .head_dim_v = 256, .block_n = 64}}>();
  return kernels;
}

}  // namespace tandem::cli::trace
