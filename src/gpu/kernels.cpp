#include "gpu/kernels.hpp"

#include <cstring>
#include <future>
#include <mutex>
#include <unordered_map>

namespace tandem::gpu {
namespace {

using Shared = std::shared_ptr<const CompiledKernel>;

std::uint64_t take_u64(std::string_view& bytes) {
  std::uint64_t value = 0;
  if (bytes.size() < sizeof(value)) {
    bytes = {};
    return 0;
  }
  std::memcpy(&value, bytes.data(), sizeof(value));
  bytes.remove_prefix(sizeof(value));
  return value;
}

/// Key to packed entry. Built once; entries stay in the library's read-only pages until one is asked for.
const std::unordered_map<std::string, std::string_view>& shipped_index() {
  static const auto index = [] {
    std::unordered_map<std::string, std::string_view> found;
    std::string_view rest(shipped_archive().data(), shipped_archive().size());
    if (take_u64(rest) != device_sources_digest()) return found;
    while (!rest.empty()) {
      const std::uint64_t bytes = take_u64(rest);
      const std::string_view entry = rest.substr(0, bytes);
      std::string key;
      if (!unpack_entry(entry, key)) break;
      found.emplace(std::move(key), entry);
      rest.remove_prefix(entry.size());
    }
    return found;
  }();
  return index;
}

FoundKernel find_beyond_memory(const KernelName& name) {
  const auto& shipped = shipped_index();
  if (const auto at = shipped.find(shipped_key(name)); at != shipped.end()) {
    std::string key;
    return {std::make_shared<const CompiledKernel>(*unpack_entry(at->second, key)), Origin::shipped};
  }
  const std::string key = cache_key(name, compiler());
  const DiskCache disk(default_cache_directory());
  if (auto kernel = disk.load(key))
    return {std::make_shared<const CompiledKernel>(std::move(*kernel)), Origin::disk};
  auto kernel = std::make_shared<const CompiledKernel>(compile(name));
  disk.store(key, *kernel);
  return {std::move(kernel), Origin::compiled};
}

}  // namespace

FoundKernel find_kernel(const KernelName& name) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::shared_future<Shared>> known;
  const std::string key = shipped_key(name);
  std::promise<Shared> promise;
  {
    std::unique_lock lock(mutex);
    if (const auto at = known.find(key); at != known.end()) {
      const std::shared_future<Shared> future = at->second;
      lock.unlock();
      return {future.get(), Origin::memory};
    }
    known.emplace(key, promise.get_future().share());
  }
  try {
    FoundKernel found = find_beyond_memory(name);
    promise.set_value(found.kernel);
    return found;
  } catch (...) {
    // Those who wait get the same error; the next call tries again.
    promise.set_exception(std::current_exception());
    const std::lock_guard lock(mutex);
    known.erase(key);
    throw;
  }
}

std::size_t shipped_kernels() {
  return shipped_index().size();
}

std::string shipped_key(const KernelName& name) {
  return name.header + "\n" + name.expression;
}

}  // namespace tandem::gpu
