# The Python extension. It compiles against the pybind11 in torch's own headers: another version would not see
# c10d::Backend as a base class. torch's CMake package is not used, since it asks for CUDA where torch was built with it.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec('torch').origin).parent)"
  OUTPUT_VARIABLE TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE TORCH_MISSING)
if(TORCH_MISSING)
  message(FATAL_ERROR "torch is not installed for ${Python_EXECUTABLE}: pip install torch, or -DMCCL_BUILD_TORCH=OFF")
endif()
message(STATUS "torch: ${TORCH_DIR}")

Python_add_library(_C MODULE WITH_SOABI
  ${CSRC}/torch/bindings.cpp ${CSRC}/torch/coalesced.cpp ${CSRC}/torch/collectives.cpp
  ${CSRC}/torch/compression.cpp ${CSRC}/torch/devices.cpp ${CSRC}/torch/future_bindings.cpp
  ${CSRC}/torch/group_bindings.cpp ${CSRC}/torch/groups.cpp
  ${CSRC}/torch/integer_mean.cpp ${CSRC}/torch/messages.cpp ${CSRC}/torch/nested.cpp ${CSRC}/torch/plan_bindings.cpp
  ${CSRC}/torch/process_group.cpp ${CSRC}/torch/simulated_device.cpp ${CSRC}/torch/sparse.cpp ${CSRC}/torch/tensors.cpp
  ${CSRC}/torch/work.cpp)
if(APPLE)
  target_sources(_C PRIVATE ${CSRC}/device/metal/calls_apple.cpp ${CSRC}/device/metal/metal_stream.cpp
    ${CSRC}/torch/mps.cpp)
  target_link_libraries(_C PRIVATE "-framework Foundation" "-framework Metal")
endif()
target_include_directories(_C SYSTEM PRIVATE
  ${TORCH_DIR}/include ${TORCH_DIR}/include/torch/csrc/api/include)
target_compile_definitions(_C PRIVATE TORCH_EXTENSION_NAME=_C TORCH_API_INCLUDE_EXTENSION_H USE_DISTRIBUTED USE_C10D)
# bindings.cpp alone is large; -O1 halves its build and nothing in torch/ is hot beyond a call.
target_compile_options(_C PRIVATE -Wall -Wextra -Wno-unused-parameter -O1 -g0)
target_link_directories(_C PRIVATE ${TORCH_DIR}/lib)
target_link_libraries(_C PRIVATE mccl_engine torch_python torch_cpu torch c10)
if(APPLE)
  set_target_properties(_C PROPERTIES BUILD_RPATH "@loader_path/../torch/lib" INSTALL_RPATH "@loader_path/../torch/lib")
else()
  # Where torch lies is torch's affair: it is imported first, and its libraries are loaded by then.
  set_target_properties(_C PROPERTIES BUILD_RPATH "" INSTALL_RPATH "$ORIGIN/../torch/lib")
  target_link_options(_C PRIVATE -Wl,--no-as-needed)
endif()
install(TARGETS _C LIBRARY DESTINATION mccl_core)
