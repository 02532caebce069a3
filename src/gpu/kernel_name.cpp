#include "gpu/kernel_name.hpp"

#include <fmt/format.h>

#include "kernels/config_fields.hpp"

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

std::string expression_of(const QuantizedConfig& config) {
  return aggregate("QuantizedConfig", config);
}

KernelName kernel_name(const ForwardConfig& config) {
  return {.header = "kernels/forward.cuh",
          .expression = fmt::format("tandem::forward<{}>", expression_of(config))};
}

KernelName kernel_name(const QuantizedConfig& config) {
  return {.header = "kernels/forward_quantized.cuh",
          .expression = fmt::format("tandem::forward_quantized<{}>", expression_of(config))};
}

KernelName kernel_name(const BackwardConfig& config, BackwardKernel which) {
  struct Place {
    const char* header;
    const char* kernel;
  };
  constexpr Place places[] = {{"kernels/backward_preprocess.cuh", "backward_preprocess"},
                              {"kernels/backward.cuh", "backward"},
                              {"kernels/backward_convert.cuh", "backward_convert"},
                              {"kernels/backward_convert.cuh", "backward_sink"}};
  const auto [header, kernel] = places[static_cast<int>(which)];
  return {.header = header, .expression = fmt::format("tandem::{}<{}>", kernel, expression_of(config))};
}

KernelName kernel_name(const PackConfig& config) {
  return {.header = "kernels/pack.cuh", .expression = fmt::format("tandem::pack<{}>", expression_of(config))};
}

KernelName kernel_name(const QuantizeConfig& config, QuantizeKernel which) {
  struct Place {
    const char* header;
    const char* kernel;
  };
  constexpr Place places[] = {{"kernels/quantize.cuh", "mean_of_keys"},
                              {"kernels/quantize.cuh", "largest_of_groups"},
                              {"kernels/quantize.cuh", "quantize"},
                              {"kernels/arrange_codes.cuh", "arrange_codes"},
                              {"kernels/dequantize.cuh", "dequantize"}};
  const auto& [header, kernel] = places[static_cast<int>(which)];
  return {.header = header, .expression = fmt::format("tandem::{}<{}>", kernel, expression_of(config))};
}

}  // namespace tandem::gpu
