// The calls of attention and of quantize: arrays of Python in, the C++ interface, arrays out.
#include "calls.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "arrays.hpp"
#include "fields.hpp"
#include "options.hpp"
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

void run_forward(const nb::tuple& tuple, const Options& options, std::uintptr_t stream) {
  Arrays arrays(tuple, forward_count);
  run(arrays.q(), forward_args(arrays, options), on_stream(options.execution, stream));
}

void run_backward(const nb::tuple& tuple, const Options& options, std::uintptr_t stream) {
  Arrays arrays(tuple, backward_count);
  run(arrays.q(), backward_args(arrays, options), on_stream(options.execution, stream));
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
