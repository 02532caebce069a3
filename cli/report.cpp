#include "report.hpp"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "cpu/cpu.hpp"
#include "files/source.hpp"

namespace tandem::cli {
namespace {

/// The value of the first line of `path` that starts with `key`: "model name : AMD EPYC" gives "AMD EPYC".
std::string first_value(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(':');
    if (line.starts_with(key) && colon != std::string::npos) {
      return line.substr(std::min(line.find_first_not_of(" \t", colon + 1), line.size()));
    }
  }
  return {};
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // More than 1024 processors do not fit the set; then every one online counts.
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
}

}  // namespace

Machine machine() {
  Machine m;
  utsname system{};
  ::uname(&system);
  m.processor = first_value("/proc/cpuinfo", "model name");
  if (m.processor.empty()) m.processor = system.machine;
  m.cores = usable_cores();
  m.memory_gib =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE)) / 0x1p30;
  m.system = fmt::format("{} {} {}", system.sysname, system.release, system.machine);
  m.target = cpu::name_of(cpu::best_target());
  return m;
}

Json to_json(const Machine& m) {
  return {{"processor", m.processor},
          {"cores", m.cores},
          {"memory_gib", m.memory_gib},
          {"system", m.system},
          {"target", m.target}};
}

Json to_json(const bench::Peak& peak) {
  return {{"threads", peak.threads},
          {"f32_gflops", peak.f32_gflops},
          {"bf16_gflops", peak.bf16_gflops},
          {"f32_instructions", peak.f32_instructions}};
}

double peak_gflops(const bench::Peak& peak, DType dtype) {
  return dtype == DType::bf16 ? std::max(peak.bf16_gflops, peak.f32_gflops) : peak.f32_gflops;
}

const char* peak_name(const bench::Peak& peak, DType dtype) {
  return dtype == DType::bf16 && peak.bf16_gflops > peak.f32_gflops ? "bf16" : "f32";
}

std::string describe(const ConstTensor& tensor) {
  std::string shape;
  for (int i = 0; i < tensor.rank; ++i) {
    shape += fmt::format("{}{}", i > 0 ? ", " : "", tensor.shape[static_cast<std::size_t>(i)]);
  }
  return fmt::format("{} ({})", name_of(tensor.dtype), shape);
}

Json to_json(const ConstTensor& tensor) {
  return {{"dtype", name_of(tensor.dtype)},
          {"shape", std::vector(tensor.shape.begin(), tensor.shape.begin() + tensor.rank)}};
}

std::string to_text(const Json& document) {
  // Bytes of file names need not be UTF-8; the document must be.
  // In ASCII: a name that controls the terminal is data to the reader of the document alone.
  return document.dump(2, ' ', true, Json::error_handler_t::replace) + "\n";
}

void print_json(const Json& document) {
  fmt::print("{}", to_text(document));
}

void say(std::string_view message) noexcept try {
  while (message.ends_with('\n')) message.remove_suffix(1);
  std::string line;
  for (const char c : message) line += c == '\n' || c == '\r' ? ' ' : c;
  line = fmt::format("tandem: {}\n", files::printable(line));
  std::fwrite(line.data(), 1, line.size(), stderr);
} catch (...) {
  std::fputs("tandem: out of memory\n", stderr);
}

Progress::Progress() : terminal_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  show("");
}

void Progress::show(const std::string& text) {
  if (!terminal_) return;
  // Not by fmt::print, which throws where stderr is full: progress is shown or it is not.
  const std::string line = fmt::format("\r{:<{}}{}", text, shown_, text.empty() ? "\r" : "");
  std::fwrite(line.data(), 1, line.size(), stderr);
  shown_ = text.size();
}

}  // namespace tandem::cli
