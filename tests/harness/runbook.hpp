// The runbooks of docs/, which readers find by the words of an error. A file that asks them is compiled with
// TANDEM_RUNBOOKS, their folder.
#pragma once

#include <fnmatch.h>

#include <fstream>
#include <string>

namespace tandem {

/// Whether the block of errors at the head of a page has what the library says; "..." on the page is any
/// words.
inline bool in_runbook(const std::string& page, const std::string& said) {
  std::ifstream file(std::string(TANDEM_RUNBOOKS) + page);
  std::string line;
  while (std::getline(file, line) && line != "```text") {
  }
  while (std::getline(file, line) && line != "```") {
    for (std::size_t at = 0; (at = line.find("...", at)) != std::string::npos;) line.replace(at, 3, "*");
    if (fnmatch(line.c_str(), said.c_str(), 0) == 0) return true;
  }
  return false;
}

}  // namespace tandem
