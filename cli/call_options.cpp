// The command line's side of a call.
#include <CLI/CLI.hpp>
#include <map>
#include <string>

#include "call.hpp"

namespace tandem::cli {

void add_attention_options(CLI::App& command, AttentionOptions& options) {
  command.add_flag("--causal", options.causal, "Query i sees keys up to i + seqlen_k - seqlen_q");
  command.add_option("--window-left", options.window_left, "Keys seen to the left of the diagonal; -1: all")
      ->capture_default_str();
  command
      .add_option("--window-right", options.window_right, "Keys seen to the right of the diagonal; -1: all")
      ->capture_default_str();
  command.add_option_function<float>(
      "--scale", [&options](float scale) { options.scale = scale; },
      "Multiplies q k^T (default: head_dim^-0.5)");
  command.add_option("--softcap", options.softcap, "Scores become softcap * tanh(score / softcap); 0: off")
      ->capture_default_str();
  command.add_flag("--deterministic", options.deterministic, "Make gradients bitwise reproducible");
  static const std::map<std::string, Precision> precisions{{name_of(Precision::exact), Precision::exact},
                                                           {name_of(Precision::fp8), Precision::fp8},
                                                           {name_of(Precision::int8), Precision::int8}};
  command
      .add_option("--precision", options.precision,
                  "Forward in the inputs' dtype (exact), or in 8 bits from f16 or bf16: fp8, int8")
      ->transform(CLI::CheckedTransformer(precisions).description("{exact,fp8,int8}"));
  command
      .add_option("--backward-precision", options.backward_precision,
                  "Gradients in 16 bits (exact), or, with --precision int8, in 8: int8")
      ->transform(CLI::CheckedTransformer(precisions).description("{exact,int8}"));
  command.add_flag("--strict", options.strict, "8 bits: no scale and no mean looks at later rows");
  command
      .add_option("--split-size", options.split_size,
                  "Keys of a split, a multiple of 128: bits then do not depend on the batch; 0: off")
      ->capture_default_str();
}

void add_execution_options(CLI::App& command, int& threads, std::string& device) {
  command.add_option("--threads", threads, "CPU threads; 0: OMP_NUM_THREADS or every core")
      ->capture_default_str();
  command.add_option("--device", device, "cpu, gpu or auto")
      ->check(CLI::IsMember({"cpu", "gpu", "auto"}))
      ->capture_default_str();
}

void add_call_options(CLI::App& command, CallOptions& options) {
  command.add_flag("--backward", options.backward, "Compute gradients too; needs dout, or --dout-seed");
  command.add_option_function<std::uint64_t>(
      "--dout-seed", [&options](std::uint64_t seed) { options.dout_seed = seed; },
      "Take normal random numbers of this seed for dout");
  add_dtype_option(command, "--dtype", options.dtype,
                   "Convert q, k, v and dout to f32, f16, bf16 or e4m3 (one scale a tensor) first");
  add_dtype_option(command, "--out-dtype", options.out_dtype,
                   "Dtype of the output of 8-bit inputs (default: bf16)");
  add_attention_options(command, options.attention);
  add_execution_options(command, options.threads, options.device);
}

}  // namespace tandem::cli
