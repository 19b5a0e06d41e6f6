# The kernel as a static library, without Python: also for other builds that include it.
include(CheckCXXCompilerFlag)
find_package(Threads REQUIRED)

set(KVC_DIR ${CMAKE_CURRENT_LIST_DIR})
add_library(kvcellar_kernel STATIC
  ${KVC_DIR}/core/levels.cpp ${KVC_DIR}/core/threads.cpp
  ${KVC_DIR}/attend/plan.cpp ${KVC_DIR}/attend/step_call.cpp
  ${KVC_DIR}/linear/linear.cpp ${KVC_DIR}/linear/coded.cpp ${KVC_DIR}/linear/blocks.cpp
  ${KVC_DIR}/linear/fitting.cpp
  ${KVC_DIR}/layers/rows.cpp ${KVC_DIR}/layers/decoder.cpp ${KVC_DIR}/layers/eagle3.cpp
  ${KVC_DIR}/experts/experts.cpp
  ${KVC_DIR}/recurrent/recurrent.cpp
  ${KVC_DIR}/isa/scalar.cpp)
target_compile_features(kvcellar_kernel PUBLIC cxx_std_17)
target_include_directories(kvcellar_kernel PUBLIC ${KVC_DIR})
target_link_libraries(kvcellar_kernel PUBLIC Threads::Threads ${CMAKE_DL_LIBS})
set_target_properties(kvcellar_kernel PROPERTIES POSITION_INDEPENDENT_CODE ON)
if(NOT MSVC)
  # Quantised bytes are the same everywhere: no multiplication and addition become one by themselves.
  target_compile_options(kvcellar_kernel PRIVATE -O3 -ffp-contract=off -fno-math-errno -Wall -Wextra)
endif()

# A level is a translation unit of its own, with its own flags: it is left out where the compiler lacks them.
# In checks (KVC_EMULATE) plain C++ takes the place of what AVX2 lacks, and `emulated` is included first.
function(kvc_level name flags)
  set(emulated ${ARGN})
  if(KVC_EMULATE AND emulated)
    set(flags "-mavx2 -mfma -mf16c -Wno-psabi -Wno-maybe-uninitialized")
  endif()
  string(REPLACE " " ";" flag_list "${flags}")
  string(TOUPPER ${name} upper)
  set(CMAKE_REQUIRED_FLAGS "${flags}")
  check_cxx_compiler_flag("${flags}" KVC_HAS_${upper})
  if(KVC_HAS_${upper} OR flags STREQUAL "")
    target_sources(kvcellar_kernel PRIVATE ${KVC_DIR}/isa/${name}.cpp)
    target_compile_definitions(kvcellar_kernel PRIVATE KVC_WITH_${upper})
    if(KVC_EMULATE)
      foreach(header ${emulated})
        list(APPEND flag_list -include ${KVC_DIR}/check/${header})
      endforeach()
    endif()
    set_source_files_properties(${KVC_DIR}/isa/${name}.cpp PROPERTIES COMPILE_OPTIONS "${flag_list}")
  endif()
endfunction()

string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" KVC_PROCESSOR)
if(KVC_PROCESSOR MATCHES "x86_64|amd64")
  if(KVC_EMULATE)
    set_source_files_properties(${KVC_DIR}/core/levels.cpp PROPERTIES COMPILE_DEFINITIONS KVC_EMULATED)
  endif()
  set(avx2 "-mavx2 -mfma -mf16c")
  # GCC 12 warns of its own headers.
  set(vnni "${avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -Wno-uninitialized -Wno-maybe-uninitialized")
  kvc_level(avx2 "${avx2}")
  kvc_level(avx_vnni "${avx2} -mavxvnni" emulated_avx_vnni.h)
  kvc_level(vnni "${vnni}" emulated_avx512.h)
  kvc_level(bf16 "${vnni} -mavx512bf16" emulated_avx512.h)
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    kvc_level(amx "${vnni} -mavx512bf16 -mamx-tile -mamx-bf16" emulated_avx512.h emulated_amx.h)
  endif()
elseif(KVC_PROCESSOR MATCHES "aarch64|arm64")
  kvc_level(neon "")
endif()
