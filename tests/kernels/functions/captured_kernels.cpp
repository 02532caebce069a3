// Backward kernels that add to the gradients of captured tensors: of Hopper with every feature that changes
// what they keep of P, S and dP, and of the family sm80 with each division of the work, which heads of more
// than 128 dimensions take on Hopper too.
#include "backward/families.hpp"
#include "functions/any_function.hpp"

namespace tandem::kernel_tests {
namespace {

template <typename Config = BackwardConfig>
constexpr Config captured(Element element, bool softcap, bool dropout) {
  return {.tiling = {.element = element, .head_dim_qk = 64, .head_dim_v = 64},
          .mask = {.causal = true, .local = true, .varlen = true},
          .transform = softcap ? ScoreTransform::softcap : ScoreTransform::raw,
          .functions = {.digest = any_digest,
                        .score_function = true,
                        .mask_function = true,
                        .dropout = dropout,
                        .captured_gradients = true}};
}

constexpr Sm80BackwardConfig of_sm80(Element element, int head_dim, bool softcap = false,
                                     bool dropout = false) {
  auto c = captured<Sm80BackwardConfig>(element, softcap, dropout);
  c.tiling.head_dim_qk = c.tiling.head_dim_v = head_dim;
  if (head_dim > 128) c.tiling.block_n = 64;
  return c;
}
/// As on GPUs with 100 KB of shared memory an SM.
constexpr Sm80BackwardConfig in_little_memory(Sm80BackwardConfig c) {
  c.q_stages = c.dout_stages = 1;
  c.ds_in_dout = true;
  c.tiling.block_m = 32;
  return c;
}

}  // namespace

std::span<const EmulatedBackward> captured_backwards() {
  static constexpr auto kernels =
      emulate<listed(captured(Element::bf16, false, false), false), captured(Element::f16, false, false),
              captured(Element::bf16, false, false), captured(Element::bf16, true, false),
              captured(Element::bf16, false, true)>();
  return kernels;
}

std::span<const EmulatedBackward> captured_sm80_backwards() {
  static constexpr auto kernels =
      emulate<listed(of_sm80(Element::bf16, 64), false), of_sm80(Element::f16, 64),
              of_sm80(Element::bf16, 128), of_sm80(Element::bf16, 192, true),
              of_sm80(Element::bf16, 64, false, true), in_little_memory(of_sm80(Element::bf16, 256))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
