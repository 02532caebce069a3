// The calls of attention and of quantize: arrays of Python in, the C++ interface, arrays out.
#include "calls.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "api/call.hpp"
#include "arrays.hpp"
#include "fields.hpp"
#include "options.hpp"
#include "signals.hpp"
#include "tandem/attention.hpp"
#include "tandem/quantize.hpp"

namespace nb = nanobind;

namespace tandem::python {
namespace {

constexpr std::size_t forward_count = input_fields.size() + forward_outputs.size();
constexpr std::size_t backward_count = input_fields.size() + backward_inputs.size() + backward_outputs.size();

// The arrays of a call, in the order of its tables; None stands for one that is not given.
class Arrays {
 public:
  Arrays(const nb::tuple& arrays, std::size_t expected) : arrays_(arrays) {
    if (arrays.size() != expected) throw nb::value_error("a call has another number of arrays");
  }

  template <typename Args, typename Table>
  void take(Args& args, const Table& table, bool writable = false) {
    for (const auto& [name, field] : table) {
      const nb::handle array = arrays_[next_++];
      if (!array.is_none()) args.*field = view_of(name, array, q(), writable);
    }
  }

  [[nodiscard]] nb::handle q() const { return arrays_[0]; }

 private:
  const nb::tuple& arrays_;
  std::size_t next_ = 0;
};

ForwardArgs forward_args(Arrays& arrays, const Options& options) {
  ForwardArgs args;
  arrays.take(args, input_fields);
  arrays.take(args, forward_outputs, true);
  options.give(args, args.options);
  return args;
}

BackwardArgs backward_args(Arrays& arrays, const Options& options) {
  BackwardArgs args;
  arrays.take(args, input_fields);
  arrays.take(args, backward_inputs);
  arrays.take(args, backward_outputs, true);
  options.give(args, args.options);
  args.captured_gradients = options.captured_gradients;
  args.accumulate_dq = options.accumulate_dq;
  args.accumulate_dk_dv = options.accumulate_dk_dv;
  return args;
}

Execution on_stream(Execution e, std::uintptr_t stream) {
  e.stream =
      reinterpret_cast<void*>(stream);  // NOLINT(performance-no-int-to-ptr): handles are integers in Python
  return e;
}

// Calls `work(execution)` without the GIL. A signal whose handler raises ends it with what that raised.
template <typename F>
void run_interruptible(Execution execution, F&& work) {
  hear_signals(execution);
  try {
    const nb::gil_scoped_release unlocked;
    work(execution);
  } catch (const Error& error) {
    if (error.status() == Status::interrupted && PyErr_Occurred() != nullptr) throw nb::python_error();
    throw;
  }
}

// Checks, plans and runs. Scratch memory of a call on a GPU comes from PyTorch where q does, and is kept
// until the launch: what comes later on the stream may have the memory.
template <typename Args>
void run(nb::handle q, const Args& args, Execution execution) {
  const Call call(args, execution, Memory::present);
  nb::object scratch;
  if (call.plan.backend == Device::Kind::cuda) {
    scratch = scratch_beside(q, call.plan.workspace_bytes);
    execution.workspace = address_of(scratch);
    execution.workspace_bytes = execution.workspace != nullptr ? call.plan.workspace_bytes : 0;
  }
  run_interruptible(execution, [&call](const Execution& e) { tandem::run(call, e); });
}

void run_forward(const nb::tuple& tuple, const Options& options, std::uintptr_t stream) {
  Arrays arrays(tuple, forward_count);
  run(arrays.q(), forward_args(arrays, options), on_stream(options.execution, stream));
}

void run_backward(const nb::tuple& tuple, const Options& options, std::uintptr_t stream) {
  Arrays arrays(tuple, backward_count);
  run(arrays.q(), backward_args(arrays, options), on_stream(options.execution, stream));
}

// Reads plain PyTorch tensors, in the order of `table`, out of `arrays` from `next` on; false where one of
// them wants the long way.
template <typename Args, typename Table>
bool read_tensors(Args& args, const Table& table, const nb::tuple& arrays, std::size_t& next) {
  for (const auto& [name, field] : table) {
    const nb::handle array = arrays[next++];
    if (array.is_none()) continue;
    const std::optional<Tensor> t = exchanged(array);
    if (!t) return false;
    args.*field = *t;
  }
  return true;
}

// The quick way of a forward call: plain PyTorch tensors in, (out, lse or None, recorded) out. None where one
// of them wants the long way: another type, rows that are not contiguous, float8. A call is recorded, and has
// an LSE, where autograd is `recording` and follows q, k, v or the sink; None where such a call has no
// gradients.
nb::object run_tensors(const nb::tuple& inputs, const Options& options, bool return_lse, bool recording) {
  if (inputs.size() != input_fields.size()) throw nb::value_error("a call has another number of inputs");
  ForwardArgs args;
  std::size_t next = 0;
  if (!read_tensors(args, input_fields, inputs, next)) return nb::none();
  if (inputs[0].is_none() || inputs[1].is_none() || inputs[2].is_none()) return nb::none();  // q, k or v
  bool recorded = false;
  if (recording) {
    std::size_t last = 0, followed = 0;  // how many inputs there are up to the last one that is
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].is_none()) continue;
      last = i + 1;
      if (requires_gradient(inputs[i])) followed = i + 1;
    }
    recorded = followed > 0;
    if (recorded && (followed > differentiable_inputs || last > inputs.size() - forward_only))
      return nb::none();
  }
  const bool with_lse = return_lse || recorded;
  const nb::handle q = inputs[0];
  const Results results = results_beside(q, args, with_lse);
  if (!results.out.is_valid()) return nb::none();
  args.out = view_of("out", results.out, q, true);
  if (with_lse) args.lse = view_of("lse", results.lse, q, true);
  options.give(args, args.options);
  Execution execution = options.execution;
  execution.stream = current_stream(args.out);
  run(q, args, execution);
  return nb::make_tuple(results.out, with_lse ? results.lse : nb::none(), recorded);
}

// The quick way of a backward call: plain PyTorch tensors in, (dq, dk, dv, dsink) out, with None for those
// that are not `needed`. None where one of the tensors wants the long way, as one whose rows are not
// contiguous.
nb::object run_backward_tensors(const nb::tuple& arrays, const Options& options, const nb::tuple& needed) {
  if (arrays.size() != backward_count - backward_outputs.size() || needed.size() != backward_outputs.size()) {
    throw nb::value_error("a backward call has another number of tensors");
  }
  BackwardArgs args;
  std::size_t next = 0;
  if (!read_tensors(args, input_fields, arrays, next) || !read_tensors(args, backward_inputs, arrays, next)) {
    return nb::none();
  }
  if (!args.dout.given() || !has_dense_rows(args.dout) || !has_dense_rows(args.dlse)) return nb::none();
  std::array<nb::object, backward_outputs.size()> made;
  for (std::size_t i = 0; i < made.size(); ++i) {
    made[i] = nb::none();
    if (arrays[i].is_none() || needed[i].ptr() != Py_True) continue;
    made[i] = made_like(arrays[i], args.*input_fields[i].second);
    args.*backward_outputs[i].second = view_of("a gradient", made[i], arrays[0], true);
  }
  options.give(args, args.options);
  Execution execution = options.execution;
  execution.stream = current_stream(args.q);
  run(arrays[0], args, execution);
  return nb::make_tuple(made[0], made[1], made[2], made[3]);
}

// f(args, execution) of a call that is planned but not run.
template <typename F>
auto planned(const nb::tuple& tuple, const Options& options, bool backward, F&& f) {
  Arrays arrays(tuple, backward ? backward_count : forward_count);
  return backward ? f(backward_args(arrays, options), options.execution)
                  : f(forward_args(arrays, options), options.execution);
}

template <typename... Tables>
nb::tuple names_of(const Tables&... tables) {
  nb::list names;
  (std::for_each(tables.begin(), tables.end(), [&](const auto& field) { names.append(field.first); }), ...);
  return nb::tuple(names);
}

void define_attention(nb::module_& m) {
  m.attr("FORWARD") = names_of(input_fields, forward_outputs);
  m.attr("BACKWARD") = names_of(input_fields, backward_inputs, backward_outputs);
  m.def("know_torch", &know_torch, nb::arg("types"), nb::arg("strided"), nb::arg("dtypes"), nb::arg("bytes"),
        nb::arg("empty_like"), nb::arg("exchange").none());
  m.def("forward_tensors", &run_tensors, nb::arg("inputs"), nb::arg("options"), nb::arg("return_lse"),
        nb::arg("recording"));
  m.def("backward_tensors", &run_backward_tensors, nb::arg("arrays"), nb::arg("options"), nb::arg("needed"));
  m.def("forward", &run_forward, nb::arg("arrays"), nb::arg("options"), nb::arg("stream") = 0);
  m.def("backward", &run_backward, nb::arg("arrays"), nb::arg("options"), nb::arg("stream") = 0);
}

void define_plans(nb::module_& m) {
  m.def(
      "explain",
      [](const nb::tuple& arrays, const Options& options, bool backward) {
        return planned(arrays, options, backward, [](const auto&... call) { return explain(call...); });
      },
      nb::arg("arrays"), nb::arg("options"), nb::arg("backward"));
  m.def(
      "workspace_bytes",
      [](const nb::tuple& arrays, const Options& options, bool backward) {
        return planned(arrays, options, backward,
                       [](const auto&... call) { return workspace_bytes(call...); });
      },
      nb::arg("arrays"), nb::arg("options"), nb::arg("backward"));
}

void define_quantize(nb::module_& m) {
  m.def(
      "quantize",
      [](const Tensor& x, const Tensor& codes, const Tensor& scales, std::optional<Tensor> mean,
         Granularity granularity, bool hadamard, int threads, std::uintptr_t stream) {
        const QuantizeArgs args{.x = x,
                                .codes = codes,
                                .scales = scales,
                                .mean = mean.value_or(Tensor{}),
                                .granularity = granularity,
                                .hadamard = hadamard};
        Execution on_threads;
        on_threads.threads = threads;
        run_interruptible(on_stream(on_threads, stream),
                          [&args](const Execution& execution) { quantize(args, execution); });
      },
      nb::arg("x"), nb::arg("codes"), nb::arg("scales"), nb::arg("mean").none(), nb::arg("granularity"),
      nb::arg("hadamard"), nb::arg("threads"), nb::arg("stream") = 0);
}

}  // namespace

void define_calls(nb::module_& m) {
  define_attention(m);
  define_plans(m);
  define_quantize(m);
}

}  // namespace tandem::python
