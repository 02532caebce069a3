// Kernels with an output gate: of every mask and any lengths, with shared keys and a split size, heads as
// rows, in tiles of every kind and heads of every size; with functions and dropout; and of the family sm80.
#include "forward/emulated_sm80.hpp"
#include "forward/families.hpp"
#include "functions/any_function.hpp"

namespace tandem::kernel_tests {
namespace {

template <typename Config = ForwardConfig>
constexpr Config any(Element element, ScoreTransform transform = raw, KeySource keys = rows) {
  Config c;
  c.tiling = {.element = element, .head_dim_qk = 64, .head_dim_v = 64};
  if constexpr (std::is_same_v<Config, Sm80ForwardConfig>) c.tiling.block_n = 64;
  c.mask = {.causal = true, .local = true, .varlen = true};
  c.keys = keys;
  c.transform = transform;
  return gated(c);
}
template <typename Config>
constexpr Config of_few(Config c, bool heads_as_rows = false) {
  c.tiling.block_m = c.tiling.block_n = 64;
  c.tiling.heads_as_rows = heads_as_rows;
  c.schedule = {};
  if constexpr (requires { c.schedule.pingpong; }) c.schedule.pingpong = false;
  c.schedule.split = true;
  return c;
}
constexpr ForwardConfig wide(Element element) {
  ForwardConfig c = any(element);
  c.tiling.head_dim_qk = c.tiling.head_dim_v = 256;
  c.tiling.block_n = 80;
  c.schedule.pingpong = false;
  return c;
}
constexpr Sm80ForwardConfig wide_sm80() {
  auto c = any<Sm80ForwardConfig>(bf16);
  c.tiling.head_dim_qk = c.tiling.head_dim_v = 256;
  c.tiling.block_m = 64;
  c.tiling.block_n = 32;
  c.stages = 1;
  return c;
}

/// With functions or, if `dropped`, dropout.
template <typename Config>
constexpr Config with(Config c, bool scored, bool dropped = false) {
  if (scored) c.transform = scaled;
  c.functions = dropped ? Functions{.digest = any_digest, .dropout = true}
                        : Functions{.digest = any_digest, .score_function = scored, .mask_function = true};
  return c;
}
constexpr ForwardConfig by_lists(ForwardConfig c) {
  c.tiling.block_n = 64;
  return listed(c, false);
}

}  // namespace

std::span<const EmulatedForward> gated_forwards() {
  static constexpr auto kernels = emulate<
      of_few(any(bf16), true), of_few(any(f16)), of_few(any(bf16)), with_split_size(of_few(any(bf16))),
      with_split_size(of_few(any(f16))), any(f16), any(bf16), any(bf16, softcap), any(f16, softcap),
      any(bf16, raw, pages), any(f16, raw, pages), with_split_size(any(bf16)), with_split_size(any(f16)),
      f32_out(any(bf16)), f32_out(any(f16)), f32_out(with_split_size(of_few(any(bf16)))),
      f32_out(of_few(any(f16))), wide(bf16), wide(f16), with_maxima(any(bf16)), by_sequence(any(bf16)),
      gated(ForwardConfig{.tiling = {.block_n = 128}, .stages = 3, .schedule = {.output_late = true}}),
      gated(ForwardConfig{
          .tiling = {.block_m = 192, .block_n = 64},
          .stages = 4,
          .q_stages = 2,
          .mask = {.causal = true},
          .schedule = {.dynamic = true, .pingpong = false, .output_late = true, .own_blocks = true}}),
      gated(ForwardConfig{.tiling = {.head_dim_qk = 64, .head_dim_v = 64, .block_n = 64},
                          .stages = 4,
                          .q_stages = 2,
                          .teams = 2,
                          .schedule = {.dynamic = true, .pingpong = false}}),
      gated(ForwardConfig{.tiling = {.head_dim_qk = 64, .head_dim_v = 64},
                          .mask = {.causal = true, .varlen = true},
                          .transform = scaled,
                          .schedule = {.pingpong = false},
                          .key_type = OperandType::e4m3})>();
  return kernels;
}

std::span<const EmulatedForward> gated_function_forwards() {
  static constexpr auto kernels =
      emulate<by_lists(with(any(bf16), false)), by_lists(with(any(bf16), true)), with(any(bf16), false),
              with(any(bf16), true), with(any(f16), true), with(any(bf16), false, true)>();
  return kernels;
}

std::span<const EmulatedForward> gated_sm80_forwards() {
  using Config = Sm80ForwardConfig;
  static constexpr std::array kernels = {emulated_sm80<of_few(any<Config>(bf16))>(),
                                         emulated_sm80<of_few(any<Config>(bf16), true)>(),
                                         emulated_sm80<any<Config>(f16)>(),
                                         emulated_sm80<any<Config>(bf16)>(),
                                         emulated_sm80<any<Config>(bf16, softcap)>(),
                                         emulated_sm80<any<Config>(bf16, raw, pages)>(),
                                         emulated_sm80<with_split_size(any<Config>(bf16))>(),
                                         emulated_sm80<f32_out(any<Config>(bf16))>(),
                                         emulated_sm80<wide_sm80()>(),
                                         emulated_sm80<with(any<Config>(bf16), true)>(),
                                         emulated_sm80<with(any<Config>(bf16), false)>(),
                                         emulated_sm80<with(any<Config>(bf16), false, true)>()};
  return kernels;
}

}  // namespace tandem::kernel_tests
