// Kernels that read K and V of 8 bits beside a 16-bit Q: every mask and varlen lengths.
#include "forward/families.hpp"

namespace tandem::kernel_tests {
namespace {

/// Pages of single rows take 128 columns. One warpgroup where thread blocks share key blocks, or for wide
/// heads.
constexpr ForwardConfig mixed(Element element, OperandType type, KeySource keys, bool split,
                              int head_dim = 128, ScoreTransform transform = ScoreTransform::scaled) {
  const bool one = split || head_dim > 128;
  return {.tiling = {.element = element,
                     .head_dim_qk = head_dim,
                     .head_dim_v = head_dim,
                     .block_m = one ? 64 : 128,
                     .block_n = head_dim == 256 ? 32 : 64},
          .stages = split ? 3 : 1,
          .mask = {.causal = true, .local = true, .varlen = true},
          .keys = keys,
          .transform = transform,
          .schedule = {.dynamic = !split, .pingpong = !one, .split = split},
          .key_type = type};
}

constexpr ForwardConfig invariant(ForwardConfig c) {
  c.schedule.invariant = true;
  return c;
}

/// Query heads that share keys are rows of a tile.
constexpr ForwardConfig grouped(ForwardConfig c) {
  c.tiling.heads_as_rows = true;
  return c;
}

constexpr Element bf16 = Element::bf16;
constexpr OperandType e4m3 = OperandType::e4m3;
constexpr OperandType s8 = OperandType::s8;

}  // namespace

std::span<const EmulatedForward> mixed_split_forwards() {
  static constexpr auto kernels =
      emulate<mixed(bf16, e4m3, KeySource::rows, true, 64), mixed(bf16, s8, KeySource::rows, true, 64),
              mixed(bf16, e4m3, KeySource::pages, true), mixed(bf16, s8, KeySource::pages, true),
              mixed(Element::f16, e4m3, KeySource::pages, true),
              mixed(Element::f16, s8, KeySource::pages, true),
              mixed(bf16, e4m3, KeySource::pages, true, 256, ScoreTransform::softcap),
              mixed(bf16, e4m3, KeySource::entries, true), mixed(bf16, e4m3, KeySource::padded_pages, true),
              mixed(bf16, s8, KeySource::padded_pages, true, 256),
              invariant(mixed(bf16, e4m3, KeySource::rows, true, 64)),
              invariant(mixed(bf16, e4m3, KeySource::pages, true)),
              f32_out(by_sequence(mixed(bf16, e4m3, KeySource::pages, true)))>();
  return kernels;
}

std::span<const EmulatedForward> mixed_forwards() {
  static constexpr auto kernels =
      emulate<mixed(bf16, e4m3, KeySource::rows, false, 64), mixed(bf16, s8, KeySource::rows, false, 192),
              mixed(bf16, e4m3, KeySource::pages, false), mixed(bf16, s8, KeySource::pages, false),
              mixed(Element::f16, e4m3, KeySource::pages, false), mixed(bf16, s8, KeySource::entries, false),
              mixed(bf16, e4m3, KeySource::padded_pages, false),
              invariant(mixed(bf16, e4m3, KeySource::rows, false, 64)),
              invariant(mixed(bf16, e4m3, KeySource::pages, false))>();
  return kernels;
}

std::span<const EmulatedForward> mixed_heads_as_rows_forwards() {
  static constexpr auto kernels = emulate<grouped(mixed(bf16, e4m3, KeySource::rows, true, 64)),
                                          grouped(mixed(bf16, s8, KeySource::rows, false, 64)),
                                          grouped(mixed(bf16, e4m3, KeySource::pages, true)),
                                          grouped(mixed(Element::f16, s8, KeySource::pages, true)),
                                          grouped(mixed(bf16, e4m3, KeySource::padded_pages, true)),
                                          grouped(mixed(bf16, e4m3, KeySource::entries, true)),
                                          grouped(invariant(mixed(bf16, e4m3, KeySource::rows, true, 64))),
                                          grouped(invariant(mixed(bf16, e4m3, KeySource::pages, true))),
                                          grouped(invariant(mixed(bf16, e4m3, KeySource::pages, false)))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
