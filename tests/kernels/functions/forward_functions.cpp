// Forward kernels with the caller's functions: every element type, score transform and place of keys, shared
// key blocks, heads as rows, and a split size.
#include "forward/families.hpp"
#include "functions/any_function.hpp"

namespace tandem::kernel_tests {
namespace {

/// `scored`: with a score function, which takes scaled scores; else with a mask function alone.
constexpr ForwardConfig with_functions(Element element, bool scored, ScoreTransform transform,
                                       KeySource keys = rows) {
  return {.tiling = {.element = element, .head_dim_qk = 64, .head_dim_v = 64},
          .mask = {.causal = true, .local = true, .varlen = true},
          .keys = keys,
          .transform = transform,
          .functions = {.digest = any_digest, .score_function = scored, .mask_function = true}};
}

constexpr ForwardConfig few(ForwardConfig c, bool split, bool heads_as_rows) {
  c.tiling.block_m = 64;
  c.tiling.block_n = 64;
  c.tiling.heads_as_rows = heads_as_rows;
  c.schedule.pingpong = false;
  c.schedule.split = split;
  return c;
}

constexpr ForwardConfig invariant(ForwardConfig c) {
  c.tiling.block_n = 64;
  c.schedule.invariant = true;
  return c;
}

/// Of equal lengths, by lists of key blocks.
constexpr ForwardConfig by_lists(bool scored, bool windowed) {
  ForwardConfig c = with_functions(bf16, scored, scored ? scaled : raw);
  c.tiling.block_n = 64;
  return listed(c, windowed);
}

}  // namespace

std::span<const EmulatedForward> function_forwards_of_lists() {
  static constexpr auto kernels =
      emulate<by_lists(false, false), by_lists(true, false), by_lists(false, true), by_lists(true, true)>();
  return kernels;
}

std::span<const EmulatedForward> function_forwards() {
  static constexpr auto kernels =
      emulate<with_functions(f16, false, raw), with_functions(f16, false, scaled),
              with_functions(f16, false, softcap), with_functions(bf16, false, raw),
              with_functions(bf16, false, scaled), with_functions(bf16, false, softcap),
              with_functions(f16, true, scaled), with_functions(f16, true, softcap),
              with_functions(bf16, true, scaled), with_functions(bf16, true, softcap),
              with_functions(bf16, false, raw, pages), with_functions(bf16, true, scaled, pages),
              with_functions(bf16, false, raw, entries), with_functions(bf16, true, scaled, entries),
              invariant(with_functions(bf16, false, raw)), invariant(with_functions(bf16, true, scaled))>();
  return kernels;
}

std::span<const EmulatedForward> function_forwards_of_few() {
  constexpr ForwardConfig masked = with_functions(bf16, false, raw);
  constexpr ForwardConfig scored = with_functions(bf16, true, scaled);
  static constexpr auto kernels =
      emulate<few(masked, true, true), few(scored, true, true), few(masked, false, true),
              few(scored, false, true), few(masked, true, false), few(scored, true, false),
              invariant(few(scored, true, true))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
