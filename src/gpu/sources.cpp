#include "gpu/sources.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace tandem::gpu {

std::uint64_t sources_digest(std::string_view name, std::span<const Source> sources) {
  std::uint64_t h = fnv_offset;
  std::vector<std::string_view> names{name};  // those before `i` are in the digest
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto source = std::ranges::find(sources, names[i], &Source::name);
    if (source == sources.end()) continue;  // the compiler will say so
    // The terminating zeros keep name and text apart.
    h = fnv1a({source->name, names[i].size() + 1}, h);
    std::string_view text(source->text);
    h = fnv1a({text.data(), text.size() + 1}, h);
    constexpr std::string_view include = "#include \"";
    for (std::size_t at = text.find(include); at != std::string_view::npos; at = text.find(include)) {
      text.remove_prefix(at + include.size());
      const std::string_view included = text.substr(0, text.find('"'));
      if (std::ranges::find(names, included) == names.end()) names.push_back(included);
    }
  }
  return h;
}

std::uint64_t sources_digest(std::string_view name) {
  static std::mutex mutex;
  static std::map<std::string, std::uint64_t, std::less<>> known;
  const std::lock_guard lock(mutex);
  const auto at = known.find(name);
  if (at != known.end()) return at->second;
  return known.emplace(name, sources_digest(name, device_sources())).first->second;
}

}  // namespace tandem::gpu
