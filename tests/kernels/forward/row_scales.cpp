// Kernels that read K and V of 8 bits with a scale for each key and KV head.
#include "forward/mixed.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedForward> row_scales_split_forwards() {
  static constexpr auto kernels =
      emulate<by_row(mixed(bf16, e4m3, pages, true)), by_row(mixed(bf16, s8, pages, true)),
              by_row(mixed(f16, e4m3, pages, true)), by_row(mixed(bf16, e4m3, pages, true, 256, softcap)),
              by_row(mixed(bf16, e4m3, entries, true)), by_row(mixed(bf16, s8, entries, true)),
              by_row(mixed(bf16, e4m3, padded_pages, true)), by_row(mixed(bf16, s8, padded_pages, true)),
              by_row(mixed(bf16, e4m3, rows, true, 64)),
              by_row(with_split_size(mixed(bf16, e4m3, pages, true)))>();
  return kernels;
}

std::span<const EmulatedForward> row_scales_forwards() {
  static constexpr auto kernels =
      emulate<by_row(mixed(bf16, e4m3, pages, false)), by_row(mixed(bf16, s8, pages, false)),
              by_row(mixed(f16, s8, pages, false)), by_row(mixed(bf16, e4m3, entries, false)),
              by_row(mixed(bf16, s8, entries, false)), by_row(mixed(bf16, e4m3, padded_pages, false)),
              by_row(mixed(bf16, s8, padded_pages, false)), by_row(mixed(bf16, s8, rows, false, 192)),
              f32_out(by_sequence(by_row(mixed(bf16, e4m3, pages, false)))),
              by_row(with_split_size(mixed(bf16, e4m3, pages, false)))>();
  return kernels;
}

std::span<const EmulatedForward> row_scales_heads_as_rows_forwards() {
  static constexpr auto kernels =
      emulate<by_row(grouped(mixed(bf16, e4m3, pages, true))), by_row(grouped(mixed(bf16, s8, pages, false))),
              by_row(grouped(mixed(bf16, e4m3, padded_pages, true))),
              by_row(grouped(mixed(bf16, e4m3, entries, true))),
              by_row(grouped(with_split_size(mixed(bf16, e4m3, pages, true))))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
