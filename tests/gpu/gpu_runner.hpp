// The GPU as the harness sees it: a Call's memory is copied to the device with all that surrounds it, and
// back.
#pragma once

#include <string>

#include "harness/runner.hpp"

namespace tandem::gpu {

/// Why no GPU test can run here; empty on a machine with a Hopper GPU and kernels for it.
std::string why_no_gpu();

/// Whether calls take the kernels sm80, which have neither 8 bits nor heads of more than 256 dimensions.
bool lacks_kernels();

class GpuRunner : public harness::Runner {
 public:
  [[nodiscard]] std::string name() const override { return "gpu"; }
  [[nodiscard]] std::string refuses(const harness::Case& spec) const override;
  [[nodiscard]] std::string refuses_max_logits(const harness::Case& spec) const override;
  void forward(harness::Call& call) override;
  /// Without a split size, where keys are shared among CTAs follows from the lengths of the whole batch.
  [[nodiscard]] bool keeps_bits_beside_others(const harness::Case& spec) const override {
    return spec.options.split_size > 0;
  }
  [[nodiscard]] std::string refuses_append(const harness::AppendCase&) const override { return {}; }
  [[nodiscard]] std::string refuses_merge(const harness::MergeCase&) const override { return {}; }
  [[nodiscard]] harness::Accumulators accumulators() const override {
    return harness::Accumulators::tensor_cores;
  }
  void append(harness::AppendCall& call) override;
  void merge(harness::MergeCall& call) override;
  void backward(harness::Call& call) override;
};

}  // namespace tandem::gpu
