// Configs to choose among: every combination of some fields' values. For any Config with a for_each_field.
#pragma once

#include <fmt/format.h>

#include <charconv>
#include <string>
#include <type_traits>
#include <vector>

#include "config/fields.hpp"
#include "tandem/error.hpp"

namespace tandem {

/// The values that one field of a Config is to take, as text: {"block_n", {"112", "128"}}.
struct FieldValues {
  std::string field;
  std::vector<std::string> values;
};

/// Reads `text` into a field: an integer, 0 or 1 for a bool, an enumerator by its name. False if it is none.
template <typename Field>
bool read_field(const std::string& text, Field& field) {
  if constexpr (std::is_enum_v<Field>) {
    for (int i = 0; i < most_enumerators; ++i) {
      if (text != name_of(static_cast<Field>(i))) continue;
      field = static_cast<Field>(i);
      return true;
    }
    return false;
  } else if constexpr (std::is_same_v<Field, bool>) {
    field = text == "1";
    return text == "0" || text == "1";
  } else {
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, field);
    return error == std::errc() && rest == end;
  }
}

/// Every combination of `fields` on top of `base`, which keeps the fields that are not named; the last field
/// varies fastest. Throws Error (invalid_argument) for a field that the Config has not, or a value that is
/// none of its type.
template <typename Config>
std::vector<Config> combinations(const Config& base, const std::vector<FieldValues>& fields) {
  std::vector<Config> configs{base};
  for (const FieldValues& wanted : fields) {
    std::vector<Config> wider;
    for (const Config& config : configs) {
      for (const std::string& text : wanted.values) {
        Config changed = config;
        bool known = false;
        for_each_field(changed, [&](std::string_view name, auto& field) {
          if (wanted.field != name) return;
          known = true;
          if (!read_field(text, field)) {
            throw Error(Status::invalid_argument,
                        fmt::format("{} is no value of the Config's field {}", text, wanted.field));
          }
        });
        if (!known) {
          throw Error(Status::invalid_argument, fmt::format("the Config has no field {}", wanted.field));
        }
        wider.push_back(changed);
      }
    }
    configs = std::move(wider);
  }
  return configs;
}

}  // namespace tandem
