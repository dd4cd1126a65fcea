# A compiler cache, where one is installed and the builder has not chosen a launcher: another clone, or
# a build after `make clean`, takes the object files of the one before.
find_program(oxytorch_ccache ccache)
if(oxytorch_ccache AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  message(STATUS "oxytorch: compiles through ${oxytorch_ccache}")
  # Paths below the tree do not tell files apart; with sloppiness it takes precompiled headers.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}
    CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros ${oxytorch_ccache})
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
endif()
