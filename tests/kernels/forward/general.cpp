// Kernels that run any problem up to a head dimension: every mask and varlen lengths.
#include "forward/families.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr ForwardConfig general(Element element, int head_dim, ScoreTransform transform) {
  return {.tiling = {.element = element,
                     .head_dim_qk = head_dim,
                     .head_dim_v = head_dim,
                     .block_n = head_dim == 256 ? 80 : 128},
          .mask = {.causal = true, .local = true, .varlen = true},
          .transform = transform,
          .schedule = {.pingpong = head_dim != 256}};
}

}  // namespace

std::span<const EmulatedForward> general_forwards() {
  static constexpr auto kernels = emulate<
      general(Element::f16, 64, ScoreTransform::raw), general(Element::f16, 64, ScoreTransform::scaled),
      general(Element::f16, 64, ScoreTransform::softcap), general(Element::bf16, 64, ScoreTransform::raw),
      general(Element::bf16, 64, ScoreTransform::scaled), general(Element::bf16, 64, ScoreTransform::softcap),
      general(Element::f16, 256, ScoreTransform::raw), general(Element::bf16, 256, ScoreTransform::raw)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
