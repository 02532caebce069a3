#include "hardware_truth.hpp"

#include <algorithm>
#include <bit>

namespace tandem::kernel_tests {
namespace {

TensorMapSpec map_of(const void* data, Swizzle swizzle, int element_bytes, Element element) {
  TensorMapSpec spec;
  spec.base = data;
  spec.rank = 4;
  spec.element_bytes = element_bytes;
  spec.element = element;
  spec.dims = {truth_cols, truth_rows, 1, 1};
  spec.strides = {truth_cols * element_bytes, truth_cols * truth_rows * element_bytes,
                  truth_cols * truth_rows * element_bytes};
  spec.box = {bytes_of(swizzle) / element_bytes, 32, 1, 1};
  spec.swizzle = swizzle;
  return spec;
}

}  // namespace

TruthInputs truth_inputs() {
  TruthInputs in;
  std::uint32_t state = 1;
  const auto next = [&state] {
    state = state * 1664525U + 1013904223U;
    return state >> 8;
  };
  for (std::size_t i = 0; i < truth_matrix; ++i) {
    // Integers from -4 to 4: every product and sum is exact.
    const float x = static_cast<float>(static_cast<int>(next() % 9) - 4);
    const auto bits = std::bit_cast<std::uint32_t>(x);
    in.bf16.push_back(static_cast<std::uint16_t>(bits >> 16));
    in.f16.push_back(static_cast<std::uint16_t>(
        x == 0.0F ? 0 : (bits >> 16 & 0x8000) | ((bits >> 13 & 0x3ffff) - (112U << 10))));
  }
  // Zeros, infinities, NaN, subnormals, powers of two, halfway cases of bf16 and f16, then anything finite.
  in.numbers = {0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0x00000001, 0x007fffff,
                0x00800000, 0x3f800000, 0x40000000, 0x3f000000, 0x3e800000, 0xbf800000, 0x41800000,
                0xc1800000, 0x42000000, 0x3f808000, 0x3f818000, 0x3f801000, 0x3f803000, 0x477fefff,
                0x477ff000, 0x477fe000, 0x7f7fffff, 0x33000000, 0x33000001, 0x33c00000, 0x387fc000,
                0x387fe000, 0x38800000, 0xff7fffff, 0xb8000001};
  while (in.numbers.size() < 64) {
    const std::uint32_t bits = next() << 16 ^ next();
    in.numbers.push_back((bits & 0x807fffff) | ((100 + (bits >> 23) % 56) << 23));
  }
  return in;
}

std::vector<unsigned char> blank_truth() {
  std::vector<unsigned char> results(truth_bytes, truth_blank);
  std::fill(results.begin() + static_cast<std::ptrdiff_t>(truth_sum_offset),
            results.begin() + static_cast<std::ptrdiff_t>(truth_late_offset), static_cast<unsigned char>(0));
  return results;
}

TruthParams truth_params(const TruthMemory& memory, EncodeTensorMap encode) {
  auto* results = static_cast<unsigned char*>(memory.results);
  TruthParams p{};
  for (const Swizzle swizzle : {Swizzle::b32, Swizzle::b64, Swizzle::b128}) {
    const auto i = static_cast<int>(swizzle);
    p.source[i] = encode(map_of(memory.bf16, swizzle, 2, Element::bf16));
    p.target[i] = encode(map_of(results + truth_target_offset(i), swizzle, 2, Element::bf16));
  }
  TensorMapSpec bytes = map_of(memory.bf16, Swizzle::b128, 1, Element::bf16);
  bytes.dims[0] *= 2;
  for (auto& stride : bytes.strides) stride *= 2;
  p.source_bytes = encode(bytes);
  p.source_f16 = encode(map_of(memory.f16, Swizzle::b128, 2, Element::f16));
  p.sum = encode(map_of(results + truth_sum_offset, Swizzle::b128, 4, Element::bf16));
  p.numbers = static_cast<const u32*>(memory.numbers);
  p.plain = static_cast<const u16*>(memory.bf16);
  p.out = reinterpret_cast<u32*>(results);
  p.late = reinterpret_cast<u32*>(results + truth_late_offset);
  return p;
}

const char* name_of(TruthSection section) {
  constexpr const char* names[truth_sections] = {"load_b32",
                                                 "load_b64",
                                                 "load_b128",
                                                 "wgmma_k_major_b32",
                                                 "wgmma_k_major_b64",
                                                 "wgmma_k_major_b128",
                                                 "wgmma_mn_major_b32",
                                                 "wgmma_mn_major_b64",
                                                 "wgmma_mn_major_b128",
                                                 "wgmma_registers",
                                                 "wgmma_f16",
                                                 "stmatrix",
                                                 "warp",
                                                 "math",
                                                 "wgmma_e4m3",
                                                 "wgmma_s8",
                                                 "wgmma_e4m3_registers",
                                                 "wgmma_u8_registers",
                                                 "pack_e4m3",
                                                 "mma_bf16",
                                                 "mma_f16",
                                                 "store_b32",
                                                 "store_b64",
                                                 "store_b128",
                                                 "reduce_add",
                                                 "copies",
                                                 "cluster_stores"};
  return names[static_cast<int>(section)];
}

// (count, byte) pairs, count 1 to 255.
std::vector<unsigned char> pack_truth(std::span<const unsigned char> results) {
  std::vector<unsigned char> file;
  for (std::size_t i = 0; i < results.size();) {
    std::size_t run = 1;
    while (run < 255 && i + run < results.size() && results[i + run] == results[i]) ++run;
    file.push_back(static_cast<unsigned char>(run));
    file.push_back(results[i]);
    i += run;
  }
  return file;
}

std::vector<unsigned char> unpack_truth(std::span<const unsigned char> file) {
  std::vector<unsigned char> results;
  for (std::size_t i = 0; i + 1 < file.size(); i += 2) results.insert(results.end(), file[i], file[i + 1]);
  return results;
}

}  // namespace tandem::kernel_tests
