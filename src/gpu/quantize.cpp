#include "gpu/quantize.hpp"

#include <algorithm>
#include <array>

#include "gpu/kernel_name.hpp"

namespace tandem::gpu {
namespace {

std::int64_t units_of(const QuantizeParams& p) {
  return std::int64_t{p.units_q} + p.units_k + p.units_v;
}

/// Blocks of threads stay, each with its next job on the way: as many as the device holds.
std::int64_t most_blocks(const QuantizeConfig& config, int device) {
  return std::int64_t{properties(device).multiprocessors} * config.blocks_per_sm();
}

}  // namespace

QuantizeKernels quantize_kernels(int device, const QuantizeConfig& config) {
  QuantizeKernels kernels;
  kernels.config = config;
  if (config.smooth_k) kernels.mean = loaded_kernel(device, Kernel::mean_of_keys, mean_config(config));
  if (exceeds_block(config.qk_scales)) {
    kernels.largest = loaded_kernel(device, Kernel::largest_of_groups, config);
  }
  kernels.codes = loaded_kernel(device, Kernel::quantize, config);
  return kernels;
}

QuantizeKernels arrange_kernels(int device, const QuantizeConfig& config) {
  QuantizeKernels kernels;
  kernels.config = config;
  kernels.codes = loaded_kernel(device, Kernel::arrange_codes, config);
  return kernels;
}

void launch_quantizer(const QuantizeKernels& kernels, const QuantizeParams& params, int device,
                      abi::Stream stream) {
  const QuantizeConfig& config = kernels.config;
  bool before = false;  // a launch that the next one may overlap the end of
  if (config.smooth_k && params.units_k > 0) {
    launch(kernels.mean,
           {.grid = static_cast<unsigned int>(params.units_k),
            .threads = static_cast<unsigned int>(mean_threads(config)),
            .stream = stream},
           &params);
    before = true;
  }
  if (exceeds_block(config.qk_scales) && params.units_k > 0) {
    launch(kernels.largest,
           {.grid = static_cast<unsigned int>(params.units_k), .threads = quantize_threads, .stream = stream},
           &params);
    before = false;  // the codes' kernel does not wait for it
  }
  const std::int64_t units = units_of(params);
  if (units == 0) return;
  launch(kernels.codes,
         {.grid = static_cast<unsigned int>(std::min(units, most_blocks(config, device))),
          .threads = quantize_threads,
          .stream = stream,
          .programmatic = before},
         &params);
}

void quantize(const Problem& problem, const QuantizeKernels& kernels, const QuantizeParams& params,
              abi::Stream stream) {
  if (!problem.of_codes()) return launch_quantizer(kernels, params, problem.device.index, stream);
  const ArrangeParams arranged = make_arrange_params(problem, params);
  if (units_of(params) == 0) return;
  launch(kernels.codes,
         {.grid = static_cast<unsigned int>(units_of(params)), .threads = quantize_threads, .stream = stream},
         &arranged);
}

void clear_counters(const QuantizedSpace& space, abi::DevicePointer scratch, abi::Stream stream) {
  check(driver().memset_d8_async(scratch + space.counters, 0, space.counter_bytes, stream),
        "cuMemsetD8Async");
}

}  // namespace tandem::gpu
