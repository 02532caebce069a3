# Installs a built tree to a fresh prefix, then builds and runs projects that know nothing but that prefix.
#   cmake -D BUILD=<tree> -D SOURCE=<this directory> -D WORK=<scratch> -D SHARED=<ON or OFF> -P check.cmake
# With SHARED=OFF, the static library is configured and built first, in WORK.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nfailed (${result}):\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK}/prefix ${WORK}/cpp ${WORK}/c)
if(NOT SHARED)
  run(${CMAKE_COMMAND} -S ${SOURCE}/../.. -B ${WORK}/static -G ${GENERATOR} -D CMAKE_BUILD_TYPE=${CONFIG}
    -D CMAKE_C_COMPILER=${C_COMPILER} -D CMAKE_CXX_COMPILER=${CXX_COMPILER} -D BUILD_SHARED_LIBS=OFF
    -D TANDEM_BUILD_CLI=OFF -D TANDEM_BUILD_TESTS=OFF -D TANDEM_BUILD_BENCH=OFF)
  run(${CMAKE_COMMAND} --build ${WORK}/static)
  set(BUILD ${WORK}/static)
endif()
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)

foreach(language cpp c)
  run(${CMAKE_COMMAND} -S ${SOURCE}/${language} -B ${WORK}/${language} -G ${GENERATOR} -D CMAKE_BUILD_TYPE=${CONFIG}
    -D CMAKE_C_COMPILER=${C_COMPILER} -D CMAKE_CXX_COMPILER=${CXX_COMPILER} -D CMAKE_PREFIX_PATH=${WORK}/prefix)
  run(${CMAKE_COMMAND} --build ${WORK}/${language})
  run(${WORK}/${language}/program)
  if(NOT output STREQUAL "tandem ${VERSION}\n")
    message(FATAL_ERROR "the ${language} program printed '${output}'")
  endif()
endforeach()

# The same program, found by pkg-config.
file(GLOB_RECURSE pc ${WORK}/prefix/*/tandem.pc)
cmake_path(GET pc PARENT_PATH pc_path)
cmake_path(GET pc_path PARENT_PATH lib_path)
set(ENV{PKG_CONFIG_PATH} ${pc_path})
run(pkg-config --cflags --libs tandem)
separate_arguments(flags UNIX_COMMAND "${output}")
run(${C_COMPILER} -std=c11 ${SOURCE}/c/main.c -o ${WORK}/c/by_pkg_config ${flags} -lm -Wl,-rpath,${lib_path})
run(${WORK}/c/by_pkg_config)
