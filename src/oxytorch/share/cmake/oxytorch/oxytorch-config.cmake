# find_package(oxytorch CONFIG [COMPONENTS program ops kernels])
#
#   oxytorch::program   opens and runs files of oxytorch.save: oxytorch/program.h
#   oxytorch::ops       registers oxytorch's operators in a program with libtorch
#   oxytorch::kernels   kernels over plain pointers, without libtorch: oxytorch/kernels.h
#
# The first two need libtorch: the torch package beside this one, or that of CMAKE_PREFIX_PATH.
# Without COMPONENTS they are left out where there is none.
get_filename_component(oxytorch_root ${CMAKE_CURRENT_LIST_DIR}/../../.. REALPATH)
set(oxytorch_components program ops kernels)

foreach(component IN LISTS oxytorch_FIND_COMPONENTS)
  if(NOT component IN_LIST oxytorch_components)
    set(oxytorch_FOUND FALSE)
    set(oxytorch_NOT_FOUND_MESSAGE
      "oxytorch: expected components program, ops or kernels, got ${component}")
    return()
  endif()
endforeach()

# Adds an imported library and the target that programs link.
function(oxytorch_add_target name library)
  if(NOT EXISTS ${oxytorch_root}/lib/lib${library}.so)
    set(oxytorch_lacks ${oxytorch_root}/lib/lib${library}.so PARENT_SCOPE)
    return()
  endif()
  if(NOT TARGET oxytorch::lib${library})
    add_library(oxytorch::lib${library} SHARED IMPORTED)
    set_target_properties(oxytorch::lib${library} PROPERTIES
      IMPORTED_LOCATION ${oxytorch_root}/lib/lib${library}.so
      INTERFACE_INCLUDE_DIRECTORIES ${oxytorch_root}/include)
  endif()
  if(NOT TARGET oxytorch::${name})
    add_library(oxytorch::${name} INTERFACE IMPORTED)
    target_link_libraries(oxytorch::${name} INTERFACE oxytorch::lib${library})
  endif()
endfunction()

set(oxytorch_wanted ${oxytorch_FIND_COMPONENTS})
if(NOT oxytorch_wanted)
  set(oxytorch_wanted ${oxytorch_components})
endif()
foreach(component IN LISTS oxytorch_wanted)
  set(oxytorch_lacks "")
  if(component STREQUAL "kernels")
    oxytorch_add_target(kernels oxytorch_kernels)
  else()
    if(NOT TARGET torch)
      find_package(Torch QUIET CONFIG HINTS ${oxytorch_root}/../torch/share/cmake)
    endif()
    if(TARGET torch)
      oxytorch_add_target(${component} oxytorch)
    else()
      set(oxytorch_lacks "libtorch; add torch.utils.cmake_prefix_path to CMAKE_PREFIX_PATH")
    endif()
    if(TARGET oxytorch::${component})
      target_link_libraries(oxytorch::${component} INTERFACE torch)
      target_compile_features(oxytorch::${component} INTERFACE cxx_std_20)
    endif()
  endif()
  if(TARGET oxytorch::${component})
    set(oxytorch_${component}_FOUND TRUE)
  elseif(oxytorch_FIND_REQUIRED_${component})
    set(oxytorch_FOUND FALSE)
    set(oxytorch_NOT_FOUND_MESSAGE "oxytorch: component ${component} lacks ${oxytorch_lacks}")
  endif()
endforeach()
if(TARGET oxytorch::ops AND NOT oxytorch_ops_source)
  # Compiled in the program, against its own libtorch.
  set(oxytorch_ops_source ${oxytorch_root}/share/cpp/register_ops.cpp)
  target_sources(oxytorch::ops INTERFACE ${oxytorch_ops_source})
endif()
