#include "recording.hpp"

namespace tandem::emulator {

constinit thread_local Tally* tally = nullptr;

void Tally::count(std::uint32_t Work::*what, std::uint32_t amount) {
  pending_.*what += amount;
  if (++instructions_ == piece) flush();
}

void Tally::add(const Step& step) {
  flush();
  steps->push_back(step);
}

void Tally::flush() {
  if (instructions_ == 0) return;
  Step step;
  step.work = pending_;
  steps->push_back(step);
  pending_ = {};
  instructions_ = 0;
}

}  // namespace tandem::emulator
