// What the subcommands print: the machine, tensors, figures, as text and as JSON.
#pragma once

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "files/tensor_data.hpp"
#include "peak.hpp"

namespace tandem::cli {

using Json = nlohmann::ordered_json;

struct Machine {
  std::string processor;
  int cores = 0;  ///< that this process may use
  double memory_gib = 0.0;
  std::string system;
  std::string target;  ///< the best instruction set that this build has for it
};
Machine machine();
Json to_json(const Machine& machine);

Json to_json(const bench::Peak& peak);
/// The arithmetic peak that tensors of `dtype` are measured by: f32 multiply-adds, or, for bf16, dot products
/// where they are faster (not on every processor that has them).
double peak_gflops(const bench::Peak& peak, DType dtype);
/// "f32" or "bf16": which of the two that is.
const char* peak_name(const bench::Peak& peak, DType dtype);

/// "f16 (3, 512, 12, 32)".
std::string describe(const ConstTensor& tensor);
Json to_json(const ConstTensor& tensor);

/// A JSON document as indented text that ends in a newline.
std::string to_text(const Json& document);
/// Prints it on stdout.
void print_json(const Json& document);

/// One line on stderr, "tandem: <message>", whatever `message` holds. A stderr that cannot be written to is
/// no reason to end otherwise than without it.
void say(std::string_view message) noexcept;

/// A line on stderr that each call overwrites, so that long work shows where it is. Silent where stderr is no
/// terminal.
class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void show(const std::string& text);

 private:
  bool terminal_;
  std::size_t shown_ = 0;
};

}  // namespace tandem::cli
