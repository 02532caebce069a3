# Writes a C++ file that holds device sources as raw string literals.
#   cmake -DROOT=src -DFILES=a;b -DOUTPUT=out.cpp -P embed_sources.cmake
file(WRITE ${OUTPUT}.part "// Made by cmake/embed_sources.cmake from the device sources.\n#include \"gpu/sources.hpp\"\n\n"
  "namespace tandem::gpu {\nnamespace {\n\nconstexpr Source sources[] = {\n")
foreach(name IN LISTS FILES)
  file(READ ${ROOT}/${name} text)
  string(FIND "${text}" ")tandem\"" clash)
  if(NOT clash EQUAL -1)
    message(FATAL_ERROR "${name} contains the delimiter )tandem\" of the literal that is to hold it")
  endif()
  file(APPEND ${OUTPUT}.part "    {\"${name}\", R\"tandem(${text})tandem\"},\n")
endforeach()
file(APPEND ${OUTPUT}.part "};\n\n}  // namespace\n\nstd::span<const Source> device_sources() { return sources; }\n\n"
  "}  // namespace tandem::gpu\n")
file(RENAME ${OUTPUT}.part ${OUTPUT})
