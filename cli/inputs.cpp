#include "inputs.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>

#include "files/npy.hpp"
#include "files/source.hpp"

namespace tandem::cli {
namespace {

constexpr std::array<std::string_view, 16> roles{
    "q",       "k",       "v",       "cu_seqlens_q", "cu_seqlens_k", "seqused_q",       "seqused_k", "sink",
    "q_scale", "k_scale", "v_scale", "page_table",   "leftpad_k",    "cache_batch_idx", "dout",      "dlse"};
constexpr std::array floating{DType::f32, DType::f16, DType::bf16, DType::e4m3};

bool is_role(std::string_view name) {
  return std::ranges::find(roles, name) != roles.end();
}

std::string all_roles() {
  return fmt::format("{}", fmt::join(roles, ", "));
}

void add(Inputs& inputs, const std::string& role, files::TensorData tensor, const std::string& file) {
  if (!inputs.tensors.emplace(role, std::move(tensor)).second) {
    files::refuse(file, "gives the tensor {} a second time; give each once", role);
  }
}

struct Rename {
  std::string role;
  std::string tensor;
};

std::vector<Rename> parse_renames(const InputOptions& options) {
  std::vector<Rename> result;
  for (const std::string& text : options.renames) {
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos || !is_role(text.substr(0, equals))) {
      throw Error(Status::invalid_argument, fmt::format("--tensor {} is not ROLE=NAME; the roles are {}",
                                                        files::in_quotes(text), all_roles()));
    }
    result.push_back({text.substr(0, equals), text.substr(equals + 1)});
  }
  return result;
}

void load_safetensors(Inputs& inputs, const std::string& path, const std::vector<Rename>& renames) {
  const files::Safetensors file(files::open_file(path));
  inputs.files.push_back(path);
  inputs.metadata.insert(file.metadata().begin(), file.metadata().end());
  for (const Rename& rename : renames) add(inputs, rename.role, file.load(rename.tensor), path);
  for (const auto& [name, entry] : file.entries()) {
    const auto renamed = [&name = name](const Rename& r) { return r.role == name || r.tensor == name; };
    if (std::ranges::any_of(renames, renamed)) continue;
    if (is_role(name)) {
      add(inputs, name, file.load(name), path);
    } else {
      inputs.ignored.push_back(name);
    }
  }
}

void load_npy(Inputs& inputs, const std::string& argument, std::optional<DType> stored_as) {
  const std::size_t equals = argument.find('=');
  const bool named = equals != std::string::npos && is_role(argument.substr(0, equals));
  const std::string path = named ? argument.substr(equals + 1) : argument;
  const std::string role = named ? argument.substr(0, equals) : std::filesystem::path(path).stem().string();
  if (!is_role(role)) {
    files::refuse(path, "is not named after a tensor ({}); give it as ROLE={}", all_roles(), path);
  }
  add(inputs, role, files::read_npy(*files::open_file(path), stored_as), path);
  inputs.files.push_back(path);
}

}  // namespace

void add_input_options(CLI::App& command, InputOptions& options, bool required) {
  auto* paths =
      command.add_option("FILES", options.paths,
                         "One .safetensors file with tensors q, k, v, ...; or .npy files named after them "
                         "(q.npy), or given as ROLE=FILE.npy");
  paths->required(required);
  command
      .add_option("--tensor", options.renames, "ROLE=NAME: the tensor NAME of the .safetensors file is ROLE")
      ->type_name("ROLE=NAME");
  add_dtype_option(
      command, "--npy-as", options.npy_as,
      "What 2-byte (u2: bf16) or 1-byte (u1: e4m3) elements of .npy files are, which NumPy has no names for");
}

Inputs load_inputs(const InputOptions& options) {
  Inputs inputs;
  const std::vector<Rename> renames = parse_renames(options);
  for (const std::string& path : options.paths) {
    if (path.ends_with(".safetensors")) {
      load_safetensors(inputs, path, renames);
    } else if (path.ends_with(".npy")) {
      load_npy(inputs, path, options.npy_as);
    } else {
      files::refuse(path, "is neither .safetensors nor .npy by its name; rename or convert it");
    }
  }
  for (const char* needed : {"q", "k", "v"}) {
    if (!inputs.tensors.contains(needed)) {
      throw Error(Status::invalid_argument,
                  fmt::format("no tensor {} in {}; name one with --tensor {}=NAME or add {}.npy", needed,
                              fmt::join(options.paths, ", "), needed, needed));
    }
  }
  return inputs;
}

DType parse_dtype(const std::string& name, const char* what) {
  const auto* found = std::ranges::find_if(floating, [&](DType d) { return name == name_of(d); });
  if (found == floating.end()) {
    throw Error(Status::invalid_argument,
                fmt::format("{} is {}; it must be f32, f16, bf16 or e4m3", what, files::in_quotes(name)));
  }
  return *found;
}

CLI::Option* add_dtype_option(CLI::App& command, const std::string& flag, std::optional<DType>& into,
                              const std::string& help) {
  return command
      .add_option_function<std::string>(
          flag, [&into, flag](const std::string& name) { into = parse_dtype(name, flag.c_str()); }, help)
      ->type_name("DTYPE");
}

}  // namespace tandem::cli
