// The functions of a backend in ik_llama.cpp's shape, for tests of the patch set: who looks up and who drops graphs, who takes
// memory of which pools, and where the lock is declared. No line of it is anybody else's.
#include "ggml-cuda/common.cuh"

#include <map>

enum ggml_status { GGML_STATUS_SUCCESS };
static const char * half_of_a_copy = "two halves";

// Every context of every model, for whoever loads tensors again.
static std::map<const void *, std::vector<ggml_backend_cuda_context *>> & everybody() {
    static std::map<const void *, std::vector<ggml_backend_cuda_context *>> all;
    return all;
}

extern "C" void ggml_backend_cuda_invalidate_graphs(const void * model) {
    for (auto ctx : everybody()[model]) {
        if (ctx) {
            ctx->cuda_graphs.clear();
        }
    }
}

struct ggml_cuda_pool_leg : public ggml_cuda_pool {
    struct piece {
        void * ptr  = nullptr;
        size_t size = 0;
    };
    piece  buffer_pool[256];
    size_t pool_size = 0;

    void * alloc(size_t size, size_t * actual_size) override;
    void   free(void * ptr, size_t size) override;
};

struct ggml_cuda_pool_vmm : public ggml_cuda_pool {
    size_t pool_used = 0;
    size_t pool_size = 0;

    void * alloc(size_t size, size_t * actual_size) override;
    void   free(void * ptr, size_t size) override;
};

static std::mutex              ggml_cuda_lock;
static std::condition_variable ggml_cuda_lock_cv;
static int                     ggml_cuda_lock_counter = 0;

template <class T> struct ggml_cuda_pool_alloc {
    explicit ggml_cuda_pool_alloc(ggml_cuda_pool & pool) { stand_in_ignore(pool); }
};
struct half {
    short bits;
};

ggml_backend_cuda_context::~ggml_backend_cuda_context() {
    std::unique_lock<std::mutex> lock(ggml_cuda_lock);
    ggml_cuda_lock_cv.wait(lock, [] { return ggml_cuda_lock_counter == 0; });
    stand_in_ignore(cuda_graphs.size());
}

static void ggml_backend_cuda_free(ggml_backend_t backend) {
    ggml_backend_cuda_context * cuda_ctx = (ggml_backend_cuda_context *) backend->context;

    delete cuda_ctx;
    delete backend;
}

static bool ggml_backend_cuda_cpy_tensor_async(ggml_backend_t backend_src, ggml_backend_t backend_dst) {
    ggml_backend_cuda_context * cuda_ctx_src = (ggml_backend_cuda_context *) backend_src->context;
    ggml_backend_cuda_context * cuda_ctx_dst = (ggml_backend_cuda_context *) backend_dst->context;

    if (half_of_a_copy != nullptr) {
        ggml_cuda_pool_alloc<half> tmp_src(cuda_ctx_src->pool());
        ggml_cuda_pool_alloc<half> tmp_dst(cuda_ctx_dst->pool());
        stand_in_ignore(tmp_src, tmp_dst);
    }
    return true;
}

static const void * ggml_cuda_graph_get_key(ggml_cgraph * cgraph) {
    return cgraph->nodes[0];
}

static ggml_cuda_graph * ggml_cuda_get_graph(ggml_backend_cuda_context & ctx, const void * key) {
    auto & graph = ctx.cuda_graphs[key];
    if (!graph) {
        graph = std::make_unique<ggml_cuda_graph>();
    }
    return graph.get();
}

// What a computation calls has the context itself.
static void multiply(ggml_backend_cuda_context & ctx) {
    ggml_cuda_pool_alloc<half> some(ctx.pool());
    stand_in_ignore(some);
}

static void evaluate_and_capture_cuda_graph(ggml_backend_cuda_context * cuda_ctx, ggml_cgraph * cgraph) {
    auto graph = ggml_cuda_get_graph(*cuda_ctx, ggml_cuda_graph_get_key(cgraph));
    multiply(*cuda_ctx);
    std::lock_guard<std::mutex> lock(ggml_cuda_lock);
    if (--ggml_cuda_lock_counter == 0 && graph != nullptr) {
        ggml_cuda_lock_cv.notify_all();
    }
    if (graph->instance != nullptr) {
        stand_in_ignore(cudaGraphLaunch(graph->instance, cuda_ctx->stream()));
    }
}

static enum ggml_status ggml_backend_cuda_graph_compute(ggml_backend_t backend, ggml_cgraph * cgraph) {
    ggml_backend_cuda_context * cuda_ctx = (ggml_backend_cuda_context *) backend->context;

    cuda_ctx->cur_graph = ggml_cuda_get_graph(*cuda_ctx, ggml_cuda_graph_get_key(cgraph));
    evaluate_and_capture_cuda_graph(cuda_ctx, cgraph);

    return GGML_STATUS_SUCCESS;
}

const void * in_use[] = { (const void *) ggml_backend_cuda_free, (const void *) ggml_backend_cuda_cpy_tensor_async,
                          (const void *) ggml_backend_cuda_graph_compute };
