#include "gpu/shipped.hpp"

#include <fmt/format.h>

#include <cstring>
#include <unordered_map>

#include "problem/log.hpp"

namespace tandem::gpu {
namespace {

/// What a kernel is looked up by: no compiler is needed, so its version is no part of it.
std::string key_of(const KernelName& name) {
  return fmt::format("sources {:016x}\n{}\n{}\n{}", sources_digest(name.header), name.header,
                     name.architecture, name.expression);
}

void append_u64(std::string& bytes, std::uint64_t value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

/// Reads 8 bytes off the front; an archive that ends before gives 0 and becomes empty.
std::uint64_t read_u64(std::string_view& bytes) {
  std::uint64_t value = 0;
  if (bytes.size() < sizeof(value)) {
    bytes = {};
    return 0;
  }
  std::memcpy(&value, bytes.data(), sizeof(value));
  bytes.remove_prefix(sizeof(value));
  return value;
}

/// Key to entry. Entries stay in the library's read-only pages until one is asked for.
using Index = std::unordered_map<std::string, std::string_view>;

const Index& index() {
  static const Index built = [] {
    Index found;
    std::string_view rest(shipped_archive().data(), shipped_archive().size());
    while (!rest.empty()) {
      const std::uint64_t bytes = read_u64(rest);
      const std::string_view entry = rest.substr(0, bytes);
      std::string key;
      if (!unpack_entry(entry, key)) {
        log(LogLevel::info, "the shipped kernels are damaged behind the first {}; reinstall Tandem",
            found.size());
        break;
      }
      found.emplace(std::move(key), entry);
      rest.remove_prefix(entry.size());
    }
    return found;
  }();
  return built;
}

}  // namespace

void append_shipped(std::string& archive, const KernelName& name, const CompiledKernel& kernel) {
  const std::string entry = pack_entry(key_of(name), kernel);
  append_u64(archive, entry.size());
  archive += entry;
}

std::optional<CompiledKernel> find_shipped(const KernelName& name) {
  const auto at = index().find(key_of(name));
  if (at == index().end()) return std::nullopt;
  std::string key;
  return unpack_entry(at->second, key);
}

std::size_t shipped_kernels() {
  return index().size();
}

}  // namespace tandem::gpu
