#include "gpu/kernel_spec.hpp"

#include <fmt/format.h>

#include "config/fields.hpp"

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

template <typename Config>
std::string aggregate(const Config& config) {
  std::string text = fmt::format("tandem::{}{{", type_name<Config>());
  const char* separator = "";
  for_each_member(config, [&](std::string_view name, const auto& member) {
    text += fmt::format("{}.{} = ", separator, name);
    if constexpr (is_part<decltype(member)>) {
      text += aggregate(member);
    } else {
      text += value_of(member);
    }
    separator = ", ";
  });
  return text + "}";
}

}  // namespace

std::string expression_of(const KernelConfig& config) {
  return std::visit([](const auto& c) { return aggregate(c); }, config);
}

KernelName KernelSpec::name(const KernelConfig& config) const {
  return {.header = header, .expression = fmt::format("tandem::{}<{}>", entry, expression_of(config))};
}

}  // namespace tandem::gpu
