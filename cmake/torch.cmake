# The torch of the environment: its headers and libtorch_cpu, reached through the stable ABI only.
find_package(Python3 COMPONENTS Interpreter REQUIRED)
execute_process(
  COMMAND ${Python3_EXECUTABLE} -c
    "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
  OUTPUT_VARIABLE torch_root OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT torch_root)
  message(FATAL_ERROR
    "oxytorch: no torch in the environment of ${Python3_EXECUTABLE}. "
    "Install torch first, then build with: pip install --no-build-isolation .")
endif()

add_library(oxytorch_torch INTERFACE)
target_include_directories(oxytorch_torch SYSTEM INTERFACE ${torch_root}/include)
# The oldest torch that the library runs on: 2.10.
target_compile_definitions(oxytorch_torch INTERFACE TORCH_TARGET_VERSION=0x020A000000000000)
target_link_libraries(oxytorch_torch INTERFACE ${torch_root}/lib/libtorch_cpu.so)
