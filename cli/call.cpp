#include "call.hpp"
#include "api/make_problem.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string_view>

#include "problem/problem.hpp"
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
      auto [quantized, scale] = quantized_e4m3(found->second);
      found->second = std::move(quantized);
      tensors.insert_or_assign(std::string(name) + "_scale", std::move(scale));
    } else if (dtype != DType::e4m3) {
      found->second = converted(found->second, dtype);
    }
  }
}

template <typename F>
void for_each_tensor(AttentionInputs& args, const F& f) {
  for (ConstTensor* tensor : {&args.q, &args.k, &args.v, &args.cu_seqlens_q, &args.cu_seqlens_k,
                              &args.seqused_q, &args.seqused_k, &args.sink, &args.q_scale, &args.k_scale,
                              &args.v_scale, &args.page_table, &args.leftpad_k, &args.cache_batch_idx}) {
    f(*tensor);
  }
}
template <typename F>
void for_each_tensor(ForwardArgs& args, const F& f) {
  for_each_tensor(static_cast<AttentionInputs&>(args), f);
  for (Tensor* tensor : {&args.out, &args.lse, &args.max_logits}) f(*tensor);
}
template <typename F>
void for_each_tensor(BackwardArgs& args, const F& f) {
  for_each_tensor(static_cast<AttentionInputs&>(args), f);
  for (ConstTensor* tensor : {&args.out, &args.lse, &args.max_logits, &args.dout, &args.dlse}) {
    f(*tensor);
  }
  for (Tensor* tensor : {&args.dq, &args.dk, &args.dv, &args.dsink}) f(*tensor);
}

}  // namespace

Call::Call(TensorSet inputs, const CallOptions& options)
    : inputs_(std::move(inputs)), backward_wanted_(options.backward), threads_(options.threads) {
  if (options.dtype) convert_inputs(inputs_, *options.dtype);
  prepare_forward(options);
  if (backward_wanted_) prepare_backward(options);
  choose_device(options.device);
}

ConstTensor Call::input(const std::string& name) const {
  const auto found = inputs_.find(name);
  return found == inputs_.end() ? ConstTensor() : found->second.view();
}

void Call::prepare_forward(const CallOptions& options) {
  forward_.q = input("q");
  forward_.k = input("k");
  forward_.v = input("v");
  forward_.cu_seqlens_q = input("cu_seqlens_q");
  forward_.cu_seqlens_k = input("cu_seqlens_k");
  forward_.seqused_q = input("seqused_q");
  forward_.seqused_k = input("seqused_k");
  forward_.sink = input("sink");
  forward_.q_scale = input("q_scale");
  forward_.k_scale = input("k_scale");
  forward_.v_scale = input("v_scale");
  forward_.page_table = input("page_table");
  forward_.leftpad_k = input("leftpad_k");
  forward_.cache_batch_idx = input("cache_batch_idx");
  forward_.options = options.attention;
  // Files are not trusted: what their lengths, pages and indices contain is checked, at the cost of reading
  // them once.
  forward_.options.check = true;

  if (forward_.q.rank < 3 || forward_.v.rank < 3) {
    throw Error(
        Status::invalid_argument,
        fmt::format("q has {} dimensions and v {}; both must be (batch, seqlen, heads, head_dim), or (total, "
                    "heads, head_dim) with cu_seqlens",
                    forward_.q.rank, forward_.v.rank));
  }
  const DType dtype = is_eight_bit(forward_.q.dtype) ? DType::bf16 : forward_.q.dtype;
  if (options.out_dtype && *options.out_dtype != dtype && !is_eight_bit(forward_.q.dtype)) {
    throw Error(
        Status::invalid_argument,
        fmt::format("--out-dtype is {} but q is {}; it is for the output of 8-bit inputs: leave it out, "
                    "or convert the inputs with --dtype {}",
                    name_of(*options.out_dtype), name_of(dtype), name_of(*options.out_dtype)));
  }
  auto shape = inputs_.at("q").shape();
  shape.back() = inputs_.at("v").shape().back();
  forward_.out = output("out", options.out_dtype.value_or(dtype), shape);
  shape.pop_back();
  std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
  forward_.lse = output("lse", DType::f32, shape);
  if (options.attention.backward_precision != Precision::exact)
    forward_.max_logits = output("max_logits", DType::f32, shape);
}

void Call::prepare_backward(const CallOptions& options) {
  if (!inputs_.contains("dout")) {
    if (!options.dout_seed) {
      throw Error(
          Status::invalid_argument,
          "--backward needs the tensor dout, which the input lacks; add it, or take random numbers with "
          "--dout-seed 1");
    }
    const files::TensorData& out = outputs_.at("out");
    files::TensorData dout(out.dtype(), out.shape());
    fill_normal(dout, *options.dout_seed);
    inputs_.emplace("dout", std::move(dout));
  }
  static_cast<AttentionInputs&>(backward_) = forward_;
  backward_.options = forward_.options;
  backward_.out = forward_.out;
  backward_.lse = forward_.lse;
  backward_.max_logits = forward_.max_logits;
  backward_.dout = input("dout");
  backward_.dlse = input("dlse");
  const auto gradient = [this](const char* name, const char* like) {
    return output(name, inputs_.at(like).dtype(), inputs_.at(like).shape());
  };
  backward_.dq = gradient("dq", "q");
  backward_.dk = gradient("dk", "k");
  backward_.dv = gradient("dv", "v");
  if (inputs_.contains("sink")) backward_.dsink = gradient("dsink", "sink");
}

Tensor Call::output(const std::string& name, DType dtype, const std::vector<std::int64_t>& shape) {
  return outputs_.emplace(name, files::TensorData(dtype, shape)).first->second.view();
}

void Call::choose_device(const std::string& wish) {
  static_cast<void>(make_problem(forward_));
  if (backward_wanted_) static_cast<void>(make_problem(backward_));
  if (wish == "cpu" || (wish == "auto" && !gpu_available())) return;
  ForwardArgs forward_there = forward_;
  BackwardArgs backward_there = backward_;
  const auto move = [](auto& tensor) { tensor.device = GpuMemory::device; };
  for_each_tensor(forward_there, move);
  for_each_tensor(backward_there, move);
  // The contents of lengths, pages and indices were checked above.
  forward_there.options.check = backward_there.options.check = false;
  std::size_t scratch = 0;
  try {
    scratch = workspace_bytes(forward_there);
    if (backward_wanted_) scratch = std::max(scratch, workspace_bytes(backward_there));
  } catch (const Error& error) {
    if (wish == "auto" && error.status() == Status::unsupported) return;
    throw;
  }
  gpu_ = std::make_unique<GpuMemory>();
  gpu_->add(inputs_);
  gpu_->add(outputs_);
  const auto place = [this](auto& tensor) { gpu_->place(tensor); };
  for_each_tensor(forward_there, place);
  for_each_tensor(backward_there, place);
  forward_on_gpu_ = forward_there;
  backward_on_gpu_ = backward_there;
  if (scratch > 0) gpu_scratch_ = gpu::DeviceBuffer(GpuMemory::device.index, scratch);
}

double Call::run_forward() {
  if (gpu_) return gpu_->seconds([&] { forward(forward_on_gpu_, gpu_execution()); });
  const Execution execution = with_workspace(forward_, threads_, forward_workspace_);
  return seconds([&] { forward(forward_, execution); });
}

double Call::run_backward() {
  if (gpu_) return gpu_->seconds([&] { backward(backward_on_gpu_, gpu_execution()); });
  const Execution execution = with_workspace(backward_, threads_, backward_workspace_);
  return seconds([&] { backward(backward_, execution); });
}

Execution Call::gpu_execution() const {
  if (gpu_scratch_.bytes() == 0) return {};
  return {.workspace = gpu_scratch_.data(), .workspace_bytes = gpu_scratch_.bytes()};
}

std::vector<std::string> Call::output_names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : outputs_) names.push_back(name);
  return names;
}

TensorSet& Call::fetch_outputs() {
  if (gpu_) gpu_->fetch(outputs_);
  return outputs_;
}

void Call::poison_outputs() {
  // All bits set is a NaN in every floating-point dtype.
  for (auto& [name, tensor] : outputs_) std::memset(tensor.bytes().data(), 0xFF, tensor.bytes().size());
  if (gpu_) gpu_->poison(outputs_);
}

double Call::forward_flops() const {
  const Problem p = make_problem(forward_);
  double pairs = 0;
  for (std::int64_t b = 0; b < p.batch; ++b)
    pairs += counted_pairs(window_of(p, b), query_rows(p, b).used, key_rows(p, b).used);
  return 2.0 * pairs * static_cast<double>(p.heads_q) * static_cast<double>(p.head_dim_qk + p.head_dim_v);
}

}  // namespace tandem::cli
