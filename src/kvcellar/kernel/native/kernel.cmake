# The kernel as a static library, without Python: also for other builds that include it.
include(CheckCXXCompilerFlag)
find_package(Threads REQUIRED)

set(KVC_DIR ${CMAKE_CURRENT_LIST_DIR})
add_library(kvcellar_kernel STATIC
  ${KVC_DIR}/coded.cpp ${KVC_DIR}/decoder.cpp ${KVC_DIR}/dispatch.cpp ${KVC_DIR}/eagle3.cpp ${KVC_DIR}/linear.cpp
  ${KVC_DIR}/plan.cpp ${KVC_DIR}/rows.cpp ${KVC_DIR}/threads.cpp ${KVC_DIR}/step_call.cpp
  ${KVC_DIR}/isa_scalar.cpp)
target_compile_features(kvcellar_kernel PUBLIC cxx_std_17)
target_include_directories(kvcellar_kernel PUBLIC ${KVC_DIR})
target_link_libraries(kvcellar_kernel PUBLIC Threads::Threads ${CMAKE_DL_LIBS})
set_target_properties(kvcellar_kernel PROPERTIES POSITION_INDEPENDENT_CODE ON)
if(NOT MSVC)
  # Quantised bytes are the same everywhere: no multiplication and addition become one by themselves.
  target_compile_options(kvcellar_kernel PRIVATE -O3 -ffp-contract=off -fno-math-errno -Wall -Wextra)
endif()

function(kvc_level name flags)
  string(REPLACE " " ";" flag_list "${flags}")
  string(TOUPPER ${name} upper)
  set(CMAKE_REQUIRED_FLAGS "${flags}")
  check_cxx_compiler_flag("${flags}" KVC_HAS_${upper})
  if(KVC_HAS_${upper} OR flags STREQUAL "")
    target_sources(kvcellar_kernel PRIVATE ${KVC_DIR}/isa_${name}.cpp)
    set_source_files_properties(${KVC_DIR}/isa_${name}.cpp PROPERTIES COMPILE_OPTIONS "${flag_list}")
    target_compile_definitions(kvcellar_kernel PRIVATE KVC_WITH_${upper})
  endif()
endfunction()

string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" KVC_PROCESSOR)
if(KVC_PROCESSOR MATCHES "x86_64|amd64")
  kvc_level(avx2 "-mavx2 -mfma -mf16c")
  if(KVC_EMULATE_AVX_VNNI)  # for checks
    kvc_level(avx_vnni "-mavx2 -mfma -mf16c")
    set_property(SOURCE ${KVC_DIR}/isa_avx_vnni.cpp APPEND PROPERTY
      COMPILE_OPTIONS -include ${KVC_DIR}/check/emulated_avx_vnni.h)
    set_property(SOURCE ${KVC_DIR}/isa_avx_vnni.cpp ${KVC_DIR}/dispatch.cpp APPEND PROPERTY
      COMPILE_DEFINITIONS KVC_EMULATED_AVX_VNNI)
  else()
    kvc_level(avx_vnni "-mavx2 -mfma -mf16c -mavxvnni")
  endif()
  if(KVC_EMULATE_AVX512)  # for checks: its code on a processor that has AVX2 only
    set(emulated ${KVC_DIR}/isa_avx512.cpp ${KVC_DIR}/isa_vnni.cpp ${KVC_DIR}/isa_bf16.cpp)
    kvc_level(avx512 "-mavx2 -mfma -mf16c -Wno-psabi -Wno-maybe-uninitialized")
    kvc_level(vnni "-mavx2 -mfma -mf16c -Wno-psabi -Wno-maybe-uninitialized")
    kvc_level(bf16 "-mavx2 -mfma -mf16c -Wno-psabi -Wno-maybe-uninitialized")
    set_property(SOURCE ${emulated} APPEND PROPERTY
      COMPILE_OPTIONS -include ${KVC_DIR}/check/emulated_avx512.h)
    set_property(SOURCE ${emulated} ${KVC_DIR}/dispatch.cpp APPEND PROPERTY
      COMPILE_DEFINITIONS KVC_EMULATED_AVX512)
  else()
    # GCC 12 warns of its own headers.
    kvc_level(avx512 "-Wno-uninitialized -Wno-maybe-uninitialized -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c")
    kvc_level(vnni "-Wno-uninitialized -Wno-maybe-uninitialized -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx2 -mfma -mf16c")
    kvc_level(bf16 "-Wno-uninitialized -Wno-maybe-uninitialized -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16 -mavx2 -mfma -mf16c")
  endif()
  # One instruction of float16 in the source for VNNI.
  check_cxx_compiler_flag(-mavx512fp16 KVC_HAS_FP16)
  if(KVC_HAS_VNNI AND (KVC_HAS_FP16 OR KVC_EMULATE_AVX512))
    target_compile_definitions(kvcellar_kernel PRIVATE KVC_WITH_FP16)
  endif()
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND NOT KVC_EMULATE_AVX512)
    kvc_level(amx "-Wno-uninitialized -Wno-maybe-uninitialized -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vbmi -mavx512vnni -mavx2 -mfma -mf16c -mamx-tile -mamx-bf16 -mamx-int8")
    if(KVC_EMULATE_AMX AND KVC_HAS_AMX)  # for checks: its code on a processor without it
      set_property(SOURCE ${KVC_DIR}/isa_amx.cpp APPEND PROPERTY
        COMPILE_OPTIONS -include ${KVC_DIR}/check/emulated_amx.h)
      target_compile_definitions(kvcellar_kernel PRIVATE KVC_EMULATED_AMX)
    endif()
  endif()
elseif(KVC_PROCESSOR MATCHES "aarch64|arm64")
  kvc_level(neon "")
endif()
