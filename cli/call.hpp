// One attention call with all its memory: inputs as read, outputs allocated, forward and backward run and
// timed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gpu_memory.hpp"
#include "inputs.hpp"
#include "tandem/attention.hpp"

namespace CLI {
class App;
}  // namespace CLI

namespace tandem {
struct Problem;
}

namespace tandem::cli {

struct CallOptions {
  AttentionOptions attention;
  int threads = 0;
  std::string device = "auto";
  bool backward = false;
  std::optional<DType> dtype;      ///< convert q, k, v and dout to it first
  std::optional<DType> out_dtype;  ///< for 8-bit inputs
  std::optional<std::uint64_t> dout_seed;
};

/// Adds what fixes the arithmetic: --causal, --window-left, --window-right, --scale, --softcap,
/// --deterministic, --precision, --strict, --split-size.
void add_attention_options(CLI::App& command, AttentionOptions& options);
/// Adds --threads and --device.
void add_execution_options(CLI::App& command, int& threads, std::string& device);
/// Adds all of the above and --backward, --dtype, --out-dtype, --dout-seed.
void add_call_options(CLI::App& command, CallOptions& options);

class Call {
 public:
  /// Takes the inputs, converts them where asked to, checks them, allocates the outputs, and moves all to the
  /// GPU where that is wished for ("gpu"), or there is one that can run the call ("auto"). Throws Error.
  Call(TensorSet inputs, const CallOptions& options);

  /// The arguments in host memory.
  [[nodiscard]] const ForwardArgs& forward_args() const { return forward_; }
  [[nodiscard]] const BackwardArgs& backward_args() const { return backward_; }
  [[nodiscard]] bool has_backward() const { return backward_wanted_; }
  [[nodiscard]] bool on_gpu() const { return gpu_ != nullptr; }
  /// The names of what the call writes.
  [[nodiscard]] std::vector<std::string> output_names() const;
  /// The outputs as they are now, in host memory.
  [[nodiscard]] TensorSet& fetch_outputs();
  /// Fills all outputs with NaN.
  void poison_outputs();

  /// Runs one pass; its scratch memory is allocated before the clock starts. Returns seconds. Backward needs
  /// a forward before it.
  double run_forward();
  double run_backward();

  /// Floating-point operations by the usual count: forward 2 * pairs * (d_qk + d_v) a query head,
  /// backward 2.5 times that. pairs is seqlen_q * seqlen_k, half of it for a causal square, else (other
  /// masks) the number of visible pairs.
  [[nodiscard]] double forward_flops() const;
  [[nodiscard]] double backward_flops() const { return 2.5 * forward_flops(); }

 private:
  void prepare_forward(const CallOptions& options);
  void prepare_backward(const CallOptions& options);
  void choose_device(const std::string& wish);
  [[nodiscard]] ConstTensor input(const std::string& name) const;
  Tensor output(const std::string& name, DType dtype, const std::vector<std::int64_t>& shape);
  [[nodiscard]] Execution gpu_execution() const;

  TensorSet inputs_;
  TensorSet outputs_;
  std::optional<files::TensorData> forward_workspace_;
  std::optional<files::TensorData> backward_workspace_;
  ForwardArgs forward_;
  BackwardArgs backward_;
  bool backward_wanted_ = false;
  int threads_ = 0;

  std::unique_ptr<GpuMemory> gpu_;
  gpu::DeviceBuffer gpu_scratch_;
  ForwardArgs forward_on_gpu_;
  BackwardArgs backward_on_gpu_;
};

}  // namespace tandem::cli
