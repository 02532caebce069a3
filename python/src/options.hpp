// What a call has besides its arrays.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tandem/attention.hpp"

namespace tandem::python {

/// Parsed functions of a call, which share memory with their copies; null where it has none.
struct Functions {
  std::shared_ptr<const Function> score, mask;
};

/// What tandem._call.Call hands over, so that one place validates its types.
struct Options {
  AttentionOptions attention;
  Execution execution;  ///< what of it is an option
  bool return_max_logits = false;
  Functions functions;
  std::vector<Tensor> captured_gradients;
  ConstTensor dropout_places;
  bool accumulate_dq = false, accumulate_dk_dv = false;

  /// Where a backward call writes the gradients of the arrays; None where not wanted.
  void set_captured_gradients(const std::vector<std::optional<Tensor>>& gradients);
  void set_dropout_places(const Tensor& places) { dropout_places = places; }
  /// Whether a backward call adds to dq, and to dk and dv.
  void set_accumulate(bool dq, bool dk_dv);
  void give(AttentionInputs& args, AttentionOptions& options) const;
  /// Whether the backward pass reads max_logits.
  [[nodiscard]] bool saves_max_logits() const { return attention.backward_precision != Precision::exact; }
};

/// The options of a tandem._call.Call, which validates those that are not Python's own values.
Options options_of(nanobind::handle call);

/// What a tandem._call.Call has of these.
nanobind::tuple metadata_of(nanobind::handle call);
nanobind::object functions_of(nanobind::handle call);

/// The options of an operator of torch.ops.tandem, in the order of its schema; nothing where one of them
/// takes a closer look.
std::optional<Options> options_of_operator(std::span<const nanobind::handle> values);

/// The class Options.
void define_options(nanobind::module_& m);

}  // namespace tandem::python
