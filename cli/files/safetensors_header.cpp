#include "files/safetensors_header.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>

namespace tandem::files {
namespace {

// NumPy's own limit on dimensions is 64; no real tensor comes near.
constexpr std::size_t most_dimensions = 64;

/// The parser's events. Nesting is bounded by what may stand where, so a depth bomb ends at its third
/// bracket.
class HeaderEvents {
 public:
  using number_integer_t = nlohmann::json::number_integer_t;
  using number_unsigned_t = nlohmann::json::number_unsigned_t;
  using number_float_t = nlohmann::json::number_float_t;
  using string_t = nlohmann::json::string_t;
  using binary_t = nlohmann::json::binary_t;

  HeaderEvents(const std::string& file, std::map<std::string, SafetensorsEntry>& entries, Metadata& metadata)
      : file_(file), entries_(entries), metadata_(metadata) {}

  bool start_object(std::size_t /*elements*/) {
    if (where_ == Where::outside) {
      where_ = Where::top;
    } else if (where_ == Where::top) {
      where_ = tensor_ == "__metadata__" ? Where::metadata : Where::entry;
      has_ = {};
    } else {
      misplaced("an object");
    }
    return true;
  }

  bool end_object() {
    if (where_ == Where::entry) {
      for (std::size_t i = 0; i < fields.size(); ++i) {
        if (!has_[i]) refuse(file_, "tensor {} has no {}; {}", in_quotes(tensor_), fields[i], remedy);
      }
    }
    where_ = where_ == Where::top ? Where::outside : Where::top;
    return true;
  }

  bool key(const string_t& name) {
    if (where_ == Where::top) {
      tensor_ = name;
      const bool fresh = name == "__metadata__" ? !std::exchange(metadata_seen_, true)
                                                : (entry_ = entries_.try_emplace(name)).second;
      if (!fresh) duplicate(name);
    } else if (where_ == Where::metadata) {
      field_ = name;
      if (metadata_.contains(name)) duplicate(name);
    } else {
      const auto* found = std::ranges::find(fields, name);
      if (found == fields.end()) {
        refuse(file_, "tensor {} has a key {}, allowed are dtype, shape and data_offsets; {}",
               in_quotes(tensor_), in_quotes(name), remedy);
      }
      if (std::exchange(has_[static_cast<std::size_t>(found - fields.begin())], true)) duplicate(name);
      field_ = name;
    }
    return true;
  }

  bool string(const string_t& value) {
    if (where_ == Where::metadata) {
      metadata_[field_] = value;
    } else if (where_ == Where::entry && field_ == "dtype") {
      entry().dtype_name = value;
    } else {
      misplaced("a string");
    }
    return true;
  }

  bool start_array(std::size_t /*elements*/) {
    if (where_ != Where::entry || field_ == "dtype") misplaced("a list");
    where_ = field_ == "shape" ? Where::shape : Where::offsets;
    offsets_ = 0;
    return true;
  }

  bool end_array() {
    if (where_ == Where::offsets && offsets_ != 2) {
      refuse(file_, "tensor {} has {} data_offsets, two are wanted; {}", in_quotes(tensor_), offsets_,
             remedy);
    }
    where_ = Where::entry;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) {
    if (where_ == Where::shape) {
      if (entry().shape.size() == most_dimensions) {
        refuse(file_, "tensor {} has more than {} dimensions; {}", in_quotes(tensor_), most_dimensions,
               remedy);
      }
      entry().shape.push_back(value);
    } else if (where_ == Where::offsets) {
      if (offsets_ < 2) (offsets_ == 0 ? entry().begin : entry().end) = value;
      ++offsets_;
    } else {
      misplaced("a number");
    }
    return true;
  }

  bool number_integer(number_integer_t /*negative*/) { misplaced("a negative number"); }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) {
    misplaced("a number that is not a 64-bit integer");
  }
  bool null() { misplaced("null"); }
  bool boolean(bool /*value*/) { misplaced("a truth value"); }
  bool binary(binary_t& /*value*/) { misplaced("binary data"); }

  bool parse_error(std::size_t position, const std::string& /*token*/,
                   const nlohmann::json::exception& /*error*/) {
    refuse(file_, "the header is not valid JSON at byte {}; is it a safetensors file? {}", position, remedy);
  }

 private:
  enum class Where { outside, top, metadata, entry, shape, offsets };
  static constexpr std::array<std::string_view, 3> fields{"dtype", "shape", "data_offsets"};
  static constexpr const char* remedy = "write the file again";

  SafetensorsEntry& entry() { return entry_.first->second; }
  [[noreturn]] void duplicate(const std::string& name) {
    refuse(file_, "the header has the key {} twice; names must be unique, {}", in_quotes(name), remedy);
  }
  [[noreturn]] void misplaced(const char* what) {
    switch (where_) {
      case Where::outside: refuse(file_, "the header is {}, one JSON object is wanted; {}", what, remedy);
      case Where::top: refuse(file_, "{} is {}, an object is wanted; {}", in_quotes(tensor_), what, remedy);
      case Where::metadata:
        refuse(file_, "metadata {} is {}, only strings are allowed; {}", in_quotes(field_), what, remedy);
      default:
        refuse(file_, "tensor {} has {} in {}, wanted are {}; {}", in_quotes(tensor_), what, field_,
               field_ == "dtype" ? "a string" : "whole numbers from 0 to 2^64 - 1", remedy);
    }
  }

  const std::string& file_;
  std::map<std::string, SafetensorsEntry>& entries_;
  Metadata& metadata_;
  Where where_ = Where::outside;
  std::string tensor_;
  std::string field_;
  std::pair<std::map<std::string, SafetensorsEntry>::iterator, bool> entry_;
  std::array<bool, 3> has_{};
  std::size_t offsets_ = 0;
  bool metadata_seen_ = false;
};

}  // namespace

void parse_safetensors_header(const std::string& file, std::string_view header,
                              std::map<std::string, SafetensorsEntry>& entries, Metadata& metadata) {
  if (header.empty() || header.front() != '{') {
    refuse(file, "the header does not start with '{{'; is it a safetensors file?");
  }
  HeaderEvents events(file, entries, metadata);
  nlohmann::json::sax_parse(header, &events);
}

}  // namespace tandem::files
