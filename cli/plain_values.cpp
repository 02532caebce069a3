#include "plain_values.hpp"

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <string>
#include <system_error>

#include "files/source.hpp"

namespace tandem::cli {
namespace {

/// A validator of CLI11: an error's text, or "". It may rewrite the value.
std::string not_empty(const std::string& value) {
  return value.empty() ? "the value is empty; give one, or leave the option out" : "";
}

template <typename Integer>
std::string decimal(std::string& value) {
  Integer number = 0;
  const char* first = value.data() + (value.starts_with('+') ? 1 : 0);
  const char* last = value.data() + value.size();
  const auto [end, error] = std::from_chars(first, last, number);
  if (error == std::errc::result_out_of_range && end == last) {
    return fmt::format("{} is beyond 64 bits; give a smaller number", files::in_quotes(value));
  }
  if (error != std::errc() || end != last) {
    return fmt::format("{} is no {}; give decimal digits", files::in_quotes(value),
                       std::is_signed_v<Integer> ? "whole number" : "whole number from 0");
  }
  value = fmt::format("{}", number);  // without leading zeros, which would make it octal
  return "";
}

/// Before all other validators.
void first(CLI::Option& option, std::string (*validator)(std::string&)) {
  option.transform(CLI::Validator(validator, "", ""));
}

}  // namespace

void expect_plain_values(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    if (option->get_items_expected_max() == 0) continue;  // a flag
    const std::string type = option->get_type_name();
    if (type.starts_with("INT")) first(*option, decimal<std::int64_t>);
    if (type.starts_with("UINT")) first(*option, decimal<std::uint64_t>);
    first(*option, [](std::string& value) { return not_empty(value); });
  }
  for (CLI::App* subcommand : app.get_subcommands(nullptr)) expect_plain_values(*subcommand);
}

}  // namespace tandem::cli
