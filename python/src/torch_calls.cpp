#include "torch_calls.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "arrays.hpp"
#include "calls.hpp"
#include "fields.hpp"
#include "options.hpp"
#include "torch_state.hpp"

namespace nb = nanobind;

namespace tandem::python {
namespace {

/// The tensors that a call reads, in the order of the tables; None stands for one that is not given.
using Inputs = std::array<nb::handle, input_fields.size()>;
using Gradients = std::array<nb::object, differentiable_inputs>;

/// Reads plain tensors; false where one of them wants the long way.
template <typename Args, typename Table>
bool read_tensors(Args& args, const Table& table, std::span<const nb::handle> arrays) {
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    if (arrays[i].is_none()) continue;
    const std::optional<Tensor> t = exchanged(arrays[i]);
    if (!t) return false;
    args.*table[i].second = *t;
  }
  return true;
}

enum class Record : std::uint8_t { no, yes, impossible };

/// Whether autograd is to record a call: where it follows q, k, v, the sink or the gate. Impossible where it
/// follows others, or such a call has no gradients.
Record record_of(const Inputs& inputs) {
  std::size_t last = 0, followed = 0;  // how many inputs there are up to the last one that is
  bool gated = false;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].is_none()) continue;
    last = i + 1;
    if (!requires_gradient(inputs[i])) continue;
    if (i == gate_input) {
      gated = true;
    } else {
      followed = i + 1;
    }
  }
  if (followed == 0 && !gated) return Record::no;
  const bool possible = followed <= differentiable_inputs && last <= inputs.size() - forward_only;
  return possible ? Record::yes : Record::impossible;
}

struct Output {
  nb::object out, lse, max_logits;  ///< the latter two only where there are some
  bool recorded = false;
};

/// The forward call. Nothing where one of the tensors wants the long way: another type, rows that are not
/// contiguous, float8. Where it is to be recorded it has what the gradients want, too.
std::optional<Output> attend(const Inputs& inputs, const Options& options, bool return_lse, bool recording) {
  ForwardArgs args;
  if (!read_tensors(args, input_fields, inputs)) return {};
  if (inputs[0].is_none() || inputs[1].is_none() || inputs[2].is_none()) return {};  // q, k or v
  const Record record = recording ? record_of(inputs) : Record::no;
  if (record == Record::impossible) return {};
  const bool recorded = record == Record::yes;
  const nb::handle q = inputs[0];
  const bool max_logits = options.return_max_logits || (recorded && options.saves_max_logits());
  const std::optional<Results> results = results_beside(q, args, return_lse || recorded, max_logits);
  if (!results) return {};
  args.out = results->out.view;
  args.lse = results->lse.view;
  args.max_logits = results->max_logits.view;
  options.give(args, args.options);
  Execution execution = options.execution;
  execution.stream = current_stream(args.out);
  run(q, args, execution);
  return Output{.out = results->out.tensor,
                .lse = results->lse.tensor,
                .max_logits = results->max_logits.tensor,
                .recorded = recorded};
}

/// The gradients of q, k, v and the sink, None of those that are not `needed`. `others`: backward_inputs.
/// Nothing where one of the tensors wants the long way, as one whose rows are not contiguous.
std::optional<Gradients> differentiate(const Inputs& inputs,
                                       const std::array<nb::handle, backward_inputs.size()>& others,
                                       const Options& options, std::span<const nb::handle> needed) {
  BackwardArgs args;
  if (!read_tensors(args, input_fields, inputs) || !read_tensors(args, backward_inputs, others)) return {};
  if (!args.dout.given() || !has_dense_rows(args.dout) || !has_dense_rows(args.dlse)) return {};
  Gradients made;
  for (std::size_t i = 0; i < made.size(); ++i) {
    made[i] = nb::none();
    if (inputs[i].is_none() || needed[i].ptr() != Py_True) continue;
    const Made gradient = made_like(inputs[i], args.*input_fields[i].second);
    made[i] = gradient.tensor;
    args.*backward_outputs[i].second = gradient.view;
  }
  options.give(args, args.options);
  Execution execution = options.execution;
  execution.stream = current_stream(args.q);
  run(inputs[0], args, execution);
  return made;
}

template <std::size_t count>
std::array<nb::handle, count> handles_of(const nb::tuple& tuple, std::size_t first = 0) {
  if (tuple.size() < first + count) throw nb::value_error("a call has another number of tensors");
  std::array<nb::handle, count> handles;
  for (std::size_t i = 0; i < count; ++i) handles[i] = tuple[first + i];
  return handles;
}

nb::tuple tuple_of(std::span<const nb::handle> handles) {
  nb::tuple tuple = nb::steal<nb::tuple>(PyTuple_New(static_cast<Py_ssize_t>(handles.size())));
  for (std::size_t i = 0; i < handles.size(); ++i) {
    PyTuple_SetItem(tuple.ptr(), static_cast<Py_ssize_t>(i), handles[i].inc_ref().ptr());
  }
  return tuple;
}

nb::object or_none(const nb::object& tensor) {
  return tensor.is_valid() ? tensor : nb::none();
}

nb::object forward_tensors(const nb::tuple& inputs, const Options& options, bool return_lse) {
  Options asked = options;
  asked.return_max_logits = options.return_max_logits || options.saves_max_logits();
  const auto output = attend(handles_of<input_fields.size()>(inputs), asked, return_lse, false);
  if (!output) return nb::none();
  return nb::make_tuple(output->out, or_none(output->lse), or_none(output->max_logits));
}

nb::object backward_tensors(const nb::tuple& arrays, const Options& options, const nb::tuple& needed) {
  const auto made = differentiate(handles_of<input_fields.size()>(arrays),
                                  handles_of<backward_inputs.size()>(arrays, input_fields.size()), options,
                                  handles_of<differentiable_inputs>(needed));
  if (!made) return nb::none();
  return tuple_of(std::array<nb::handle, 4>{(*made)[0], (*made)[1], (*made)[2], (*made)[3]});
}

// A record of autograd's is a torch.autograd.Function whose `forward` and `backward` are here.

struct Names {
  nb::str arrays = interned("arrays"), differentiated = interned("differentiated"), call = interned("call"),
          to_save = interned("to_save"), materialize_grads = interned("materialize_grads"),
          saved_tensors = interned("saved_tensors"), needs_input_grad = interned("needs_input_grad");

  static nb::str interned(const char* text) { return nb::steal<nb::str>(PyUnicode_InternFromString(text)); }
};

const Names& names() {
  static const auto* made = new Names;
  return *made;
}

constexpr std::size_t metadata_count = input_fields.size() - differentiable_inputs;

/// What know_record has made known, kept for ever.
std::atomic<PyObject*> apply = nullptr, in_full = nullptr, apply_gated = nullptr;

Inputs inputs_of(nb::handle q, nb::handle k, nb::handle v, nb::handle sink, const nb::tuple& metadata) {
  Inputs inputs{q, k, v, sink};
  const auto others = handles_of<metadata_count>(metadata);
  std::copy(others.begin(), others.end(), inputs.begin() + differentiable_inputs);
  return inputs;
}

/// The arrays that a call's functions read.
nb::args read_by(nb::handle functions) {
  return nb::borrow<nb::args>(nb::tuple(nb::getattr(functions, names().arrays)));
}

/// The result of a tandem._call.Call, and what it returns besides; None where PyTorch follows it otherwise
/// than by autograd, or a tensor wants the long way.
nb::object attend_and_record(nb::handle call, nb::handle q, nb::handle k, nb::handle v, nb::handle sink,
                             nb::handle wants_lse) {
  if (is_followed() || is_profiled()) return nb::none();
  const Options options = options_of(call);
  const int return_lse = PyObject_IsTrue(wants_lse.ptr());
  if (return_lse < 0) throw nb::python_error();
  const Inputs inputs = inputs_of(q, k, v, sink, metadata_of(call));
  auto output = attend(inputs, options, return_lse != 0, is_recording());
  if (!output) return nb::none();
  auto& [out, lse, max_logits, recorded] = *output;
  if (recorded) {
    const nb::object functions = functions_of(call);
    const nb::handle applied(apply);
    const nb::object made = nb::make_tuple(
        out, lse, options.saves_max_logits() ? max_logits : nb::object(nb::none()), return_lse != 0);
    const nb::handle gate = inputs[gate_input];
    nb::object followed;
    if (!gate.is_none() && requires_gradient(gate)) {
      const nb::object read = functions.is_none() ? nb::object(nb::make_tuple()) : read_by(functions);
      followed = nb::handle(apply_gated)(call, made, q, k, v, sink, gate, *nb::borrow<nb::args>(read));
    } else {
      followed = functions.is_none() ? applied(call, made, q, k, v, sink)
                                     : applied(call, made, q, k, v, sink, *read_by(functions));
    }
    out = return_lse != 0 ? nb::object(followed[0]) : followed;
    if (return_lse != 0) lse = followed[1];
  }
  if (!options.return_max_logits) return return_lse != 0 ? nb::object(nb::make_tuple(out, lse)) : out;
  return return_lse != 0 ? nb::make_tuple(out, lse, max_logits) : nb::make_tuple(out, max_logits);
}

/// The metadata that a call had, from saved[next] on: hooks of autograd's may have saved copies.
nb::tuple saved_metadata(nb::handle call, const nb::tuple& saved, std::size_t next) {
  const nb::tuple given = metadata_of(call);
  auto metadata = handles_of<metadata_count>(given);
  for (nb::handle& t : metadata) {
    if (!t.is_none()) t = saved[next++];
  }
  return tuple_of(metadata);
}

/// As save_for_backward has it, and returns what autograd follows: out, or out and lse. What functions read
/// is saved, too, and what the metadata are: PyTorch then notices where one is changed before the backward
/// pass. `output`: out, lse, max_logits or None, and whether the caller gets the LSE.
nb::object record(nb::handle ctx, nb::handle call, nb::handle output, nb::handle q, nb::handle k,
                  nb::handle v, nb::handle sink, const nb::args& read) {
  const nb::tuple results = nb::borrow<nb::tuple>(output), metadata = metadata_of(call);
  std::vector<nb::handle> saved;
  saved.reserve(7 + read.size() + metadata.size());
  saved = {q, k, v, sink, results[0], results[1]};
  saved.insert(saved.end(), read.begin(), read.end());
  saved.push_back(results[2]);
  for (const nb::handle t : metadata) {
    if (!t.is_none()) saved.push_back(t);
  }
  nb::setattr(ctx, names().to_save, tuple_of(saved));
  nb::setattr(ctx, names().materialize_grads, nb::bool_(false));
  nb::setattr(ctx, names().call, call);
  return results[3].is(nb::handle(Py_True)) ? nb::object(nb::make_tuple(results[0], results[1])) : results[0];
}

/// The gradients of what record() has recorded, for the engine; what is unusual is done in full, in Python.
nb::object apply_backward(nb::handle ctx, nb::handle dout, nb::handle dlse) {
  const Names& n = names();
  const nb::handle long_way(in_full);
  if (dout.is_none() || is_followed() || is_profiled() || is_recording() || is_deterministic()) {
    return long_way(ctx, dout, dlse);
  }
  const nb::object call = nb::getattr(ctx, n.call);
  const nb::object functions = functions_of(call);
  if (!functions.is_none() && nb::len(nb::getattr(functions, n.differentiated)) > 0) {
    return long_way(ctx, dout, dlse);
  }
  const nb::tuple needed = nb::borrow<nb::tuple>(nb::getattr(ctx, n.needs_input_grad));
  const nb::tuple saved = nb::borrow<nb::tuple>(nb::getattr(ctx, n.saved_tensors));
  if (!functions.is_none()) {
    const nb::args read = read_by(functions);
    for (std::size_t i = 0; i < read.size(); ++i) {
      if (!saved[6 + i].is(read[i])) return long_way(ctx, dout, dlse, saved);  // a copy that a hook has made
    }
  }
  const nb::tuple metadata = saved_metadata(call, saved, needed.size() + 1);
  const auto made = differentiate(inputs_of(saved[0], saved[1], saved[2], saved[3], metadata),
                                  {saved[4], saved[5], dout, dlse, saved[needed.size()]}, options_of(call),
                                  handles_of<differentiable_inputs>(needed, 2));
  if (!made) return long_way(ctx, dout, dlse, saved);
  std::vector<nb::handle> all(needed.size(), Py_None);
  std::copy(made->begin(), made->end(), all.begin() + 2);
  return tuple_of(all);
}

// The kernels of torch.ops.tandem: what PyTorch calls with the arguments of an operator's schema.

using Arguments = std::span<const nb::handle>;

/// q, k, v, sink and the metadata.
Inputs inputs_of(Arguments differentiable, Arguments metadata) {
  Inputs inputs;
  std::copy(metadata.begin(), metadata.end(), std::ranges::copy(differentiable, inputs.begin()).out);
  return inputs;
}

/// The options among the arguments, and PyTorch's wish for determinism as the operator runs.
std::optional<Options> options_of(Arguments arguments) {
  std::optional<Options> options = options_of_operator(arguments);
  if (options) options->attention.deterministic |= is_deterministic();
  return options;
}

/// What stands for a result that is not wanted.
nb::object empty_beside(nb::handle q) {
  Tensor none = *exchanged(q);
  none.rank = 1;
  none.shape[0] = 0;
  return made_like(q, none).tensor;
}

/// As torch.ops.tandem.attention has it. Nothing of what takes the long way.
nb::object forward_operator(Arguments arguments, bool recording) {
  if (arguments.size() <= input_fields.size() || !arguments.back().is_none()) return {};  // out_dtype
  const std::size_t metadata = arguments.size() - 1 - metadata_count;
  const Inputs inputs =
      inputs_of(arguments.first(differentiable_inputs), arguments.subspan(metadata, metadata_count));
  if (recording && record_of(inputs) != Record::no) return {};
  std::optional<Options> options =
      options_of(arguments.subspan(differentiable_inputs, metadata - differentiable_inputs));
  if (!options) return {};
  options->return_max_logits |= options->saves_max_logits();
  const auto output = attend(inputs, *options, true, false);
  if (!output) return {};
  return nb::make_tuple(output->out, output->lse,
                        options->return_max_logits ? output->max_logits : empty_beside(inputs[0]));
}

/// As torch.ops.tandem.attention_backward has it: empty tensors stand for gradients that are not needed.
nb::object backward_operator(Arguments arguments, bool recording) {
  constexpr std::size_t first = 2, out = first + differentiable_inputs, options_begin = out + 3;
  constexpr std::size_t needed = differentiable_inputs;
  if (arguments.size() < options_begin + metadata_count + needed) return {};
  const std::size_t metadata = arguments.size() - needed - metadata_count;
  if (recording && std::ranges::any_of(arguments.first(options_begin),
                                       [](nb::handle t) { return !t.is_none() && requires_gradient(t); }))
    return {};
  const std::optional<Options> options =
      options_of(arguments.subspan(options_begin, metadata - options_begin));
  if (!options) return {};
  const Inputs inputs =
      inputs_of(arguments.subspan(first, differentiable_inputs), arguments.subspan(metadata, metadata_count));
  auto made = differentiate(
      inputs, {arguments[out], arguments[out + 1], arguments[0], arguments[1], arguments[out + 2]}, *options,
      arguments.last(needed));
  if (!made) return {};
  for (nb::object& gradient : *made) {
    if (gradient.is_none()) gradient = empty_beside(inputs[0]);
  }
  return tuple_of(std::array<nb::handle, needed>{(*made)[0], (*made)[1], (*made)[2], (*made)[3]});
}

/// A kernel of an operator without a frame of Python, each of which a compiled graph looks at.
/// `for_autograd`: it gets the keyset first and is asked before the transforms below autograd, where
/// `long_way` goes. `defaults`: of all arguments; PyTorch leaves out last ones that have them.
nb::object operator_kernel(bool backward, bool for_autograd, nb::object long_way, const nb::tuple& defaults) {
  std::array<nb::handle, 64> handles;
  const std::size_t first = for_autograd ? 1 : 0, count = first + defaults.size();
  if (count > handles.size()) throw nb::value_error("an operator has too many arguments");
  for (std::size_t i = 0; i < defaults.size(); ++i) {
    handles[first + i] = nb::handle(defaults[i]).inc_ref();  // kept for ever, as operators are
  }
  return nb::cpp_function([=](const nb::args& given) -> nb::object {
    std::array<nb::handle, 64> all = handles;
    std::copy(given.begin(), given.end(), all.begin());
    if (!for_autograd || !is_followed()) {
      const Arguments arguments = Arguments(all).subspan(first, count - first);
      const bool recording = for_autograd && is_recording();
      nb::object result =
          backward ? backward_operator(arguments, recording) : forward_operator(arguments, recording);
      if (result.is_valid()) return result;
    }
    return long_way(*nb::borrow<nb::args>(tuple_of(Arguments(all).first(count))));
  });
}

}  // namespace

void define_torch_calls(nb::module_& m) {
  m.def("know_torch", &know_torch, nb::arg("types"), nb::arg("strided"), nb::arg("dtypes"),
        nb::arg("exchange").none());
  m.def("know_states", &know_states, nb::arg("idle"), nb::arg("forward_ad"), nb::arg("profiled"),
        nb::arg("recording"), nb::arg("deterministic"));
  m.def("is_followed", &is_followed);
  m.def("forward_tensors", &forward_tensors, nb::arg("inputs"), nb::arg("options"), nb::arg("return_lse"));
  m.def("backward_tensors", &backward_tensors, nb::arg("arrays"), nb::arg("options"), nb::arg("needed"));
  m.def("attend", &attend_and_record, nb::arg("call"), nb::arg("q").none(), nb::arg("k").none(),
        nb::arg("v").none(), nb::arg("sink").none(), nb::arg("return_lse"));
  m.def(
      "know_record",
      [](nb::object applying, nb::object differentiating, nb::object applying_gated) {
        apply = applying.release().ptr();
        in_full = differentiating.release().ptr();
        apply_gated = applying_gated.release().ptr();
      },
      nb::arg("apply"), nb::arg("in_full"), nb::arg("apply_gated"));
  m.def("record", &record, nb::arg("ctx"), nb::arg("call"), nb::arg("output"), nb::arg("q"), nb::arg("k"),
        nb::arg("v"), nb::arg("sink").none(), nb::arg("read"));
  m.def("operator_kernel", &operator_kernel, nb::arg("backward"), nb::arg("for_autograd"),
        nb::arg("long_way"), nb::arg("defaults"));
  m.attr("apply_backward") = nb::cpp_function(&apply_backward, nb::is_method(), nb::arg("dout").none(),
                                              nb::arg("dlse") = nb::none());
}

}  // namespace tandem::python
