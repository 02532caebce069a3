// Where the kernels of a call keep what they make on the way: named regions of one piece of memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tandem::gpu {

/// The workspace's, and that of its regions.
constexpr std::size_t workspace_alignment = 256;

enum class Region : int {
  none,
  /// 0 before the first launch: the counter of tiles; with it, those of the sums behind K's mean. Of a call
  /// to quantize the largest magnitudes, then the counters.
  counters,
  q,  ///< tensors that TMA can read, in place of the caller's
  k,
  v,
  dout,
  q_quantized,  ///< what the quantiser makes (quantized_layout.hpp)
  k_quantized,
  v_quantized,
  dout_quantized,
  q_transposed,  ///< what the 8-bit backward pass reads, too (EightBitBackwardParams)
  k_transposed,
  dout_transposed,
  row_factors,
  q_scales,
  k_scales,
  v_scales,
  shift,
  mean,
  sums,
  lse_log2,  ///< what the backward kernels work in (BackwardParams)
  delta,
  dq_sum,
  dq_semaphores,
  tiles_added,
  dk,  ///< one head's, where the caller wants none
  dv,
  part_out,  ///< partial results of splits (ForwardParams)
  part_sums,
  block_lists
};
constexpr std::size_t regions_count = 30;

/// Offsets of the regions that a call has, in the order in which they were taken.
class Workspace {
 public:
  /// Room for `bytes`, 0 too. The region ends at a multiple of `alignment`.
  void reserve(Region region, std::int64_t bytes, std::size_t alignment = workspace_alignment) {
    offsets_[static_cast<std::size_t>(region)] = bytes_;
    bytes_ += (static_cast<std::size_t>(bytes) + alignment - 1) / alignment * alignment;
  }
  /// Region::counters.
  void reserve_counters(std::int64_t bytes, std::size_t alignment = workspace_alignment) {
    reserve(Region::counters, bytes, alignment);
    counter_bytes_ = static_cast<std::size_t>(bytes);
  }

  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] std::size_t counter_bytes() const { return counter_bytes_; }
  /// The region in `memory`, which has bytes().
  [[nodiscard]] char* at(Region region, char* memory) const {
    return memory + offsets_[static_cast<std::size_t>(region)];
  }
  template <typename T>
  [[nodiscard]] T* at(Region region, char* memory) const {
    return reinterpret_cast<T*>(at(region, memory));
  }

 private:
  std::array<std::size_t, regions_count> offsets_{};
  std::size_t bytes_ = 0;
  std::size_t counter_bytes_ = 0;
};

}  // namespace tandem::gpu
