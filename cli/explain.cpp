// tandem explain: which kernel and tiles a call would run with, and why.
#include <CLI/CLI.hpp>
#include <memory>

#include "call.hpp"
#include "command.hpp"
#include "report.hpp"

namespace tandem::cli {
namespace {

struct ExplainOptions {
  std::int64_t batch = 1;
  std::int64_t seqlen_q = 1024;
  std::int64_t seqlen_k = 0;
  std::int64_t heads = 8;
  std::int64_t heads_kv = 0;
  std::int64_t head_dim = 64;
  std::int64_t head_dim_v = 0;
  std::int64_t page_size = 0;
  std::string dtype = "f32";
  bool backward = false;
  AttentionOptions attention;
  int threads = 0;
  std::string device = "auto";
  bool json = false;
};

std::int64_t or_else(std::int64_t value, std::int64_t otherwise) {
  return value > 0 ? value : otherwise;
}

template <typename Args>
int print(const Args& args, const ExplainOptions& options) {
  const Execution execution{.threads = options.threads};
  const std::string text = explain(args, execution);
  const std::size_t bytes = workspace_bytes(args, execution);
  if (!options.json) {
    fmt::print("{}{}", text, text.ends_with('\n') ? "" : "\n");
    return success;
  }
  Json document{{"pass", options.backward ? "backward" : "forward"}, {"workspace_bytes", bytes}};
  document["lines"] = Json::array();
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    document["lines"].push_back(text.substr(at, end - at));
    at = end + 1;
  }
  print_json(document);
  return success;
}

int explain_on(Device device, const ExplainOptions& options) {
  const DType dtype = parse_dtype(options.dtype, "--dtype");
  const DType out_dtype = dtype == DType::e4m3 ? DType::bf16 : dtype;
  const std::int64_t seqlen_k = or_else(options.seqlen_k, options.seqlen_q);
  const std::int64_t heads_kv = or_else(options.heads_kv, options.heads);
  const std::int64_t head_dim_v = or_else(options.head_dim_v, options.head_dim);
  // Shapes without memory: explain reads none.
  AttentionInputs inputs;
  inputs.q =
      ConstTensor(nullptr, dtype, {options.batch, options.seqlen_q, options.heads, options.head_dim}, device);
  inputs.k = ConstTensor(nullptr, dtype, {options.batch, seqlen_k, heads_kv, options.head_dim}, device);
  inputs.v = ConstTensor(nullptr, dtype, {options.batch, seqlen_k, heads_kv, head_dim_v}, device);
  if (options.page_size > 0) {
    const std::int64_t pages = seqlen_k / options.page_size + (seqlen_k % options.page_size > 0 ? 1 : 0);
    inputs.page_table = ConstTensor(nullptr, DType::i32, {options.batch, pages}, device);
    inputs.seqused_k = ConstTensor(nullptr, DType::i32, {options.batch}, device);
    for (ConstTensor* tensor : {&inputs.k, &inputs.v}) {
      const std::int64_t head_dim = tensor->shape[3];
      *tensor =
          ConstTensor(nullptr, dtype, {options.batch * pages, options.page_size, heads_kv, head_dim}, device);
    }
  }
  const Tensor out(nullptr, out_dtype, {options.batch, options.seqlen_q, options.heads, head_dim_v}, device);
  const Tensor lse(nullptr, DType::f32, {options.batch, options.heads, options.seqlen_q}, device);
  if (!options.backward) {
    ForwardArgs args{inputs, out, lse, {}, options.attention};
    return print(args, options);
  }
  BackwardArgs args;
  if (options.attention.backward_precision != Precision::exact) args.max_logits = lse;
  static_cast<AttentionInputs&>(args) = inputs;
  args.out = out;
  args.lse = lse;
  args.dout = out;
  args.dq =
      Tensor(nullptr, dtype, {options.batch, options.seqlen_q, options.heads, options.head_dim}, device);
  args.dk = Tensor(nullptr, dtype, {options.batch, seqlen_k, heads_kv, options.head_dim}, device);
  args.dv = Tensor(nullptr, dtype, {options.batch, seqlen_k, heads_kv, head_dim_v}, device);
  args.options = options.attention;
  return print(args, options);
}

int run_explain(const ExplainOptions& options) {
  if (options.device == "cpu" || (options.device == "auto" && !gpu_available()))
    return explain_on({}, options);
  try {
    return explain_on(GpuMemory::device, options);
  } catch (const Error& error) {
    // As a call would: auto takes the CPU for what the GPU cannot do.
    if (options.device == "auto" && error.status() == Status::unsupported) return explain_on({}, options);
    throw;
  }
}

}  // namespace

void add_explain(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<ExplainOptions>();
  CLI::App* command =
      app.add_subcommand("explain", "Say which kernel and tiles a call would run with, and why");
  command->add_option("--batch", options->batch, "Sequences")->capture_default_str();
  command->add_option("--seqlen,--seqlen-q", options->seqlen_q, "Queries a sequence")->capture_default_str();
  command->add_option("--seqlen-k", options->seqlen_k, "Keys a sequence; 0: as many as queries")
      ->capture_default_str();
  command->add_option("--heads", options->heads, "Query heads")->capture_default_str();
  command->add_option("--heads-kv", options->heads_kv, "Key and value heads; 0: as many")
      ->capture_default_str();
  command->add_option("--head-dim", options->head_dim, "Head dimension of q and k")->capture_default_str();
  command->add_option("--head-dim-v", options->head_dim_v, "Head dimension of v; 0: the same")
      ->capture_default_str();
  command
      ->add_option("--page-size", options->page_size,
                   "Keys and values in pages of so many rows, as a cache has them; 0: in one piece")
      ->capture_default_str();
  command->add_option("--dtype", options->dtype, "f32, f16, bf16 or e4m3")->capture_default_str();
  command->add_flag("--backward", options->backward, "Explain the backward pass");
  add_attention_options(*command, options->attention);
  add_execution_options(*command, options->threads, options->device);
  command->add_flag("--json", options->json, "Print as JSON");
  command->footer(R"(Examples:
  tandem explain --dtype bf16 --head-dim 128 --seqlen 4096 --causal
  tandem explain --heads 32 --heads-kv 8 --seqlen-q 1 --seqlen-k 8192 --json
  tandem explain --seqlen-q 1 --seqlen-k 8192 --page-size 16 --device cpu
  tandem explain --head-dim 65        (an error: says which rule it breaks and what to do))");
  command->callback([options, &chosen] { chosen = [options] { return run_explain(*options); }; });
}

}  // namespace tandem::cli
