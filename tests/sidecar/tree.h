// What a tree's own structs name, so that they and the sidecar can be read by a compiler without CUDA. Nothing here has
// a body: it is compiled with -fsyntax-only.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cinttypes>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#define GGML_CALL
#define GGML_CUDA_MAX_DEVICES 16
#define GGML_CUDA_MAX_STREAMS 8
#define GGML_CUDA_NAME "CUDA"
#define GGML_MAX_SRC 10
#define GGML_MAX_DIMS 4
#define GGML_MAX_OP_PARAMS 64
#define GGML_CUDA_CC_HOPPER 900
#define GGML_CUDA_CC_AMPERE 800
#define GGML_CUDA_FUSION 1
#define GGML_CUDA_MIN_BATCH_OFFLOAD 32
#define CUBLAS_VER_MAJOR 12
#define CUBLAS_VER_MINOR 8

template <class... All> inline void warden_ignore(All &&...) {}
#define GGML_LOG_DEBUG(...) warden_ignore(__VA_ARGS__)
#define GGML_LOG_INFO(...) warden_ignore(__VA_ARGS__)
#define GGML_LOG_WARN(...) warden_ignore(__VA_ARGS__)
#define GGML_LOG_ERROR(...) warden_ignore(__VA_ARGS__)
#define GGML_CUDA_LOG_INFO(...) warden_ignore(__VA_ARGS__)
#define GGML_CUDA_LOG_WARN(...) warden_ignore(__VA_ARGS__)
#define GGML_CUDA_LOG_ERROR(...) warden_ignore(__VA_ARGS__)
#define GGML_UNUSED(x) warden_ignore(x)
#define GGML_ASSERT(x) warden_ignore(x)
#define GGML_ABORT(...) std::abort()
#define CUDA_CHECK(x) warden_ignore(x)
#define CU_CHECK(x) warden_ignore(x)
#define CUBLAS_CHECK(x) warden_ignore(x)

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation, cudaErrorNotReady, cudaErrorPeerAccessAlreadyEnabled };
enum cublasStatus_t { CUBLAS_STATUS_SUCCESS };
enum { cudaStreamNonBlocking, CUBLAS_TF32_TENSOR_OP_MATH, cudaEventDisableTiming };
typedef struct CUstream_st *    cudaStream_t;
typedef struct CUevent_st *     cudaEvent_t;
typedef struct CUgraph_st *     cudaGraph_t;
typedef struct CUgraphExec_st * cudaGraphExec_t;
typedef struct CUgraphNode_st * cudaGraphNode_t;
typedef struct cublasContext *  cublasHandle_t;
struct cudaKernelNodeParams {
    void * func;
};

cudaError_t    cudaGetLastError();
cudaError_t    cudaDeviceSynchronize();
cudaError_t    cudaDeviceCanAccessPeer(int *, int, int);
cudaError_t    cudaEventCreateWithFlags(cudaEvent_t *, int);
cudaError_t    cudaEventDestroy(cudaEvent_t);
cudaError_t    cudaFree(void *);
cudaError_t    cudaGraphDestroy(cudaGraph_t);
cudaError_t    cudaGraphExecDestroy(cudaGraphExec_t);
cudaError_t    cudaGraphLaunch(cudaGraphExec_t, cudaStream_t);
cudaError_t    cudaStreamCreateWithFlags(cudaStream_t *, int);
cudaError_t    cudaMemGetInfo(size_t *, size_t *);
cudaError_t    cudaStreamDestroy(cudaStream_t);
cudaError_t    cudaStreamQuery(cudaStream_t);
cudaError_t    cudaStreamSynchronize(cudaStream_t);
cublasStatus_t cublasCreate(cublasHandle_t *);
cublasStatus_t cublasDestroy(cublasHandle_t);
cublasStatus_t cublasSetMathMode(cublasHandle_t, int);
cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t);
cublasStatus_t cublasSetWorkspace(cublasHandle_t, void *, size_t);
template <class T> cudaError_t cudaMalloc(T **, size_t);

// The driver's interface, for the pool that maps memory into a range of addresses.
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef int                CUdevice;
enum { CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
struct CUmemLocation {
    int type, id;
};
struct CUmemAllocationProp {
    int           type;
    CUmemLocation location;
};
struct CUmemAccessDesc {
    CUmemLocation location;
    int           flags;
};
int cuMemAddressFree(CUdeviceptr, size_t);
int cuMemAddressReserve(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
int cuMemCreate(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
int cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
int cuMemRelease(CUmemGenericAllocationHandle);
int cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
int cuMemUnmap(CUdeviceptr, size_t);

struct ggml_backend {
    void * context;
};
typedef ggml_backend * ggml_backend_t;

enum ggml_op { GGML_OP_NONE };
struct ggml_tensor {
    int64_t ne[4];
};
struct ggml_cgraph {
    int            n_nodes;
    ggml_tensor ** nodes;
};
struct ggml_graph_node_properties {
    void * node_address;
};
struct ggml_cuda_graph_node_properties {
    void * node_address;
};
struct ggml_cuda_stream_context {
    void reset();
};
struct warden_device_info {
    int device_count;
    struct {
        int    cc;
        bool   vmm;
        size_t vmm_granularity;
    } devices[GGML_CUDA_MAX_DEVICES];
};
const warden_device_info & ggml_cuda_info();
int         ggml_cuda_get_physical_device(int);
cudaError_t ggml_cuda_device_malloc(void **, size_t, int);
void        ggml_cuda_set_device(int);
int64_t     ggml_time_us();

struct ggml_cuda_pool {
    virtual ~ggml_cuda_pool() = default;
    virtual void * alloc(size_t size, size_t * actual_size) = 0;
    virtual void   free(void * ptr, size_t size)            = 0;
};
