# For scripts/abi, as CMAKE_PROJECT_tandem_INCLUDE: debugging information in what defines public functions, so that
# their types can be compared. All other files are compiled as ever, and the compiler cache has them.
function(tandem_describe_public_sources)
  get_target_property(sources tandem_objects SOURCES)
  list(FILTER sources INCLUDE REGEX "/src/(api|problem)/")
  set_property(SOURCE ${sources} TARGET_DIRECTORY tandem_objects APPEND PROPERTY COMPILE_OPTIONS -g)
endfunction()
cmake_language(DEFER CALL tandem_describe_public_sources)
