// Kernels that read K and V of 8 bits beside a 16-bit Q: every mask and varlen lengths.
#include "forward/mixed.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedForward> mixed_split_forwards() {
  static constexpr auto kernels =
      emulate<mixed(bf16, e4m3, KeySource::rows, true, 64), mixed(bf16, s8, KeySource::rows, true, 64),
              mixed(bf16, e4m3, KeySource::pages, true), mixed(bf16, s8, KeySource::pages, true),
              mixed(Element::f16, e4m3, KeySource::pages, true),
              mixed(Element::f16, s8, KeySource::pages, true),
              mixed(bf16, e4m3, KeySource::pages, true, 256, ScoreTransform::softcap),
              mixed(bf16, e4m3, KeySource::entries, true), mixed(bf16, e4m3, KeySource::padded_pages, true),
              mixed(bf16, s8, KeySource::padded_pages, true, 256),
              with_split_size(mixed(bf16, e4m3, KeySource::rows, true, 64)),
              with_split_size(mixed(bf16, e4m3, KeySource::pages, true)),
              f32_out(by_sequence(mixed(bf16, e4m3, KeySource::pages, true)))>();
  return kernels;
}

std::span<const EmulatedForward> mixed_forwards() {
  static constexpr auto kernels =
      emulate<mixed(bf16, e4m3, KeySource::rows, false, 64), mixed(bf16, s8, KeySource::rows, false, 192),
              mixed(bf16, e4m3, KeySource::pages, false), mixed(bf16, s8, KeySource::pages, false),
              mixed(Element::f16, e4m3, KeySource::pages, false), mixed(bf16, s8, KeySource::entries, false),
              mixed(bf16, e4m3, KeySource::padded_pages, false),
              with_split_size(mixed(bf16, e4m3, KeySource::rows, false, 64)),
              with_split_size(mixed(bf16, e4m3, KeySource::pages, false))>();
  return kernels;
}

std::span<const EmulatedForward> mixed_heads_as_rows_forwards() {
  static constexpr auto kernels =
      emulate<grouped(mixed(bf16, e4m3, KeySource::rows, true, 64)),
              grouped(mixed(bf16, s8, KeySource::rows, false, 64)),
              grouped(mixed(bf16, e4m3, KeySource::pages, true)),
              grouped(mixed(Element::f16, s8, KeySource::pages, true)),
              grouped(mixed(bf16, e4m3, KeySource::padded_pages, true)),
              grouped(mixed(bf16, e4m3, KeySource::entries, true)),
              grouped(with_split_size(mixed(bf16, e4m3, KeySource::rows, true, 64))),
              grouped(with_split_size(mixed(bf16, e4m3, KeySource::pages, true))),
              grouped(with_split_size(mixed(bf16, e4m3, KeySource::pages, false)))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
