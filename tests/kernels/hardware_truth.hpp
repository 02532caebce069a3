// What truth_kernel is given and what it writes, on either side: the emulator's test and the GPU's share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "config/tensor_map_spec.hpp"
#include "hardware_truth.cuh"

namespace tandem::kernel_tests {

/// The kernel's inputs, the same everywhere.
struct TruthInputs {
  std::vector<std::uint16_t> bf16;  ///< truth_rows x truth_cols
  std::vector<std::uint16_t> f16;
  std::vector<std::uint32_t> numbers;
};
TruthInputs truth_inputs();

/// Everything that it writes: `out`, then the three u16 targets, then the f32 target, then `late`. All start
/// as `truth_blank` bytes, the f32 target as zeros.
constexpr unsigned char truth_blank = 0xee;
constexpr std::size_t truth_matrix = std::size_t{truth_rows} * truth_cols;
constexpr std::size_t truth_late_offset = truth_words * 4 + 3 * truth_matrix * 2 + truth_matrix * 4;
constexpr std::size_t truth_cluster_offset = truth_late_offset + std::size_t{truth_copied_words} * 4;
constexpr std::size_t truth_bytes = truth_late_offset + truth_late_words * 4;
constexpr std::size_t truth_target_offset(int swizzle) {
  return truth_words * 4 + static_cast<std::size_t>(swizzle) * truth_matrix * 2;
}
constexpr std::size_t truth_sum_offset = truth_target_offset(3);
std::vector<unsigned char> blank_truth();

/// Params for inputs and results that lie at these addresses (device or host).
struct TruthMemory {
  const void* bf16;
  const void* f16;
  const void* numbers;
  void* results;
};
TruthParams truth_params(const TruthMemory& memory, EncodeTensorMap encode);

/// A section's name, as TruthSection has it.
const char* name_of(TruthSection section);

/// The file that a GPU's bytes are recorded in: results run-length encoded, since most of the targets stays
/// blank.
std::vector<unsigned char> pack_truth(std::span<const unsigned char> results);
std::vector<unsigned char> unpack_truth(std::span<const unsigned char> file);

}  // namespace tandem::kernel_tests
