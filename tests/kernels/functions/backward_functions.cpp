// Backward kernels with the caller's functions: with a score function and without, with a softcap before it,
// and those of wide heads.
#include "backward/families.hpp"
#include "functions/any_function.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr BackwardConfig with_functions(Element element, bool scored, bool softcap) {
  return {.tiling = {.element = element, .head_dim_qk = 64, .head_dim_v = 64},
          .mask = {.causal = true, .local = true, .varlen = true},
          .transform = softcap ? ScoreTransform::softcap : ScoreTransform::raw,
          .functions = {.digest = any_digest, .score_function = scored, .mask_function = true}};
}

/// Full attention of one length: each key tile starts at another query block.
constexpr BackwardConfig staggered() {
  BackwardConfig c = with_functions(Element::bf16, true, false);
  c.mask = {};
  c.schedule = {.staggered = true};
  return c;
}

/// `queries` at a time.
constexpr BackwardConfig pingpong(BackwardConfig c, int queries) {
  c.tiling.block_m = queries;
  c.q_stages = 3;
  c.schedule.pingpong = true;
  return c;
}

constexpr BackwardConfig wide(int head_dim, bool scored) {
  BackwardConfig c = head_dim == 256 ? cluster_of_two : BackwardConfig{.tiling = {.block_n = 64}};
  const BackwardConfig narrow = with_functions(Element::bf16, scored, false);
  c.tiling.head_dim_qk = c.tiling.head_dim_v = head_dim;
  c.mask = narrow.mask;
  c.functions = narrow.functions;
  return c;
}

}  // namespace

std::span<const EmulatedBackward> function_backwards_of_lists() {
  constexpr BackwardConfig masked = with_functions(Element::bf16, false, false);
  constexpr BackwardConfig scored = with_functions(Element::bf16, true, false);
  static constexpr auto kernels =
      emulate<listed(masked, false), listed(scored, false), listed(masked, true), listed(scored, true),
              listed(with_functions(Element::bf16, false, true), true),
              listed(with_functions(Element::bf16, true, true), true), listed(wide(192, false), true),
              listed(wide(256, true), true), pingpong(listed(masked, false), 64),
              pingpong(listed(scored, true), 64), pingpong(listed(masked, true), 128),
              pingpong(listed(scored, false), 128)>();
  return kernels;
}

std::span<const EmulatedBackward> function_backwards() {
  static constexpr auto kernels =
      emulate<staggered(), with_functions(Element::f16, true, false),
              with_functions(Element::bf16, true, false), with_functions(Element::f16, true, true),
              with_functions(Element::bf16, true, true), with_functions(Element::f16, false, false),
              with_functions(Element::bf16, false, false), with_functions(Element::bf16, false, true),
              wide(192, true), wide(192, false), wide(256, true),
              pingpong(with_functions(Element::bf16, true, false), 64),
              pingpong(with_functions(Element::f16, false, false), 128)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
