#include "cache.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "tandem/cache.hpp"

namespace nb = nanobind;

namespace tandem::python {
namespace {

using Input = std::pair<const char*, ConstTensor AppendArgs::*>;
using Output = std::pair<const char*, Tensor AppendArgs::*>;

constexpr auto append_inputs = std::to_array<Input>({
    {"k_new", &AppendArgs::k_new},
    {"v_new", &AppendArgs::v_new},
    {"cu_seqlens_new", &AppendArgs::cu_seqlens_new},
    {"seqused_new", &AppendArgs::seqused_new},
    {"page_table", &AppendArgs::page_table},
    {"cache_batch_idx", &AppendArgs::cache_batch_idx},
    {"leftpad_k", &AppendArgs::leftpad_k},
    {"cache_seqlens", &AppendArgs::cache_seqlens},
    {"slot_mapping", &AppendArgs::slot_mapping},
    {"k_scale", &AppendArgs::k_scale},
    {"v_scale", &AppendArgs::v_scale},
    {"rotary_cos", &AppendArgs::rotary_cos},
    {"rotary_sin", &AppendArgs::rotary_sin},
    {"rotary_offsets", &AppendArgs::rotary_offsets},
    {"q", &AppendArgs::q},
});
constexpr auto append_outputs = std::to_array<Output>({
    {"k_cache", &AppendArgs::k_cache},
    {"v_cache", &AppendArgs::v_cache},
    {"k_scale_cache", &AppendArgs::k_scale_cache},
    {"v_scale_cache", &AppendArgs::v_scale_cache},
    {"q_out", &AppendArgs::q_out},
});

Execution make_execution(int threads, std::uintptr_t stream) {
  Execution e;
  e.threads = threads;
  e.stream =
      reinterpret_cast<void*>(stream);  // NOLINT(performance-no-int-to-ptr): handles are integers in Python
  return e;
}

/// The views that `tensors` has for the fields of a table, in its order; None of those not given.
template <typename Table>
void take(AppendArgs& args, const Table& table, const std::vector<std::optional<Tensor>>& tensors) {
  if (tensors.size() != table.size()) throw nb::value_error("an append has another number of arrays");
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (tensors[i]) args.*table[i].second = *tensors[i];
  }
}

template <typename Table>
nb::tuple names_of(const Table& table) {
  nb::list names;
  for (const auto& field : table) names.append(field.first);
  return nb::tuple(names);
}

void append(const std::vector<std::optional<Tensor>>& inputs,
            const std::vector<std::optional<Tensor>>& outputs, bool interleaved, bool check, int threads,
            std::uintptr_t stream) {
  AppendArgs args;
  take(args, append_inputs, inputs);
  take(args, append_outputs, outputs);
  args.rotary_interleaved = interleaved;
  args.check = check;
  const nb::gil_scoped_release unlocked;
  append_kv(args, make_execution(threads, stream));
}

void merge_parts(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses, const Tensor& out,
                 const Tensor& lse, int threads, std::uintptr_t stream) {
  const std::vector<ConstTensor> parts(outs.begin(), outs.end());
  const std::vector<ConstTensor> statistics(lses.begin(), lses.end());
  const nb::gil_scoped_release unlocked;
  merge({.outs = parts, .lses = statistics, .out = out, .lse = lse}, make_execution(threads, stream));
}

}  // namespace

void define_cache(nb::module_& m) {
  m.attr("APPEND_INPUTS") = names_of(append_inputs);
  m.attr("APPEND_OUTPUTS") = names_of(append_outputs);
  m.def("append_kv", &append, nb::arg("inputs"), nb::arg("outputs"), nb::arg("interleaved"), nb::arg("check"),
        nb::arg("threads"), nb::arg("stream") = 0);
  m.def("merge", &merge_parts, nb::arg("outs"), nb::arg("lses"), nb::arg("out"), nb::arg("lse"),
        nb::arg("threads"), nb::arg("stream") = 0);
}

}  // namespace tandem::python
