// forward_part and backward_part: calls of forward, backward and merge on rows of the pieces.
#include "tandem/parts.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "api/call.hpp"
#include "api/check.hpp"
#include "api/operand_of.hpp"
#include "api/part_rows.hpp"
#include "api/workspace.hpp"
#include "gpu/scratch.hpp"
#include "ops/plan_gpu.hpp"
#include "tandem/cache.hpp"

namespace tandem {
namespace {

using check::Argument;

/// The options of a call over `rows`; those of the whole tensors if there are none.
AttentionOptions options_of(const PartOptions& options, const PartCall* call) {
  AttentionOptions o;
  o.scale = options.scale;
  o.causal = call == nullptr && options.causal;
  o.window_left = call == nullptr ? options.window_left : call->window_left;
  o.window_right = call == nullptr ? options.window_right : call->window_right;
  o.softcap = options.softcap;
  o.deterministic = options.deterministic;
  return o;
}

void set_inputs(AttentionInputs& in, const PartInputs& args, const Piece& queries, const Piece& keys) {
  in.q = rows_of(args.q, queries);
  in.k = rows_of(args.k, keys);
  in.v = rows_of(args.v, keys);
}

ForwardArgs forward_of(const ForwardPartArgs& args, const PartCall& call) {
  ForwardArgs f;
  set_inputs(f, args, call.queries, call.keys);
  f.options = options_of(args.options, &call);
  f.out = rows_of(args.out, call.queries);
  f.lse = columns_of(args.lse, call.queries);
  return f;
}

BackwardArgs backward_of(const BackwardPartArgs& args, const PartCall& call) {
  BackwardArgs b;
  set_inputs(b, args, call.queries, call.keys);
  b.options = options_of(args.options, &call);
  b.out = rows_of(args.out, call.queries);
  b.lse = columns_of(args.lse, call.queries);
  b.dout = rows_of(args.dout, call.queries);
  b.dlse = columns_of(args.dlse, call.queries);
  b.dq = rows_of(args.dq, call.queries);
  b.dk = rows_of(args.dk, call.keys);
  b.dv = rows_of(args.dv, call.keys);
  b.accumulate_dq = b.accumulate_dk_dv = args.accumulate;
  return b;
}

/// Checks everything, in the user's terms, and says which call there is.
PartCall checked(const ForwardPartArgs& args, Memory memory) {
  ForwardArgs whole;
  whole.q = args.q;
  whole.k = args.k;
  whole.v = args.v;
  whole.out = args.out;
  whole.lse = args.lse;
  whole.options = options_of(args.options, nullptr);
  make_problem(whole, memory);
  check::dtype({"out", args.out}, {DType::f32});
  check::given({"lse", args.lse}, "(batch, heads_q, seqlen_q)");
  return call_of(args);
}

PartCall checked(const BackwardPartArgs& args, Memory memory) {
  BackwardArgs whole;
  whole.q = args.q;
  whole.k = args.k;
  whole.v = args.v;
  whole.out = args.out;
  whole.lse = args.lse;
  whole.dout = args.dout;
  whole.dlse = args.dlse;
  whole.dq = args.dq;
  whole.dk = args.dk;
  whole.dv = args.dv;
  whole.options = options_of(args.options, nullptr);
  make_problem(whole, memory);
  if (args.accumulate) {
    for (const Argument& a : {Argument{"dq", args.dq}, {"dk", args.dk}, {"dv", args.dv}}) {
      if (a.given()) check::dtype(a, {DType::f32});
    }
  }
  return call_of(args);
}

/// Contiguous tensors in scratch memory, one behind the other.
class Results {
 public:
  /// Null for tensors that are only described.
  explicit Results(std::byte* memory) : memory_(memory) {}

  Tensor like(const ConstTensor& t, DType dtype) {
    if (!t.given()) return {};
    Tensor copy;
    copy.dtype = dtype;
    copy.rank = t.rank;
    copy.shape = t.shape;
    copy.device = t.device;
    std::int64_t step = 1;
    for (int i = t.rank; i-- > 0;) {
      copy.stride[static_cast<std::size_t>(i)] = step;
      step *= t.shape[static_cast<std::size_t>(i)];
    }
    if (memory_ != nullptr) copy.data = memory_ + bytes_;
    const std::size_t bytes = static_cast<std::size_t>(step) * size_of(dtype);
    bytes_ += (bytes + workspace_alignment - 1) / workspace_alignment * workspace_alignment;
    return copy;
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  std::byte* memory_;
  std::size_t bytes_ = 0;
};

/// What accumulating makes of a forward call on the way: the part, and a copy of what was there.
struct ForwardResults {
  Tensor out, lse, before, before_lse;
  ForwardResults(Results& results, const ForwardArgs& f)
      : out(results.like(f.out, DType::f32)),
        lse(results.like(f.lse, DType::f32)),
        before(results.like(f.out, DType::f32)),
        before_lse(results.like(f.lse, DType::f32)) {}
  void go_to(ForwardArgs& f) const {
    f.out = out;
    f.lse = lse;
  }
};
/// Bytes of the results of a call with these arguments.
std::size_t result_bytes(const ForwardArgs& args) {
  Results measure(nullptr);
  const ForwardResults results(measure, args);
  return measure.bytes();
}

/// Those of the results and of the call that makes them.
std::size_t bytes_to_accumulate(ForwardArgs args, const Execution& execution) {
  Results results(nullptr);
  ForwardResults(results, args).go_to(args);
  return results.bytes() + described_bytes(Call(args, execution, Memory::described), execution);
}

/// Memory for results: the first bytes of the caller's workspace, or memory for as long as this lives. The
/// call that makes the results has what follows, or allocates for itself.
class ResultMemory {
 public:
  ResultMemory(Device device, const Execution& execution, std::size_t bytes)
      : execution_(execution), rest_(execution), bytes_(bytes) {
    if (execution.workspace != nullptr) {
      check_workspace(execution, 0);  // whether it is aligned, as the tensors in it must be
      data_ = static_cast<std::byte*>(execution.workspace);
      // Where that is more than there is, run() says so before anything is touched.
      rest_.workspace = data_ + bytes;
      rest_.workspace_bytes = execution.workspace_bytes - std::min(bytes, execution.workspace_bytes);
    } else if (device.kind == Device::Kind::cuda) {
      check_gpu(device.index);
      guard_.emplace(device.index);
      scratch_.emplace(nullptr, bytes, static_cast<gpu::abi::Stream>(execution.stream));
      data_ = reinterpret_cast<std::byte*>(scratch_->data());
    } else {
      owned_ = Workspace(Execution{}, bytes);
      data_ = owned_.memory().data();
    }
  }
  [[nodiscard]] std::byte* data() const { return data_; }
  void run(const ForwardArgs& args) const {
    const Call call(args, rest_, Memory::present);
    if (execution_.workspace != nullptr) check_workspace(execution_, bytes_ + call.plan.workspace_bytes);
    tandem::run(call, rest_);
  }

 private:
  const Execution& execution_;
  Execution rest_;  ///< of the call that makes the results
  std::size_t bytes_;
  std::byte* data_ = nullptr;
  std::optional<gpu::ContextGuard> guard_;  // outlives the memory, which is freed in its context
  std::optional<gpu::Scratch> scratch_;
  Workspace owned_;
};

/// Calls that write outputs whole: that of the visible pairs, and those that give rows without one what rows
/// without keys have.
std::vector<Call> writing(const ForwardPartArgs& args, const PartCall& call, const Execution& execution,
                          Memory memory) {
  std::vector<Call> calls;
  if (!call.empty()) calls.emplace_back(forward_of(args, call), execution, memory);
  for (const Piece& rows : others(call.queries, args.q.shape[1])) {
    if (rows.count > 0) calls.emplace_back(forward_of(args, without_keys(rows)), execution, memory);
  }
  return calls;
}

std::vector<Call> writing(const BackwardPartArgs& args, const PartCall& call, const Execution& execution,
                          Memory memory) {
  std::vector<Call> calls;
  if (!call.empty()) calls.emplace_back(backward_of(args, call), execution, memory);
  BackwardPartArgs of_queries = args, of_keys = args;
  of_queries.dk = of_queries.dv = of_keys.dq = {};
  for (const Piece& rows : others(call.queries, args.q.shape[1])) {
    if (rows.count > 0 && args.dq.given()) {
      calls.emplace_back(backward_of(of_queries, without_keys(rows)), execution, memory);
    }
  }
  for (const Piece& rows : others(call.keys, args.k.shape[1])) {
    if (rows.count > 0 && (args.dk.given() || args.dv.given())) {
      calls.emplace_back(backward_of(of_keys, without_queries(rows)), execution, memory);
    }
  }
  return calls;
}

std::size_t most_bytes(const std::vector<Call>& calls, const Execution& execution) {
  std::size_t bytes = 0;
  for (const Call& call : calls) bytes = std::max(bytes, described_bytes(call, execution));
  return bytes;
}

template <typename Args>
void write(const Args& args, const PartCall& part, const Execution& execution) {
  const std::vector<Call> calls = writing(args, part, execution, Memory::present);
  if (execution.workspace != nullptr) check_workspace(execution, most_bytes(calls, execution));
  for (const Call& call : calls) run(call, execution);
}

}  // namespace

void forward_part(const ForwardPartArgs& args, const Execution& execution) {
  const PartCall part = checked(args, Memory::present);
  if (!args.accumulate) return write(args, part, execution);
  if (part.empty()) return;
  ForwardArgs f = forward_of(args, part);
  const Tensor out = f.out, lse = f.lse;
  const ResultMemory memory(args.q.device, execution, result_bytes(f));
  Results results(memory.data());
  const ForwardResults r(results, f);
  r.go_to(f);
  memory.run(f);
  // merge does not write where it reads: what was there is copied, as the one part of a merge, and then
  // merged with the part, both laid out alike, as a GPU wants them.
  const ConstTensor before = out, before_lse = lse;
  merge({.outs = {&before, 1}, .lses = {&before_lse, 1}, .out = r.before, .lse = r.before_lse}, execution);
  const std::array<ConstTensor, 2> outs{r.before, r.out}, lses{r.before_lse, r.lse};
  merge({.outs = outs, .lses = lses, .out = out, .lse = lse}, execution);
}

void backward_part(const BackwardPartArgs& args, const Execution& execution) {
  const PartCall part = checked(args, Memory::present);
  if (!args.accumulate) return write(args, part, execution);
  if (part.empty()) return;
  backward(backward_of(args, part), execution);
}

std::size_t workspace_bytes(const ForwardPartArgs& args, const Execution& execution) {
  const PartCall part = checked(args, Memory::described);
  if (!args.accumulate) return most_bytes(writing(args, part, execution, Memory::described), execution);
  return part.empty() ? 0 : bytes_to_accumulate(forward_of(args, part), execution);
}

std::size_t workspace_bytes(const BackwardPartArgs& args, const Execution& execution) {
  const PartCall part = checked(args, Memory::described);
  if (!args.accumulate) return most_bytes(writing(args, part, execution, Memory::described), execution);
  return part.empty() ? 0 : workspace_bytes(backward_of(args, part), execution);
}

}  // namespace tandem
