// Kernels that read K and V of 8 bits with a scale for each key and KV head.
#include "forward/mixed.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedForward> row_scales_split_forwards() {
  static constexpr auto kernels = emulate<
      by_row(mixed(bf16, e4m3, KeySource::pages, true)), by_row(mixed(bf16, s8, KeySource::pages, true)),
      by_row(mixed(Element::f16, e4m3, KeySource::pages, true)),
      by_row(mixed(bf16, e4m3, KeySource::pages, true, 256, ScoreTransform::softcap)),
      by_row(mixed(bf16, e4m3, KeySource::entries, true)), by_row(mixed(bf16, s8, KeySource::entries, true)),
      by_row(mixed(bf16, e4m3, KeySource::padded_pages, true)),
      by_row(mixed(bf16, s8, KeySource::padded_pages, true)),
      by_row(mixed(bf16, e4m3, KeySource::rows, true, 64)),
      by_row(with_split_size(mixed(bf16, e4m3, KeySource::pages, true)))>();
  return kernels;
}

std::span<const EmulatedForward> row_scales_forwards() {
  static constexpr auto kernels =
      emulate<by_row(mixed(bf16, e4m3, KeySource::pages, false)),
              by_row(mixed(bf16, s8, KeySource::pages, false)),
              by_row(mixed(Element::f16, s8, KeySource::pages, false)),
              by_row(mixed(bf16, e4m3, KeySource::entries, false)),
              by_row(mixed(bf16, s8, KeySource::entries, false)),
              by_row(mixed(bf16, e4m3, KeySource::padded_pages, false)),
              by_row(mixed(bf16, s8, KeySource::padded_pages, false)),
              by_row(mixed(bf16, s8, KeySource::rows, false, 192)),
              f32_out(by_sequence(by_row(mixed(bf16, e4m3, KeySource::pages, false)))),
              by_row(with_split_size(mixed(bf16, e4m3, KeySource::pages, false)))>();
  return kernels;
}

std::span<const EmulatedForward> row_scales_heads_as_rows_forwards() {
  static constexpr auto kernels =
      emulate<by_row(grouped(mixed(bf16, e4m3, KeySource::pages, true))),
              by_row(grouped(mixed(bf16, s8, KeySource::pages, false))),
              by_row(grouped(mixed(bf16, e4m3, KeySource::padded_pages, true))),
              by_row(grouped(mixed(bf16, e4m3, KeySource::entries, true))),
              by_row(grouped(with_split_size(mixed(bf16, e4m3, KeySource::pages, true))))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
