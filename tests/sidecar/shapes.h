// A small backend of our own in the shape of one era of ggml's CUDA backend: SHAPE says which. It has the members that
// the sidecar looks for, and a computation that captures, launches, and takes memory and handles as the real one does.
//
//     SHAPE       graphs                    lock       handles       pools         more
//     ONE_BARE    one                       none       by device     by device
//     ONE         one                       yes        by device     by device
//     MAP         by first node             yes        by device     and stream
//     SWEPT       by first node             yes        by device     and stream    own sweep of old graphs
//     SPACES      by first node             yes        and stream    and stream    own sweep, workspaces of handles
//     FORK        by first node             plain int  by device     by device     current graph, copy pointers
//     PLAIN       none (no USE_CUDA_GRAPH)  yes        by device     and stream
#pragma once

#include <array>
#include <condition_variable>
#include <memory>
#include <unordered_map>
#include <vector>

#include "stub-cuda.h"

#define ONE_BARE 1
#define ONE 2
#define MAP 3
#define SWEPT 4
#define SPACES 5
#define FORK 6
#define PLAIN 7
#ifndef SHAPE
#error "say which SHAPE"
#endif

#define SHAPE_HAS_MAP (SHAPE == MAP || SHAPE == SWEPT || SHAPE == SPACES || SHAPE == FORK)
#define SHAPE_HAS_GRAPHS (SHAPE != PLAIN)
#define SHAPE_HAS_LOCK (SHAPE != ONE_BARE)
#define SHAPE_BY_STREAM (SHAPE == MAP || SHAPE == SWEPT || SHAPE == SPACES || SHAPE == PLAIN)
#define SHAPE_SWEEPS (SHAPE == SWEPT || SHAPE == SPACES)
#if SHAPE_HAS_GRAPHS
#define USE_CUDA_GRAPH
#endif

#define GGML_CUDA_MAX_DEVICES 16
#define GGML_CUDA_MAX_STREAMS 8

struct ggml_tensor {
    int data;
};
struct ggml_cgraph {
    int            n_nodes;
    ggml_tensor ** nodes;
};
struct ggml_backend {
    void * context;
};
typedef ggml_backend * ggml_backend_t;

// ---------------------------------------------------------------------------------------------- pools

struct ggml_cuda_pool {
    virtual ~ggml_cuda_pool() = default;
    virtual void * alloc(size_t bytes)              = 0;
    virtual void   free(void * memory, size_t bytes) = 0;
    // What an allocation that was just made touches.
    virtual std::set<mock::id> touched(void * memory) = 0;
};

// Keeps what was returned, and gives each piece out again whole.
struct ggml_cuda_pool_leg : ggml_cuda_pool {
    struct piece {
        void * ptr  = nullptr;
        size_t size = 0;
    };
    int                   device;
    std::array<piece, 32> buffer_pool{};
    size_t                pool_size = 0;

    explicit ggml_cuda_pool_leg(int device) : device(device) {}
    ~ggml_cuda_pool_leg() override {
        ggml_cuda_set_device(device);
        for (piece & kept : buffer_pool) {
            if (kept.ptr != nullptr) {
                cudaFree(kept.ptr);
                pool_size -= kept.size;
            }
        }
        if (pool_size != 0) {
            mock::wrong("a pool ends while %zu bytes of it are in use", pool_size);
        }
    }
    void * alloc(size_t bytes) override {
        for (piece & kept : buffer_pool) {
            if (kept.ptr != nullptr && kept.size == bytes) {
                void * memory = kept.ptr;
                kept          = {};
                return memory;
            }
        }
        void * memory = nullptr;
        ggml_cuda_set_device(device);
        cudaMalloc(&memory, bytes);
        pool_size += bytes;
        return memory;
    }
    void free(void * memory, size_t bytes) override {
        for (piece & kept : buffer_pool) {
            if (kept.ptr == nullptr) {
                kept.ptr  = memory;
                kept.size = bytes;
                return;
            }
        }
        mock::wrong("the pool is full");
    }
    std::set<mock::id> touched(void * memory) override { return { mock::of(memory) }; }
};

// One range of addresses that grows.
struct ggml_cuda_pool_vmm : ggml_cuda_pool {
    std::vector<void *> mapped;
    int                 device;
    size_t              pool_used = 0, pool_size = 0;

    explicit ggml_cuda_pool_vmm(int device) : device(device) {}
    ~ggml_cuda_pool_vmm() override {
        if (pool_used != 0) {
            mock::wrong("a pool ends while %zu bytes of it are in use", pool_used);
        }
        for (void * part : mapped) {
            cudaFree(part);
        }
    }
    void * alloc(size_t bytes) override {
        if (pool_used + bytes > pool_size) {
            const size_t more = pool_used + bytes - pool_size;
            mapped.push_back(nullptr);
            cudaMalloc(&mapped.back(), more);
            pool_size += more;
        }
        pool_used += bytes;
        return mapped.back();
    }
    void               free(void *, size_t bytes) override { pool_used -= bytes; }
    std::set<mock::id> touched(void *) override {
        std::set<mock::id> all;
        for (void * part : mapped) {
            all.insert(mock::of(part));
        }
        return all;
    }
};

inline bool pools_are_vmm = false;

// --------------------------------------------------------------------------------------------- graphs

#if SHAPE_HAS_LOCK
static std::mutex              ggml_cuda_lock;
static std::condition_variable ggml_cuda_lock_cv;
#if SHAPE == FORK
static int ggml_cuda_lock_counter = 0;
#else
static std::atomic<int> ggml_cuda_lock_counter;
#endif
#endif

struct ggml_cuda_graph {
#if SHAPE_HAS_GRAPHS
    cudaGraph_t     graph    = nullptr;
    cudaGraphExec_t instance = nullptr;
    bool            warm     = false;
#if SHAPE_SWEEPS
    int64_t last_used_time = 0;
#endif
#if SHAPE_HAS_MAP
    std::vector<std::array<char, 600>> node_props;
#else
    std::vector<std::array<char, 600>> ggml_graph_properties;
    const void *                       key = nullptr;
#endif
#if SHAPE == FORK
    char ** dest_ptrs_d;
    int     dest_ptrs_size = 0;
#endif
    ggml_cuda_graph() = default;
    ggml_cuda_graph(const ggml_cuda_graph &) = delete;
    ggml_cuda_graph & operator=(const ggml_cuda_graph &) = delete;
    ~ggml_cuda_graph() {
        if (instance != nullptr && cudaGraphExecDestroy(instance) != cudaSuccess) {
            std::abort();
        }
        if (graph != nullptr) {
            cudaGraphDestroy(graph);
        }
    }
#endif
};

// -------------------------------------------------------------------------------------------- context

struct ggml_backend_cuda_context {
    int            device;
    cudaStream_t   streams[GGML_CUDA_MAX_DEVICES][GGML_CUDA_MAX_STREAMS] = {};
#if SHAPE == SPACES
    cublasHandle_t cublas_handles[GGML_CUDA_MAX_DEVICES][GGML_CUDA_MAX_STREAMS] = {};
    void *         cublas_workspaces[GGML_CUDA_MAX_DEVICES][GGML_CUDA_MAX_STREAMS] = {};
    size_t         cublas_workspace_sizes[GGML_CUDA_MAX_DEVICES] = {};
#else
    cublasHandle_t cublas_handles[GGML_CUDA_MAX_DEVICES] = {};
#endif
#if SHAPE_BY_STREAM
    int                             curr_stream_no = 0;
    std::unique_ptr<ggml_cuda_pool> pools[GGML_CUDA_MAX_DEVICES][GGML_CUDA_MAX_STREAMS];
#else
    std::unique_ptr<ggml_cuda_pool> pools[GGML_CUDA_MAX_DEVICES];
#endif
#if SHAPE_HAS_MAP
    std::unordered_map<const void *, std::unique_ptr<ggml_cuda_graph>> cuda_graphs;
#elif SHAPE_HAS_GRAPHS
    std::unique_ptr<ggml_cuda_graph> cuda_graph;
#endif
#if SHAPE_SWEEPS
    int64_t clock = 0, last_graph_eviction_sweep = 0;
#endif
#if SHAPE == FORK
    ggml_cuda_graph * cur_graph = nullptr;
#endif

    explicit ggml_backend_cuda_context(int device) : device(device) {}
    ggml_backend_cuda_context(const ggml_backend_cuda_context &) = delete;
    ggml_backend_cuda_context & operator=(const ggml_backend_cuda_context &) = delete;

    ~ggml_backend_cuda_context() {
#if SHAPE_HAS_LOCK
        std::unique_lock<std::mutex> lock(ggml_cuda_lock);
        ggml_cuda_lock_cv.wait(lock, [] { return ggml_cuda_lock_counter == 0; });
#endif
        for (auto & row : streams) {
            for (cudaStream_t stream : row) {
                if (stream != nullptr) {
                    cudaStreamDestroy(stream);
                }
            }
        }
        for (int d = 0; d < GGML_CUDA_MAX_DEVICES; ++d) {
            ggml_cuda_set_device(d);
#if SHAPE == SPACES
            for (int s = 0; s < GGML_CUDA_MAX_STREAMS; ++s) {
                if (cublas_handles[d][s] != nullptr) {
                    cublasDestroy(cublas_handles[d][s]);
                    cudaFree(cublas_workspaces[d][s]);
                }
            }
#else
            if (cublas_handles[d] != nullptr) {
                cublasDestroy(cublas_handles[d]);
            }
#endif
        }
#if SHAPE_HAS_MAP
        cuda_graphs.clear(); // graphs and pools under the lock too: the runtime here has no patience
#elif SHAPE_HAS_GRAPHS
        cuda_graph.reset();
#endif
        for (auto & pool : pools) {
            reset(pool);
        }
    }
    static void reset(std::unique_ptr<ggml_cuda_pool> & pool) { pool.reset(); }
    template <class T, size_t N> static void reset(T (&row)[N]) {
        for (T & each : row) {
            reset(each);
        }
    }

    int stream_number() const {
#if SHAPE_BY_STREAM
        return curr_stream_no;
#else
        return 0;
#endif
    }
    cudaStream_t stream(int on, int number) {
        if (streams[on][number] == nullptr) {
            ggml_cuda_set_device(on);
            cudaStreamCreate(&streams[on][number]);
        }
        return streams[on][number];
    }
    cudaStream_t stream() { return stream(device, stream_number()); }

#if SHAPE == SPACES
    cublasHandle_t cublas_handle() {
        cublasHandle_t & here = cublas_handles[device][curr_stream_no];
        if (here == nullptr) {
            ggml_cuda_set_device(device);
            cublasCreate(&here);
            cublas_workspace_sizes[device] = 4096;
            cudaMalloc(&cublas_workspaces[device][curr_stream_no], cublas_workspace_sizes[device]);
        }
        return here;
    }
#else
    cublasHandle_t cublas_handle(int on) {
        if (cublas_handles[on] == nullptr) {
            ggml_cuda_set_device(on);
            cublasCreate(&cublas_handles[on]);
        }
        return cublas_handles[on];
    }
    cublasHandle_t cublas_handle() { return cublas_handle(device); }
#endif

    ggml_cuda_pool & pool() {
#if SHAPE_BY_STREAM
        auto & here = pools[device][curr_stream_no];
#else
        auto & here = pools[device];
#endif
        if (!here) {
            if (pools_are_vmm) {
                here = std::make_unique<ggml_cuda_pool_vmm>(device);
            } else {
                here = std::make_unique<ggml_cuda_pool_leg>(device);
            }
        }
        return *here;
    }

#if SHAPE_HAS_GRAPHS
    ggml_cuda_graph & graph_of(const void * key) {
#if SHAPE_HAS_MAP
#if SHAPE_SWEEPS
        clock += 1;
        if (clock - last_graph_eviction_sweep > 5000) {
            last_graph_eviction_sweep = clock;
            cudaStreamSynchronize(stream());
            for (auto it = cuda_graphs.begin(); it != cuda_graphs.end();) {
                it = clock - it->second->last_used_time > 10000 ? cuda_graphs.erase(it) : std::next(it);
            }
        }
#endif
        auto & here = cuda_graphs[key];
        if (!here) {
            here = std::make_unique<ggml_cuda_graph>();
            here->node_props.resize(4);
        }
#if SHAPE_SWEEPS
        here->last_used_time = clock;
#endif
#if SHAPE == FORK
        cur_graph = here.get();
#endif
        return *here;
#else
        (void) key;
        if (!cuda_graph) {
            cuda_graph = std::make_unique<ggml_cuda_graph>();
        }
        return *cuda_graph;
#endif
    }
#endif
};

#if SHAPE_HAS_MAP
static const void * ggml_cuda_graph_get_key(ggml_cgraph * graph) {
    return graph->nodes[0];
}
#endif
