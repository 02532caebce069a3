// Forward and backward kernels with dropout, alone and beside the caller's
// functions: what functions need kernels of their own for.
#include "backward/families.hpp"
#include "forward/families.hpp"
#include "functions/any_function.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr Functions dropped(bool scored) {
  return {.digest = any_digest, .score_function = scored, .mask_function = true, .dropout = true};
}

constexpr ForwardConfig forward(Element element, bool scored, ScoreTransform transform,
                                KeySource keys = KeySource::rows) {
  return {.tiling = {.element = element, .head_dim_qk = 64, .head_dim_v = 64},
          .mask = {.causal = true, .local = true, .varlen = true},
          .keys = keys,
          .transform = transform,
          .functions = dropped(scored)};
}

constexpr ForwardConfig few(bool scored, bool split, bool heads_as_rows) {
  ForwardConfig c = forward(Element::bf16, scored, scored ? ScoreTransform::scaled : ScoreTransform::raw);
  c.tiling.block_m = c.tiling.block_n = 64;
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

/// Without any function and with equal lengths: blocks are rescaled lazily.
constexpr ForwardConfig lazy() {
  ForwardConfig c = forward(Element::bf16, false, ScoreTransform::raw);
  c.mask = {};
  c.functions.mask_function = false;
  return c;
}

constexpr BackwardConfig backward_of(Element element, bool scored, bool softcap) {
  return {.tiling = {.element = element, .head_dim_qk = 64, .head_dim_v = 64},
          .mask = {.causal = true, .local = true, .varlen = true},
          .transform = softcap ? ScoreTransform::softcap : ScoreTransform::raw,
          .functions = dropped(scored)};
}

constexpr BackwardConfig wide(int head_dim) {
  BackwardConfig c = head_dim == 256 ? cluster_of_two : BackwardConfig{.tiling = {.block_n = 64}};
  const BackwardConfig narrow = backward_of(Element::bf16, false, false);
  c.tiling.head_dim_qk = c.tiling.head_dim_v = head_dim;
  c.mask = narrow.mask;
  c.functions = narrow.functions;
  return c;
}

/// Of a part of a sequence.
template <typename Config>
constexpr Config placed(Config c) {
  c.functions.dropout_places = true;
  return c;
}

}  // namespace

std::span<const EmulatedForward> dropout_forwards() {
  using enum ScoreTransform;
  constexpr Element bf16 = Element::bf16;
  static constexpr auto kernels =
      emulate<lazy(), forward(Element::f16, false, raw), forward(bf16, false, raw),
              forward(bf16, false, softcap), forward(bf16, true, scaled),
              forward(bf16, false, raw, KeySource::pages), forward(bf16, false, raw, KeySource::entries),
              invariant(forward(bf16, false, raw)), placed(forward(Element::f16, false, raw)),
              placed(forward(bf16, false, raw)), placed(forward(bf16, true, scaled)),
              placed(invariant(forward(bf16, false, raw)))>();
  return kernels;
}

std::span<const EmulatedForward> dropout_forwards_of_few() {
  static constexpr auto kernels = emulate<few(false, true, true), few(false, true, false),
                                          few(true, true, false), placed(few(false, true, true))>();
  return kernels;
}

std::span<const EmulatedBackward> dropout_backwards() {
  static constexpr auto kernels =
      emulate<listed(backward_of(Element::bf16, false, false), false),
              backward_of(Element::f16, false, false), backward_of(Element::bf16, false, false),
              backward_of(Element::bf16, false, true), backward_of(Element::bf16, true, false), wide(192),
              wide(256), placed(backward_of(Element::f16, false, false)),
              placed(backward_of(Element::bf16, false, false)), placed(wide(256))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
