// Work on a numbered list in a process of its own, which may die or hang at any of its items.
#pragma once

#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tandem::cli {

/// What is known of one item.
struct ItemReport {
  nlohmann::ordered_json facts = nlohmann::ordered_json::object();  ///< everything that was reported, merged
  std::string failure;  ///< why it was given up; empty: it was not
};

/// How the worker tells the supervisor of its progress; used in the worker's process.
class Reporter {
 public:
  explicit Reporter(int descriptor) : descriptor_(descriptor) {}
  /// From here on the worker is busy with `item`; what goes wrong is its fault.
  void begin(std::size_t item) const;
  void facts(std::size_t item, const nlohmann::ordered_json& facts) const;
  /// The item is given up. The worker goes on, or returns false if what it stands on is damaged.
  void failure(std::size_t item, const std::string& why) const;
  /// What the worker threw, and its Status.
  void error(const std::string& text, int status) const;

 private:
  void send(const nlohmann::ordered_json& message) const;
  int descriptor_;
};

/// Runs `worker(reports, reporter)` in a child process until one returns true (all is done). A worker that
/// returns false, dies, or stays longer than `patience` with one item is followed by another, which sees in
/// `reports` what is known so far, items given up included. Throws what a worker threw (as an
/// Error) while it was busy with no item, and Error (runtime) for one that came no further than the one
/// before it. `show`
/// is called with each item that is begun.
std::vector<ItemReport> supervise(
    std::size_t items, std::chrono::milliseconds patience,
    const std::function<bool(const std::vector<ItemReport>&, const Reporter&)>& worker,
    const std::function<void(std::size_t)>& show);

}  // namespace tandem::cli
