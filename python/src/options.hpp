// What a call has besides its arrays.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tandem/attention.hpp"

namespace tandem::python {

/// What tandem._call.Call hands over, so that one place judges its types.
struct Options {
  AttentionOptions attention;
  int threads = 0;
  int sm_limit = 0;
  std::optional<Function> score, mask;
  std::vector<Tensor> captured_gradients;
  ConstTensor dropout_places;
  bool accumulate_dq = false, accumulate_dk_dv = false;

  /// Text, or None, the arrays that both read, and the numbers of those whose gradients may be asked for.
  void set_functions(const std::optional<std::string>& score_text,
                     const std::optional<std::string>& mask_text, const std::vector<Tensor>& captured,
                     const std::vector<int>& differentiated);
  /// Where a backward call writes the gradients of the arrays; None where not wanted.
  void set_captured_gradients(const std::vector<std::optional<Tensor>>& gradients);
  /// `places`: dropout_places, or None.
  void set_dropout(float p, std::uint64_t seed, std::uint64_t offset, const std::optional<Tensor>& places);
  /// Whether a backward call adds to dq, and to dk and dv.
  void set_accumulate(bool dq, bool dk_dv);
  void give(AttentionInputs& args, AttentionOptions& options) const;
};

/// The class Options.
void define_options(nanobind::module_& m);

}  // namespace tandem::python
