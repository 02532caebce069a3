#include "gpu_runner.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "gpu/device.hpp"
#include "plan/facts.hpp"
#include "tandem/error.hpp"

namespace tandem::gpu {
namespace {

using harness::Box;
using harness::Call;

/// Boxes on the device. Whole pages are copied, so that alignment and surroundings are the host's, and writes
/// outside the elements come back to be noticed.
class DeviceBoxes {
 public:
  explicit DeviceBoxes(abi::Stream stream) : stream_(stream) {}

  /// The box's tensor with its address on the device.
  template <typename Tensor>
  void move(Tensor& tensor, const Box& box) {
    if (!box.given()) return;
    auto& buffer = buffers_[&box.bytes()];  // values may be columns of the keys
    if (buffer == nullptr) {
      buffer = std::make_unique<DeviceBuffer>(0, box.bytes().size());
      buffer->copy_from_host(box.bytes().data(), box.bytes().size(), stream_);
    }
    const std::ptrdiff_t offset = static_cast<const std::byte*>(box.view().data) - box.bytes().data();
    tensor.data = static_cast<std::byte*>(buffer->data()) + offset;
    tensor.device = {.kind = Device::Kind::cuda, .index = 0};
  }

  void copy_back() const {
    for (const auto& [bytes, buffer] : buffers_) {
      buffer->copy_to_host(bytes->data(), bytes->size(), stream_);
    }
    synchronize(0, stream_);
  }

 private:
  abi::Stream stream_;
  std::map<const harness::GuardedBytes*, std::unique_ptr<DeviceBuffer>> buffers_;
};

void move_inputs(DeviceBoxes& boxes, const Call& call, AttentionInputs& args) {
  boxes.move(args.q, call.q);
  boxes.move(args.k, call.k);
  boxes.move(args.v, call.v);
  boxes.move(args.cu_seqlens_q, call.cu_seqlens_q);
  boxes.move(args.cu_seqlens_k, call.cu_seqlens_k);
  boxes.move(args.seqused_q, call.seqused_q);
  boxes.move(args.seqused_k, call.seqused_k);
  boxes.move(args.page_table, call.page_table);
  boxes.move(args.leftpad_k, call.leftpad_k);
  boxes.move(args.cache_batch_idx, call.cache_batch_idx);
  boxes.move(args.causal_by_sequence, call.causal_by_sequence);
  boxes.move(args.dropout_places, call.dropout_places);
  boxes.move(args.sink, call.sink);
  boxes.move(args.gate, call.gate);
  boxes.move(args.q_scale, call.q_scale);
  boxes.move(args.k_scale, call.k_scale);
  boxes.move(args.v_scale, call.v_scale);
}

/// The functions of a call, which read the device's copies of what they capture.
class DeviceFunctions {
 public:
  DeviceFunctions(DeviceBoxes& boxes, const Call& call, AttentionInputs& args) {
    std::vector<ConstTensor> views;
    for (const Box& box : call.captured) {
      ConstTensor& view = views.emplace_back(box.view());
      boxes.move(view, box);
    }
    const auto moved = [&](std::optional<Function>& own, const Function*& f) {
      if (f == nullptr) return;
      const bool scored = f->kind() == Function::Kind::score;
      f = &own.emplace(Function::parse(f->text(), f->kind(), views,
                                       scored ? call.spec.differentiated : std::vector<int>()));
    };
    moved(score_, args.score_function);
    moved(mask_, args.mask_function);
  }

 private:
  std::optional<Function> score_, mask_;
};

/// A pass on the device's copies of a call's memory; `move` moves what is the pass's own.
template <typename Args, typename Move, typename Pass>
void run(const Call& call, Args args, const Move& move, const Pass& pass) {
  const Stream stream(0);
  DeviceBoxes boxes(stream.get());
  move_inputs(boxes, call, args);
  const DeviceFunctions functions(boxes, call, args);
  move(boxes, args);
  Execution execution{.stream = stream.get()};
  DeviceBuffer workspace;
  if (call.spec.workspace) {
    execution.workspace_bytes = workspace_bytes(args, execution);
    workspace = DeviceBuffer(0, execution.workspace_bytes);
    workspace.fill(0xff, stream.get());  // NaN
    execution.workspace = workspace.data();
  }
  pass(args, execution);
  boxes.copy_back();
}

bool has_wide_heads(const harness::Case& spec) {
  return std::max(spec.head_dim_qk, spec.head_dim_v) > max_gpu_head_dim;
}

/// Whether a case has a plan, which those have not that are refused by name.
bool is_planned(const harness::Case& spec) {
  const Stream stream(0);
  DeviceBoxes boxes(stream.get());
  const Call call(spec);
  ForwardArgs args = call.forward_args();
  move_inputs(boxes, call, args);
  const DeviceFunctions functions(boxes, call, args);
  boxes.move(args.out, call.out);
  boxes.move(args.lse, call.lse);
  boxes.move(args.max_logits, call.max_logits);
  try {
    explain(args);
  } catch (const Error& error) {
    if (error.status() != Status::unsupported) throw;
    return false;
  }
  return true;
}

}  // namespace

bool lacks_kernels() {
  return facts_of(properties(0)).family == Family::sm80;
}

std::string why_no_gpu() {
  if (const std::string why = why_no_driver(); !why.empty()) return why;
  const DeviceProperties& device = properties(0);
  return is_hopper(device) ? "" : device.name + " is no Hopper GPU";
}

std::string GpuRunner::refuses(const harness::Case& spec) const {
  if (spec.dtype == DType::e4m3) {
    if (spec.options.precision != Precision::exact || !is_planned(spec))
      return "no kernel takes such e4m3 queries";
  } else if (spec.dtype != DType::f16 && spec.dtype != DType::bf16) {
    return "f16, bf16 and e4m3 only";
  }
  if (has_wide_heads(spec)) {
    if (spec.head_dim_qk > max_gpu_wide_head_dim_qk || spec.head_dim_v > max_gpu_wide_head_dim_v)
      return "heads are too wide";
    if (spec.key_dtype) return "wide heads are of 16 bits";
  }
  if (spec.of_cache() && spec.key_dtype && !is_planned(spec))
    return "TMA cannot read 8-bit keys of the cache";
  for (const harness::Layout* layout : {&spec.q, &spec.k, &spec.v, &spec.out}) {
    if (layout->sparse) return "tensors larger than their memory cannot be copied";
  }
  if (spec.options.backward_precision != Precision::exact && !is_planned(spec))
    return "no kernel has such gradients in 8 bits";
  if (lacks_kernels() && !is_planned(spec)) return "the family sm80 has no kernel for it yet";
  return {};
}

std::string GpuRunner::refuses_max_logits(const harness::Case& spec) const {
  if (lacks_kernels() || has_wide_heads(spec)) return "no kernel finds them";
  const bool functions = !spec.score_function.empty() || !spec.mask_function.empty();
  return functions || spec.options.dropout_p > 0.0F ? "no kernel with functions finds them" : "";
}

void GpuRunner::forward(Call& call) {
  run(
      call, call.forward_args(),
      [&](DeviceBoxes& boxes, ForwardArgs& args) {
        boxes.move(args.out, call.out);
        boxes.move(args.lse, call.lse);
        boxes.move(args.max_logits, call.max_logits);
      },
      [](const ForwardArgs& args, const Execution& execution) { tandem::forward(args, execution); });
}

void GpuRunner::backward(Call& call) {
  // No GPU kernel has them: gradients are the CPU's, from the GPU's outputs.
  if (has_wide_heads(call.spec)) return tandem::backward(call.backward_args(), Execution{});
  std::vector<Tensor> gradients;
  run(
      call, call.backward_args(),
      [&](DeviceBoxes& boxes, BackwardArgs& args) {
        gradients.assign(args.captured_gradients.begin(), args.captured_gradients.end());
        for (std::size_t n = 0; n < gradients.size(); ++n)
          boxes.move(gradients[n], call.captured_gradients[n]);
        args.captured_gradients = gradients;
        boxes.move(args.out, call.out);
        boxes.move(args.lse, call.lse);
        boxes.move(args.dout, call.dout);
        boxes.move(args.dlse, call.dlse);
        if (args.options.backward_precision != Precision::exact) boxes.move(args.max_logits, call.max_logits);
        boxes.move(args.dq, call.dq);
        boxes.move(args.dk, call.dk);
        boxes.move(args.dv, call.dv);
        boxes.move(args.dsink, call.dsink);
        boxes.move(args.dgate, call.dgate);
      },
      [](const BackwardArgs& args, const Execution& execution) { tandem::backward(args, execution); });
}

void GpuRunner::append(harness::AppendCall& call) {
  const Stream stream(0);
  DeviceBoxes boxes(stream.get());
  AppendArgs args = call.args();
  call.for_each_tensor(args, [&](auto& field, const Box& box) { boxes.move(field, box); });
  append_kv(args, {.stream = stream.get()});
  boxes.copy_back();
}

void GpuRunner::merge(harness::MergeCall& call) {
  const Stream stream(0);
  DeviceBoxes boxes(stream.get());
  MergeArgs args = call.args();
  std::vector<ConstTensor> outs(args.outs.begin(), args.outs.end());
  std::vector<ConstTensor> lses(args.lses.begin(), args.lses.end());
  for (std::size_t i = 0; i < outs.size(); ++i) {
    boxes.move(outs[i], call.outs[i]);
    boxes.move(lses[i], call.lses[i]);
  }
  boxes.move(args.out, call.out);
  boxes.move(args.lse, call.lse);
  args.outs = outs;
  args.lses = lses;
  tandem::merge(args, {.stream = stream.get()});
  boxes.copy_back();
}

}  // namespace tandem::gpu
