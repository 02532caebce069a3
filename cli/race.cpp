#include "race.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <thread>

#include "gpu/kernels.hpp"
#include "tandem/error.hpp"
#include "values.hpp"

namespace tandem::cli {
namespace {

using Json = nlohmann::ordered_json;
constexpr int device = 0;

class Race {
 public:
  Race(RaceCourse& course, const RaceRules& rules, const std::vector<ItemReport>& reports,
       const Reporter& reporter)
      : course_(course), rules_(rules), reports_(reports), reporter_(reporter), out_(course.kernels.size()) {
    for (std::size_t i = 0; i < out_.size(); ++i) out_[i] = !reports[i].failure.empty();
  }

  bool run() {
    require_first();
    compile();
    require_first();
    for (std::size_t i = 0; i < out_.size(); ++i) {
      // Whoever was checked by a worker before this one need not be again; the first is what to compare with.
      if (out_[i] || (i > 0 && reports_[i].facts.contains("max_difference"))) continue;
      if (!guarded(i, [&] { check(i); })) return false;
    }
    require_first();
    return time();
  }

 private:
  void give_up(std::size_t i, const std::string& why) {
    out_[i] = true;
    reporter_.failure(i, why);
    if (i == 0) first_failure_ = why;
  }
  void require_first() const {
    const std::string& why = reports_[0].failure.empty() ? first_failure_ : reports_[0].failure;
    if (out_[0]) throw Error(Status::runtime, "the planned kernel failed, nothing can be compared: " + why);
  }
  /// Runs what a driver error may end. After one the context is not to be trusted: false.
  template <typename F>
  bool guarded(std::size_t i, F&& f) {
    reporter_.begin(i);
    try {
      f();
    } catch (const Error& e) {
      give_up(i, e.what());
      return false;
    }
    return true;
  }

  void compile() {
    std::atomic<std::size_t> next = 0;
    std::mutex mutex;
    const auto work = [&] {
      for (std::size_t i = next++; i < out_.size(); i = next++) {
        if (out_[i]) continue;
        try {
          const gpu::KernelUsage usage = gpu::find_kernel(course_.kernels[i]).kernel->usage;
          const std::lock_guard lock(mutex);
          reporter_.facts(i, {{"registers", usage.registers},
                              {"stack_bytes", usage.stack_bytes},
                              {"spill_bytes", usage.spill_store_bytes + usage.spill_load_bytes},
                              {"serialised", usage.serialised != 0}});
        } catch (const Error& e) {
          const std::lock_guard lock(mutex);
          give_up(i, e.what());
        }
      }
    };
    std::vector<std::jthread> threads;
    threads.reserve(rules_.compilers);
    for (unsigned t = 0; t < rules_.compilers; ++t) threads.emplace_back(work);
  }

  /// The outputs of one call on poisoned memory, as f32.
  std::vector<files::TensorData> results(std::size_t i) {
    for (RaceOutput& output : course_.outputs) output.buffer.fill(0xFF);
    course_.launch(i);
    std::vector<files::TensorData> all;
    for (const RaceOutput& output : course_.outputs) {
      files::TensorData host(output.dtype,
                             {static_cast<std::int64_t>(output.buffer.bytes() / size_of(output.dtype))});
      output.buffer.copy_to_host(host.bytes().data(), host.bytes().size());
      gpu::synchronize(device);
      all.push_back(output.dtype == DType::f32 ? std::move(host) : converted(host, DType::f32));
    }
    return all;
  }

  void check(std::size_t i) {
    std::vector<files::TensorData> found = results(i);
    const std::vector<files::TensorData>& expected = i == 0 ? found : reference_;
    double worst = 0.0;
    for (std::size_t n = 0; n < found.size(); ++n) {
      const RaceOutput& output = course_.outputs[n];
      const auto* a = reinterpret_cast<const float*>(found[n].bytes().data());
      const auto* b = reinterpret_cast<const float*>(expected[n].bytes().data());
      float largest = 0.0F;
      float difference = 0.0F;
      for (std::int64_t k = 0; k < found[n].numel(); ++k) {
        if (std::isnan(a[k])) {
          give_up(i, fmt::format("{}[{}] is NaN, or was not written", output.name, k));
          return;
        }
        largest = std::max(largest, std::abs(b[k]));
        difference = std::max(difference, std::abs(a[k] - b[k]));
      }
      const double bound = output.tolerance * static_cast<double>(largest);
      if (static_cast<double>(difference) > bound) {
        give_up(i, fmt::format("{} is off by {:.3g}, the bound is {:.3g}", output.name, difference, bound));
        return;
      }
      if (bound > 0) worst = std::max(worst, static_cast<double>(difference) / bound);
    }
    if (i == 0) reference_ = std::move(found);
    reporter_.facts(i, {{"max_difference", worst}});
  }

  double milliseconds(std::size_t i, int calls) {
    start_.record(nullptr);
    for (int n = 0; n < calls; ++n) course_.launch(i);
    end_.record(nullptr);
    return static_cast<double>(end_.milliseconds_since(start_));
  }

  /// Rounds of all kernels, one after the other, so that a change of clocks meets each alike.
  bool time() {
    std::vector<std::vector<double>> times(out_.size());
    for (int round = 0; round < rules_.rounds; ++round) {
      for (std::size_t i = 0; i < out_.size(); ++i) {
        if (out_[i]) continue;
        const bool sound = guarded(i, [&] {
          const double one = std::max(milliseconds(i, 1), 1e-4);
          const int calls = std::max(1, static_cast<int>(rules_.burst_ms / one));
          times[i].push_back(milliseconds(i, calls) * 1e3 / calls);
        });
        if (!sound) return false;
      }
    }
    for (std::size_t i = 0; i < out_.size(); ++i) {
      if (out_[i]) continue;
      std::ranges::sort(times[i]);
      const double us = times[i][times[i].size() / 2];
      reporter_.facts(i, {{"us", us},
                          {"tflops", course_.flops / us / 1e6},
                          {"spread", (times[i].back() - times[i].front()) / us}});
    }
    return true;
  }

  RaceCourse& course_;
  const RaceRules& rules_;
  const std::vector<ItemReport>& reports_;
  const Reporter& reporter_;
  std::vector<char> out_;  ///< given up
  std::string first_failure_;
  std::vector<files::TensorData> reference_;
  gpu::Event start_{device};
  gpu::Event end_{device};
};

}  // namespace

bool race(RaceCourse& course, const RaceRules& rules, const std::vector<ItemReport>& reports,
          const Reporter& reporter) {
  return Race(course, rules, reports, reporter).run();
}

}  // namespace tandem::cli
