#include "call.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <string_view>

#include "api/problem.hpp"
#include "values.hpp"

namespace tandem::cli {
namespace {

/// Scratch memory as the library wants it. Allocated at a call's first run and kept, so that later runs do
/// not pay for it.
template <typename Args>
Execution with_workspace(const Args& args, int threads, std::optional<files::TensorData>& memory) {
  constexpr std::size_t alignment = 256;
  Execution execution{.threads = threads};
  const std::size_t bytes = workspace_bytes(args, execution);
  if (!memory) memory.emplace(DType::s8, std::vector{static_cast<std::int64_t>(bytes + alignment)});
  void* start = memory->bytes().data();
  std::size_t room = memory->bytes().size();
  execution.workspace = std::align(alignment, bytes, start, room);
  execution.workspace_bytes = bytes;
  return execution;
}

template <typename Pass>
double seconds(const Pass& pass) {
  const auto start = std::chrono::steady_clock::now();
  pass();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void convert_inputs(TensorSet& tensors, DType dtype) {
  for (const char* name : {"q", "k", "v", "dout"}) {
    const auto found = tensors.find(name);
    if (found == tensors.end() || found->second.dtype() == dtype) continue;
    const DType from = found->second.dtype();
    if (from != DType::f32 && from != DType::f16 && from != DType::bf16) {
      throw Error(Status::invalid_argument,
                  fmt::format("{} is {} and cannot be converted to {}; give f32, f16 or bf16", name,
                              name_of(from), name_of(dtype)));
    }
    if (dtype == DType::e4m3 && std::string_view(name) != "dout") {
      auto [codes, scale] = quantized_e4m3(found->second);
      found->second = std::move(codes);
      tensors.insert_or_assign(std::string(name) + "_scale", std::move(scale));
    } else if (dtype != DType::e4m3) {
      found->second = converted(found->second, dtype);
    }
  }
}

/// Query-key pairs that one head of one sequence is counted for.
double counted_pairs(const Problem& p, std::int64_t seqlen_q, std::int64_t seqlen_k) {
  const double all = static_cast<double>(seqlen_q) * static_cast<double>(seqlen_k);
  if (p.window_left < 0 && p.window_right < 0) return all;
  if (p.window_left < 0 && p.window_right == 0 && seqlen_q == seqlen_k) return all / 2;
  double pairs = 0;
  for (std::int64_t i = 0; i < seqlen_q; ++i) {
    const KeyRange seen = visible_keys(p, i, seqlen_q, seqlen_k);
    pairs += static_cast<double>(std::max<std::int64_t>(0, seen.last - seen.first));
  }
  return pairs;
}

}  // namespace

Call::Call(TensorSet inputs, const CallOptions& options)
    : inputs_(std::move(inputs)), backward_wanted_(options.backward), threads_(options.threads) {
  refuse_device(options.device);
  if (options.dtype) convert_inputs(inputs_, *options.dtype);
  const auto view = [this](const char* name) {
    const auto found = inputs_.find(name);
    return found == inputs_.end() ? ConstTensor() : std::as_const(found->second).view();
  };
  forward_.q = view("q");
  forward_.k = view("k");
  forward_.v = view("v");
  forward_.cu_seqlens_q = view("cu_seqlens_q");
  forward_.cu_seqlens_k = view("cu_seqlens_k");
  forward_.seqused_q = view("seqused_q");
  forward_.seqused_k = view("seqused_k");
  forward_.sink = view("sink");
  forward_.q_scale = view("q_scale");
  forward_.k_scale = view("k_scale");
  forward_.v_scale = view("v_scale");
  forward_.options = options.attention;
  // Files are not trusted: what their cu_seqlens and seqused contain is checked, at the cost of reading them
  // once.
  forward_.options.check = true;

  const DType dtype = forward_.q.dtype;
  const int rank = forward_.q.rank;
  if (rank < 3 || forward_.v.rank != rank) {
    throw Error(
        Status::invalid_argument,
        fmt::format(
            "q has {} dimensions and v {}; both must be (batch, seqlen, heads, head_dim), or (total, heads, "
            "head_dim) with cu_seqlens",
            rank, forward_.v.rank));
  }
  const bool quantized = dtype == DType::e4m3;
  auto out_shape = inputs_.at("q").shape();
  out_shape.back() = inputs_.at("v").shape().back();
  const DType out_dtype = options.out_dtype.value_or(quantized ? DType::bf16 : dtype);
  outputs_.emplace("out", files::TensorData(out_dtype, out_shape));
  auto lse_shape = out_shape;
  lse_shape.pop_back();
  std::swap(lse_shape[lse_shape.size() - 1], lse_shape[lse_shape.size() - 2]);
  outputs_.emplace("lse", files::TensorData(DType::f32, lse_shape));
  forward_.out = outputs_.at("out").view();
  forward_.lse = outputs_.at("lse").view();
  if (!backward_wanted_) return;

  if (!inputs_.contains("dout")) {
    if (!options.dout_seed) {
      throw Error(Status::invalid_argument,
                  "--backward needs the tensor dout, which the input lacks; add it, or take random "
                  "numbers with --dout-seed 1");
    }
    files::TensorData dout(out_dtype, out_shape);
    fill_normal(dout, *options.dout_seed);
    inputs_.emplace("dout", std::move(dout));
  }
  static_cast<AttentionInputs&>(backward_) = forward_;
  backward_.options = forward_.options;
  backward_.out = forward_.out;
  backward_.lse = forward_.lse;
  backward_.dout = view("dout");
  backward_.dlse = view("dlse");
  const auto gradient = [this](const char* name, const char* like) {
    const files::TensorData& tensor = inputs_.at(like);
    return outputs_.emplace(name, files::TensorData(tensor.dtype(), tensor.shape())).first->second.view();
  };
  backward_.dq = gradient("dq", "q");
  backward_.dk = gradient("dk", "k");
  backward_.dv = gradient("dv", "v");
  if (inputs_.contains("sink")) backward_.dsink = gradient("dsink", "sink");
}

double Call::run_forward() {
  const Execution execution = with_workspace(forward_, threads_, forward_workspace_);
  return seconds([&] { forward(forward_, execution); });
}

double Call::run_backward() {
  const Execution execution = with_workspace(backward_, threads_, backward_workspace_);
  return seconds([&] { backward(backward_, execution); });
}

double Call::forward_flops() const {
  const Problem p = make_problem(forward_);
  double pairs = 0;
  for (std::int64_t b = 0; b < p.batch; ++b)
    pairs += counted_pairs(p, query_rows(p, b).used, key_rows(p, b).used);
  return 2.0 * pairs * static_cast<double>(p.heads_q) * static_cast<double>(p.head_dim_qk + p.head_dim_v);
}

}  // namespace tandem::cli
