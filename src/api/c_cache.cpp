// Caches in the C interface.
#include <cstddef>
#include <vector>

#include "api/c_interface.hpp"
#include "tandem/cache.hpp"

namespace tandem {
namespace {

/// The least that any caller passes: the structs as they were first.
constexpr std::size_t append_args_size_0_1 = 16 + 18 * sizeof(tandem_tensor);
constexpr std::size_t merge_args_size_0_1 = 32 + 2 * sizeof(tandem_tensor);
static_assert(sizeof(tandem_append_args) == append_args_size_0_1 + 2 * sizeof(tandem_tensor));
static_assert(sizeof(tandem_merge_args) == merge_args_size_0_1);

AppendArgs args_of(const tandem_append_args* given) {
  if (given == nullptr) check::invalid("args is NULL; pass the address of a tandem_append_args");
  const auto a = c::adopt("args", *given, tandem_append_args_default(), append_args_size_0_1);
  AppendArgs r;
  r.k_new = c::input(a.k_new);
  r.v_new = c::input(a.v_new);
  r.cu_seqlens_new = c::input(a.cu_seqlens_new);
  r.seqused_new = c::input(a.seqused_new);
  r.k_cache = c::output(a.k_cache);
  r.v_cache = c::output(a.v_cache);
  r.page_table = c::input(a.page_table);
  r.cache_batch_idx = c::input(a.cache_batch_idx);
  r.leftpad_k = c::input(a.leftpad_k);
  r.cache_seqlens = c::input(a.cache_seqlens);
  r.slot_mapping = c::input(a.slot_mapping);
  r.k_scale = c::input(a.k_scale);
  r.v_scale = c::input(a.v_scale);
  r.k_scale_cache = c::output(a.k_scale_cache);
  r.v_scale_cache = c::output(a.v_scale_cache);
  r.rotary_cos = c::input(a.rotary_cos);
  r.rotary_sin = c::input(a.rotary_sin);
  r.rotary_offsets = c::input(a.rotary_offsets);
  r.rotary_interleaved = a.rotary_interleaved != 0;
  r.q = c::input(a.q);
  r.q_out = c::output(a.q_out);
  r.check = a.check != 0;
  return r;
}

/// The tensors of a list, checked to be one.
std::vector<ConstTensor> tensors(const char* name, const tandem_tensor* list, std::int64_t parts) {
  if (list == nullptr && parts > 0) {
    check::invalid("args.{} is NULL but parts is {}; pass the address of that many tensors", name, parts);
  }
  std::vector<ConstTensor> all;
  if (parts > 0) all.reserve(static_cast<std::size_t>(parts));
  for (std::int64_t i = 0; i < parts; ++i) all.push_back(c::input(list[i]));
  return all;
}

}  // namespace
}  // namespace tandem

int tandem_append_kv(const tandem_append_args* args, const tandem_execution* execution) {
  return tandem::c::guarded(
      [&] { tandem::append_kv(tandem::args_of(args), tandem::c::execution_of(execution)); });
}

int tandem_merge(const tandem_merge_args* args, const tandem_execution* execution) {
  using namespace tandem;  // NOLINT(google-build-using-namespace): the names of this function alone
  return c::guarded([&] {
    if (args == nullptr) check::invalid("args is NULL; pass the address of a tandem_merge_args");
    const auto a = c::adopt("args", *args, tandem_merge_args_default(), merge_args_size_0_1);
    if (a.parts < 0) check::invalid("parts is {}; it must be 1 at least", a.parts);
    const std::vector<ConstTensor> outs = tensors("outs", a.outs, a.parts);
    const std::vector<ConstTensor> lses = tensors("lses", a.lses, a.parts);
    merge({.outs = outs, .lses = lses, .out = c::output(a.out), .lse = c::output(a.lse)},
          c::execution_of(execution));
  });
}
