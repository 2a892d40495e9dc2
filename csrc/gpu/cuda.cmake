# Sets KVSERVER_WITH_CUDA and, where that is true, makes the CUDA compiler and CUDA::cudart_static known.
# Looked for: what CMAKE_CUDA_COMPILER or CUDACXX names, nvcc in PATH, nvcc under /usr/local/cuda*.
# KVSERVER_CUDA=ON: an error if it cannot be used. AUTO: a line with the reason why it is left out.
include(CheckLanguage)

set(KVSERVER_CUDA_LEAST 12.8)  # the first to compile for sm_100
set(KVSERVER_WITH_CUDA OFF)

if(NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE)  # of a build folder from before there was one
endif()
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  file(GLOB kvserver_cuda_folders /usr/local/cuda /usr/local/cuda-*)
  find_program(KVSERVER_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS ${kvserver_cuda_folders} PATH_SUFFIXES bin)
  if(KVSERVER_NVCC)
    set(ENV{CUDACXX} ${KVSERVER_NVCC})
  endif()
endif()
check_language(CUDA)

if(NOT CMAKE_CUDA_COMPILER)
  set(kvserver_cuda_missing "no working nvcc was found")
else()
  enable_language(CUDA)
  find_package(CUDAToolkit QUIET)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS KVSERVER_CUDA_LEAST)
    set(kvserver_cuda_missing "${CMAKE_CUDA_COMPILER} is of version ${CMAKE_CUDA_COMPILER_VERSION}")
  elseif(NOT TARGET CUDA::cudart_static)
    set(kvserver_cuda_missing "the static CUDA runtime was not found")
  else()
    set(KVSERVER_WITH_CUDA ON)
  endif()
endif()

if(KVSERVER_WITH_CUDA)
  message(STATUS "kvserver: with CUDA ${CMAKE_CUDA_COMPILER_VERSION}, ${CMAKE_CUDA_COMPILER}")
elseif(KVSERVER_CUDA STREQUAL "AUTO")
  message(STATUS "kvserver: CUDA is left out: ${kvserver_cuda_missing}. To have it, install a CUDA toolkit of "
    "${KVSERVER_CUDA_LEAST} or later and build again, with CUDACXX=/path/to/nvcc if it is in no usual place")
else()
  message(FATAL_ERROR "kvserver: KVSERVER_CUDA is ${KVSERVER_CUDA}, but ${kvserver_cuda_missing}; "
    "a CUDA toolkit of ${KVSERVER_CUDA_LEAST} or later is needed")
endif()
