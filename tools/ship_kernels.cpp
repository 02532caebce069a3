// Compiles the kernels that are shipped inside the library. Needs NVRTC, no GPU.
//
//   ship_kernels ARCHIVE [WORKERS [FOLDER [EVERY]]]   writes them; says which would be slow. WORKERS: one a
//   core unless given. FOLDER: each image too, as a file, and their names in names.txt, and of kernels only
//   every so many-th, for scripts/compare_kernels.py
//
// Exits with 1 if a kernel did not compile. It does not refuse slow ones: another ptxas than the one the
// tiles were chosen with may spill, and a slow kernel is better than none. The tests refuse them
// (tests/gpu/shipped_test.cpp).
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "gpu/cache.hpp"
#include "gpu/kernel_spec.hpp"
#include "gpu/shipped.hpp"
#include "ops/backward/launch.hpp"
#include "ops/backward/plan.hpp"
#include "ops/cache/launch.hpp"
#include "ops/cache/plan.hpp"
#include "ops/decode/plan.hpp"
#include "ops/eight_bit/launch.hpp"
#include "ops/eight_bit/plan.hpp"
#include "ops/eight_bit_backward/launch.hpp"
#include "ops/eight_bit_backward/plan.hpp"
#include "ops/forward/launch.hpp"
#include "ops/forward/plan.hpp"
#include "ops/latent/plan.hpp"
#include "ops/pack/launch.hpp"
#include "ops/portable_set.hpp"
#include "ops/quantize/launch.hpp"
#include "ops/quantize/plan.hpp"
#include "tandem/error.hpp"

namespace {

using namespace tandem;

struct Item {
  gpu::KernelName name;
  std::string objection;  ///< why there is no kernel
  std::string slow;       ///< why the kernel would be slow
  gpu::CompiledKernel kernel;

  Item(gpu::KernelName name_, std::string objection_)
      : name(std::move(name_)), objection(std::move(objection_)) {}
};

std::vector<Item> items_to_compile() {
  std::vector<Item> items;
  std::vector<gpu::KernelName> shared;  // kernels that serve several Configs
  const auto add_once = [&](const gpu::KernelName& name) {
    if (std::find(shared.begin(), shared.end(), name) != shared.end()) return;
    shared.push_back(name);
    items.emplace_back(name, "");
  };
  const auto add_forwards = [&](const auto& configs) {
    for (const auto& config : configs) {
      items.emplace_back(gpu::kernel_of(config).name(config), forward_objection(config));
      constexpr bool merges = requires {
        config.merges_parts;
      };
      if (config.schedule.split && !merges) add_once(gpu::kernels::combine.name(combine_config(config)));
    }
  };
  add_forwards(shipped_forward_configs());
  add_forwards(shipped_decode_configs());
  add_forwards(shipped_latent_configs());
  for (const BackwardConfig& config : shipped_backward_configs()) {
    items.emplace_back(gpu::kernels::backward.name(config), backward_objection(config));
    for (const gpu::KernelSpec* kernel :
         {&gpu::kernels::backward_preprocess, &gpu::kernels::backward_convert}) {
      add_once(kernel->name(gpu::backward_rows_config(config)));
    }
    if (!config.f32_dk_dv) continue;
    BackwardConfig all = config;
    all.f32_dq = true;
    add_once(gpu::kernels::backward_convert.name(gpu::backward_convert_config(all)));
  }
  for (const QuantizeConfig& config : shipped_quantize_configs()) {
    items.emplace_back(gpu::kernels::quantize.name(config), "");
    add_once(gpu::kernels::mean_of_keys.name(mean_config(config)));
  }
  for (const EightBitConfig& config : shipped_eight_bit_configs()) {
    items.emplace_back(gpu::kernels::eight_bit_forward.name(config), eight_bit_objection(config));
  }
  for (const EightBitBackwardConfig& config : shipped_eight_bit_backward_configs()) {
    items.emplace_back(gpu::kernels::eight_bit_backward.name(config), eight_bit_backward_objection(config));
    const QuantizeConfig quantizer = gradient_quantizer_of(config);
    add_once(gpu::kernels::mean_of_gradients.name(mean_config(quantizer)));
    add_once(gpu::kernels::quantize_keys.name(quantizer));
    add_once(gpu::kernels::quantize_queries.name(quantizer));
    add_once(gpu::kernels::eight_bit_convert.name(gpu::eight_bit_convert_config(config)));
  }
  for (const AppendConfig& config : shipped_append_configs()) {
    items.emplace_back(gpu::kernels::append.name(config), "");
  }
  for (const MergeConfig& config : shipped_merge_configs()) {
    items.emplace_back(gpu::kernels::merge.name(config), "");
  }
  for (const bool paired : {false, true}) {
    items.emplace_back(gpu::kernels::pack.name(PackConfig{.paired = paired}), "");
  }
  for (gpu::KernelName& name : portable_kernels()) items.emplace_back(std::move(name), "");
  return items;
}

void compile(Item& item) {
  if (!item.objection.empty()) return;
  try {
    // The users' cache serves here too: a second build of the same sources compiles nothing.
    const gpu::DiskCache cache(gpu::default_cache_directory());
    const std::string key = gpu::cache_key(item.name, gpu::compiler());
    if (auto known = cache.load(key)) {
      item.kernel = std::move(*known);
    } else {
      item.kernel = gpu::compile(item.name);
      cache.store(key, item.kernel);
    }
  } catch (const Error& e) {
    item.objection = e.what();
    return;
  }
  const gpu::KernelUsage& usage = item.kernel.usage;
  if (usage.serialised != 0) {
    item.slow = "ptxas serialises its products";
  } else if (usage.stack_bytes > 0) {
    item.slow = fmt::format("{} bytes of stack ({} spilled, {} reloaded)", usage.stack_bytes,
                            usage.spill_store_bytes, usage.spill_load_bytes);
  }
}

void compile_all(std::vector<Item>& items, unsigned workers) {
  std::atomic<std::size_t> next = 0;
  std::vector<std::jthread> threads;
  for (unsigned i = 0; i < workers; ++i) {
    threads.emplace_back([&] {
      for (std::size_t j = next++; j < items.size(); j = next++) compile(items[j]);
    });
  }
}

/// Prints what is wrong.
void report(const std::vector<Item>& items) {
  for (const Item& item : items) {
    if (item.objection.empty() && item.slow.empty()) continue;
    fmt::print(stderr, "{}\n  {}{}\n", item.name.expression, item.objection, item.slow);
  }
}

void write(const char* archive, const std::vector<Item>& items) {
  std::string bytes;
  std::size_t compiled = 0;
  for (const Item& item : items) {
    if (!item.objection.empty()) continue;
    gpu::append_shipped(bytes, item.name, item.kernel);
    ++compiled;
  }
  std::ofstream file(archive, std::ios::binary | std::ios::trunc);
  file << bytes;
  file.close();
  if (!file) throw Error(Status::runtime, fmt::format("{} cannot be written", archive));
  const auto portable = [](const Item& item) { return item.kernel.is_ptx(); };
  std::size_t ptx_bytes = 0;
  for (const Item& item : items) ptx_bytes += portable(item) ? item.kernel.image.size() : 0;
  fmt::print("{} of {} kernels, {} KiB; {} of them portable, {} KiB\n", compiled, items.size(),
             bytes.size() / 1024, std::ranges::count_if(items, portable), ptx_bytes / 1024);
}

void write_images(const std::filesystem::path& folder, const std::vector<Item>& items) {
  std::filesystem::create_directories(folder);
  std::ofstream names(folder / "names.txt");
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::vector<char>& image = items[i].kernel.image;
    std::ofstream(folder / fmt::format("{}.{}", i, items[i].kernel.is_ptx() ? "ptx" : "cubin"),
                  std::ios::binary)
        .write(image.data(), static_cast<std::streamsize>(image.size()));
    names << items[i].name.expression << '\n';
  }
}

/// Whether every kernel compiled.
bool run(const char* archive, unsigned workers, const char* folder, unsigned every) {
  std::vector<Item> items = items_to_compile();
  std::erase_if(items, [&, i = 0U](const Item&) mutable { return i++ % every != 0; });
  compile_all(items, workers);
  report(items);
  write(archive, items);
  if (folder != nullptr) write_images(folder, items);
  return std::ranges::all_of(items, [](const Item& item) { return item.objection.empty(); });
}

}  // namespace

int main(int argc, char** argv) try {
  unsigned workers = std::max(1U, std::thread::hardware_concurrency());
  unsigned every = 1;
  if (argc > 2) std::from_chars(argv[2], argv[2] + std::strlen(argv[2]), workers);
  if (argc > 4) std::from_chars(argv[4], argv[4] + std::strlen(argv[4]), every);
  if (argc < 2 || argc > 5 || workers == 0 || every == 0) {
    fmt::print(stderr, "usage: ship_kernels ARCHIVE [WORKERS [FOLDER [EVERY]]]\n");
    return 2;
  }
  return run(argv[1], workers, argc > 3 ? argv[3] : nullptr, every) ? 0 : 1;
} catch (const std::exception& e) {
  fmt::print(stderr, "ship_kernels: {}\n", e.what());
  return 1;
}
