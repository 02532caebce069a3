# fmt as headers: the library and the program must not need libfmt.so where they run. But in its header-only mode every
# file that formats compiles fmt's functions again, three of the four or five seconds that such a file takes. So files
# take the declarations (tandem_fmt_headers), and src/problem/fmt.cpp has the functions: it is one of tandem_objects,
# and the library tandem_fmt for what is linked without those. It names functions inside fmt 9, which Debian 12 and
# Ubuntu 24.04 have; another version is used header-only.
find_package(fmt REQUIRED)

add_library(tandem_fmt_headers INTERFACE)
if(fmt_VERSION VERSION_GREATER_EQUAL 9 AND fmt_VERSION VERSION_LESS 10)
  target_include_directories(tandem_fmt_headers SYSTEM INTERFACE
    $<TARGET_PROPERTY:fmt::fmt-header-only,INTERFACE_INCLUDE_DIRECTORIES>)
else()
  target_link_libraries(tandem_fmt_headers INTERFACE fmt::fmt-header-only)
endif()

add_library(tandem_fmt STATIC ${PROJECT_SOURCE_DIR}/src/problem/fmt.cpp)
target_link_libraries(tandem_fmt PUBLIC tandem_fmt_headers PRIVATE tandem_flags)
