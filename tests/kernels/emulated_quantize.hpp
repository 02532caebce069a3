// The quantiser in the emulator, as a quantised call on a GPU launches it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "launch.hpp"
#include "ops/quantize/launch.hpp"

// After it: the device language has names at file scope that others declare inside theirs.
#include "ops/quantize/common/mean_of_keys.cuh"
#include "ops/quantize/common/quantize.cuh"

namespace tandem::kernel_tests {

/// Scratch memory of NaN, as a call's workspace may be, but for the counters.
struct QuantizedScratch {
  std::vector<char> memory;
  char* data;

  explicit QuantizedScratch(const gpu::Workspace& space) : memory(space.bytes() + 256, '\xff') {
    data = memory.data() + (256 - reinterpret_cast<std::uintptr_t>(memory.data()) % 256);
    std::fill_n(space.at(gpu::Region::counters, data), space.counter_bytes(), '\0');
  }
  QuantizedScratch(QuantizedScratch&&) = default;
};

template <QuantizeConfig C>
void launch_mean(const QuantizeParams& params, const emulator::Options& options) {
  emulator::launch(mean_of_keys<C>, params,
                   {.blocks = static_cast<unsigned>(params.items_k),
                    .threads = static_cast<unsigned>(mean_threads(C)),
                    .shared_bytes = static_cast<std::size_t>(mean_shared_bytes(C))},
                   options);
}

template <QuantizeConfig C>
void run_quantizer(const QuantizeParams& params, emulator::Options options) {
  if (C.smooth_k && params.items_k > 0) {
    launch_mean<C>(params, options);
    const auto means = static_cast<std::size_t>(params.batch * params.mean_stride.batch);
    options.of_previous_grid = {{params.mean, means * sizeof(float), false}};
  }
  emulator::launch(
      quantize<C>, params,
      {.blocks = static_cast<unsigned>(std::min(params.items_q + params.items_k + params.items_v, 5)),
       .threads = static_cast<unsigned>(C.threads()),
       .shared_bytes = static_cast<std::size_t>(quantize_shared_bytes(C))},
      options);
}

}  // namespace tandem::kernel_tests
