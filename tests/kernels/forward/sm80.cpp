// The family sm80: every shape of its tiles, then kernels that run any problem up to a head dimension.
#include "forward/emulated_sm80.hpp"
#include "forward/variants.hpp"

namespace tandem::kernel_tests {
namespace {

template <Sm80ForwardConfig... configs>
constexpr std::array<EmulatedForward, sizeof...(configs)> emulate() {
  return {emulated_sm80<configs>()...};
}

constexpr Sm80ForwardConfig dense(int head_dim_qk, int head_dim_v, int block_m, int block_n, int stages = 1) {
  return {.tiling = {.head_dim_qk = head_dim_qk,
                     .head_dim_v = head_dim_v,
                     .block_m = block_m,
                     .block_n = block_n},
          .stages = stages};
}

constexpr Sm80ForwardConfig causal(Sm80ForwardConfig c) {
  c.mask.causal = true;
  return c;
}
constexpr Sm80ForwardConfig local(Sm80ForwardConfig c) {
  c.mask.causal = c.mask.local = true;
  c.tiling.element = f16;
  return c;
}

/// Every mask and any lengths.
constexpr Sm80ForwardConfig general(Element element, int head_dim, ScoreTransform transform = raw,
                                    KeySource keys = rows) {
  Sm80ForwardConfig c = dense(head_dim, head_dim, head_dim == 256 ? 64 : 128, head_dim == 256 ? 32 : 64);
  c.tiling.element = element;
  c.stages = head_dim == 256 ? 1 : 2;
  c.mask = {.causal = true, .local = true, .varlen = true};
  c.keys = keys;
  c.transform = transform;
  return c;
}

/// The blocks that heads of 64 have without a split size.
constexpr Sm80ForwardConfig of_128_keys(Sm80ForwardConfig c) {
  c.tiling.block_n = 128;
  c.stages = 1;
  return c;
}

/// Tiles of few queries, whose key blocks thread blocks share.
constexpr Sm80ForwardConfig split(Element element, int head_dim, KeySource keys = rows,
                                  ScoreTransform transform = raw) {
  Sm80ForwardConfig c = general(element, head_dim, transform, keys);
  c.tiling.block_m = 64;
  c.schedule.split = true;
  return c;
}
constexpr Sm80ForwardConfig invariant(Sm80ForwardConfig c) {
  c.tiling.block_m = 64;
  c.schedule.invariant = true;
  return c;
}
constexpr Sm80ForwardConfig grouped(Sm80ForwardConfig c) {
  c.tiling.block_m = 64;
  c.tiling.heads_as_rows = true;
  return c;
}

}  // namespace

std::span<const EmulatedForward> sm80_forwards() {
  static constexpr auto kernels =
      emulate<dense(64, 64, 128, 128, 2), causal(dense(64, 64, 128, 128, 2)), local(dense(64, 64, 128, 128)),
              local(dense(64, 64, 128, 112, 2)), dense(64, 64, 128, 64, 2), local(dense(96, 96, 128, 64, 2)),
              dense(128, 128, 128, 32, 3), causal(dense(128, 128, 128, 64, 2)),
              local(dense(192, 128, 128, 32)), causal(dense(192, 192, 128, 64)), dense(160, 160, 64, 48, 2),
              f32_out(by_sequence(causal(dense(64, 64, 128, 128)))), causal(dense(256, 256, 64, 64, 2)),
              local(dense(256, 256, 64, 64)), causal(dense(256, 256, 128, 64)), dense(256, 256, 128, 32),
              of_128_keys(general(bf16, 64))>();
  return kernels;
}

std::span<const EmulatedForward> general_sm80_forwards() {
  static constexpr auto kernels =
      emulate<general(f16, 64), general(f16, 64, scaled), general(f16, 64, softcap), general(bf16, 64),
              general(bf16, 64, scaled), general(bf16, 64, softcap), general(f16, 256), general(bf16, 256),
              general(f16, 64, raw, pages), general(bf16, 64, raw, pages), general(bf16, 256, raw, pages),
              general(bf16, 256, softcap, pages), general(f16, 64, raw, entries),
              general(bf16, 64, raw, entries), general(bf16, 64, raw, padded_pages),
              general(bf16, 256, raw, padded_pages), invariant(general(f16, 64)),
              invariant(general(bf16, 64)), invariant(general(bf16, 64, softcap)),
              invariant(general(bf16, 256)), invariant(general(f16, 64, raw, pages)),
              invariant(general(bf16, 64, raw, pages)), invariant(general(bf16, 64, softcap, pages)),
              invariant(general(bf16, 256, raw, pages)), invariant(general(bf16, 64, raw, entries)),
              by_sequence(general(bf16, 64)), by_sequence(general(f16, 64, raw, pages)),
              by_sequence(general(bf16, 64, raw, pages)), f32_out(general(bf16, 64)),
              f32_out(general(f16, 64, raw, pages)), f32_out(by_sequence(general(bf16, 64, raw, pages))),
              by_sequence(invariant(general(bf16, 64, raw, pages)))>();
  return kernels;
}

std::span<const EmulatedForward> split_sm80_forwards() {
  static constexpr auto kernels =
      emulate<split(f16, 64), split(bf16, 64), split(bf16, 64, rows, softcap), split(bf16, 256),
              split(f16, 64, pages), split(bf16, 64, pages), split(bf16, 256, pages),
              split(bf16, 64, entries), split(bf16, 64, padded_pages), invariant(split(f16, 64)),
              invariant(split(bf16, 64)), invariant(split(bf16, 64, rows, softcap)),
              invariant(split(bf16, 256)), invariant(split(f16, 64, pages)),
              invariant(split(bf16, 64, pages)), invariant(split(bf16, 64, pages, softcap)),
              invariant(split(bf16, 256, pages)), invariant(split(bf16, 64, entries)),
              invariant(split(bf16, 64, padded_pages)), by_sequence(split(bf16, 64)),
              by_sequence(split(bf16, 64, pages)), f32_out(split(bf16, 64)), f32_out(split(f16, 64, pages)),
              f32_out(invariant(split(bf16, 64))), f32_out(by_sequence(split(bf16, 64, pages))),
              by_sequence(invariant(split(bf16, 64, pages)))>();
  return kernels;
}

/// The contract takes the first that suits: of short keys the plan shares none.
std::span<const EmulatedForward> grouped_sm80_forwards() {
  static constexpr auto kernels =
      emulate<grouped(general(bf16, 64)), grouped(general(f16, 64)), grouped(general(bf16, 64, raw, pages)),
              grouped(general(f16, 64, raw, pages)), grouped(split(bf16, 64)),
              grouped(split(bf16, 64, pages)), grouped(split(bf16, 64, entries)),
              grouped(split(bf16, 64, rows, softcap)), grouped(split(bf16, 256)),
              grouped(split(bf16, 64, padded_pages)), grouped(of_128_keys(general(bf16, 64))),
              grouped(of_128_keys(split(bf16, 64, pages))), grouped(invariant(split(bf16, 64))),
              grouped(invariant(split(f16, 64, pages))), grouped(invariant(split(bf16, 64, pages))),
              grouped(invariant(split(bf16, 64, padded_pages))), grouped(invariant(general(bf16, 64)))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
