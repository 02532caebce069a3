// Backward kernels that add to the gradients of captured tensors: of Hopper with every feature that changes
// what they keep of P, S and dP, and of the family sm80 with each division of the work, which heads of more
// than 128 dimensions take on Hopper too.
#include "backward/families.hpp"
#include "functions/any_function.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr BackwardConfig captured(Element element, bool softcap, bool dropout) {
  return {.tiling = {.element = element, .head_dim_qk = 64, .head_dim_v = 64},
          .mask = {.causal = true, .local = true, .varlen = true},
          .softcap = softcap,
          .functions = {.digest = any_digest,
                        .score_function = true,
                        .mask_function = true,
                        .dropout = dropout,
                        .captured_gradients = true}};
}

constexpr BackwardConfig of_sm80(BackwardConfig c, int head_dim) {
  c.tiling.head_dim_qk = c.tiling.head_dim_v = head_dim;
  c.family = Family::sm80;
  if (head_dim > 128) c.tiling.block_n = 64;
  return c;
}
/// As on GPUs with 100 KB of shared memory an SM.
constexpr BackwardConfig in_little_memory(BackwardConfig c) {
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
  static constexpr auto kernels = emulate<
      listed(of_sm80(captured(Element::bf16, false, false), 64), false),
      of_sm80(captured(Element::f16, false, false), 64), of_sm80(captured(Element::bf16, false, false), 128),
      of_sm80(captured(Element::bf16, true, false), 192), of_sm80(captured(Element::bf16, false, true), 64),
      in_little_memory(of_sm80(captured(Element::bf16, false, false), 256))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
