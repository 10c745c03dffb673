// The structs of a backend in ik_llama.cpp's shape, for tests of the patch set: names and types, and nothing that works.
#pragma once

#include "tree.h"

struct ggml_cuda_graph {
    cudaGraph_t                             graph    = nullptr;
    cudaGraphExec_t                         instance = nullptr;
    std::vector<ggml_graph_node_properties> ggml_graph_properties;
    char **                                 dest_ptrs_d    = nullptr;
    int                                     dest_ptrs_size = 0;
};

struct ggml_backend_cuda_context {
    int            device;
    const void *   model;
    cudaStream_t   streams[GGML_CUDA_MAX_DEVICES][GGML_CUDA_MAX_STREAMS] = {};
    cublasHandle_t cublas_handles[GGML_CUDA_MAX_DEVICES]                 = {};

    std::unordered_map<const void *, std::unique_ptr<ggml_cuda_graph>> cuda_graphs;
    ggml_cuda_graph *                                                  cur_graph = nullptr;
    std::unique_ptr<ggml_cuda_pool>                                    pools[GGML_CUDA_MAX_DEVICES];

    ggml_backend_cuda_context(int device, const void * model);
    ~ggml_backend_cuda_context();

    ggml_cuda_pool & pool();
    cudaStream_t     stream();
    cublasHandle_t   cublas_handle();
};
