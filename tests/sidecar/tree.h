// The types that a tree's own structs name, so that a compiler without CUDA can read them with the sidecar: the stand-in of
// `patches prove`, and the base of the pools, which the stand-in's program takes from the tree. It is compiled with -fsyntax-only.
#pragma once

#include "stand-in.h"

cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t);

struct ggml_cuda_pool {
    virtual ~ggml_cuda_pool() = default;
    virtual void * alloc(size_t size, size_t * actual_size) = 0;
    virtual void   free(void * ptr, size_t size)            = 0;
};
