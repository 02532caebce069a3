// tandem run: tensors in, attention, tensors out.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "call.hpp"
#include "command.hpp"
#include "outputs.hpp"
#include "report.hpp"

namespace tandem::cli {
namespace {

struct RunOptions {
  InputOptions input;
  CallOptions call;
  std::string out;
  bool json = false;
};

int run(const RunOptions& options) {
  check_output_path(options.out);
  Inputs inputs = load_inputs(options.input);
  Call call(std::move(inputs.tensors), options.call);
  check_inputs_stay(output_paths(options.out, call.output_names()), inputs.files);
  const double forward_seconds = call.run_forward();
  const double backward_seconds = call.has_backward() ? call.run_backward() : 0.0;
  const TensorSet& outputs = call.fetch_outputs();
  const auto paths = write_outputs(outputs, options.out, {{"made by", std::string("tandem ") + version()}});

  if (options.json) {
    Json document{{"device", call.on_gpu() ? "gpu" : "cpu"},
                  {"forward_ms", forward_seconds * 1e3},
                  {"forward_gflops", call.forward_flops() / forward_seconds / 1e9}};
    if (call.has_backward()) {
      document["backward_ms"] = backward_seconds * 1e3;
      document["backward_gflops"] = call.backward_flops() / backward_seconds / 1e9;
    }
    for (const auto& [name, tensor] : outputs) document["outputs"][name] = to_json(tensor.view());
    document["ignored"] = inputs.ignored;
    document["files"] = paths;
    print_json(document);
    return success;
  }
  fmt::print("device    {}\n", call.on_gpu() ? "gpu (times include the kernels' compilation)" : "cpu");
  fmt::print("forward   {:9.3f} ms\n", forward_seconds * 1e3);
  if (call.has_backward()) fmt::print("backward  {:9.3f} ms\n", backward_seconds * 1e3);
  for (const auto& [name, tensor] : outputs) {
    fmt::print("{:<8}  {}\n", name, describe(tensor.view()));
  }
  if (!inputs.ignored.empty())
    fmt::print("ignored   {}\n", files::printable(fmt::format("{}", fmt::join(inputs.ignored, ", "))));
  for (const std::string& path : paths) fmt::print("wrote     {}\n", files::printable(path));
  return success;
}

}  // namespace

void add_run(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command =
      app.add_subcommand("run", "Compute attention on tensors from files and write the results");
  add_input_options(*command, options->input, true);
  command
      ->add_option(
          "-o,--out", options->out,
          "x.safetensors: all results in one file; DIR: one .npy file a result (bf16 as u2, e4m3 as u1)")
      ->required();
  add_call_options(*command, options->call);
  command->add_flag("--json", options->json, "Print the summary as JSON");
  command->footer(
      R"(Tensors: q, k, v; optionally cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sink, q_scale,
k_scale, v_scale, page_table, leftpad_k, cache_batch_idx, dout, dlse. Results: out, lse; with --backward
also dq, dk, dv (and dsink), with --backward-precision int8 max_logits. Shapes: (batch, seqlen, heads,
head_dim), or (total, heads, head_dim) with cu_seqlens; with page_table, k and v are (pages, page_size, heads, head_dim).

Examples:
  tandem run qkv.safetensors --causal --out result.safetensors
  tandem run q.npy k.npy v.npy --window-left 128 --window-right 0 --out results/
  tandem run q=queries.npy k.npy v.npy dout.npy --backward --out gradients.safetensors
  tandem run model.safetensors --tensor q=l0.q --tensor k=l0.k --tensor v=l0.v --out out.safetensors)");
  command->callback([options, &chosen] { chosen = [options] { return run(*options); }; });
}

}  // namespace tandem::cli
