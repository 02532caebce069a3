#include "gpu/kernel_name.hpp"

#include <fmt/format.h>

#include "kernels/config/fields.hpp"

namespace tandem::gpu {
namespace {

std::string value_of(int value) {
  return fmt::format("{}", value);
}
std::string value_of(bool value) {
  return value ? "true" : "false";
}
template <typename Enum>
requires std::is_enum_v<Enum> std::string value_of(Enum value) {
  return fmt::format("tandem::{}::{}", type_name<Enum>(), name_of(value));
}

template <typename Config>
std::string aggregate(const char* type, const Config& config) {
  std::string text = fmt::format("tandem::{}{{", type);
  const char* separator = "";
  for_each_field(config, [&](const char* name, auto value) {
    text += fmt::format("{}.{} = {}", separator, name, value_of(value));
    separator = ", ";
  });
  return text + "}";
}

}  // namespace

std::string expression_of(const ForwardConfig& config) {
  return aggregate("ForwardConfig", config);
}
std::string expression_of(const BackwardConfig& config) {
  return aggregate("BackwardConfig", config);
}
std::string expression_of(const PackConfig& config) {
  return aggregate("PackConfig", config);
}
std::string expression_of(const QuantizeConfig& config) {
  return aggregate("QuantizeConfig", config);
}

std::string expression_of(const EightBitConfig& config) {
  return aggregate("EightBitConfig", config);
}

KernelName kernel_name(const ForwardConfig& config) {
  return {.header = "kernels/sm90/forward.cuh",
          .expression = fmt::format("tandem::forward<{}>", expression_of(config))};
}

KernelName kernel_name(const EightBitConfig& config) {
  return {.header = "kernels/sm90/eight_bit.cuh",
          .expression = fmt::format("tandem::eight_bit_forward<{}>", expression_of(config))};
}

KernelName kernel_name(const BackwardConfig& config, BackwardKernel which) {
  struct Place {
    const char* header;
    const char* kernel;
  };
  constexpr Place places[] = {{"kernels/common/preprocess.cuh", "backward_preprocess"},
                              {"kernels/sm90/backward.cuh", "backward"},
                              {"kernels/common/convert.cuh", "backward_convert"},
                              {"kernels/common/convert.cuh", "backward_sink"}};
  const auto [header, kernel] = places[static_cast<int>(which)];
  return {.header = header, .expression = fmt::format("tandem::{}<{}>", kernel, expression_of(config))};
}

KernelName kernel_name(const PackConfig& config) {
  return {.header = "kernels/common/pack.cuh",
          .expression = fmt::format("tandem::pack<{}>", expression_of(config))};
}

KernelName kernel_name(const QuantizeConfig& config, QuantizeKernel which) {
  struct Place {
    const char* header;
    const char* kernel;
  };
  constexpr Place places[] = {{"kernels/common/mean_of_keys.cuh", "mean_of_keys"},
                              {"kernels/common/quantize.cuh", "largest_of_groups"},
                              {"kernels/common/quantize.cuh", "quantize"},
                              {"kernels/common/arrange_codes.cuh", "arrange_codes"},
                              {"kernels/common/dequantize.cuh", "dequantize"}};
  const auto& [header, kernel] = places[static_cast<int>(which)];
  return {.header = header, .expression = fmt::format("tandem::{}<{}>", kernel, expression_of(config))};
}

}  // namespace tandem::gpu
