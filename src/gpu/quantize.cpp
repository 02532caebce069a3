#include "gpu/quantize.hpp"

#include <array>

#include "gpu/kernel_name.hpp"
#include "plan/quantize_plan.hpp"

namespace tandem::gpu {
namespace {

LoadedKernel quantize_kernel(int device, const QuantizeConfig& config, QuantizeKernel which) {
  static std::array<KernelTable<QuantizeConfig>, 2> tables;
  return tables[static_cast<std::size_t>(which)].get(device, config, [which](int d, const QuantizeConfig& c) {
    const int shared = which == QuantizeKernel::mean ? mean_shared_bytes : quantize_shared_bytes(c);
    return load_kernel(d, kernel_name(c, which), shared);
  });
}

}  // namespace

QuantizeKernels quantize_kernels(int device, const QuantizeConfig& config) {
  return {.mean = config.smooth_k ? quantize_kernel(device, mean_config(config), QuantizeKernel::mean)
                                  : LoadedKernel{},
          .codes = quantize_kernel(device, config, QuantizeKernel::codes)};
}

void quantize(const Problem& problem, const Recipe& recipe, const QuantizeKernels& kernels, char* scratch,
              abi::Stream stream) {
  const QuantizedSpace space = quantized_space(problem, recipe);
  const QuantizeConfig config = choose_quantize_config(problem, recipe);
  const QuantizeParams params = make_quantize_params(problem, recipe, scratch);
  const std::int64_t means = mean_units(problem, recipe);
  if (means > 0) {
    const auto arrived = reinterpret_cast<abi::DevicePointer>(scratch + space.arrived);
    check(driver().memset_d8_async(arrived, 0, space.arrived_bytes, stream), "cuMemsetD8Async");
    launch(kernels.mean,
           {.grid = static_cast<unsigned int>(means),
            .threads = static_cast<unsigned int>(mean_threads(config)),
            .stream = stream},
           &params);
  }
  if (const std::int64_t units = quantize_units(params); units > 0) {
    launch(kernels.codes,
           {.grid = static_cast<unsigned int>(units),
            .threads = quantize_threads,
            .stream = stream,
            .programmatic = means > 0},
           &params);
  }
}

}  // namespace tandem::gpu
