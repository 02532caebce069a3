// tandem verify: runs a call and holds every output against the oracle.
#include <CLI/CLI.hpp>
#include <memory>

#include "command.hpp"
#include "verification.hpp"

namespace tandem::cli {
namespace {

struct VerifyOptions {
  InputOptions input;
  CallOptions call;
  bool json = false;
};

int verify_files(const VerifyOptions& options) {
  Inputs inputs = load_inputs(options.input);
  Call call(std::move(inputs.tensors), options.call);
  Progress progress;
  progress.show("computing, then comparing with the fp64 oracle ...");
  const Verification result = verify(call);
  progress.show("");
  if (options.json) {
    Json document{{"right", result.right()},
                  {"device", call.on_gpu() ? "gpu" : "cpu"},
                  {"forward_ms", result.forward_seconds * 1e3}};
    if (call.has_backward()) document["backward_ms"] = result.backward_seconds * 1e3;
    for (const Verdict& verdict : result.verdicts) document["outputs"].push_back(to_json(verdict));
    document["ignored"] = inputs.ignored;
    print_json(document);
  } else {
    fmt::print("{:<8} {:>12} {:>16} {:>10} {:>9}\n", "output", "max error", "bound", "wrong", "of bound");
    for (const Verdict& v : result.verdicts) {
      fmt::print("{:<8} {:>12.3e} {:>16} {:>10} {:>8.1f}%  {:<36} {}\n", v.output, v.deviation.largest,
                 describe(v.bound), v.deviation.wrong, 100 * v.deviation.share, describe_whole(v),
                 v.right() ? "ok" : "WRONG");
    }
  }
  if (result.right()) return success;
  say("a result is off by more than its bound");
  return verify_failed;
}

}  // namespace

void add_verify(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<VerifyOptions>();
  CLI::App* command =
      app.add_subcommand("verify", "Compute attention and compare every result with the fp64 oracle");
  add_input_options(*command, options->input, true);
  add_call_options(*command, options->call);
  command->add_flag("--json", options->json, "Print the errors as JSON");
  command->footer(
      R"(Bounds: f32 results and lse 1e-5 relative to max(1, |value|), f32 gradients 1e-5 of their largest
element; 16-bit results twice the error of the plain formula in the same dtype, plus 3e-5. Of tensors of 4096
elements or more besides: the root mean square (RMS) of the error at most 1.5 times that of a fused 16-bit
attention, and the gain, the regression of the result on the exact one, within 0.4 % of 1. "of bound" is the
largest share of the three. The exit code is 1 if anything is off by more. The oracle is a plain triple loop in fp64: seconds for sequences of a
thousand, minutes for ten thousand.

Examples:
  tandem verify qkv.safetensors --causal
  tandem verify qkv.safetensors --dtype bf16 --backward --dout-seed 1 --json)");
  command->callback([options, &chosen] { chosen = [options] { return verify_files(*options); }; });
}

}  // namespace tandem::cli
