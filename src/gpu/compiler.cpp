#include "gpu/compiler.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <mutex>

#include "gpu/nvrtc.hpp"
#include "problem/stats.hpp"
#include "tandem/error.hpp"

namespace tandem::gpu {
namespace {

// No -lineinfo: it makes a cubin four times as large (310 KB instead of 77), and the shipped set has fifty.
constexpr const char* options[] = {"-std=c++20", "-default-device", "--ptxas-options=-v"};

struct Opened {
  OpenedNvrtc nvrtc;
  CompilerInfo info;
  std::vector<int> architectures;  ///< that it compiles for: 80, 86, 90, ...
};

const Opened& opened() {
  static const Opened one = [] {
    Opened o{.nvrtc = open_nvrtc(), .info = {}, .architectures = {}};
    if (!o.nvrtc.objection.empty()) return o;
    o.info.path = o.nvrtc.path;
    o.nvrtc.functions.version(&o.info.major, &o.info.minor);
    if (o.info.major < 12) {
      o.nvrtc.objection = fmt::format("NVRTC {}.{} ({}) is too old: C++20 for sm_90a needs 12.0 or later",
                                      o.info.major, o.info.minor, o.info.path);
      return o;
    }
    int count = 0;
    o.nvrtc.functions.count_architectures(&count);
    o.architectures.resize(static_cast<std::size_t>(count));
    o.nvrtc.functions.list_architectures(o.architectures.data());
    return o;
  }();
  return one;
}

const Nvrtc& functions() {
  compiler();
  return opened().nvrtc.functions;
}

/// An NVRTC program, destroyed at the end of its scope.
class Program {
 public:
  Program(const Nvrtc& nvrtc, const KernelName& name, std::span<const Source> sources)
      : nvrtc_(nvrtc), architecture_(architecture_option(name)) {
    std::vector<const char*> names;
    std::vector<const char*> texts;
    for (const Source& source : sources) {
      names.push_back(source.name);
      texts.push_back(source.text);
    }
    const std::string main = fmt::format("#include \"{}\"\n{}", name.header, name.functions);
    require(nvrtc_.create_program(&program_, main.c_str(), "kernel.cu", static_cast<int>(names.size()),
                                  texts.data(), names.data()),
            "nvrtcCreateProgram");
    require(nvrtc_.add_name_expression(program_, name.expression.c_str()), "nvrtcAddNameExpression");
  }
  ~Program() { nvrtc_.destroy_program(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  Nvrtc::Result compile() {
    std::vector<const char*> all{architecture_.c_str()};
    all.insert(all.end(), std::begin(options), std::end(options));
    return nvrtc_.compile_program(program_, static_cast<int>(all.size()), all.data());
  }
  [[nodiscard]] std::string log() const {
    std::size_t bytes = 0;
    require(nvrtc_.get_log_size(program_, &bytes), "nvrtcGetProgramLogSize");
    std::string text(bytes, '\0');
    require(nvrtc_.get_log(program_, text.data()), "nvrtcGetProgramLog");
    while (!text.empty() && text.back() == '\0') text.pop_back();
    return text;
  }
  [[nodiscard]] std::string symbol(const std::string& expression) const {
    const char* lowered = nullptr;
    require(nvrtc_.get_lowered_name(program_, expression.c_str(), &lowered), "nvrtcGetLoweredName");
    return lowered;
  }
  [[nodiscard]] std::vector<char> cubin() const {
    std::size_t bytes = 0;
    require(nvrtc_.get_cubin_size(program_, &bytes), "nvrtcGetCUBINSize");
    std::vector<char> image(bytes);
    require(nvrtc_.get_cubin(program_, image.data()), "nvrtcGetCUBIN");
    return image;
  }
  [[nodiscard]] std::vector<char> ptx() const {
    std::size_t bytes = 0;
    require(nvrtc_.get_ptx_size(program_, &bytes), "nvrtcGetPTXSize");
    std::vector<char> image(bytes);
    require(nvrtc_.get_ptx(program_, image.data()), "nvrtcGetPTX");
    return image;
  }

 private:
  void require(Nvrtc::Result result, const char* call) const {
    if (result != 0)
      fail_by(call, Status::runtime, fmt::format("{}: {}", call, nvrtc_.get_error_string(result)));
  }

  const Nvrtc& nvrtc_;
  std::string architecture_;
  Nvrtc::Program program_ = nullptr;
};

/// The first number that stands right before `unit`, as in "16 bytes stack frame"; 0 if there is none.
int number_before(const std::string& log, std::string_view unit) {
  for (std::size_t end = log.find(unit); end != std::string::npos; end = log.find(unit, end + 1)) {
    std::size_t begin = end;
    while (begin > 0 && log[begin - 1] >= '0' && log[begin - 1] <= '9') --begin;
    int value = 0;
    if (std::from_chars(log.data() + begin, log.data() + end, value).ec == std::errc{}) return value;
  }
  return 0;
}

/// Architectures that instructions are compiled for are sm_..., and those of PTX compute_...
bool is_virtual(std::string_view architecture) {
  return architecture.starts_with("compute_");
}

}  // namespace

const CompilerInfo& compiler() {
  if (!opened().nvrtc.objection.empty())
    fail_by("a kernel that is not there needs NVRTC", Status::unsupported, opened().nvrtc.objection);
  return opened().info;
}

std::string why_no_compiler() {
  return opened().nvrtc.objection;
}

std::string why_not_compiled_for(const std::string& architecture) {
  if (!opened().nvrtc.objection.empty()) return opened().nvrtc.objection;
  int number = 0;
  const std::size_t at = architecture.find('_') + 1;
  std::from_chars(architecture.data() + at, architecture.data() + architecture.size(), number);
  if (std::ranges::find(opened().architectures, number) != opened().architectures.end()) return {};
  return fmt::format("NVRTC {}.{} ({}) does not know {}", compiler().major, compiler().minor, compiler().path,
                     architecture);
}

std::string architecture_option(const KernelName& name) {
  return "--gpu-architecture=" + name.architecture;
}

std::span<const char* const> compile_options() {
  return options;
}

KernelUsage parse_usage(const std::string& log) {
  return {.registers = number_before(log, " registers"),
          .stack_bytes = number_before(log, " bytes stack frame"),
          .spill_store_bytes = number_before(log, " bytes spill stores"),
          .spill_load_bytes = number_before(log, " bytes spill loads"),
          .serialised = log.find("instructions are serialized") != std::string::npos};
}

CompiledKernel compile(const KernelName& name, std::span<const Source> sources) {
  Program program(functions(), name, sources);
  const Nvrtc::Result result = program.compile();
  const std::string log = program.log();
  if (result != 0) {
    fail(Status::runtime, "{} does not compile for {} by NVRTC {}.{} ({}):\n{}", name.expression,
         name.architecture, compiler().major, compiler().minor, functions().get_error_string(result), log);
  }
  return {.image = is_virtual(name.architecture) ? program.ptx() : program.cubin(),
          .symbol = program.symbol(name.expression),
          .usage = parse_usage(log)};
}

}  // namespace tandem::gpu
