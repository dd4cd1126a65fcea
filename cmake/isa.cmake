# THE list of instruction-set levels. Flags, detection and dispatch table are generated from it.
#
#   oxytorch_level(NAME <name> IMPLIES <levels> FEATURES <cpuid names> FLAGS <compiler flags>
#                  HAS <capabilities> LACKS <capabilities>)
#
# A processor supports a level if it has the level's features and those of every level it implies.
# Levels are tried from last to first. Feature names are those of core/probe.cpp. A level has the
# capabilities of the levels that it implies and those in HAS, but not those in LACKS. They are what
# kernels ask for: OXY_HAS_INT8_DOT is 1 or 0 in a kernel, level_has(Capability::int8_dot) is for
# other C++ code and oxytorch.isa.has("int8_dot") for Python.
set(oxytorch_capabilities
  vectors_256      # vectors of 256 bits
  vectors_512      # vectors of 512 bits
  int8_dot         # an instruction that adds four products of bytes, or two of 16-bit integers
  bf16_dot         # an instruction that adds two products of bfloat16
  fast_bf16_dot    # which takes no longer than one that multiplies float32
  tiles            # the tile registers of AMX, for bytes and bfloat16
)
set(oxytorch_levels "")

function(oxytorch_level)
  cmake_parse_arguments(row "" "NAME" "IMPLIES;FEATURES;FLAGS;HAS;LACKS" ${ARGN})
  list(APPEND oxytorch_levels ${row_NAME})
  set(oxytorch_levels "${oxytorch_levels}" PARENT_SCOPE)
  set(all_features ${row_FEATURES})
  set(all_flags "")
  set(all_implied "")
  set(all_has "")
  foreach(implied IN LISTS row_IMPLIES)
    list(APPEND all_features ${oxytorch_${implied}_features})
    list(APPEND all_flags ${oxytorch_${implied}_flags})
    list(APPEND all_implied ${implied} ${oxytorch_${implied}_implied})
    list(APPEND all_has ${oxytorch_${implied}_has})
  endforeach()
  list(APPEND all_flags ${row_FLAGS})
  list(APPEND all_has ${row_HAS})
  list(REMOVE_ITEM all_has "" ${row_LACKS})
  foreach(capability IN LISTS all_has row_LACKS)
    if(NOT capability IN_LIST oxytorch_capabilities)
      message(FATAL_ERROR "oxytorch: level ${row_NAME}: unknown capability ${capability}")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES all_features)
  list(REMOVE_DUPLICATES all_flags)
  list(REMOVE_DUPLICATES all_implied)
  set(oxytorch_${row_NAME}_features "${all_features}" PARENT_SCOPE)
  set(oxytorch_${row_NAME}_flags "${all_flags}" PARENT_SCOPE)
  set(oxytorch_${row_NAME}_implied "${all_implied}" PARENT_SCOPE)
  set(oxytorch_${row_NAME}_has "${all_has}" PARENT_SCOPE)
endfunction()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  oxytorch_level(NAME generic FLAGS -march=x86-64-v2
    FEATURES sse3 ssse3 sse4_1 sse4_2 popcnt cx16)
  oxytorch_level(NAME avx2 IMPLIES generic FLAGS -march=x86-64-v3
    FEATURES os_avx avx avx2 fma f16c bmi1 bmi2 movbe lzcnt HAS vectors_256)
  oxytorch_level(NAME avx2_vnni IMPLIES avx2 FLAGS -mavxvnni
    FEATURES avx_vnni HAS int8_dot)
  oxytorch_level(NAME avx512 IMPLIES avx2 FLAGS -march=x86-64-v4 -mprefer-vector-width=512
    FEATURES os_avx512 avx512f avx512bw avx512dq avx512vl avx512cd
    HAS vectors_512)
  oxytorch_level(NAME avx512_vnni IMPLIES avx512 FLAGS -mavx512vnni
    FEATURES avx512_vnni HAS int8_dot)
  oxytorch_level(NAME avx512_bf16 IMPLIES avx512_vnni FLAGS -mavx512bf16
    FEATURES avx512_bf16 HAS bf16_dot fast_bf16_dot)
  # Measured: processors with FP16 or AMX take about six cycles for two products of bfloat16.
  oxytorch_level(NAME avx512_fp16 IMPLIES avx512_bf16 FLAGS -mavx512fp16
    FEATURES avx512_fp16 LACKS fast_bf16_dot)
  oxytorch_level(NAME amx IMPLIES avx512_bf16 FLAGS -mamx-tile -mamx-int8 -mamx-bf16
    FEATURES os_amx amx_tile amx_int8 amx_bf16 HAS tiles LACKS fast_bf16_dot)
else()
  oxytorch_level(NAME generic)
endif()

# Which of them are compiled: all, native (generic and the best one that this machine runs), or names.
set(choices all)
if(SKBUILD_STATE STREQUAL "editable")
  set(choices native)
endif()
set(OXYTORCH_LEVELS ${choices} CACHE STRING
  "Levels to build: all, native (generic and this machine's best), or names separated by ;")

# Writes the header: every level by name, what each needs, and which are built.
function(oxytorch_write_levels path built)
  set(each "")
  set(either "")
  set(rows "")
  set(mask "0u")
  foreach(level IN LISTS oxytorch_levels)
    list(FIND oxytorch_levels ${level} index)
    if(level IN_LIST built)
      string(APPEND each " \\\n  MACRO(${level}, __VA_ARGS__)")
      string(APPEND either " \\\n  BUILT(${level}, __VA_ARGS__)")
      string(APPEND mask " | 1u << ${index}")
    else()
      string(APPEND either " \\\n  LEFT_OUT(${level}, __VA_ARGS__)")
    endif()
    set(features "")
    foreach(feature IN LISTS oxytorch_${level}_features)
      string(APPEND features " FEATURE(${feature})")
    endforeach()
    set(implied "")
    foreach(other IN LISTS oxytorch_${level}_implied)
      list(FIND oxytorch_levels ${other} index)
      string(APPEND implied " | 1u << ${index}")
    endforeach()
    set(has "")
    foreach(capability IN LISTS oxytorch_${level}_has)
      list(FIND oxytorch_capabilities ${capability} bit)
      string(APPEND has " | 1u << ${bit}")
    endforeach()
    string(APPEND rows " \\\n  LEVEL(${level}, (0u${implied}), (0u${has}),${features})")
  endforeach()
  list(LENGTH oxytorch_levels count)
  list(TRANSFORM oxytorch_capabilities REPLACE "(.+)" "CAPABILITY(\\1)" OUTPUT_VARIABLE capabilities)
  list(JOIN capabilities " " capabilities)
  file(CONFIGURE OUTPUT ${path} CONTENT
"// Written by cmake/isa.cmake.
#pragma once

#define OXY_LEVEL_COUNT ${count}

// Bit i is set if level i is built.
#define OXY_LEVELS_BUILT (${mask})

// MACRO(level, ...) for every level that is built.
#define OXY_FOR_EACH_LEVEL(MACRO, ...)${each}

// BUILT(level, ...) or LEFT_OUT(level, ...) for every level.
#define OXY_FOR_EACH_ROW(BUILT, LEFT_OUT, ...)${either}

// CAPABILITY(name) for every capability.
#define OXY_CAPABILITIES(CAPABILITY) ${capabilities}

// LEVEL(level, mask of implied levels, mask of capabilities, FEATURE(feature)...) for every level.
#define OXY_LEVEL_TABLE(LEVEL, FEATURE)${rows}
" @ONLY)
endfunction()

# The best level that this machine runs, asked of the code that asks it at run time.
function(oxytorch_find_native result)
  oxytorch_write_levels(${CMAKE_BINARY_DIR}/native/oxytorch_levels.h "${oxytorch_levels}")
  try_run(status compiled
    SOURCES ${CMAKE_SOURCE_DIR}/cmake/native.cpp ${CMAKE_SOURCE_DIR}/src/oxytorch/core/probe.cpp
    CMAKE_FLAGS
      "-DINCLUDE_DIRECTORIES=${CMAKE_BINARY_DIR}/native\;${CMAKE_SOURCE_DIR}/src/oxytorch"
    CXX_STANDARD 20
    NO_CACHE
    COMPILE_OUTPUT_VARIABLE errors
    RUN_OUTPUT_VARIABLE found)
  if(NOT compiled OR NOT status EQUAL 0 OR NOT found IN_LIST oxytorch_levels)
    message(FATAL_ERROR "oxytorch: cannot tell this machine's level; give OXYTORCH_LEVELS=all or "
      "names of levels (${errors}${found})")
  endif()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

if(OXYTORCH_LEVELS STREQUAL "all")
  set(wanted ${oxytorch_levels})
elseif(OXYTORCH_LEVELS STREQUAL "native")
  oxytorch_find_native(wanted)
else()
  set(wanted ${OXYTORCH_LEVELS})
  foreach(level IN LISTS wanted)
    if(NOT level IN_LIST oxytorch_levels)
      list(JOIN oxytorch_levels ", " known)
      message(FATAL_ERROR "oxytorch: OXYTORCH_LEVELS: expected all, native or names of levels "
        "(${known}), got ${level}")
    endif()
  endforeach()
endif()

# In the order of the list, and always the one that runs everywhere. A compiler that lacks a level's
# flags builds without that level and says so.
include(CheckCXXCompilerFlag)
set(oxytorch_built "")
foreach(level IN LISTS oxytorch_levels)
  if(NOT level IN_LIST wanted AND NOT level STREQUAL "generic")
    continue()
  endif()
  string(REPLACE ";" " " joined "${oxytorch_${level}_flags}")
  if(joined)
    set(CMAKE_REQUIRED_QUIET ON)
    check_cxx_compiler_flag("${joined}" oxytorch_has_${level})
    if(NOT oxytorch_has_${level})
      message(WARNING "oxytorch: the compiler lacks '${joined}'; level ${level} is left out")
      continue()
    endif()
  endif()
  list(APPEND oxytorch_built ${level})
endforeach()
list(JOIN oxytorch_built ", " shown)
message(STATUS "oxytorch: levels ${shown}")
oxytorch_write_levels(${CMAKE_BINARY_DIR}/generated/oxytorch_levels.h "${oxytorch_built}")

# One object library per level over every kernel; a kernel that lacks a level is a link error. The
# folder of a kernel is the op, whose code has a namespace of its own at each level.
function(oxytorch_add_kernels target)
  foreach(kernel IN LISTS ARGN)
    cmake_path(GET kernel PARENT_PATH folder)
    cmake_path(GET folder FILENAME op)
    set_source_files_properties(${kernel} PROPERTIES COMPILE_DEFINITIONS OXY_FOLDER=${op})
  endforeach()
  foreach(level IN LISTS oxytorch_built)
    list(FIND oxytorch_levels ${level} index)
    set(objects ${target}_${level})
    add_library(${objects} OBJECT ${ARGN})
    add_dependencies(${objects} oxytorch_rules oxytorch_panel_tables)
    target_include_directories(${objects} PRIVATE src/oxytorch ${CMAKE_BINARY_DIR}/generated)
    target_compile_definitions(${objects} PRIVATE
      OXY_LEVEL=${level}::OXY_FOLDER OXY_LEVEL_INDEX=${index})
    foreach(capability IN LISTS oxytorch_capabilities)
      string(TOUPPER OXY_HAS_${capability} macro)
      set(value 0)
      if(capability IN_LIST oxytorch_${level}_has)
        set(value 1)
      endif()
      target_compile_definitions(${objects} PRIVATE ${macro}=${value})
    endforeach()
    target_compile_options(${objects} PRIVATE -Wall -Werror -Wundef)
    # GCC 12 takes the "undefined" operands inside its own intrinsics for uninitialized variables.
    target_compile_options(${objects} PRIVATE
      $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized -Wno-maybe-uninitialized>
      -Wno-psabi $<IF:$<BOOL:${OXYTORCH_SANITIZE}>,-O1,-O3> -fno-math-errno -fno-trapping-math -fno-exceptions -fno-rtti
      -fno-threadsafe-statics -fno-lto ${oxytorch_${level}_flags})
    target_link_libraries(${target} PRIVATE ${objects})
    # Code outside the namespace of op and level could be shared by the linker.
    add_custom_command(TARGET ${target} PRE_LINK COMMAND_EXPAND_LISTS VERBATIM
      COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tools/check_objects.py
        --nm ${CMAKE_NM} --level ${level} $<TARGET_OBJECTS:${objects}>)
  endforeach()
endfunction()
