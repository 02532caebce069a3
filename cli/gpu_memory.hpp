// A call's tensors in GPU memory.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "gpu/device.hpp"
#include "inputs.hpp"

namespace tandem::cli {

/// Copies of tensors in the memory of the first GPU (CUDA_VISIBLE_DEVICES says which that is), and its clock.
class GpuMemory {
 public:
  static constexpr Device device{.kind = Device::Kind::cuda, .index = 0};

  GpuMemory() : start_(device.index), end_(device.index) {}

  /// Allocates room for every tensor and copies its bytes there. The tensors must stay where they are.
  void add(TensorSet& tensors);
  /// Makes a view of an added tensor one of its copy. Views of nothing stay that.
  template <typename View>
  void place(View& view) const {
    if (!view.given()) return;
    view.data = buffers_.at(view.data).data();
    view.device = device;
  }

  /// Fills the copies of `tensors` with all bits set, which is NaN; copies them back to the host.
  void poison(const TensorSet& tensors);
  void fetch(TensorSet& tensors) const;

  /// Seconds that the GPU spends on what `launch` puts into the default stream.
  template <typename Launch>
  double seconds(const Launch& launch) {
    start_.record(nullptr);
    launch();
    end_.record(nullptr);
    return static_cast<double>(end_.milliseconds_since(start_)) / 1e3;
  }

 private:
  std::map<const void*, gpu::DeviceBuffer> buffers_;
  gpu::Event start_, end_;
};

/// Whether a GPU is there that the kernels run on.
bool gpu_available();

/// Whether `message` says what keeps the first GPU from running any kernel: no driver, no GPU, another
/// architecture, no compiler.
bool is_objection_of_gpu(const std::string& message);

/// GFLOP/s of the first GPU's tensor cores in 16 bits at its highest clock: 4096 operations a cycle and
/// multiprocessor (Hopper).
double gpu_nominal_gflops();

}  // namespace tandem::cli
