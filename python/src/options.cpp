#include "options.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fields.hpp"

namespace nb = nanobind;

namespace tandem::python {
namespace {

// Reads a value of Python's own; false of any other. What can be made into one is the Python layer's to
// validate: a tensor may require a gradient, which a float would drop without a word.
bool read(nb::handle value, float& place) {
  if (!PyFloat_Check(value.ptr()) && !PyLong_Check(value.ptr())) return false;
  place = static_cast<float>(PyFloat_AsDouble(value.ptr()));
  if (PyErr_Occurred() == nullptr) return true;
  PyErr_Clear();  // an integer beyond the range
  return false;
}

bool read(nb::handle value, std::optional<float>& place) {
  return value.is_none() || read(value, place.emplace());
}

bool read(nb::handle value, bool& place) {
  place = value.ptr() == Py_True;
  return place || value.ptr() == Py_False;
}

bool read(nb::handle value, int& place) {
  return nb::try_cast(value, place);
}

bool read(nb::handle value, std::int64_t& place) {
  return nb::try_cast(value, place);
}

// A seed, modulo 2^64; None until one is drawn.
bool read(nb::handle value, std::uint64_t& place) {
  if (value.is_none()) return true;
  place = PyLong_AsUnsignedLongLongMask(value.ptr());
  if (PyErr_Occurred() == nullptr) return true;
  PyErr_Clear();
  return false;
}

bool read(nb::handle value, Window place) {
  std::pair<std::int64_t, std::int64_t> window;
  if (!nb::try_cast(value, window)) return false;
  std::tie(place.left, place.right) = window;
  return true;
}

bool read(nb::handle value, Precision& place) {
  std::string name;
  if (!nb::try_cast(value, name)) return false;
  for (const Precision precision : {Precision::exact, Precision::fp8, Precision::int8}) {
    place = precision;
    if (name == name_of(precision)) return true;
  }
  return false;
}

// The values of OPTIONS. The text of its TypeError is the name of the first of another type.
Options make_options(const nb::tuple& values) {
  Options options;
  std::size_t n = 0;
  each_option(options.attention, options.execution, options.return_max_logits,
              [&](const char* name, auto&& place) {
                if (!read(values[n++], place)) throw nb::type_error(name);
              });
  return options;
}

// A member of a class that has __slots__, read past the lookup of its name: a call has 18 of them. Never
// destroyed: Python may be gone by then.
class Member {
 public:
  Member(nb::handle type, const char* name)
      : descriptor_(nb::object(nb::getattr(type, name)).release().ptr()),
        get_(reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(descriptor_), Py_tp_descr_get))) {}

  [[nodiscard]] nb::object of(nb::handle object) const {
    PyObject* const value = get_(descriptor_, object.ptr(), nullptr);
    if (value == nullptr) throw nb::python_error();
    return nb::steal(value);
  }

 private:
  PyObject* descriptor_;
  descrgetfunc get_;
};

// The members of tandem._call.Call and their defaults, which are mostly what a call has: those are known by
// their identity.
struct Known {
  Options defaults;
  std::vector<bool> in_operators;  ///< whether torch.ops.tandem takes it, too
  std::vector<std::pair<Member, PyObject*>> members;
  Member metadata, functions;
  nb::str parsed = interned("parsed"), options = interned("options");

  explicit Known(nb::handle call) : metadata(call, "metadata"), functions(call, "functions") {}
  static nb::str interned(const char* text) { return nb::steal<nb::str>(PyUnicode_InternFromString(text)); }
};

// What know_options made last. Earlier ones are kept: a thread may be reading one.
std::atomic<const Known*> known = nullptr;

void know_options(nb::handle call, const nb::tuple& defaults, const std::vector<bool>& in_operators) {
  auto made = std::make_unique<Known>(call);
  made->defaults = make_options(defaults);
  made->in_operators = in_operators;
  std::size_t n = 0;
  Options options;
  each_option(options.attention, options.execution, options.return_max_logits,
              [&](const char* name, auto&& /*place*/) {
                made->members.emplace_back(Member(call, name), nb::object(defaults[n++]).release().ptr());
              });
  known = made.release();
}

nb::tuple option_names() {
  Options options;
  nb::list names;
  each_option(options.attention, options.execution, options.return_max_logits,
              [&names](const char* name, auto&& /*place*/) { names.append(name); });
  return nb::tuple(names);
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

nb::tuple metadata_of(nb::handle call) {
  return nb::borrow<nb::tuple>(known.load()->metadata.of(call));
}

nb::object functions_of(nb::handle call) {
  return known.load()->functions.of(call);
}

Options options_of(nb::handle call) {
  const Known& of_call = *known;
  bool plain = true;
  Options options = of_call.defaults;
  std::size_t n = 0;
  each_option(options.attention, options.execution, options.return_max_logits,
              [&](const char* /*name*/, auto&& place) {
                const auto& [member, value] = of_call.members[n++];
                const nb::object given = member.of(call);
                if (given.ptr() != value && !read(given, place)) plain = false;
              });
  if (!plain || options.attention.dropout_p != 0 || options.execution.sm_limit != 0)
    return nb::cast<Options>(call.attr(of_call.options)());
  const nb::object functions = functions_of(call);
  if (!functions.is_none()) options.functions = nb::cast<Functions>(functions.attr(of_call.parsed)());
  return options;
}

std::optional<Options> options_of_operator(std::span<const nb::handle> values) {
  const Known& of_call = *known;
  bool plain = true;
  Options options = of_call.defaults;
  std::size_t option = 0, n = 0;
  const auto next = [&](auto& place) { plain = plain && n < values.size() && read(values[n++], place); };
  each_option(options.attention, options.execution, options.return_max_logits,
              [&](const char* /*name*/, auto&& place) {
                if (!of_call.in_operators[option++]) return;
                if constexpr (std::is_same_v<std::remove_cvref_t<decltype(place)>, Window>) {
                  next(place.left);
                  next(place.right);
                } else {
                  next(place);
                }
              });
  if (!plain || n != values.size() || options.execution.sm_limit != 0) return {};
  return options;
}

void Options::set_captured_gradients(const std::vector<std::optional<Tensor>>& gradients) {
  captured_gradients.clear();
  for (const std::optional<Tensor>& t : gradients) captured_gradients.push_back(t.value_or(Tensor{}));
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
      .def(nb::new_(&make_options), nb::arg("values"))
      .def_rw("functions", &Options::functions)
      .def("set_captured_gradients", &Options::set_captured_gradients, nb::arg("gradients"))
      .def("set_dropout_places", &Options::set_dropout_places, nb::arg("places"))
      .def("set_accumulate", &Options::set_accumulate, nb::arg("dq"), nb::arg("dk_dv"))
      .def_prop_ro("threads", [](const Options& options) { return options.execution.threads; });
  m.attr("OPTIONS") = option_names();
  m.def("know_options", &know_options, nb::arg("call"), nb::arg("defaults"), nb::arg("in_operators"));
}

}  // namespace tandem::python
