#include "options.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>

namespace nb = nanobind;

namespace tandem::python {
namespace {

// A number of Python's own. What can be made into one is the Python layer's to judge: a tensor may require a
// gradient, which a float would drop without a word.
float number(nb::handle value) {
  if (PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr())) {
    const double number = PyFloat_AsDouble(value.ptr());
    if (PyErr_Occurred() == nullptr) return static_cast<float>(number);
    PyErr_Clear();  // an integer beyond the range
  }
  throw nb::type_error("not a number");
}

Options make_options(nb::handle scale, bool causal, std::int64_t window_left, std::int64_t window_right,
                     nb::handle softcap, bool deterministic, bool check, Precision precision, bool strict,
                     std::int64_t split_size, int threads) {
  AttentionOptions o;
  if (!scale.is_none()) o.scale = number(scale);
  o.causal = causal;
  o.window_left = window_left;
  o.window_right = window_right;
  o.softcap = number(softcap);
  o.deterministic = deterministic;
  o.check = check;
  o.precision = precision;
  o.strict = strict;
  o.split_size = split_size;
  return {.attention = o,
          .threads = threads,
          .sm_limit = 0,
          .functions = {},
          .captured_gradients = {},
          .dropout_places = {}};
}

// Text, or None, the arrays that both read, and the numbers of those whose gradients may be asked for.
Functions parse(const std::optional<std::string>& score, const std::optional<std::string>& mask,
                const std::vector<Tensor>& captured, const std::vector<int>& differentiated) {
  const std::vector<ConstTensor> views(captured.begin(), captured.end());
  using Kind = Function::Kind;
  Functions f;
  if (score) {
    f.score = std::make_shared<Function>(Function::parse(*score, Kind::score, views, differentiated));
  }
  if (mask) f.mask = std::make_shared<Function>(Function::parse(*mask, Kind::mask, views));
  return f;
}

}  // namespace

void Options::set_captured_gradients(const std::vector<std::optional<Tensor>>& gradients) {
  captured_gradients.clear();
  for (const std::optional<Tensor>& t : gradients) captured_gradients.push_back(t.value_or(Tensor{}));
}

void Options::set_dropout(float p, std::uint64_t seed, std::uint64_t offset,
                          const std::optional<Tensor>& places) {
  attention.dropout_p = p;
  attention.dropout_seed = seed;
  attention.dropout_offset = offset;
  if (places) dropout_places = *places;
}

void Options::set_accumulate(bool dq, bool dk_dv) {
  accumulate_dq = dq;
  accumulate_dk_dv = dk_dv;
}

void Options::give(AttentionInputs& args, AttentionOptions& options) const {
  options = attention;
  args.score_function = functions.score.get();
  args.mask_function = functions.mask.get();
  args.dropout_places = dropout_places;
}

void define_options(nb::module_& m) {
  nb::class_<Functions>(m, "Functions", "Parsed functions, whose arrays have to stay where they are.")
      .def(nb::new_(&parse), nb::arg("score").none(), nb::arg("mask").none(), nb::arg("captured"),
           nb::arg("differentiated"));
  nb::class_<Options>(m, "Options")
      .def(nb::new_(&make_options), nb::arg("scale") = nb::none(), nb::arg("causal") = false,
           nb::arg("window_left") = -1, nb::arg("window_right") = -1, nb::arg("softcap") = 0.0F,
           nb::arg("deterministic") = false, nb::arg("check") = false,
           nb::arg("precision") = Precision::exact, nb::arg("strict") = false, nb::arg("split_size") = 0,
           nb::arg("threads") = 0)
      .def_rw("functions", &Options::functions)
      .def("set_captured_gradients", &Options::set_captured_gradients, nb::arg("gradients"))
      .def("set_dropout", &Options::set_dropout, nb::arg("p"), nb::arg("seed"), nb::arg("offset"),
           nb::arg("places").none())
      .def("set_accumulate", &Options::set_accumulate, nb::arg("dq"), nb::arg("dk_dv"))
      .def_ro("threads", &Options::threads)
      .def_rw("sm_limit", &Options::sm_limit);
}

}  // namespace tandem::python
