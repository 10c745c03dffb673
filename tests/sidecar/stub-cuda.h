// A CUDA runtime that computes nothing and forgives nothing.
//
// It knows every stream, graph, executable, cuBLAS handle and piece of device memory that lives, which of them the work
// in flight uses, and which of them a captured graph would touch. Whatever a real device would answer with a crash or
// with silent corruption ends the process here, at once, with a sentence on stderr and exit code 99:
//
//     use or destruction of something that does not live          destruction while work in flight uses it
//     destruction while any stream is being captured              a launch of a graph whose memory or handle is gone
//     a cuBLAS call with another current device than its handle's  any call after the runtime's own end
#pragma once

#include <atomic>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation, cudaErrorNotReady, cudaErrorUnknown };
enum cublasStatus_t { CUBLAS_STATUS_SUCCESS, CUBLAS_STATUS_NOT_INITIALIZED };
typedef struct CUstream_st *    cudaStream_t;
typedef struct CUgraph_st *     cudaGraph_t;
typedef struct CUgraphExec_st * cudaGraphExec_t;
typedef struct cublasContext *  cublasHandle_t;

namespace mock {

enum kind { stream, graph, executable, handle, memory, kinds };
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

struct thing {
    mock::kind   kind;
    int          device;
    size_t       bytes;
    std::set<id> uses; // of a stream: what work in flight uses; of graphs: what a launch would touch
    std::set<id> record = {}; // of a stream that is being captured: what the graph will touch
    bool         capturing = false;
};

struct runtime {
    std::mutex                   mutex;
    std::map<id, thing>          things;
    id                           last = 0x1000; // never used twice, so that nothing dead is taken for something living
    size_t                       living[kinds] = {}, made[kinds] = {};
    size_t                       bytes = 0, captures = 0, synchronisations = 0;
    bool                         ended = false;
    cudaError_t                  next_synchronise = cudaSuccess;
    bool                         busy = false; // work that was launched is not done yet
    size_t                       free_bytes = size_t(8) << 30; // of every device
    std::function<void(id)>      on_synchronise; // called without the lock

    static runtime & get() {
        static runtime * const one = new runtime;
        return *one;
    }
};

// Set while the sidecar runs in this thread, so that its calls can be told from those of the code around it.
inline thread_local bool   inside_sidecar = false;
inline thread_local int    current_device = 0;
inline thread_local cudaError_t last_error = cudaSuccess;
inline std::atomic<size_t> calls_by_sidecar{ 0 };

inline std::unique_lock<std::mutex> enter(const char * call) {
    std::unique_lock<std::mutex> lock(runtime::get().mutex);
    if (runtime::get().ended) {
        wrong("%s after the end of the runtime", call);
    }
    if (inside_sidecar) {
        calls_by_sidecar += 1;
    }
    return lock;
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

inline id make(mock::kind kind, size_t bytes) {
    runtime & all = runtime::get();
    all.last += 0x100;
    all.things[all.last] = thing{ kind, current_device, bytes, {}, {}, false };
    all.living[kind] += 1;
    all.made[kind] += 1;
    all.bytes += bytes;
    return all.last;
}

inline void destroy(id which, mock::kind kind, const char * call) {
    runtime & all = runtime::get();
    thing &   it  = at(which, kind, call);
    if (all.captures > 0) {
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

template <class T> id of(T * pointer) { return reinterpret_cast<id>(pointer); }

// ---------------------------------------------------------------------- for the code that plays ggml

// A kernel on a stream that touches these things: recorded when the stream is being captured, else in flight.
inline void launch(cudaStream_t on, const std::set<id> & touched) {
    auto    lock = enter("a kernel");
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
inline void fail_synchronisations(cudaError_t how) {
    std::lock_guard<std::mutex> lock(runtime::get().mutex);
    runtime::get().next_synchronise = how;
}
inline void keep_busy(bool busy) {
    std::lock_guard<std::mutex> lock(runtime::get().mutex);
    runtime::get().busy = busy;
}
inline void leave_free(size_t bytes) {
    std::lock_guard<std::mutex> lock(runtime::get().mutex);
    runtime::get().free_bytes = bytes;
}
inline void finish_work(cudaStream_t on) {
    auto lock = enter("the end of work");
    at(of(on), stream, "the end of work").uses.clear();
}
inline size_t synchronisations() {
    std::lock_guard<std::mutex> lock(runtime::get().mutex);
    return runtime::get().synchronisations;
}
inline cudaError_t failed(cudaError_t how) {
    last_error = how;
    return how;
}
inline void on_synchronise(std::function<void(id)> what) {
    std::lock_guard<std::mutex> lock(runtime::get().mutex);
    runtime::get().on_synchronise = std::move(what);
}
inline void end_runtime() {
    std::lock_guard<std::mutex> lock(runtime::get().mutex);
    runtime::get().ended = true;
}

} // namespace mock

inline void ggml_cuda_set_device(int device) {
    auto lock = mock::enter("set_device");
    mock::current_device = device;
}

inline cudaError_t cudaStreamCreate(cudaStream_t * out) {
    auto lock = mock::enter("cudaStreamCreate");
    *out      = reinterpret_cast<cudaStream_t>(mock::make(mock::stream, 0));
    return cudaSuccess;
}

inline cudaError_t cudaGetLastError() {
    auto              lock = mock::enter("cudaGetLastError");
    const cudaError_t last = mock::last_error;
    mock::last_error       = cudaSuccess;
    return last;
}

inline cudaError_t cudaMemGetInfo(size_t * free_bytes, size_t * all_bytes) {
    auto lock   = mock::enter("cudaMemGetInfo");
    *free_bytes = mock::runtime::get().free_bytes;
    *all_bytes  = size_t(16) << 30;
    return cudaSuccess;
}

namespace mock {
inline void about_to_wait(cudaStream_t stream, const char * call) {
    std::function<void(mock::id)> first;
    {
        auto lock = mock::enter(call);
        first     = mock::runtime::get().on_synchronise;
    }
    if (first) {
        first(mock::of(stream));
    }
}
} // namespace mock

inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    mock::about_to_wait(stream, "cudaStreamQuery");
    auto          lock = mock::enter("cudaStreamQuery");
    mock::thing & it   = mock::at(mock::of(stream), mock::stream, "cudaStreamQuery");
    if (it.capturing) {
        mock::wrong("cudaStreamQuery of a stream that is being captured");
    }
    if (mock::runtime::get().next_synchronise != cudaSuccess) {
        return mock::failed(mock::runtime::get().next_synchronise);
    }
    if (mock::runtime::get().busy && !it.uses.empty()) {
        return mock::failed(cudaErrorNotReady);
    }
    it.uses.clear();
    return cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    mock::about_to_wait(stream, "cudaStreamSynchronize");
    auto          lock = mock::enter("cudaStreamSynchronize");
    mock::thing & it   = mock::at(mock::of(stream), mock::stream, "cudaStreamSynchronize");
    if (it.capturing) {
        mock::wrong("cudaStreamSynchronize of a stream that is being captured");
    }
    if (mock::runtime::get().next_synchronise != cudaSuccess) {
        return mock::failed(mock::runtime::get().next_synchronise);
    }
    mock::runtime::get().synchronisations += 1;
    it.uses.clear();
    return cudaSuccess;
}

inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    auto lock = mock::enter("cudaStreamDestroy");
    mock::at(mock::of(stream), mock::stream, "cudaStreamDestroy").uses.clear(); // waits for its work
    mock::destroy(mock::of(stream), mock::stream, "cudaStreamDestroy");
    return cudaSuccess;
}

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream) {
    auto          lock = mock::enter("cudaStreamBeginCapture");
    mock::thing & it   = mock::at(mock::of(stream), mock::stream, "cudaStreamBeginCapture");
    if (it.capturing) {
        mock::wrong("a capture inside of a capture");
    }
    it.capturing = true;
    it.record.clear();
    mock::runtime::get().captures += 1;
    return cudaSuccess;
}

inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t * out) {
    auto          lock = mock::enter("cudaStreamEndCapture");
    mock::thing & it   = mock::at(mock::of(stream), mock::stream, "cudaStreamEndCapture");
    if (!it.capturing) {
        mock::wrong("the end of a capture that did not begin");
    }
    it.capturing = false;
    mock::runtime::get().captures -= 1;
    const std::set<mock::id> record = it.record;
    const mock::id made = mock::make(mock::graph, 0);
    mock::runtime::get().things[made].uses = record;
    *out = reinterpret_cast<cudaGraph_t>(made);
    return cudaSuccess;
}

inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t * out, cudaGraph_t graph) {
    auto                     lock   = mock::enter("cudaGraphInstantiate");
    const std::set<mock::id> record = mock::at(mock::of(graph), mock::graph, "cudaGraphInstantiate").uses;
    const mock::id           made   = mock::make(mock::executable, 0);
    mock::runtime::get().things[made].uses = record;
    *out = reinterpret_cast<cudaGraphExec_t>(made);
    return cudaSuccess;
}

inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    auto               lock    = mock::enter("cudaGraphLaunch");
    std::set<mock::id> touched = mock::at(mock::of(executable), mock::executable, "cudaGraphLaunch").uses;
    for (mock::id which : touched) {
        if (!mock::runtime::get().things.count(which)) {
            mock::wrong("cudaGraphLaunch: the graph uses %#zx, which does not live any more", (size_t) which);
        }
    }
    touched.insert(mock::of(executable));
    mock::at(mock::of(stream), mock::stream, "cudaGraphLaunch").uses.insert(touched.begin(), touched.end());
    return cudaSuccess;
}

inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    auto lock = mock::enter("cudaGraphExecDestroy");
    mock::destroy(mock::of(executable), mock::executable, "cudaGraphExecDestroy");
    return cudaSuccess;
}

inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    auto lock = mock::enter("cudaGraphDestroy");
    // May be called while others capture: it only frees the host's description.
    mock::at(mock::of(graph), mock::graph, "cudaGraphDestroy");
    mock::runtime::get().living[mock::graph] -= 1;
    mock::runtime::get().things.erase(mock::of(graph));
    return cudaSuccess;
}

inline cudaError_t cudaMalloc(void ** out, size_t bytes) {
    auto lock = mock::enter("cudaMalloc");
    *out      = reinterpret_cast<void *>(mock::make(mock::memory, bytes));
    return cudaSuccess;
}

inline cudaError_t cudaFree(void * memory) {
    auto lock = mock::enter("cudaFree");
    mock::destroy(mock::of(memory), mock::memory, "cudaFree");
    return cudaSuccess;
}

inline cublasStatus_t cublasCreate(cublasHandle_t * out) {
    auto lock = mock::enter("cublasCreate");
    *out      = reinterpret_cast<cublasHandle_t>(mock::make(mock::handle, 0));
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasDestroy(cublasHandle_t handle) {
    auto      lock   = mock::enter("cublasDestroy");
    const int device = mock::at(mock::of(handle), mock::handle, "cublasDestroy").device;
    if (device != mock::current_device) {
        mock::wrong("cublasDestroy of a handle of device %d while device %d is current", device, mock::current_device);
    }
    mock::destroy(mock::of(handle), mock::handle, "cublasDestroy");
    return CUBLAS_STATUS_SUCCESS;
}
