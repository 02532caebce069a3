#include "gpu/kernel_name.hpp"

#include <fmt/format.h>

#include "kernels/config/fields.hpp"

namespace tandem::gpu {
namespace {

std::string value_of(int value) {
  return fmt::format("{}", value);
}
std::string value_of(unsigned long long value) {
  return fmt::format("{:#x}ULL", value);
}
std::string value_of(bool value) {
  return value ? "true" : "false";
}
template <typename Enum>
requires std::is_enum_v<Enum> std::string value_of(Enum value) {
  return fmt::format("tandem::{}::{}", type_name<Enum>(), name_of(value));
}

constexpr const char* config_name(const ForwardConfig& /*config*/) {
  return "ForwardConfig";
}
constexpr const char* config_name(const EightBitConfig& /*config*/) {
  return "EightBitConfig";
}
constexpr const char* config_name(const BackwardConfig& /*config*/) {
  return "BackwardConfig";
}
constexpr const char* config_name(const QuantizeConfig& /*config*/) {
  return "QuantizeConfig";
}
constexpr const char* config_name(const PackConfig& /*config*/) {
  return "PackConfig";
}
constexpr const char* config_name(const AppendConfig& /*config*/) {
  return "AppendConfig";
}
constexpr const char* config_name(const MergeConfig& /*config*/) {
  return "MergeConfig";
}

template <typename Part>
requires is_part<Part>
constexpr const char* config_name(const Part& /*part*/) {
  return part_name<Part>();
}

template <typename Config>
std::string aggregate(const Config& config) {
  std::string text = fmt::format("tandem::{}{{", config_name(config));
  const char* separator = "";
  for_each_member(config, [&](const char* name, const auto& member) {
    using Member = std::remove_cvref_t<decltype(member)>;
    text += fmt::format("{}.{} = ", separator, name);
    if constexpr (is_part<Member>) {
      text += aggregate(member);
    } else {
      text += value_of(member);
    }
    separator = ", ";
  });
  return text + "}";
}

/// Where a kernel's source is, by Kernel.
struct Place {
  const char* header;
  const char* name;
};
constexpr Place places[] = {
    {"kernels/common/pack.cuh", "pack"},
    {"kernels/common/dequantize.cuh", "dequantize"},
    {"kernels/common/mean_of_keys.cuh", "mean_of_keys"},
    {"kernels/common/quantize.cuh", "largest_of_groups"},
    {"kernels/common/quantize.cuh", "quantize"},
    {"kernels/common/arrange_quantized.cuh", "arrange_quantized"},
    {"kernels/sm90/forward.cuh", "forward"},
    {"kernels/sm90/forward_wide.cuh", "forward_wide"},
    {"kernels/sm80/forward.cuh", "sm80_forward"},
    {"kernels/sm90/decode.cuh", "decode"},
    {"kernels/common/combine.cuh", "combine"},
    {"kernels/common/block_lists.cuh", "list_blocks"},
    {"kernels/common/block_lists.cuh", "list_query_blocks"},
    {"kernels/common/clear_gradients.cuh", "clear_gradients"},
    {"kernels/sm90/eight_bit.cuh", "eight_bit_forward"},
    {"kernels/common/preprocess.cuh", "backward_preprocess"},
    {"kernels/sm90/backward.cuh", "backward"},
    {"kernels/sm80/backward.cuh", "sm80_backward"},
    {"kernels/common/convert.cuh", "backward_convert"},
    {"kernels/common/convert.cuh", "backward_sink"},
    {"kernels/common/append.cuh", "append"},
    {"kernels/common/merge.cuh", "merge"},
};

}  // namespace

std::string expression_of(const KernelConfig& config) {
  return std::visit([](const auto& c) { return aggregate(c); }, config);
}

KernelName kernel_name(Kernel kernel, const KernelConfig& config) {
  const auto& [header, name] = places[static_cast<std::size_t>(kernel)];
  return {.header = header, .expression = fmt::format("tandem::{}<{}>", name, expression_of(config))};
}

BlockShape block_shape(Kernel kernel, const KernelConfig& config) {
  const auto quantizer = [&]() -> const QuantizeConfig& { return std::get<QuantizeConfig>(config); };
  const auto backward = [&]() -> const BackwardConfig& { return std::get<BackwardConfig>(config); };
  switch (kernel) {
    case Kernel::pack: return {.threads = pack_threads};
    case Kernel::dequantize: return {.threads = quantize_threads};
    case Kernel::mean_of_keys:
      return {.threads = mean_threads(quantizer()), .shared_bytes = mean_shared_bytes(quantizer())};
    case Kernel::largest_of_groups:
    case Kernel::quantize:
      return {.threads = quantize_threads, .shared_bytes = quantize_shared_bytes(quantizer())};
    case Kernel::arrange_quantized:
      return {.threads = quantize_threads, .shared_bytes = arrange_shared_bytes(quantizer())};
    case Kernel::forward:
    case Kernel::forward_wide:
    case Kernel::sm80_forward:
    case Kernel::decode: {
      const auto& c = std::get<ForwardConfig>(config);
      return {.threads = c.threads(), .shared_bytes = forward_shared_bytes(c), .cluster = c.cluster()};
    }
    case Kernel::combine:
      return {.threads = 32 * combine_rows,
              .shared_bytes = combine_shared_bytes(std::get<ForwardConfig>(config))};
    case Kernel::list_blocks:
    case Kernel::list_query_blocks: return {.threads = list_threads, .shared_bytes = list_shared_bytes};
    case Kernel::clear_gradients: return {.threads = clear_threads};
    case Kernel::eight_bit_forward: {
      const auto& c = std::get<EightBitConfig>(config);
      return {.threads = c.threads(), .shared_bytes = eight_bit_shared_bytes(c)};
    }
    case Kernel::backward_preprocess:
    case Kernel::backward_convert: return {.threads = backward_rows_threads(backward())};
    case Kernel::backward:
    case Kernel::sm80_backward:
      return {.threads = backward().threads(),
              .shared_bytes = backward_shared_bytes(backward()),
              .cluster = backward().tiling.cluster};
    case Kernel::backward_sink:
      return {.threads = backward_sink_threads, .shared_bytes = backward_sink_shared_bytes};
    case Kernel::append: return {.threads = append_threads, .shared_bytes = append_shared_bytes};
    case Kernel::merge: return {.threads = merge_threads};
  }
  return {};
}

}  // namespace tandem::gpu
