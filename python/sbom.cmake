# A bill of materials (CycloneDX, PEP 770) for the wheel: what other projects' code the extension module has in it, by the
# versions in the headers that it was compiled from. auditwheel adds another of the libraries that it copies.
set(sbom_components "[]")
function(sbom_component name version licence where)
  string(JSON count LENGTH "${sbom_components}")
  string(JSON components SET "${sbom_components}" ${count} "{\"type\": \"library\", \"name\": \"${name}\", \"version\": \"${version}\",
    \"licenses\": [{\"expression\": \"${licence}\"}], \"purl\": \"pkg:${where}@${version}\"}")
  set(sbom_components "${components}" PARENT_SCOPE)
endfunction()
# The version in a header's macros prefixMAJOR, prefixMINOR and prefixPATCH.
function(version_in header prefix variable)
  file(READ ${header} text)
  set(numbers)
  foreach(part MAJOR MINOR PATCH)
    string(REGEX MATCH "#define ${prefix}${part} +([0-9]+)" found "${text}")
    list(APPEND numbers ${CMAKE_MATCH_1})
  endforeach()
  list(JOIN numbers . version)
  set(${variable} ${version} PARENT_SCOPE)
endfunction()

sbom_component(fmt ${fmt_VERSION} MIT github/fmtlib/fmt)
find_file(TANDEM_HWY_HEADER hwy/highway.h REQUIRED)
mark_as_advanced(TANDEM_HWY_HEADER)
version_in(${TANDEM_HWY_HEADER} HWY_ version)
sbom_component(highway ${version} "Apache-2.0 OR BSD-3-Clause" github/google/highway)
version_in(${NB_DIR}/include/nanobind/nanobind.h NB_VERSION_ version)
sbom_component(nanobind ${version} BSD-3-Clause pypi/nanobind)
version_in(${NB_DIR}/ext/robin_map/include/tsl/robin_growth_policy.h TSL_RH_VERSION_ version)
sbom_component(robin-map ${version} MIT github/Tessil/robin-map)
if(EXISTS "${jaxlib}/version.py")
  file(STRINGS ${jaxlib}/version.py version REGEX "^_version = ")
  string(REGEX REPLACE "[^0-9.]" "" version "${version}")
  sbom_component(jaxlib ${version} Apache-2.0 pypi/jaxlib)
endif()

set(sbom_kernels none)
if(TANDEM_SHIP_KERNELS AND TANDEM_NVRTC)
  cmake_path(GET TANDEM_NVRTC FILENAME sbom_kernels)
endif()
file(CONFIGURE OUTPUT tandem.cdx.json @ONLY CONTENT [[{
  "bomFormat": "CycloneDX",
  "specVersion": "1.6",
  "version": 1,
  "metadata": {
    "component": {
      "type": "library",
      "bom-ref": "tandem-attention",
      "name": "tandem-attention",
      "version": "@PROJECT_VERSION@",
      "licenses": [{"expression": "Apache-2.0"}],
      "purl": "pkg:pypi/tandem-attention@@PROJECT_VERSION@",
      "properties": [
        {"name": "tandem:compiler", "value": "@CMAKE_CXX_COMPILER_ID@ @CMAKE_CXX_COMPILER_VERSION@"},
        {"name": "tandem:gpu_kernels_compiled_by", "value": "@sbom_kernels@"}
      ]
    }
  },
  "components": @sbom_components@
}
]])
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/tandem.cdx.json DESTINATION ${SKBUILD_METADATA_DIR}/sboms COMPONENT python
  EXCLUDE_FROM_ALL)
