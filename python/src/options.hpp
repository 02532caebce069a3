// What a call has besides its arrays.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <vector>

#include "tandem/attention.hpp"

namespace tandem::python {

/// What tandem._call.Call hands over, so that one place judges its types.
struct Options {
  AttentionOptions attention;
  int threads = 0;
  std::optional<Function> score, mask;

  /// Text, or None, and the arrays that both read.
  void set_functions(const std::optional<std::string>& score_text,
                     const std::optional<std::string>& mask_text, const std::vector<Tensor>& captured);
  void give(AttentionInputs& args, AttentionOptions& options) const;
};

/// The class Options.
void define_options(nanobind::module_& m);

}  // namespace tandem::python
