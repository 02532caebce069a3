// Kernels of the family sm80 with the caller's functions: forward with every score transform and place of
// keys, shared key blocks, heads as rows and a split size, then backward; both with lists of blocks and with
// dropout.
#include "backward/families.hpp"
#include "forward/emulated_sm80.hpp"
#include "functions/any_function.hpp"

namespace tandem::kernel_tests {
namespace {

template <Sm80ForwardConfig... configs>
constexpr std::array<EmulatedForward, sizeof...(configs)> emulate_forward() {
  return {emulated_sm80<configs>()...};
}

constexpr Functions functions(bool scored) {
  return {.digest = any_digest, .score_function = scored, .mask_function = true};
}

constexpr Sm80ForwardConfig forward(Element element, bool scored, ScoreTransform transform,
                                    KeySource keys = KeySource::rows) {
  return {.tiling = {.element = element, .head_dim_qk = 64, .head_dim_v = 64, .block_m = 128, .block_n = 64},
          .stages = 2,
          .mask = {.causal = true, .local = true, .varlen = true},
          .keys = keys,
          .transform = transform,
          .functions = functions(scored)};
}

constexpr Sm80ForwardConfig few(Sm80ForwardConfig c, bool split, bool heads_as_rows) {
  c.tiling.block_m = 64;
  c.tiling.heads_as_rows = heads_as_rows;
  c.schedule.split = split;
  return c;
}
constexpr Sm80ForwardConfig invariant(Sm80ForwardConfig c) {
  c.tiling.block_m = 64;
  c.schedule.invariant = true;
  return c;
}
/// Of equal lengths, by lists of key blocks.
constexpr Sm80ForwardConfig by_lists(bool scored, bool windowed, int stages) {
  Sm80ForwardConfig c = forward(Element::bf16, scored, scored ? ScoreTransform::scaled : ScoreTransform::raw);
  c.stages = stages;
  return listed(c, windowed);
}

constexpr Sm80BackwardConfig backward_of(Element element, bool scored, bool softcap, int head_dim = 64) {
  return {.tiling = {.element = element, .head_dim_qk = head_dim, .head_dim_v = head_dim},
          .mask = {.causal = true, .local = true, .varlen = true},
          .transform = softcap ? ScoreTransform::softcap : ScoreTransform::raw,
          .functions = functions(scored)};
}
constexpr Sm80BackwardConfig in_order(Sm80BackwardConfig c) {
  c.schedule.deterministic = true;
  return c;
}
/// As on GPUs with 100 KB of shared memory an SM.
constexpr Sm80BackwardConfig in_little_memory(Sm80BackwardConfig c) {
  c.q_stages = c.dout_stages = 1;
  c.ds_in_dout = true;
  return c;
}
/// Wide heads, whose queries two warpgroups halve.
constexpr Sm80BackwardConfig halved(Sm80BackwardConfig c, int block_m) {
  c.tiling.block_n = 64;
  c.tiling.block_m = block_m;
  return c;
}
/// As of heads to 64 dimensions: a thread has 64 scores of a block, two words of what is kept.
constexpr Sm80BackwardConfig with_queries(Sm80BackwardConfig c, int block_m) {
  c.tiling.block_m = block_m;
  return c;
}

template <typename Config>
constexpr Config dropped(Config c) {
  c.functions.dropout = true;
  return c;
}
/// Of a part of a sequence.
template <typename Config>
constexpr Config placed(Config c) {
  c.functions.dropout = c.functions.dropout_places = true;
  return c;
}

}  // namespace

std::span<const EmulatedForward> function_sm80_forwards() {
  using enum ScoreTransform;
  constexpr Element f16 = Element::f16;
  constexpr Element bf16 = Element::bf16;
  static constexpr auto kernels =
      emulate_forward<forward(f16, false, raw), forward(f16, true, scaled), forward(bf16, false, raw),
                      forward(bf16, false, softcap), forward(bf16, true, scaled),
                      forward(bf16, true, softcap), forward(bf16, false, raw, KeySource::pages),
                      forward(bf16, true, scaled, KeySource::entries), invariant(forward(bf16, false, raw)),
                      invariant(forward(bf16, true, scaled))>();
  return kernels;
}

std::span<const EmulatedForward> dropout_sm80_forwards() {
  using enum ScoreTransform;
  constexpr Element bf16 = Element::bf16;
  static constexpr auto kernels =
      emulate_forward<dropped(forward(Element::f16, false, raw)), dropped(forward(bf16, false, raw)),
                      dropped(forward(bf16, false, softcap)), dropped(forward(bf16, true, scaled)),
                      dropped(forward(bf16, false, raw, KeySource::pages)),
                      dropped(forward(bf16, false, raw, KeySource::entries)),
                      dropped(invariant(forward(bf16, false, raw))),
                      placed(forward(Element::f16, false, raw)), placed(forward(bf16, false, raw))>();
  return kernels;
}

std::span<const EmulatedForward> dropout_sm80_forwards_of_few() {
  constexpr Sm80ForwardConfig masked = forward(Element::bf16, false, ScoreTransform::raw);
  constexpr Sm80ForwardConfig scored = forward(Element::bf16, true, ScoreTransform::scaled);
  static constexpr auto kernels =
      emulate_forward<dropped(few(masked, true, true)), dropped(few(masked, true, false)),
                      dropped(few(scored, true, false))>();
  return kernels;
}

std::span<const EmulatedForward> function_sm80_forwards_of_few() {
  using enum ScoreTransform;
  constexpr Sm80ForwardConfig masked = forward(Element::bf16, false, raw);
  constexpr Sm80ForwardConfig scored = forward(Element::bf16, true, scaled);
  static constexpr auto kernels =
      emulate_forward<few(masked, true, true), few(scored, false, true), few(scored, true, false)>();
  return kernels;
}

std::span<const EmulatedForward> function_sm80_forwards_of_lists() {
  static constexpr auto kernels = emulate_forward<by_lists(false, false, 2), by_lists(true, false, 1),
                                                  by_lists(false, true, 1), by_lists(true, true, 2)>();
  return kernels;
}

std::span<const EmulatedBackward> function_sm80_backwards_of_lists() {
  constexpr Sm80BackwardConfig masked = backward_of(Element::bf16, false, false);
  constexpr Sm80BackwardConfig scored = backward_of(Element::bf16, true, false, 128);
  static constexpr auto kernels =
      emulate<listed(masked, false), listed(in_little_memory(scored), true),
              listed(halved(backward_of(Element::bf16, false, false, 192), 64), false)>();
  return kernels;
}

std::span<const EmulatedBackward> function_sm80_backwards() {
  static constexpr auto kernels =
      emulate<backward_of(Element::f16, true, false), backward_of(Element::bf16, true, false),
              backward_of(Element::bf16, false, false), backward_of(Element::bf16, true, true),
              backward_of(Element::bf16, false, true),
              in_order(in_little_memory(backward_of(Element::bf16, false, false, 128))),
              halved(in_little_memory(backward_of(Element::bf16, true, true, 256)), 32)>();
  return kernels;
}

std::span<const EmulatedBackward> dropout_sm80_backwards() {
  constexpr Sm80BackwardConfig masked = backward_of(Element::bf16, false, false);
  constexpr Sm80BackwardConfig of_64_queries = backward_of(Element::bf16, true, false, 128);
  static constexpr auto kernels =
      emulate<dropped(listed(masked, false)), dropped(backward_of(Element::f16, false, false)),
              dropped(with_queries(masked, 128)), dropped(backward_of(Element::bf16, false, true)),
              dropped(in_order(in_little_memory(of_64_queries))),
              dropped(halved(backward_of(Element::bf16, false, false, 192), 64)),
              dropped(halved(in_little_memory(backward_of(Element::bf16, false, false, 256)), 32)),
              placed(backward_of(Element::f16, false, false)), placed(masked)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
