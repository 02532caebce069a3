# Install rules: headers, library, CMake package, pkg-config file.
include(CMakePackageConfigHelpers)

install(TARGETS tandem EXPORT tandem-targets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tandem TYPE INCLUDE FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/NOTICE TYPE DOC)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tandem)
install(EXPORT tandem-targets NAMESPACE tandem:: DESTINATION ${package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/tandem-config.cmake.in tandem-config.cmake
  INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
# Before 1.0 a minor version may change the C++ interface.
write_basic_package_version_file(tandem-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/tandem-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/tandem-config-version.cmake
  DESTINATION ${package_dir})

set(TANDEM_STATIC_LIBS "")
if(NOT BUILD_SHARED_LIBS)
  list(TRANSFORM OpenMP_CXX_LIB_NAMES PREPEND -l OUTPUT_VARIABLE openmp_libs)
  list(JOIN openmp_libs " " openmp_libs)
  set(TANDEM_STATIC_LIBS " ${openmp_libs} -ldl -lm -lstdc++")
endif()
file(RELATIVE_PATH TANDEM_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" TANDEM_PC_TO_PREFIX ${TANDEM_PC_TO_PREFIX})
configure_file(${PROJECT_SOURCE_DIR}/cmake/tandem.pc.in tandem.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/tandem.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
