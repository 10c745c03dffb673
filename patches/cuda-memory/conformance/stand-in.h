// CUDA as far as a tree's own structs, its pools and the sidecar name it: a runtime that computes nothing and forgives nothing.
//
// It knows every stream, event, graph, executable, cuBLAS handle and piece of device memory that lives, and what the work in
// flight uses. What a device would answer with a crash or with silent corruption ends the process here with a sentence on
// standard error and exit code 99: use or destruction of what does not live, destruction of what work in flight uses, and
// destruction while a graph is being captured. `llama-warden patches prove` compiles a tree's structs against it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cinttypes>
#include <condition_variable>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

// ------------------------------------------------------------------------------------------------ ggml's words

#define GGML_CALL
#define GGML_API
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

template <class... All> inline void stand_in_ignore(All &&...) {}
#define GGML_LOG_DEBUG(...) stand_in_ignore(__VA_ARGS__)
#define GGML_LOG_INFO(...) stand_in_ignore(__VA_ARGS__)
#define GGML_LOG_WARN(...) stand_in_ignore(__VA_ARGS__)
#define GGML_LOG_ERROR(...) stand_in_ignore(__VA_ARGS__)
#define GGML_CUDA_LOG_INFO(...) stand_in_ignore(__VA_ARGS__)
#define GGML_CUDA_LOG_WARN(...) stand_in_ignore(__VA_ARGS__)
#define GGML_CUDA_LOG_ERROR(...) stand_in_ignore(__VA_ARGS__)
#define GGML_UNUSED(x) stand_in_ignore(x)
#define GGML_ASSERT(x) ((x) ? (void) 0 : mock::wrong("GGML_ASSERT(%s)", #x))
#define GGML_ABORT(...) mock::wrong("GGML_ABORT")
#define CUDA_CHECK(x) mock::checked((int) (x), #x)
#define CU_CHECK(x) mock::checked((int) (x), #x)
#define CUBLAS_CHECK(x) mock::checked((int) (x), #x)

// -------------------------------------------------------------------------------------------------- the runtime

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation, cudaErrorNotReady, cudaErrorPeerAccessAlreadyEnabled };
enum cublasStatus_t { CUBLAS_STATUS_SUCCESS };
enum { cudaStreamNonBlocking, CUBLAS_TF32_TENSOR_OP_MATH, CUBLAS_DEFAULT_MATH, cudaEventDisableTiming };
typedef struct CUstream_st *    cudaStream_t;
typedef struct CUevent_st *     cudaEvent_t;
typedef struct CUgraph_st *     cudaGraph_t;
typedef struct CUgraphExec_st * cudaGraphExec_t;
typedef struct CUgraphNode_st * cudaGraphNode_t;
typedef struct cublasContext *  cublasHandle_t;
struct cudaKernelNodeParams {
    void * func;
};

namespace mock {

enum kind { stream, event, graph, executable, handle, memory, kinds };
typedef uintptr_t id;

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void wrong(const char * text, ...) {
    va_list list;
    va_start(list, text);
    std::fputs("WRONG: ", stderr);
    std::vfprintf(stderr, text, list);
    std::fputc('\n', stderr);
    va_end(list);
    std::fflush(stderr);
    std::_Exit(99);
}

inline void checked(int status, const char * call) {
    if (status != 0) {
        wrong("%s failed", call);
    }
}

struct thing {
    mock::kind   kind;
    size_t       bytes;
    std::set<id> uses;           // of a stream: what work in flight uses; of graphs: what a launch would touch
    std::set<id> record    = {}; // of a stream that is being captured: what the graph will touch
    bool         capturing = false;
};

struct runtime {
    std::mutex          mutex;
    std::map<id, thing> things;
    id                  last = 0x100000; // never used twice, so that nothing dead is taken for something living
    size_t              living[kinds] = {}, made[kinds] = {};
    size_t              bytes = 0, captures = 0;

    static runtime & get() {
        static runtime * const one = new runtime;
        return *one;
    }
};

// Set while the sidecar runs in this thread, so that its calls can be told from those of the code around it.
inline thread_local bool   inside_sidecar = false;
inline thread_local int    current_device = 0;
inline std::atomic<size_t> calls_by_sidecar{ 0 };

inline std::unique_lock<std::mutex> enter() {
    if (inside_sidecar) {
        calls_by_sidecar += 1;
    }
    return std::unique_lock<std::mutex>(runtime::get().mutex);
}

template <class T> id of(T * pointer) {
    return reinterpret_cast<id>(pointer);
}

inline thing & at(id which, mock::kind kind, const char * call) {
    auto found = runtime::get().things.find(which);
    if (found == runtime::get().things.end()) {
        wrong("%s: %#zx does not live", call, (size_t) which);
    }
    if (found->second.kind != kind) {
        wrong("%s: %#zx is of another kind", call, (size_t) which);
    }
    return found->second;
}

inline id make(mock::kind kind, size_t bytes, std::set<id> uses = {}) {
    runtime & all = runtime::get();
    all.last += 0x1000;
    all.things[all.last] = thing{ kind, bytes, std::move(uses) };
    all.living[kind] += 1;
    all.made[kind] += 1;
    all.bytes += bytes;
    return all.last;
}

inline void destroy(id which, mock::kind kind, const char * call) {
    runtime & all = runtime::get();
    thing &   it  = at(which, kind, call);
    if (all.captures > 0 && kind != graph) { // of a graph only the host's description goes
        wrong("%s while a graph is being captured", call);
    }
    for (auto & other : all.things) {
        if (other.second.kind == stream && other.second.uses.count(which)) {
            wrong("%s: %#zx is used by work in flight", call, (size_t) which);
        }
    }
    all.living[kind] -= 1;
    all.bytes -= it.bytes;
    all.things.erase(which);
}

// A kernel on a stream that touches these things: recorded when the stream is being captured, else in flight.
inline void launch(cudaStream_t on, const std::set<id> & touched) {
    auto    lock = enter();
    thing & it   = at(of(on), stream, "a kernel");
    for (id which : touched) {
        if (!runtime::get().things.count(which)) {
            wrong("a kernel: %#zx does not live", (size_t) which);
        }
    }
    (it.capturing ? it.record : it.uses).insert(touched.begin(), touched.end());
}

inline size_t living(mock::kind kind) {
    std::lock_guard<std::mutex> lock(runtime::get().mutex);
    return runtime::get().living[kind];
}
inline size_t made(mock::kind kind) {
    std::lock_guard<std::mutex> lock(runtime::get().mutex);
    return runtime::get().made[kind];
}
inline size_t bytes() {
    std::lock_guard<std::mutex> lock(runtime::get().mutex);
    return runtime::get().bytes;
}
// The memory that lives, so that a kernel can be said to touch what an allocation lies in.
inline std::set<id> all_memory() {
    std::lock_guard<std::mutex> lock(runtime::get().mutex);
    std::set<id>                all;
    for (auto & one : runtime::get().things) {
        if (one.second.kind == memory) {
            all.insert(one.first);
        }
    }
    return all;
}

} // namespace mock

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceCanAccessPeer(int * can, int, int) {
    *can = 0;
    return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(size_t * free_bytes, size_t * all_bytes) {
    auto lock   = mock::enter();
    *free_bytes = size_t(8) << 30;
    *all_bytes  = size_t(16) << 30;
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t * out, int) {
    auto lock = mock::enter();
    *out      = reinterpret_cast<cudaStream_t>(mock::make(mock::stream, 0));
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t * out) { return cudaStreamCreateWithFlags(out, 0); }
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t * out, int, int) { return cudaStreamCreateWithFlags(out, 0); }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t * out, int) {
    auto lock = mock::enter();
    *out      = reinterpret_cast<cudaEvent_t>(mock::make(mock::event, 0));
    return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t * out) { return cudaEventCreateWithFlags(out, 0); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    auto lock = mock::enter();
    mock::destroy(mock::of(event), mock::event, "cudaEventDestroy");
    return cudaSuccess;
}
inline mock::thing & stand_in_done(cudaStream_t stream, const char * call) {
    mock::thing & it = mock::at(mock::of(stream), mock::stream, call);
    if (it.capturing) {
        mock::wrong("%s of a stream that is being captured", call);
    }
    it.uses.clear();
    return it;
}
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    auto lock = mock::enter();
    stand_in_done(stream, "cudaStreamQuery");
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    auto lock = mock::enter();
    stand_in_done(stream, "cudaStreamSynchronize");
    return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
    auto lock = mock::enter();
    for (auto & one : mock::runtime::get().things) {
        one.second.uses = one.second.kind == mock::stream ? std::set<mock::id>{} : one.second.uses;
    }
    return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    auto lock = mock::enter();
    stand_in_done(stream, "cudaStreamDestroy"); // it waits for its work
    mock::destroy(mock::of(stream), mock::stream, "cudaStreamDestroy");
    return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    auto lock = mock::enter();
    mock::destroy(mock::of(graph), mock::graph, "cudaGraphDestroy");
    return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    auto lock = mock::enter();
    mock::destroy(mock::of(executable), mock::executable, "cudaGraphExecDestroy");
    return cudaSuccess;
}
template <class T> cudaError_t cudaMalloc(T ** out, size_t bytes) {
    auto lock = mock::enter();
    *out      = reinterpret_cast<T *>(mock::make(mock::memory, bytes));
    return cudaSuccess;
}
inline cudaError_t cudaFree(void * memory) {
    auto lock = mock::enter();
    if (memory != nullptr) {
        mock::destroy(mock::of(memory), mock::memory, "cudaFree");
    }
    return cudaSuccess;
}
template <class T> cudaError_t cudaMallocHost(T ** out, size_t bytes) { return cudaMalloc(out, bytes); }
inline cudaError_t cudaFreeHost(void * memory) { return cudaFree(memory); }
inline cublasStatus_t cublasCreate(cublasHandle_t * out) {
    auto lock = mock::enter();
    *out      = reinterpret_cast<cublasHandle_t>(mock::make(mock::handle, 0));
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasDestroy(cublasHandle_t handle) {
    auto lock = mock::enter();
    mock::destroy(mock::of(handle), mock::handle, "cublasDestroy");
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t stand_in_use(cublasHandle_t handle, const char * call) {
    auto lock = mock::enter();
    mock::at(mock::of(handle), mock::handle, call);
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetMathMode(cublasHandle_t handle, int) { return stand_in_use(handle, "cublasSetMathMode"); }
inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t) { return stand_in_use(handle, "cublasSetStream"); }
inline cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *, size_t) {
    return stand_in_use(handle, "cublasSetWorkspace");
}

// ------------------------------------------ the driver's interface, for the pool that maps memory into a range

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
namespace mock {
// What is mapped: where, how much, which memory.
struct mapped {
    CUdeviceptr start;
    size_t      bytes;
    id          memory;
};
inline std::vector<mapped> & mappings() {
    static std::vector<mapped> * const all = new std::vector<mapped>;
    return *all;
}
} // namespace mock
inline int cuMemAddressReserve(CUdeviceptr * out, size_t, size_t, CUdeviceptr, unsigned long long) {
    static std::atomic<unsigned long long> next{ 1ull << 40 };
    *out = next.fetch_add(1ull << 36);
    return 0;
}
inline int cuMemAddressFree(CUdeviceptr, size_t) { return 0; }
inline int cuMemCreate(CUmemGenericAllocationHandle * out, size_t bytes, const CUmemAllocationProp *, unsigned long long) {
    auto lock = mock::enter();
    *out      = mock::make(mock::memory, bytes);
    return 0;
}
inline int cuMemMap(CUdeviceptr start, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
    auto lock = mock::enter();
    mock::at((mock::id) handle, mock::memory, "cuMemMap");
    mock::mappings().push_back({ start, bytes, (mock::id) handle });
    return 0;
}
inline int cuMemRelease(CUmemGenericAllocationHandle) { return 0; } // it lives on while it is mapped
inline int cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) { return 0; }
inline int cuMemUnmap(CUdeviceptr start, size_t bytes) {
    auto   lock = mock::enter();
    auto & all  = mock::mappings();
    for (auto it = all.begin(); it != all.end();) {
        if (it->start >= start && it->start < start + bytes) {
            mock::destroy(it->memory, mock::memory, "cuMemUnmap");
            it = all.erase(it);
        } else {
            ++it;
        }
    }
    return 0;
}

// ------------------------------------------------------------------------------------------- ggml, what is around

struct ggml_backend {
    void * context;
};
typedef ggml_backend * ggml_backend_t;

enum ggml_op { GGML_OP_NONE };
struct ggml_tensor {
    int64_t ne[GGML_MAX_DIMS];
};
struct ggml_cgraph {
    int            n_nodes;
    ggml_tensor ** nodes;
    uint64_t       uid;
};
struct ggml_graph_node_properties {
    void * node_address;
};
struct ggml_cuda_graph_node_properties {
    void * node_address;
};
struct ggml_cuda_stream_context {
    void reset() {}
};
struct ggml_backend_cuda_context;
struct ggml_cuda_device_info {
    int device_count;
    struct {
        int    cc;
        bool   vmm;
        size_t vmm_granularity;
    } devices[GGML_CUDA_MAX_DEVICES];
    // A fork keeps the contexts of each model.
    std::unordered_map<const void *, std::array<ggml_backend_cuda_context *, GGML_CUDA_MAX_DEVICES>> all_ctx;
};
inline const ggml_cuda_device_info & ggml_cuda_info() {
    static ggml_cuda_device_info one = [] {
        ggml_cuda_device_info info = {};
        info.device_count         = 2;
        for (auto & device : info.devices) {
            device.cc              = GGML_CUDA_CC_HOPPER;
            device.vmm             = true;
            device.vmm_granularity = size_t(2) << 20;
        }
        return info;
    }();
    return one;
}
inline int         ggml_cuda_get_physical_device(int device) { return device; }
inline int         ggml_cuda_get_device() { return mock::current_device; }
inline void        ggml_cuda_set_device(int device) { mock::current_device = device; }
inline cudaError_t ggml_cuda_device_malloc(void ** out, size_t bytes, int device) {
    ggml_cuda_set_device(device);
    return cudaMalloc(out, bytes);
}
inline int64_t ggml_time_us() {
    static std::atomic<int64_t> now{ 0 };
    return now += 1;
}
