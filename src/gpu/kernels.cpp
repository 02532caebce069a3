#include "gpu/kernels.hpp"

#include <array>
#include <chrono>
#include <future>
#include <mutex>
#include <unordered_map>

#include "gpu/shipped.hpp"
#include "problem/log.hpp"
#include "problem/stats.hpp"
#include "tandem/error.hpp"

namespace tandem::gpu {
namespace {

using Shared = std::shared_ptr<const CompiledKernel>;

/// Counts a kernel, and says in the log where it came from and what that took.
void report(const KernelName& name, Origin origin, std::chrono::steady_clock::time_point start) {
  const auto passed = std::chrono::steady_clock::now() - start;
  const std::chrono::duration<double> spent = passed;
  constexpr std::array names = {"memory", "shipped", "portable", "disk", "compiled"};
  const char* const from = names[static_cast<std::size_t>(origin)];
  count_kernel(from, passed);
  if (events_are_watched()) {
    send_event({.operation = "kernel",
                .subject = name.expression,
                .backend = "cuda",
                .family = name.architecture,
                .kernel = from,
                .plan = {},
                .nanoseconds = static_cast<std::uint64_t>(std::chrono::nanoseconds(passed).count())});
  }
  const char* how = origin == Origin::compiled   ? "compiled"
                    : origin == Origin::disk     ? "read from disk"
                    : origin == Origin::portable ? "shipped as PTX, which the driver compiles,"
                                                 : "shipped";
  log(LogLevel::info, "{}: {} in {:.3f} s", name.expression, how, spent.count());
}

/// The shipped kernel of that name, and where there is none and nothing compiles for its architecture, the
/// portable one: `name` is that one's then.
std::optional<FoundKernel> find_in_library(KernelName& name) {
  const auto found = [](CompiledKernel&& kernel, Origin origin) {
    return FoundKernel{std::make_shared<const CompiledKernel>(std::move(kernel)), origin};
  };
  if (auto kernel = find_shipped(name)) return found(std::move(*kernel), Origin::shipped);
  if (why_portable(name.architecture).empty()) return std::nullopt;
  name.architecture = portable_architecture;
  if (auto kernel = find_shipped(name)) return found(std::move(*kernel), Origin::portable);
  if (const std::string why = why_no_compiler(); !why.empty())
    fail(Status::unsupported, "{}; the shipped set has no kernel for this call", why);
  return std::nullopt;
}

FoundKernel find_beyond_memory(KernelName name) {
  if (auto found = find_in_library(name)) return *found;
  const std::string key = cache_key(name, compiler());
  const DiskCache disk(default_cache_directory());
  if (auto kernel = disk.load(key))
    return {std::make_shared<const CompiledKernel>(std::move(*kernel)), Origin::disk};
  auto kernel = std::make_shared<const CompiledKernel>(compile(name));
  disk.store(key, *kernel);
  return {std::move(kernel), Origin::compiled};
}

/// The kernels that were found, and those that are looked for.
struct InMemory {
  std::mutex mutex;
  std::unordered_map<std::string, std::shared_future<Shared>> known;
};
InMemory& memory() {
  static InMemory kernels;
  return kernels;
}

std::string key_of(const KernelName& name) {
  return name.header + "\n" + name.architecture + "\n" + name.expression + "\n" + name.functions;
}

}  // namespace

void forget_kernel(const KernelName& name) {
  auto& [mutex, known] = memory();
  const std::lock_guard lock(mutex);
  known.erase(key_of(name));
}

std::string why_portable(const std::string& architecture) {
  if (!why_no_compiler().empty() && shipped_kernels() == 0) return {};
  return why_not_compiled_for(architecture);
}

FoundKernel find_kernel(const KernelName& name) {
  auto& [mutex, known] = memory();
  const std::string key = key_of(name);
  std::promise<Shared> promise;
  {
    std::unique_lock lock(mutex);
    if (const auto at = known.find(key); at != known.end()) {
      const std::shared_future<Shared> future = at->second;
      lock.unlock();
      FoundKernel found{future.get(), Origin::memory};
      count_kernel("memory", {});
      return found;
    }
    known.emplace(key, promise.get_future().share());
  }
  try {
    const auto start = std::chrono::steady_clock::now();
    FoundKernel found = find_beyond_memory(name);
    report(name, found.origin, start);
    promise.set_value(found.kernel);
    return found;
  } catch (...) {
    // Threads that wait get the same error; the next call tries again.
    promise.set_exception(std::current_exception());
    const std::lock_guard lock(mutex);
    known.erase(key);
    throw;
  }
}

}  // namespace tandem::gpu
