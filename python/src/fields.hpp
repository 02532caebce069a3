// The tensors and the options of a call by name and in order, as Python and JAX name and pass them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "tandem/attention.hpp"

namespace tandem::python {

template <typename Args, typename View>
using Fields = std::pair<const char*, View Args::*>;

constexpr auto input_fields = std::to_array<Fields<AttentionInputs, ConstTensor>>({
    {"q", &AttentionInputs::q},
    {"k", &AttentionInputs::k},
    {"v", &AttentionInputs::v},
    {"sink", &AttentionInputs::sink},
    {"cu_seqlens_q", &AttentionInputs::cu_seqlens_q},
    {"cu_seqlens_k", &AttentionInputs::cu_seqlens_k},
    {"seqused_q", &AttentionInputs::seqused_q},
    {"seqused_k", &AttentionInputs::seqused_k},
    {"q_scale", &AttentionInputs::q_scale},
    {"k_scale", &AttentionInputs::k_scale},
    {"v_scale", &AttentionInputs::v_scale},
    {"indices", &AttentionInputs::indices},
    {"topk_length", &AttentionInputs::topk_length},
    {"gate", &AttentionInputs::gate},
    {"page_table", &AttentionInputs::page_table},
    {"leftpad_k", &AttentionInputs::leftpad_k},
    {"cache_batch_idx", &AttentionInputs::cache_batch_idx},
    {"causal_by_sequence", &AttentionInputs::causal_by_sequence},
});
/// So many first inputs may require gradients, and the gate; so many last ones (_call.FORWARD_ONLY) are of
/// calls that have none.
constexpr std::size_t differentiable_inputs = 4, forward_only = 4, gate_input = 13;
static_assert(input_fields[gate_input].second == &AttentionInputs::gate);
constexpr auto forward_outputs = std::to_array<Fields<ForwardArgs, Tensor>>({
    {"out", &ForwardArgs::out},
    {"lse", &ForwardArgs::lse},
    {"max_logits", &ForwardArgs::max_logits},
});
constexpr auto backward_inputs = std::to_array<Fields<BackwardArgs, ConstTensor>>({
    {"out", &BackwardArgs::out},
    {"lse", &BackwardArgs::lse},
    {"dout", &BackwardArgs::dout},
    {"dlse", &BackwardArgs::dlse},
    {"max_logits", &BackwardArgs::max_logits},
});
constexpr auto backward_outputs = std::to_array<Fields<BackwardArgs, Tensor>>({
    {"dq", &BackwardArgs::dq},
    {"dk", &BackwardArgs::dk},
    {"dv", &BackwardArgs::dv},
    {"dsink", &BackwardArgs::dsink},
    {"dgate", &BackwardArgs::dgate},
});

/// Where the two numbers of a window go.
struct Window {
  std::int64_t &left, &right;
};

/// Calls f(name, place) of each option: what tandem._call.Call names and JAX passes as an attribute.
template <typename F>
void each_option(AttentionOptions& options, Execution& execution, bool& return_max_logits, F&& f) {
  f("scale", options.scale);
  f("causal", options.causal);
  f("window", Window{options.window_left, options.window_right});
  f("softcap", options.softcap);
  f("deterministic", options.deterministic);
  f("check", options.check);
  f("threads", execution.threads);
  f("precision", options.precision);
  f("strict", options.strict);
  f("backward_precision", options.backward_precision);
  f("split_size", options.split_size);
  f("dropout_p", options.dropout_p);
  f("dropout_seed", options.dropout_seed);
  f("dropout_offset", options.dropout_offset);
  f("sm_limit", execution.sm_limit);
  f("return_max_logits", return_max_logits);
}

}  // namespace tandem::python
