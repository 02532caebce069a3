# Installs a built tree to a fresh prefix, then builds and runs projects that know nothing but that prefix.
#   cmake -D BUILD=<tree> -D SOURCE=<this directory> -D WORK=<scratch> -D SHARED=<ON or OFF> -P check.cmake
# With SHARED=OFF, the static library is configured and built first, in <tree>-static.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nfailed (${result}):\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK}/prefix ${WORK}/cpp ${WORK}/c ${WORK}/docs ${WORK}/serve)
if(NOT SHARED)
  # Beside the tree that was built: at the same depth paths are the same, so that the compiler cache has all of it.
  set(static ${BUILD}-static)
  run(${CMAKE_COMMAND} -S ${SOURCE}/../.. -B ${static} -G ${GENERATOR} -D CMAKE_BUILD_TYPE=${CONFIG}
    -D CMAKE_C_COMPILER=${C_COMPILER} -D CMAKE_CXX_COMPILER=${CXX_COMPILER} -D BUILD_SHARED_LIBS=OFF
    -D TANDEM_BUILD_CLI=OFF -D TANDEM_BUILD_TESTS=OFF -D TANDEM_BUILD_BENCH=OFF)
  run(${CMAKE_COMMAND} --build ${static})
  set(BUILD ${static})
endif()
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)

# The name that programs ask the loader for. Before 1.0 a minor version may change the C++ interface, so it is in the name.
if(SHARED)
  string(REGEX MATCH "^0[.][0-9]+|^[1-9][0-9]*" soversion ${VERSION})
  file(GLOB_RECURSE named ${WORK}/prefix/*/libtandem.so.${soversion})
  if(NOT named)
    file(GLOB_RECURSE found ${WORK}/prefix/*/libtandem.so*)
    message(FATAL_ERROR "no libtandem.so.${soversion} was installed, only ${found}")
  endif()
endif()

foreach(language cpp c)
  run(${CMAKE_COMMAND} -S ${SOURCE}/${language} -B ${WORK}/${language} -G ${GENERATOR} -D CMAKE_BUILD_TYPE=${CONFIG}
    -D CMAKE_C_COMPILER=${C_COMPILER} -D CMAKE_CXX_COMPILER=${CXX_COMPILER} -D CMAKE_PREFIX_PATH=${WORK}/prefix)
  run(${CMAKE_COMMAND} --build ${WORK}/${language})
  run(${WORK}/${language}/program)
  if(NOT output STREQUAL "tandem ${VERSION}\n")
    message(FATAL_ERROR "the ${language} program printed '${output}'")
  endif()
endforeach()

# The example that serves: it checks its own results, and that pages were shared, copied and taken back.
run(${CMAKE_COMMAND} -S ${SOURCE}/../../examples/serve -B ${WORK}/serve -G ${GENERATOR} -D CMAKE_BUILD_TYPE=${CONFIG}
  -D CMAKE_CXX_COMPILER=${CXX_COMPILER} -D CMAKE_PREFIX_PATH=${WORK}/prefix)
run(${CMAKE_COMMAND} --build ${WORK}/serve)
run(${WORK}/serve/serve)
if(NOT output MATCHES "[1-9][0-9]* pages shared, [1-9][0-9]* of them copied before a write, [1-9][0-9]* evictions")
  message(FATAL_ERROR "the example that serves printed '${output}'")
endif()

# What the guides show, as it stands there: C++ with the guide's CMake, and C by its command.
function(snippet page language path)
  file(READ ${SOURCE}/../../${page} text)
  string(FIND "${text}" "```${language}\n" begin)
  if(begin EQUAL -1)
    message(FATAL_ERROR "${page} has no snippet in ${language}")
  endif()
  string(LENGTH "```${language}\n" fence)
  math(EXPR begin "${begin} + ${fence}")
  string(SUBSTRING "${text}" ${begin} -1 text)
  string(FIND "${text}" "```" end)
  string(SUBSTRING "${text}" 0 ${end} text)
  file(WRITE ${path} "${text}")
endfunction()
function(expect_last_words words page)
  if(NOT output MATCHES "(^|[ \n])${words}\n$")
    message(FATAL_ERROR "the program of ${page} printed '${output}', which does not end in ${words}")
  endif()
endfunction()
function(expect_program page words)
  string(MAKE_C_IDENTIFIER ${page} name)
  set(folder ${WORK}/docs/${name})
  snippet(${page} cpp ${folder}/main.cpp)
  snippet(docs/guides/cpp.md cmake ${folder}/CMakeLists.txt)
  run(${CMAKE_COMMAND} -S ${folder} -B ${folder}/build -G ${GENERATOR} -D CMAKE_BUILD_TYPE=${CONFIG}
    -D CMAKE_CXX_COMPILER=${CXX_COMPILER} -D CMAKE_PREFIX_PATH=${WORK}/prefix)
  run(${CMAKE_COMMAND} --build ${folder}/build)
  run(${folder}/build/example)
  expect_last_words("${words}" ${page})
endfunction()
expect_program(docs/guides/cpp.md "5 1")

# And the C programs found by pkg-config: the one above, and the guide's.
file(GLOB_RECURSE pc ${WORK}/prefix/*/tandem.pc)
cmake_path(GET pc PARENT_PATH pc_path)
cmake_path(GET pc_path PARENT_PATH lib_path)
set(ENV{PKG_CONFIG_PATH} ${pc_path})
run(pkg-config --cflags --libs tandem)
separate_arguments(flags UNIX_COMMAND "${output}")
run(${C_COMPILER} -std=c11 ${SOURCE}/c/main.c -o ${WORK}/c/by_pkg_config ${flags} -lm -Wl,-rpath,${lib_path})
run(${WORK}/c/by_pkg_config)
snippet(docs/guides/cpp.md c ${WORK}/docs/main.c)
run(${C_COMPILER} -std=c11 ${WORK}/docs/main.c ${flags} -Wl,-rpath,${lib_path} -o ${WORK}/docs/from_c)
run(${WORK}/docs/from_c)
expect_last_words("1.5 2" docs/guides/cpp.md)
