// Kernels that read K and V of 8 bits beside a 16-bit Q: every mask and varlen lengths.
#include "forward/mixed.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedForward> mixed_split_forwards() {
  static constexpr auto kernels =
      emulate<mixed(bf16, e4m3, rows, true, 64), mixed(bf16, s8, rows, true, 64),
              mixed(bf16, e4m3, pages, true), mixed(bf16, s8, pages, true), mixed(f16, e4m3, pages, true),
              mixed(f16, s8, pages, true), mixed(bf16, e4m3, pages, true, 256, softcap),
              mixed(bf16, e4m3, entries, true), mixed(bf16, e4m3, padded_pages, true),
              mixed(bf16, s8, padded_pages, true, 256), with_split_size(mixed(bf16, e4m3, rows, true, 64)),
              with_split_size(mixed(bf16, e4m3, pages, true)),
              f32_out(by_sequence(mixed(bf16, e4m3, pages, true)))>();
  return kernels;
}

std::span<const EmulatedForward> mixed_forwards() {
  static constexpr auto kernels =
      emulate<mixed(bf16, e4m3, rows, false, 64), mixed(bf16, s8, rows, false, 192),
              mixed(bf16, e4m3, pages, false), mixed(bf16, s8, pages, false), mixed(f16, e4m3, pages, false),
              mixed(bf16, s8, entries, false), mixed(bf16, e4m3, padded_pages, false),
              with_split_size(mixed(bf16, e4m3, rows, false, 64)),
              with_split_size(mixed(bf16, e4m3, pages, false))>();
  return kernels;
}

std::span<const EmulatedForward> mixed_heads_as_rows_forwards() {
  static constexpr auto kernels =
      emulate<grouped(mixed(bf16, e4m3, rows, true, 64)), grouped(mixed(bf16, s8, rows, false, 64)),
              grouped(mixed(bf16, e4m3, pages, true)), grouped(mixed(f16, s8, pages, true)),
              grouped(mixed(bf16, e4m3, padded_pages, true)), grouped(mixed(bf16, e4m3, entries, true)),
              grouped(with_split_size(mixed(bf16, e4m3, rows, true, 64))),
              grouped(with_split_size(mixed(bf16, e4m3, pages, true))),
              grouped(with_split_size(mixed(bf16, e4m3, pages, false)))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
