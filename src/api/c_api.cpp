// The C interface: structs -> arguments, exceptions -> statuses.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "api/c_interface.hpp"
#include "tandem/attention.hpp"
#include "tandem/log.hpp"
#include "tandem/quantize.hpp"
#include "tandem/stats.hpp"
#include "tandem/tandem.h"

namespace {

using tandem::c::adopt;
using tandem::c::execution_of;
using tandem::c::guarded;
using tandem::c::input;
using tandem::c::output;
using tandem::check::invalid;

/// The least that any caller passes: the structs as they were first. tandem_options has grown by `strict`
/// and `split_size` since, tandem_forward_args by the cache and the mask by sequence, tandem_execution by
/// the interruption; tandem_options by dropout, and the arguments of both passes by functions, the places of
/// dropout, indices and the gate.
constexpr std::size_t options_size_0_1 = 56;
constexpr std::size_t forward_args_size_0_1 = 16 + 13 * sizeof(tandem_tensor);
constexpr std::size_t backward_args_size_0_1 = 16 + 16 * sizeof(tandem_tensor);
constexpr std::size_t execution_size_0_1 = 40;
static_assert(sizeof(tandem_tensor) == 88);
static_assert(sizeof(tandem_options) == options_size_0_1 + 16 + 24);
static_assert(sizeof(tandem_functions) == 32);
static_assert(sizeof(tandem_forward_args) ==
              forward_args_size_0_1 + 9 * sizeof(tandem_tensor) + sizeof(tandem_functions));
static_assert(sizeof(tandem_backward_args) ==
              backward_args_size_0_1 + sizeof(tandem_functions) + 16 + 6 * sizeof(tandem_tensor));
static_assert(sizeof(tandem_execution) == execution_size_0_1 + 16);
static_assert(sizeof(tandem_quantize_args) == 16 + 4 * sizeof(tandem_tensor));

/// The message of this thread's last failure. `text` is `storage`, or a literal where there was no memory for
/// a copy.
struct LastError {
  std::string storage;
  const char* text = "";
};
thread_local LastError
    last_error;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables): the C interface's errno

tandem::AttentionOptions options_of(const tandem_options* given) {
  if (given == nullptr) return {};
  const tandem_options o = adopt("options", *given, tandem_options_default(), options_size_0_1);
  tandem::AttentionOptions r;
  if (o.has_scale != 0) r.scale = o.scale;
  r.causal = o.causal != 0;
  r.window_left = o.window_left;
  r.window_right = o.window_right;
  r.softcap = o.softcap;
  r.deterministic = o.deterministic != 0;
  r.check = o.check != 0;
  r.precision = static_cast<tandem::Precision>(o.precision);
  r.strict = o.strict != 0;
  r.backward_precision = static_cast<tandem::Precision>(o.backward_precision);
  r.split_size = o.split_size;
  r.dropout_p = o.dropout_p;
  r.dropout_seed = o.dropout_seed;
  r.dropout_offset = o.dropout_offset;
  return r;
}

template <typename CArgs>
void shared_inputs(const CArgs& from, tandem::AttentionInputs& to) {
  to.q = input(from.q);
  to.k = input(from.k);
  to.v = input(from.v);
  to.cu_seqlens_q = input(from.cu_seqlens_q);
  to.cu_seqlens_k = input(from.cu_seqlens_k);
  to.seqused_q = input(from.seqused_q);
  to.seqused_k = input(from.seqused_k);
  to.sink = input(from.sink);
  to.dropout_places = input(from.dropout_places);
  to.indices = input(from.indices);
  to.topk_length = input(from.topk_length);
  to.gate = input(from.gate);
}

/// A call's functions, which its arguments point to.
struct Functions {
  std::optional<tandem::Function> score, mask;
  std::vector<tandem::Tensor> gradients;

  void give(const tandem_functions& from, const tandem_tensor* wanted, tandem::AttentionInputs& to) {
    if (from.captured_count < 0 || (from.captured_count > 0 && from.captured == nullptr)) {
      invalid(
          "functions.captured_count is {}, but functions.captured is {}; pass an array of so many tensors",
          from.captured_count, from.captured == nullptr ? "NULL" : "given");
    }
    const auto count = static_cast<std::size_t>(from.captured_count);
    std::vector<tandem::ConstTensor> captured;
    std::vector<int> differentiated;
    for (std::size_t n = 0; n < count; ++n) {
      captured.push_back(input(from.captured[n]));
      if (wanted == nullptr) continue;
      gradients.push_back(output(wanted[n]));
      if (gradients.back().given()) differentiated.push_back(static_cast<int>(n));
    }
    using Kind = tandem::Function::Kind;
    if (from.score != nullptr) {
      score = tandem::Function::parse(from.score, Kind::score, captured, differentiated);
      to.score_function = &*score;
    } else if (!differentiated.empty()) {
      invalid("captured_gradients are given without functions.score; pass both, or neither");
    }
    if (from.mask != nullptr)
      to.mask_function = &mask.emplace(tandem::Function::parse(from.mask, Kind::mask, captured));
  }
};

tandem::ForwardArgs args_of(const tandem_forward_args* given, Functions& functions) {
  if (given == nullptr) invalid("args is NULL; pass the address of a tandem_forward_args");
  const auto a = adopt("args", *given, tandem_forward_args_default(), forward_args_size_0_1);
  tandem::ForwardArgs r;
  shared_inputs(a, r);
  r.q_scale = input(a.q_scale);
  r.k_scale = input(a.k_scale);
  r.v_scale = input(a.v_scale);
  r.out = output(a.out);
  r.lse = output(a.lse);
  r.max_logits = output(a.max_logits);
  r.page_table = input(a.page_table);
  r.leftpad_k = input(a.leftpad_k);
  r.cache_batch_idx = input(a.cache_batch_idx);
  r.causal_by_sequence = input(a.causal_by_sequence);
  functions.give(a.functions, nullptr, r);
  r.options = options_of(a.options);
  return r;
}

tandem::BackwardArgs args_of(const tandem_backward_args* given, Functions& functions) {
  if (given == nullptr) invalid("args is NULL; pass the address of a tandem_backward_args");
  const auto a = adopt("args", *given, tandem_backward_args_default(), backward_args_size_0_1);
  tandem::BackwardArgs r;
  shared_inputs(a, r);
  r.out = input(a.out);
  r.lse = input(a.lse);
  r.dout = input(a.dout);
  r.dlse = input(a.dlse);
  r.max_logits = input(a.max_logits);
  r.dq = output(a.dq);
  r.dk = output(a.dk);
  r.dv = output(a.dv);
  r.dsink = output(a.dsink);
  r.dgate = output(a.dgate);
  functions.give(a.functions, a.captured_gradients, r);
  r.captured_gradients = functions.gradients;
  r.accumulate_dq = a.accumulate_dq != 0;
  r.accumulate_dk_dv = a.accumulate_dk_dv != 0;
  r.options = options_of(a.options);
  return r;
}

tandem::QuantizeArgs args_of(const tandem_quantize_args* given) {
  if (given == nullptr) invalid("args is NULL; pass the address of a tandem_quantize_args");
  const auto a = adopt("args", *given, tandem_quantize_args_default(), sizeof(tandem_quantize_args));
  tandem::QuantizeArgs r;
  r.x = input(a.x);
  r.codes = output(a.codes);
  r.scales = output(a.scales);
  r.mean = output(a.mean);
  r.granularity = static_cast<tandem::Granularity>(a.granularity);
  r.hadamard = a.hadamard != 0;
  return r;
}

template <typename CArgs>
int workspace_bytes(const CArgs* args, const tandem_execution* execution, std::size_t* bytes) {
  return guarded([&] {
    if (bytes == nullptr) invalid("bytes is NULL; pass the address of a size_t");
    Functions functions;
    *bytes = tandem::workspace_bytes(args_of(args, functions), execution_of(execution));
  });
}

/// Copies text as tandem_forward_explain does.
void copy_text(const std::string& whole, char* text, std::size_t capacity, std::size_t* needed) {
  if (text == nullptr && capacity > 0)
    invalid("text is NULL but capacity is {}; pass a buffer, or capacity 0", capacity);
  if (needed != nullptr) *needed = whole.size() + 1;
  if (capacity == 0) return;
  const std::size_t length = std::min(whole.size(), capacity - 1);
  std::memcpy(text, whole.data(), length);
  text[length] = '\0';
}

template <typename CArgs>
int explain(const CArgs* args, const tandem_execution* execution, char* text, std::size_t capacity,
            std::size_t* needed) {
  return guarded([&] {
    Functions functions;
    copy_text(tandem::explain(args_of(args, functions), execution_of(execution)), text, capacity, needed);
  });
}

}  // namespace

namespace tandem {

int c::fail(Status status, const char* message) noexcept {
  try {
    last_error.storage = message;
    last_error.text = last_error.storage.c_str();
  } catch (...) {
    last_error.text = "memory is exhausted";
  }
  return static_cast<int>(status);
}

Execution c::execution_of(const tandem_execution* given) {
  if (given == nullptr) return {};
  const tandem_execution e = adopt("execution", *given, tandem_execution_default(), execution_size_0_1);
  Execution execution{.threads = e.threads,
                      .stream = e.stream,
                      .workspace = e.workspace,
                      .workspace_bytes = e.workspace_bytes,
                      .sm_limit = e.sm_limit};
  if (e.interrupted != nullptr) {
    // The caller's struct lives as long as the call.
    execution.interrupted_context = const_cast<tandem_execution*>(given);
    execution.interrupted = [](void* context) {
      const auto* callers = static_cast<const tandem_execution*>(context);
      return callers->interrupted(callers->interrupted_context) != 0;
    };
  }
  return execution;
}

}  // namespace tandem

int tandem_forward(const tandem_forward_args* args, const tandem_execution* execution) {
  return guarded([&] {
    Functions functions;
    tandem::forward(args_of(args, functions), execution_of(execution));
  });
}

int tandem_backward(const tandem_backward_args* args, const tandem_execution* execution) {
  return guarded([&] {
    Functions functions;
    tandem::backward(args_of(args, functions), execution_of(execution));
  });
}

int tandem_quantize(const tandem_quantize_args* args, const tandem_execution* execution) {
  return guarded([&] { tandem::quantize(args_of(args), execution_of(execution)); });
}

int tandem_forward_workspace_bytes(const tandem_forward_args* args, const tandem_execution* execution,
                                   size_t* bytes) {
  return workspace_bytes(args, execution, bytes);
}

int tandem_backward_workspace_bytes(const tandem_backward_args* args, const tandem_execution* execution,
                                    size_t* bytes) {
  return workspace_bytes(args, execution, bytes);
}

int tandem_forward_explain(const tandem_forward_args* args, const tandem_execution* execution, char* text,
                           size_t capacity, size_t* needed) {
  return explain(args, execution, text, capacity, needed);
}

int tandem_backward_explain(const tandem_backward_args* args, const tandem_execution* execution, char* text,
                            size_t capacity, size_t* needed) {
  return explain(args, execution, text, capacity, needed);
}

void tandem_set_log(int level, tandem_log_sink sink) {
  static std::atomic<tandem_log_sink> to{nullptr};
  to = sink;
  tandem::set_log(
      static_cast<tandem::LogLevel>(level),
      sink == nullptr ? nullptr : +[](tandem::LogLevel of, const char* message) {
        if (const tandem_log_sink now = to) now(static_cast<int>(of), message);
      });
}

int tandem_stats_text(char* text, size_t capacity, size_t* needed) {
  return guarded([&] { copy_text(tandem::stats_text(), text, capacity, needed); });
}

const char* tandem_last_error(void) {
  return last_error.text;
}

const char* tandem_version(void) {
  return tandem::version();
}
