// One scenario per process, named by the first argument, with its settings in the environment: the sidecar reads them
// once. Exit code 0: as promised. 1: a check failed. 99: the runtime of stub-cuda.h saw what a device would not forgive.
//
// Nothing here sleeps for luck: what happens in time is waited for, with a deadline.
#include "shapes.h"

#if SHAPE_HAS_LOCK
#define LLAMA_WARDEN_HAS_GRAPH_LOCK 1
#else
#define LLAMA_WARDEN_HAS_NO_GRAPH_LOCK 1
#endif
#include "llama-warden-cuda.cuh"

#include <chrono>
#include <new>
#include <string>
#include <sys/wait.h>
#include <thread>

#if defined(LLAMA_WARDEN_TEST_NO_THREADS)
#include <cerrno>
#include <dlfcn.h>
#include <pthread.h>
static std::atomic<bool> threads_run_out{ false };
extern "C" int pthread_create(pthread_t * thread, const pthread_attr_t * attributes, void * (*run)(void *), void * argument) {
    using function = int (*)(pthread_t *, const pthread_attr_t *, void * (*) (void *), void *);
    static const function real = reinterpret_cast<function>(dlsym(RTLD_NEXT, "pthread_create"));
    return threads_run_out ? EAGAIN : real(thread, attributes, run, argument);
}
#endif

using namespace llama_warden;
using context_t = ggml_backend_cuda_context;

#define CHECK(holds)                                                                  \
    do {                                                                              \
        if (!(holds)) {                                                               \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #holds); \
            std::fflush(stderr);                                                      \
            std::_Exit(1);                                                            \
        }                                                                             \
    } while (false)

template <class F> static void wait_until(const char * what, F holds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!holds()) {
        if (std::chrono::steady_clock::now() > end) {
            std::fprintf(stderr, "did not come: %s\n", what);
            std::_Exit(1);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
}

// ------------------------------------------------------------------------------------------ playing ggml

static ggml_tensor many_tensors[200000];

// As with GGML_CUDA_DISABLE_GRAPHS=1: graphs are looked up and never captured.
[[maybe_unused]] static bool graphs_are_off = false;

// What one computation does.
struct work {
    size_t                bytes = 0;          // of the pool
    bool                  blas  = false;
    std::function<void()> inside;             // called while it runs, captured or not
};

static void body(context_t & context, const work & what) {
    std::set<mock::id> touched;
    void *             memory = nullptr;
    if (what.bytes > 0) {
        memory  = context.pool().alloc(what.bytes);
        touched = context.pool().touched(memory);
    }
    if (what.blas) {
        touched.insert(mock::of(context.cublas_handle()));
#if SHAPE == SPACES
        touched.insert(mock::of(context.cublas_workspaces[context.device][context.curr_stream_no]));
#endif
    }
    mock::launch(context.stream(), touched);
    if (what.inside) {
        what.inside();
    }
    if (memory != nullptr) {
        context.pool().free(memory, what.bytes);
    }
}

#if SHAPE_HAS_GRAPHS
static void capture(context_t & context, ggml_cuda_graph & graph, const work & what) {
#if SHAPE_HAS_LOCK
    {
        std::lock_guard<std::mutex> lock(ggml_cuda_lock);
        ggml_cuda_lock_counter += 1;
    }
#endif
    cudaStreamBeginCapture(context.stream());
    body(context, what);
    if (graph.graph != nullptr) {
        cudaGraphDestroy(graph.graph);
        graph.graph = nullptr;
    }
    cudaStreamEndCapture(context.stream(), &graph.graph);
#if SHAPE_HAS_LOCK
    std::lock_guard<std::mutex> lock(ggml_cuda_lock);
    ggml_cuda_lock_counter -= 1;
    if (ggml_cuda_lock_counter == 0) {
        ggml_cuda_lock_cv.notify_all();
    }
#endif
}
#endif

// The place of ggml_backend_cuda_graph_compute, with the hooks where the patch set puts them. The first computation of a
// graph runs as it is, the second is captured, later ones are launched.
static void compute(context_t & context, size_t key, const work & what = {}) {
    ggml_tensor * node  = &many_tensors[key];
    ggml_cgraph   graph = { 1, &node };

    mock::inside_sidecar = true;
    compute_guard guard(&context);
    mock::inside_sidecar = false;
#if SHAPE == FORK
    auto dropped = [&] { // the guard holds the lock
        const auto & values = registry::get().find(&context)->values;
        return values[v_evicted] + values[v_invalidations];
    };
    const uint64_t before = config().any() ? dropped() : 0;
#endif

    ggml_cuda_set_device(context.device);
#if SHAPE_HAS_GRAPHS
    ggml_cuda_graph & cached = context.graph_of(node);
#if !SHAPE_HAS_MAP
    if (cached.key != node) { // another computation: captured anew at once
        if (cached.instance != nullptr) {
            cudaStreamSynchronize(context.stream());
#if SHAPE_HAS_LOCK
            // What the backend does by itself is not what is looked at: it waits for captures of others.
            std::unique_lock<std::mutex> lock(ggml_cuda_lock);
            ggml_cuda_lock_cv.wait(lock, [] { return ggml_cuda_lock_counter == 0; });
#endif
            cudaGraphExecDestroy(cached.instance);
            cached.instance = nullptr;
        }
        cached.warm = cached.key != nullptr;
        cached.key  = node;
    }
#endif
    if (cached.instance != nullptr) {
        cudaGraphLaunch(cached.instance, context.stream());
        if (what.inside) {
            what.inside();
        }
    } else if (cached.warm && !graphs_are_off) {
        capture(context, cached, what);
        cudaGraphInstantiate(&cached.instance, cached.graph);
        cudaGraphLaunch(cached.instance, context.stream());
    } else {
        cached.warm = true;
        body(context, what);
    }
#if SHAPE == FORK
    if (cached.dest_ptrs_size == 0 && !graphs_are_off) {
        void * pointers = nullptr;
        cudaMalloc(&pointers, 64);
        cached.dest_ptrs_d    = static_cast<char **>(pointers);
        cached.dest_ptrs_size = 8;
    }
#endif
#else
    body(context, what);
#endif
    mock::inside_sidecar = true;
    guard.finish(&graph);
    mock::inside_sidecar = false;
    if (config().any()) {
        CHECK(mock::current_device == context.device);
    }
#if SHAPE == FORK
    CHECK(context.cur_graph == nullptr || context.cuda_graphs.count(node) == 1);
    CHECK(context.cur_graph == nullptr || context.cur_graph == context.cuda_graphs[node].get());
    CHECK(!config().any() || dropped() == before || context.cur_graph == nullptr); // what was found by it may be gone
#endif
}

static void twice(context_t & context, size_t key, const work & what = {}) {
    compute(context, key, what);
    compute(context, key, what);
}

static void free_backend(context_t * context) {
    mock::inside_sidecar = true;
    forget(context);
    mock::inside_sidecar = false;
#if SHAPE == FORK
    // The fork does not give these back either; here each byte is counted.
    cudaStreamSynchronize(context->stream());
    std::unique_lock<std::mutex> lock(ggml_cuda_lock);
    ggml_cuda_lock_cv.wait(lock, [] { return ggml_cuda_lock_counter == 0; });
    for (auto & entry : context->cuda_graphs) {
        if (entry.second->dest_ptrs_size > 0) {
            cudaFree(entry.second->dest_ptrs_d);
        }
    }
    lock.unlock();
#endif
    delete context;
}

static std::shared_ptr<state> state_of(context_t & context) {
    return registry::get().find(&context);
}
// A counter, read under the lock as the idle thread may be writing it.
static uint64_t counter(context_t & context, value which) {
    const std::shared_ptr<state> st = state_of(context);
    std::lock_guard<std::mutex>  lock(st->mutex);
    return st->values[which];
}
[[maybe_unused]] static size_t graphs_in(context_t & context) {
    const std::shared_ptr<state> st = state_of(context);
    std::lock_guard<std::mutex>  lock(st->mutex);
    return cached_graphs(context);
}
static size_t threads() {
    size_t count = 0;
    for (const char * line : { "/proc/self/status" }) {
        FILE * file = std::fopen(line, "r");
        char   text[256];
        while (file != nullptr && std::fgets(text, sizeof(text), file) != nullptr) {
            (void) std::sscanf(text, "Threads: %zu", &count);
        }
        if (file != nullptr) {
            std::fclose(file);
        }
    }
    return count;
}

// Whatever was made is gone when its context is: no leak, in any scenario that ends with it.
static void nothing_lives() {
    for (int kind = 0; kind < mock::kinds; ++kind) {
        CHECK(mock::living((mock::kind) kind) == 0);
    }
    CHECK(mock::bytes() == 0);
}

// --------------------------------------------------------------------------------------------- scenarios

// Without a variable: no call, no thread, no memory of contexts.
static void inert() {
    const size_t before = threads();
    for (int round = 0; round < 3; ++round) {
        auto * context = new context_t(round);
        for (size_t key = 0; key < 300; ++key) {
            twice(*context, key, { 1 << 20, true, {} });
        }
        free_backend(context);
    }
    CHECK(!config().any());
    CHECK(mock::calls_by_sidecar == 0);
    CHECK(registry::get().all().empty());
    CHECK(threads() == before);
    nothing_lives();
}

// What works in every shape: all fixes on, two contexts on two devices, and nothing that a device would not forgive.
static void everything() {
    auto * one = new context_t(0);
    auto * two = new context_t(3);
    for (size_t i = 0; i < 3000; ++i) {
        context_t & context = i % 2 == 0 ? *one : *two;
        state_of(context)->last_reset = now_ms() - 2000; // no waiting for the interval
        compute(context, i / 2 % 7 == 0 ? i : i / 2 % 5, { (i / 2 % 11 + 1) << 18, i % 3 == 0, {} });
    }
    for (context_t * context : { one, two }) {
        CHECK(counter(*context, v_computes) == 1500);
        CHECK(counter(*context, v_errors) == 0);
        CHECK(counter(*context, v_cublas_resets) >= 10);
        CHECK(counter(*context, v_purges) >= 1);
#if SHAPE_HAS_MAP
        CHECK(counter(*context, v_evicted) >= 10);
#endif
    }
    free_backend(one);
    free_backend(two);
    nothing_lives();
}

#if SHAPE_HAS_MAP
// LLAMA_WARDEN_GRAPH_CACHE_CAP=4
static void cap() {
    context_t context(0);
    size_t    most = 0;
    for (size_t key = 0; key < 60; ++key) {
        twice(context, key);
        most = std::max(most, context.cuda_graphs.size());
        CHECK(context.cuda_graphs.size() <= 4);
        CHECK(context.cuda_graphs.count(&many_tensors[key]) == 1);
    }
    CHECK(most == 4);
    CHECK(mock::living(mock::executable) == context.cuda_graphs.size());
#if SHAPE != FORK
    CHECK(counter(context, v_evicted) == 60 - context.cuda_graphs.size());
#endif
    forget(&context);
}

// LLAMA_WARDEN_GRAPH_CACHE_CAP=4: three stay when a fifth comes, the ones used last.
static void lru() {
    context_t context(0);
    for (size_t key : { 10, 11, 12, 13, 10, 14 }) {
        compute(context, key);
    }
    auto has = [&](size_t key) { return context.cuda_graphs.count(&many_tensors[key]) == 1; };
    CHECK(context.cuda_graphs.size() == 3);
    CHECK(has(14) && has(10) && has(13) && !has(11) && !has(12));
    forget(&context);
}

// LLAMA_WARDEN_GRAPH_CACHE_CAP=1: the smallest still keeps the one in use, and launches it.
static void one() {
    context_t context(0);
    for (int i = 0; i < 50; ++i) {
        compute(context, 5);
    }
    CHECK(mock::made(mock::executable) == 1 && context.cuda_graphs.size() == 1);
    compute(context, 6);
    CHECK(context.cuda_graphs.size() == 1 && context.cuda_graphs.count(&many_tensors[6]) == 1);
    forget(&context);
}

// LLAMA_WARDEN_GRAPH_CACHE_CAP=16: 130 graphs for each token, as with layers on the CPU.
static void rotation() {
    context_t context(0);
    auto token = [&] {
        for (size_t key = 0; key < 130; ++key) {
            compute(context, key);
        }
    };
    for (int i = 0; i < 4; ++i) {
        token();
    }
    const uint64_t evicted  = counter(context, v_evicted);
    const size_t   captured = mock::made(mock::executable);
    for (int i = 0; i < 30; ++i) {
        token();
    }
    CHECK(counter(context, v_evicted) == evicted);
    CHECK(mock::made(mock::executable) <= captured + 130);
    CHECK(mock::living(mock::executable) == 130);
    CHECK(counter(context, v_live_splits) == 130 && counter(context, v_effective_cap) == 130);
    // And when the model is used whole again, the bound comes back.
    for (int i = 0; i < 200; ++i) {
        compute(context, 1000);
    }
    CHECK(counter(context, v_live_splits) == 1 && context.cuda_graphs.size() <= 16);
    forget(&context);
}

// LLAMA_WARDEN_GRAPH_CACHE_CAP=16: graphs that never come again, between tokens that do.
static void used_once() {
    context_t context(0);
    for (size_t i = 0; i < 30000; ++i) {
        compute(context, 100 + i);
        compute(context, i % 3);
        CHECK(context.cuda_graphs.size() <= 16);
        CHECK(state_of(context)->rounds.live() <= 3);
    }
    // Also a hundred thousand in a row, with nothing that comes again between them.
    for (size_t i = 0; i < 100000; ++i) {
        compute(context, 50000 + i);
        CHECK(context.cuda_graphs.size() <= 16);
        CHECK(state_of(context)->ticks.size() <= 2 * 16 + 64 + 1);
    }
    forget(&context);
}

// LLAMA_WARDEN_GRAPH_CACHE_CAP=1000: ggml's own sweep takes graphs too; their times are not kept for ever.
static void swept() {
    context_t context(0);
    for (size_t i = 0; i < 20000; ++i) {
        compute(context, i);
        if (i % 100 == 0) {
            cudaStreamSynchronize(context.stream());
#if SHAPE == FORK
            for (auto & entry : context.cuda_graphs) {
                cudaFree(entry.second->dest_ptrs_d);
            }
#endif
            context.cuda_graphs.clear();
        }
        CHECK(state_of(context)->ticks.size() <= 2 * 101 + 64 + 1);
    }
    CHECK(counter(context, v_evicted) == 0);
    forget(&context);
}

// LLAMA_WARDEN_GRAPH_CACHE_CAP=16: prompts in pieces of 41 graphs, then tokens of 130, again and again.
static void mixed() {
    context_t context(0);
    for (int request = 0; request < 10; ++request) {
        for (int piece = 0; piece < 5; ++piece) {
            for (size_t key = 0; key < 41; ++key) {
                compute(context, 500 + key);
            }
        }
        uint64_t evicted = 0;
        for (int token = 0; token < 12; ++token) {
            if (token == 3) {
                evicted = counter(context, v_evicted);
            }
            for (size_t key = 0; key < 130; ++key) {
                compute(context, key);
            }
        }
        CHECK(counter(context, v_evicted) == evicted); // no thrash within the answer
        CHECK(context.cuda_graphs.size() <= 130);
    }
    forget(&context);
}

// LLAMA_WARDEN_GRAPH_CACHE_CAP=16: addresses of old graphs that come again by accident.
static void reuse() {
    context_t context(0);
    uint64_t  random = 88172645463325252u;
    for (size_t i = 0; i < 30000; ++i) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        compute(context, 10 + random % 1000);
        compute(context, 0);
        compute(context, 0);
        CHECK(context.cuda_graphs.size() <= std::max<size_t>(16, state_of(context)->rounds.live()));
        CHECK(state_of(context)->rounds.live() <= 4);
    }
    forget(&context);
}
#endif

#if SHAPE_HAS_GRAPHS && SHAPE_HAS_LOCK
// LLAMA_WARDEN_GRAPH_IDLE_TRIM_S=1
static void idle_trim() {
    auto * context = new context_t(2);
    for (int round = 1; round <= 2; ++round) {
        for (size_t key = 0; key < 5; ++key) {
            compute(*context, key);
            compute(*context, key);
            compute(*context, key);
        }
        CHECK(mock::living(mock::executable) > 0);
        wait_until("the graphs are given back", [] { return mock::living(mock::executable) == 0; });
        wait_until("and counted", [&] { return counter(*context, v_trimmed) > 0; });
        CHECK(graphs_in(*context) == 0);
    }
    CHECK(counter(*context, v_evicted) == 0 && counter(*context, v_errors) == 0);
    free_backend(context);
    nothing_lives();
}

// LLAMA_WARDEN_GRAPH_IDLE_TRIM_S=1: a context that computes keeps its graphs, however long that takes; another is trimmed.
static void idle_busy() {
    context_t busy(0), idle(1);
    twice(busy, 1);
    const size_t before = mock::living(mock::executable);
    compute(busy, 1, { 0, false, [&] {
        // As old as a computation can get, and a moment older than the other's.
        state_of(busy)->last_use = 1;
        twice(idle, 2);
        CHECK(mock::living(mock::executable) == before + 1);
        wait_until("the idle context is trimmed", [&] { return counter(idle, v_trimmed) > 0; });
        CHECK(mock::living(mock::executable) == before);
        ggml_cuda_set_device(busy.device);
    } });
    forget(&busy);
    forget(&idle);
}

// LLAMA_WARDEN_GRAPH_IDLE_TRIM_S=1: nothing is destroyed while another thread captures.
static void idle_capture() {
    context_t         capturing(0), idle(1);
    std::atomic<bool> captured{ false }, go_on{ false };
    twice(idle, 2);
    compute(capturing, 1);
    std::thread other([&] {
        compute(capturing, 1, { 0, false, [&] {
            captured = true;
            wait_until("go on", [&] { return go_on.load(); });
        } });
    });
    wait_until("the capture runs", [&] { return captured.load(); });
    wait_until("the idle thread came and left", [&] { return counter(idle, v_skipped) > 0; });
    CHECK(graphs_in(idle) == 1 && counter(idle, v_trimmed) == 0);
    go_on = true;
    other.join();
    wait_until("the graphs go afterwards", [&] { return counter(idle, v_trimmed) == 1; });
    forget(&capturing);
    forget(&idle);
}

// LLAMA_WARDEN_GRAPH_IDLE_TRIM_S=1: a second hooked function of the backend takes the guard only, and looks up graphs.
static void idle_guard_alone() {
    context_t context(0);
    twice(context, 1);
    for (int i = 0; i < 2000; ++i) {
        const compute_guard guard(&context);
        state_of(context)->last_use = 1; // due at any time
        state_of(context)->trimmed  = false;
        context.graph_of(&many_tensors[i % 50]);
    }
    wait_until("the graphs go", [&] { return graphs_in(context) == 0; });
    forget(&context);
}
#endif

#if SHAPE_HAS_LOCK
// Two contexts as a communicator knows them.
struct pair_of_backends {
    ggml_backend   backends[2];
    ggml_backend_t all[2] = { &backends[0], &backends[1] };
    pair_of_backends(context_t & one, context_t & other) : backends{ { &one }, { &other } } {}
};

// LLAMA_WARDEN_POOL_BUDGET_MIB=1, LLAMA_WARDEN_POOL_PURGE_INTERVAL_MS=1000: adding up over devices, which is no computation,
// takes memory of the pools of several contexts. The idle thread gives back another context's pool meanwhile, and not these.
static void all_reduce() {
    context_t        one(0), other(1), witness(2);
    pair_of_backends pair(one, other);
    auto             fill = [](context_t & context) {
        compute(context, 1, { 4 << 20, false, {} }); // purged at its end
        compute(context, 1, { 4 << 20, false, {} }); // too soon for another purge
        const std::shared_ptr<state> st = state_of(context);
        std::lock_guard<std::mutex>  lock(st->mutex);
        st->last_use = 1, st->last_purge = 0, st->purge_interval = 1000; // due at any time
    };
    fill(one), fill(other);
    auto held = hold(pair.all, 2);
    state_of(one)->last_use = state_of(other)->last_use = 1;
    std::set<mock::id>            touched[2];
    void *                        memory[2];
    const std::vector<context_t *> both = { &one, &other };
    std::vector<ggml_cuda_pool *> pools;
    for (context_t * context : both) {
        pools.push_back(&context->pool());
    }
    const uint64_t purges[2] = { state_of(one)->values[v_purges], state_of(other)->values[v_purges] };
    for (uint64_t round = 1; round <= 2; ++round) {
        fill(witness);
        const uint64_t before = counter(witness, v_purges);
        wait_until("the idle thread comes by", [&] { return counter(witness, v_purges) > before; });
    }
    for (size_t i = 0; i < 2; ++i) {
        CHECK(state_of(*both[i])->values[v_purges] == purges[i]);
        memory[i]  = pools[i]->alloc(2 << 20);
        touched[i] = pools[i]->touched(memory[i]);
        mock::launch(both[i]->stream(), touched[i]);
    }
    for (size_t i = 0; i < 2; ++i) {
        pools[i]->free(memory[i], 2 << 20);
        cudaStreamSynchronize(both[i]->stream());
    }
    held.reset();
    for (size_t i = 0; i < 2; ++i) {
        wait_until("these are given back afterwards", [&] { return counter(*both[i], v_purges) > purges[i]; });
    }
    for (context_t * context : { &one, &other, &witness }) {
        forget(context);
    }
}

// All fixes: two threads, each of which computes on its context and then adds up over both, as often as the idle thread
// can be made to come.
static void all_reduce_race() {
    context_t                one(0), other(1);
    pair_of_backends         pair(one, other);
    std::vector<std::thread> both;
    for (context_t * own : { &one, &other }) {
        both.emplace_back([&, own] {
            const auto begin = now_ms();
            for (size_t i = 0; i < 200 || now_ms() - begin < 1500; ++i) {
                compute(*own, i % 3, { (i % 7 + 1) << 18, i % 2 == 0, {} });
                {
                    const auto held = hold(pair.all, 2);
                    for (context_t * context : { &one, &other }) {
                        ggml_cuda_set_device(context->device);
                        void * memory = context->pool().alloc((i % 5 + 1) << 18);
                        mock::launch(context->stream(), context->pool().touched(memory));
                        context->pool().free(memory, (i % 5 + 1) << 18);
                        const std::shared_ptr<state> st = state_of(*context);
                        st->last_purge = 0, st->purge_interval = 1;
                    }
                }
                {
                    const std::shared_ptr<state> st = state_of(*own);
                    std::lock_guard<std::mutex>  lock(st->mutex);
                    st->last_use = 1; // as after a long pause
                }
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
        });
    }
    for (std::thread & each : both) {
        each.join();
    }
    CHECK(counter(one, v_errors) == 0 && counter(one, v_purges) > 0);
    forget(&one);
    forget(&other);
}

// LLAMA_WARDEN_POOL_BUDGET_MIB=1, LLAMA_WARDEN_POOL_PURGE_INTERVAL_MS=1: what each request needs anew is given back ever
// more rarely.
static void idle_backs_off() {
    context_t context(1);
    auto      interval = [&] {
        const std::shared_ptr<state> st = state_of(context);
        std::lock_guard<std::mutex>  lock(st->mutex);
        return st->purge_interval;
    };
    uint64_t purges = 0;
    for (int request = 0; request < 3; ++request) {
        const uint64_t before = interval();
        for (int part = 0; part < 3; ++part) { // small ones first
            compute(context, 2, { 4096, false, {} });
        }
        const std::shared_ptr<state> st = state_of(context);
        {
            std::lock_guard<std::mutex> lock(st->mutex);
            st->last_purge     = now_ms(); // so that this computation does not purge by itself
            st->purge_interval = 100000;
        }
        compute(context, 1, { 4 << 20, false, {} });
        {
            std::lock_guard<std::mutex> lock(st->mutex);
            CHECK(st->values[v_purges] == purges);
            if (request > 0) {
                CHECK(st->purge_interval == 10000); // doubled, up to ten seconds: it was needed again
            }
            st->purge_interval = before;
            st->last_purge     = 0;
            st->last_use       = 1;
        }
        wait_until("the pool is given back", [&] { return counter(context, v_purges) > purges; });
        purges = counter(context, v_purges);
    }
    // What is not needed again brings the short interval back.
    {
        const std::shared_ptr<state> st = state_of(context);
        std::lock_guard<std::mutex>  lock(st->mutex);
        st->purge_interval = 5000;
    }
    for (int i = 0; i < 40; ++i) {
        compute(context, 2, { 4096, false, {} });
    }
    CHECK(interval() == 1);
    forget(&context);
}

// LLAMA_WARDEN_POOL_BUDGET_MIB=1, LLAMA_WARDEN_POOL_PURGE_INTERVAL_MS=1: the host returned long ago and the device is still
// at work: nothing is given back, and nobody waits for it.
static void stream_busy() {
    context_t context(1), witness(0);
    mock::keep_busy(true);
    auto fill = [](context_t & which) {
        const std::shared_ptr<state> st = state_of(which);
        {
            std::lock_guard<std::mutex> lock(st->mutex);
            st->last_purge     = now_ms();
            st->purge_interval = 100000;
        }
        compute(which, 1, { 4 << 20, false, {} });
        std::lock_guard<std::mutex> lock(st->mutex);
        st->last_purge = 0, st->purge_interval = 1, st->last_use = 1;
    };
    fill(context);
    const size_t synchronised = mock::synchronisations();
    for (int round = 0; round < 2; ++round) {
        fill(witness);
        const uint64_t before = counter(witness, v_purges);
        wait_until("the idle thread comes by", [&] {
            mock::finish_work(witness.stream());
            return counter(witness, v_purges) > before;
        });
    }
    CHECK(counter(context, v_purges) == 0 && counter(context, v_errors) == 0);
    CHECK(mock::synchronisations() == synchronised);
    {
        const std::shared_ptr<state> st = state_of(context);
        std::lock_guard<std::mutex>  lock(st->mutex);
        CHECK(st->last_use > 1); // the device's work counts as use
    }
    mock::keep_busy(false);
    wait_until("it is given back", [&] { return counter(context, v_purges) == 1; });
    forget(&context);
    forget(&witness);
}

// LLAMA_WARDEN_POOL_BUDGET_MIB=1, LLAMA_WARDEN_POOL_PURGE_INTERVAL_MS=1000: what is left over goes without a computation.
static void idle_purge() {
    auto * context = new context_t(1);
    compute(*context, 1, { 4 << 20, false, {} });
    CHECK(counter(*context, v_purges) == 1);
    compute(*context, 2, { 4 << 20, false, {} }); // too soon after the first
    CHECK(counter(*context, v_purges) == 1 && mock::bytes() >= 4 << 20);
    wait_until("the pool is given back", [] { return mock::bytes() < 1 << 20; });
    wait_until("and counted", [&] { return counter(*context, v_purges) == 2; });
    compute(*context, 3, { 512 << 10, false, {} });
    CHECK(counter(*context, v_purges) == 2);
    free_backend(context);
    nothing_lives();
}
#endif

// LLAMA_WARDEN_POOL_BUDGET_MIB=1, LLAMA_WARDEN_POOL_PURGE_INTERVAL_MS=20000
static void purge() {
    auto *  context = new context_t(1);
    state & st      = *state_of(*context);
    auto    age     = [&](uint64_t ms) { st.last_purge = now_ms() - ms; };
    auto    purges  = [&] { return counter(*context, v_purges); };

    for (int i = 0; i < 5; ++i) {
        compute(*context, 1, { 512 << 10, true, {} });
    }
    CHECK(purges() == 0 && counter(*context, v_pool_peak) == 512 << 10);

    const size_t executables = mock::living(mock::executable);
    CHECK(executables == (SHAPE_HAS_GRAPHS ? 1 : 0));
    compute(*context, 2, { 4 << 20, false, {} });
    CHECK(purges() == 1 && counter(*context, v_purged_bytes) >= 4 << 20);
    CHECK(mock::bytes() < 4 << 20);
    CHECK(mock::living(mock::executable) == 0); // they knew addresses of the pool
    CHECK(counter(*context, v_invalidations) == 1);

    // The next computation needs it all again: that is its demand, so the interval doubles.
    compute(*context, 2, { 4 << 20, false, {} });
    CHECK(purges() == 1 && st.purge_interval == 20000);
    st.purge_interval = 3000; // as after a shorter setting
    age(2500);
    compute(*context, 2, { 4 << 20, false, {} });
    CHECK(purges() == 1); // not before the interval
    age(3500);
    compute(*context, 2, { 4 << 20, false, {} });
    CHECK(purges() == 2);
    compute(*context, 2, { 4 << 20, false, {} });
    CHECK(st.purge_interval == 6000 && purges() == 2);
    age(6500);
    compute(*context, 2, { 4 << 20, false, {} });
    CHECK(purges() == 3);
    compute(*context, 3, { 256 << 10, false, {} }); // no more demand
    CHECK(st.purge_interval == 20000 && purges() == 3);

    // Not while a part of it is in use.
    void * held = context->pool().alloc(2 << 20);
    age(20500);
    compute(*context, 3, { 256 << 10, false, {} });
    CHECK(purges() == 3 && counter(*context, v_skipped) == 1);
    context->pool().free(held, 2 << 20);
    age(20500);
    compute(*context, 3, { 256 << 10, false, {} });
    CHECK(purges() == 4);
    free_backend(context);
    nothing_lives();
}

// LLAMA_WARDEN_POOL_BUDGET_MIB=1, LLAMA_WARDEN_POOL_PURGE_INTERVAL_MS=1: each micro-batch of a long prompt needs a little
// more than the one before, as copies of a quantised KV cache do, and a pool keeps each size that it ever had.
static void hoard() {
    auto *  context = new context_t(1);
    state & st      = *state_of(*context);
    auto    batch   = [&](size_t key, size_t need) { // 100 ms after the one before
        st.last_purge -= std::min<uint64_t>(st.last_purge, 100);
        compute(*context, key, { need, false, {} });
    };
    size_t need = 2 << 20;
    for (size_t i = 1; i <= 60; ++i) {
        need += 128 << 10;
        batch(i, need);
        CHECK(counter(*context, v_pool_peak) <= 3 * need);
    }
    // Where each needs the same, nothing is hoarded, and to give it back would only cost time.
    const uint64_t purges = counter(*context, v_purges);
    for (size_t i = 0; i < 60; ++i) {
        batch(100, need);
    }
    CHECK(counter(*context, v_purges) <= purges + 2);
    free_backend(context);
    nothing_lives();
}

// LLAMA_WARDEN_POOL_BUDGET_MIB=1, LLAMA_WARDEN_POOL_PURGE_INTERVAL_MS=0: after each micro-batch above the budget.
static void every_batch() {
    auto * context = new context_t(1);
    for (size_t i = 1; i <= 20; ++i) {
        compute(*context, 1, { 4 << 20, false, {} });
        CHECK(counter(*context, v_purges) == i && mock::bytes() < 1 << 20);
    }
    for (size_t i = 0; i < 20; ++i) { // tokens
        compute(*context, 2, { 512 << 10, false, {} });
    }
    CHECK(counter(*context, v_purges) == 20);
    free_backend(context);
    nothing_lives();
}

// LLAMA_WARDEN_CUBLAS_RESET_EVERY=10, LLAMA_WARDEN_CUBLAS_RESET_INTERVAL_S=1
static void cublas() {
    auto * one = new context_t(0);
    auto * two = new context_t(1);
    auto   age = [&](uint64_t ms) {
        state_of(*one)->last_reset = now_ms() - ms;
        state_of(*two)->last_reset = now_ms() - ms;
    };
    for (int i = 0; i < 50; ++i) {
        age(0);
        compute(*one, 1, { 4096, true, {} });
        compute(*two, 1, { 4096, true, {} });
    }
    CHECK(mock::made(mock::handle) == 2 && counter(*one, v_cublas_resets) == 0); // not before the interval

    // A handle of another device in the same context, as with rows over devices, and of another stream.
#if SHAPE == SPACES
    one->curr_stream_no = 3;
    one->cublas_handle();
    one->curr_stream_no = 0;
#else
    one->cublas_handle(5);
    ggml_cuda_set_device(0);
#endif
    const size_t bytes = mock::bytes();
    uint64_t     after = 0;
    for (int reset = 1; reset <= 100; ++reset) {
        age(1500);
        for (int i = 0; i < 10; ++i) {
            compute(*one, 1, { 4096, true, {} });
            compute(*two, 1, { 4096, true, {} });
            CHECK(cublas_handles(*one) >= 1 && has_current_handle(*one)); // there again before the next computation
        }
        CHECK(counter(*one, v_cublas_resets) > after && counter(*two, v_cublas_resets) > after);
        CHECK(counter(*one, v_cublas_resets) <= counter(*two, v_cublas_resets) + 1);
        after = counter(*one, v_cublas_resets);
        CHECK(mock::living(mock::handle) == 2 && mock::bytes() <= bytes);
    }
    CHECK(counter(*one, v_cublas_resets) == 100 && counter(*two, v_cublas_resets) == 100);
    CHECK(mock::made(mock::handle) == 2 + 1 + 200);
#if SHAPE == SPACES
    CHECK(one->cublas_handles[0][3] == nullptr && one->cublas_workspaces[0][3] == nullptr);
    CHECK(mock::bytes() == bytes - 4096);
#else
    CHECK(one->cublas_handles[5] == nullptr);
#endif
    // Without a handle there is nothing to reset.
    auto * three = new context_t(2);
    for (int i = 0; i < 30; ++i) {
        state_of(*three)->last_reset = now_ms() - 1500;
        compute(*three, 1);
    }
    CHECK(counter(*three, v_cublas_resets) == 0);
    free_backend(one);
    free_backend(two);
    free_backend(three);
    nothing_lives();
}

// LLAMA_WARDEN_CUBLAS_RESET_EVERY=10, LLAMA_WARDEN_CUBLAS_RESET_INTERVAL_S=1: a handle that could not be had again stays.
static void cublas_low_memory() {
    context_t context(0);
    mock::leave_free(100 << 20);
    for (int i = 0; i < 100; ++i) {
        state_of(context)->last_reset = now_ms() - 1500;
        compute(context, 1, { 4096, true, {} });
    }
    CHECK(mock::made(mock::handle) == 1 && counter(context, v_cublas_resets) == 0 && counter(context, v_skipped) > 0);
    mock::leave_free(size_t(1) << 30);
    state_of(context)->last_reset = now_ms() - 1500;
    compute(context, 1, { 4096, true, {} });
    CHECK(mock::made(mock::handle) == 2 && counter(context, v_cublas_resets) == 1);
    forget(&context);
}

#if SHAPE_HAS_MAP
// LLAMA_WARDEN_GRAPH_CACHE_CAP=4: with graphs switched off an entry is a note on the host, and no stream is waited for.
static void nothing_held() {
    context_t context(0);
    graphs_are_off = true;
    const size_t before = mock::synchronisations();
    for (size_t key = 0; key < 60; ++key) {
        twice(context, key);
        CHECK(context.cuda_graphs.size() <= 4);
    }
    CHECK(counter(context, v_evicted) == 60 - context.cuda_graphs.size());
    CHECK(mock::synchronisations() == before && mock::made(mock::executable) == 0);
    forget(&context);
}
#endif

#if SHAPE == FORK
// LLAMA_WARDEN_GRAPH_IDLE_TRIM_S=1: a thread that computes nothing clears the graphs, as the fork does when a tensor is
// loaded again, at the moments at which the idle thread does.
static void cleared_elsewhere() {
    context_t context(0);
    for (int round = 0; round < 300; ++round) {
        twice(context, (size_t) round % 3);
        {
            const std::shared_ptr<state> st = state_of(context);
            std::lock_guard<std::mutex>  lock(st->mutex);
            st->last_use = 1, st->trimmed = false, st->not_before = 0;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(round % 10));
        {
            const auto held = hold(&context);
            for (auto & entry : context.cuda_graphs) { // the fork leaks these; here each byte is counted
                cudaStreamSynchronize(context.stream());
                if (entry.second->dest_ptrs_size > 0) {
                    cudaFree(entry.second->dest_ptrs_d);
                }
            }
            context.cuda_graphs.clear();
            context.cur_graph = nullptr;
        }
    }
    CHECK(counter(context, v_errors) == 0);
    forget(&context);
}
#endif

#if SHAPE_HAS_LOCK && SHAPE_HAS_MAP
// LLAMA_WARDEN_GRAPH_CACHE_CAP=1: a counter of captures that never falls costs one wait, not one for each computation.
static void lock_timeout() {
    context_t context(0);
    {
        std::lock_guard<std::mutex> lock(ggml_cuda_lock);
        ggml_cuda_lock_counter += 1;
    }
    const auto begin = std::chrono::steady_clock::now();
    for (size_t key = 0; key < 200; ++key) {
        twice(context, key);
    }
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10)); // 200 waits would be 40 s
    const uint64_t skipped = counter(context, v_skipped);
    CHECK(skipped >= 1 && skipped <= 4 && counter(context, v_evicted) == 0);
    CHECK(context.cuda_graphs.size() == 200);
    {
        std::lock_guard<std::mutex> lock(ggml_cuda_lock);
        ggml_cuda_lock_counter -= 1;
    }
    state_of(context)->not_before = 0;
    twice(context, 200);
    CHECK(context.cuda_graphs.size() == 1 && counter(context, v_evicted) == 200);
    forget(&context);
}

// LLAMA_WARDEN_GRAPH_CACHE_CAP=1: an error of a stream is ggml's to find; nothing is touched.
static void stream_error() {
    context_t context(0);
    mock::fail_synchronisations(cudaErrorUnknown);
    for (size_t key = 0; key < 20; ++key) {
        twice(context, key);
    }
    CHECK(counter(context, v_errors) >= 1 && counter(context, v_evicted) == 0 && context.cuda_graphs.size() == 20);
    CHECK(cudaGetLastError() == cudaSuccess); // ggml would end the process for it after its next kernel
    mock::fail_synchronisations(cudaSuccess);
    forget(&context);
}

// All fixes: two threads, two contexts, captures all the time, and the idle thread among them.
static void two_threads() {
    std::vector<std::thread> both;
    for (int device : { 0, 1 }) {
        both.emplace_back([device] {
            for (int life = 0; life < 4; ++life) {
                auto *     context = new context_t(device);
                const auto begin   = now_ms();
                for (size_t i = 0; i < 300 || now_ms() - begin < 300; ++i) {
                    {
                        const compute_guard         guard(context);
                        const std::shared_ptr<state> st = state_of(*context);
                        st->last_reset                  = i % 40 == 0 ? now_ms() - 2000 : st->last_reset;
                        st->last_purge                  = i % 30 == 0 ? now_ms() - 90000 : st->last_purge;
                    }
                    compute(*context, i / 3 % 3 == 0 ? i / 9 : i % 3, { (i % 7 + 1) << 18, i % 2 == 0, {} });
                }
                CHECK(counter(*context, v_errors) == 0);
                free_backend(context);
            }
        });
    }
    for (std::thread & each : both) {
        each.join();
    }
    nothing_lives();
}
#endif

// LLAMA_WARDEN_REPORT, and the cap where there is a map: prints what a reader must find.
static void report() {
    std::vector<context_t *> contexts;
    for (int i = 0; i < 70; ++i) {
        contexts.push_back(new context_t(i % 16));
        for (int n = 0; n <= i; ++n) {
            compute(*contexts[i], 1, { 1 << 16, true, {} });
        }
    }
    for (int i : { 3, 4 }) {
        free_backend(contexts[i]);
        contexts[i] = nullptr;
    }
    auto * late = new context_t(9); // takes the place of the first that ended
    compute(*late, 1);
    contexts.push_back(late);
    for (context_t * context : contexts) { // the last words, whatever the time since those before
        if (context != nullptr) {
            state & st = *state_of(*context);
            std::lock_guard<std::mutex> lock(st.mutex);
            publish(*context, st, now_ms(), true);
            if (st.record != nullptr) {
                std::printf("live %u %d %zu", st.number, st.device,
                            (size_t) (reinterpret_cast<uint8_t *>(st.record) - report_file()));
                for (uint64_t value : st.values) {
                    std::printf(" %llu", (unsigned long long) value);
                }
                std::printf("\n");
            }
        }
    }
    std::printf("pid %d\n", (int) ::getpid());
    std::printf("handles %d workspaces %d\n", SHAPE == SPACES, SHAPE == SPACES);
    std::fflush(stdout);
    for (context_t * context : contexts) {
        if (context != nullptr && context != late && context != contexts[0]) {
            free_backend(context);
        }
    }
}

// LLAMA_WARDEN_REPORT: a context at the address of one that is gone is another one.
static void same_address() {
    alignas(context_t) static unsigned char place[sizeof(context_t)];
    for (uint32_t life = 0; life < 3; ++life) {
        auto * context = new (place) context_t((int) life);
        compute(*context, 1);
        CHECK(counter(*context, v_computes) == 1);
        CHECK(state_of(*context)->number == life && state_of(*context)->device == (int) life);
        forget(context);
        context->~context_t();
    }
    CHECK(registry::get().all().empty());
}

// LLAMA_WARDEN_REPORT: somebody cuts the file while it is written, as a full disk would: the server goes on.
static void report_cut() {
    context_t context(0);
    compute(context, 1);
    CHECK(::truncate(config().report, 0) == 0);
    for (int i = 0; i < 3; ++i) {
        compute(context, 1);
        const std::shared_ptr<state> st = state_of(context);
        std::lock_guard<std::mutex>  lock(st->mutex);
        publish(context, *st, now_ms(), true);
    }
    forget(&context);
}

// LLAMA_WARDEN_REPORT: computes, says so, and waits until there is a file `NAME.go`.
static void report_held() {
    context_t context(0);
    for (int i = 0; i < 7; ++i) {
        compute(context, 1);
    }
    {
        const std::shared_ptr<state> st = state_of(context);
        std::lock_guard<std::mutex>  lock(st->mutex);
        publish(context, *st, now_ms(), true);
    }
    std::printf("pid %d\n", (int) ::getpid());
    std::fflush(stdout);
    const std::string go = std::string(std::getenv("LLAMA_WARDEN_REPORT")) + ".go";
    wait_until("the file that lets it go on", [&] { return ::access(go.c_str(), F_OK) == 0; });
    forget(&context);
}

// ---------------------------------------------------------------------------------------- reclaim on demand

// The supervisor's side of LLAMA_WARDEN_RECLAIM. The file stays open: to close it would give up the locks of this process.
struct desk {
    int      file;
    uint64_t seq = 0;

    explicit desk(uint32_t version = reclaim::version, size_t size = reclaim::file_size)
        : file(::open(std::getenv("LLAMA_WARDEN_RECLAIM"), O_CREAT | O_RDWR, 0600)) {
        CHECK(file >= 0 && ::ftruncate(file, (off_t) size) == 0);
        reclaim::header header = {};
        std::memcpy(header.magic, reclaim::magic, sizeof(header.magic));
        header.version = version;
        header.blocks  = reclaim::blocks;
        CHECK(::pwrite(file, &header, sizeof(header), 0) == (ssize_t) sizeof(header));
    }
    void write(const reclaim::request & asked) const {
        CHECK(::pwrite(file, &asked, sizeof(asked), (off_t) reclaim::block_size) == (ssize_t) sizeof(asked));
    }
    void ask(uint32_t what, uint32_t deadline_ms = 60000) {
        reclaim::request asked = {};
        asked.seq              = ++seq;
        asked.what             = what;
        asked.deadline_ms      = deadline_ms;
        asked.check            = reclaim::check_of(asked);
        write(asked);
    }
    reclaim::answer look(uint32_t block = reclaim::blocks) const {
        reclaim::answer answer = {};
        const off_t     at     = (off_t) (reclaim::block_size * (2 + block));
        if (::pread(file, &answer, sizeof(answer), at) != (ssize_t) sizeof(answer) || answer.check != reclaim::check_of(answer)) {
            return {};
        }
        return answer;
    }
    bool is_answered() const { return look().seq == seq && look().result != 0; }
    reclaim::answer answered() const {
        wait_until("an answer", [&] { return is_answered(); });
        return look();
    }
    // Somebody has opened the file and can be asked.
    void taken() const { wait_until("a block is taken", [&] { return look().pid == (uint32_t) ::getpid(); }); }
};
static bool is(const reclaim::answer & answer, reclaim::result how) { return answer.result == (uint16_t) how; }
constexpr uint32_t all_of_cuda = reclaim::graphs | reclaim::pools | reclaim::cublas;

// As after a long pause.
[[maybe_unused]] static void make_idle(context_t & context) {
    const std::shared_ptr<state> st = state_of(context);
    std::lock_guard<std::mutex>  lock(st->mutex);
    st->last_use = 1;
}

static void hoard(context_t & context) {
    for (size_t key = 0; key < 5; ++key) {
        twice(context, key, { (key + 1) << 20, true, {} });
    }
}

// LLAMA_WARDEN_RECLAIM: whoever computes gives back at the end of a computation, and goes on.
static void reclaim_busy() {
    desk   desk;
    auto * context = new context_t(2);
    hoard(*context);
    wait_until("a block is taken", [&] {
        compute(*context, 1);
        return desk.look().pid != 0;
    });
    CHECK(desk.look().able == all_of_cuda && desk.look().seq == 0);
    for (int round = 0; round < 2; ++round) {
        hoard(*context);
        desk.ask(all_of_cuda);
        size_t made = mock::made(mock::handle);
        wait_until("an answer", [&] {
            compute(*context, 1, { 1 << 20, true, {} });
            return desk.is_answered();
        });
        const reclaim::answer answer = desk.look();
        CHECK(is(answer, reclaim::result::done) && answer.left == 0);
        CHECK(answer.bytes[2] >= 5 << 20); // pools
        CHECK((answer.bytes[0] > 0) == SHAPE_HAS_MAP);
        CHECK(mock::made(mock::handle) == made + 1); // one, where the stream that computes had one
#if SHAPE == SPACES
        CHECK(answer.bytes[3] == 0); // it is there again at once
#endif
    }
    CHECK(counter(*context, v_errors) == 0);
    free_backend(context);
    nothing_lives();
}

#if SHAPE_HAS_LOCK
// LLAMA_WARDEN_POOL_BUDGET_MIB=1: the idle thread has looked at everything once, from its beginning to its end.
static void idle_thread_comes(context_t & witness) {
    for (int round = 0; round < 2; ++round) {
        const std::shared_ptr<state> st = state_of(witness);
        {
            std::lock_guard<std::mutex> lock(st->mutex);
            st->last_purge = now_ms(), st->purge_interval = 100000; // not at the end of the computation
        }
        compute(witness, 1, { 4 << 20, false, {} });
        const uint64_t before = counter(witness, v_purges);
        {
            std::lock_guard<std::mutex> lock(st->mutex);
            st->last_purge = 0, st->purge_interval = 1, st->last_use = 1;
        }
        wait_until("the idle thread comes by", [&] { return counter(witness, v_purges) > before; });
    }
}

// LLAMA_WARDEN_RECLAIM: what nobody uses goes back within moments, of all contexts, again and again; and what the other fixes
// know of the demand stays as it is.
static void reclaim_idle() {
    desk   desk;
    auto * one = new context_t(0);
    auto * two = new context_t(3);
    compute(*one, 1), compute(*two, 1);
    desk.taken();
    for (int round = 0; round < 3; ++round) {
        uint64_t pool = 0;
        for (context_t * context : { one, two }) {
            hoard(*context);
            const std::shared_ptr<state> st = state_of(*context);
            std::lock_guard<std::mutex>  lock(st->mutex);
            st->watched = 9, st->purge_interval = 1234, st->last_purge = 77, st->patience = 0;
            pool += ask_pools(*context).bytes;
        }
        desk.ask(all_of_cuda);
        make_idle(*one), make_idle(*two);
        const reclaim::answer answer = desk.answered();
        CHECK(is(answer, reclaim::result::done) && answer.left == 0);
        CHECK(answer.bytes[2] == pool && (answer.bytes[0] > 0) == SHAPE_HAS_MAP && (answer.bytes[1] > 0) == SHAPE_HAS_MAP);
        CHECK(mock::living(mock::executable) == 0 && graphs_in(*one) == 0 && graphs_in(*two) == 0);
        for (context_t * context : { one, two }) {
            const std::shared_ptr<state> st = state_of(*context);
            std::lock_guard<std::mutex>  lock(st->mutex);
            CHECK(ask_pools(*context).bytes == 0);
            CHECK(st->watched == 9 && st->purge_interval == 1234 && st->last_purge == 77 && st->not_before == 0);
        }
    }
    desk.ask(all_of_cuda); // nothing is left, so there is nothing to wait for; handles are made anew
    CHECK(is(desk.answered(), reclaim::result::done) && desk.look().bytes[0] == 0 && desk.look().bytes[2] == 0);
    desk.ask(reclaim::heap); // another part's
    desk.ask(reclaim::graphs);
    CHECK(is(desk.answered(), reclaim::result::done));
    free_backend(one);
    free_backend(two);
    nothing_lives();
}

// LLAMA_WARDEN_RECLAIM: a request in the middle of a token waits for the end of the computation, and a second is left to
// whoever computes; then what is asked for is done, and nothing else.
static void reclaim_only() {
    desk   desk;
    auto * context = new context_t(0);
    hoard(*context);
    desk.taken();
    desk.ask(reclaim::graphs);
    const size_t handles = mock::made(mock::handle);
    compute(*context, 1, { 1 << 20, false, [&] {
        wait_until("the idle thread has seen it", [] { return commands::wanted() != 0; });
        CHECK(!desk.is_answered());
    } });
    wait_until("an answer", [&] { // the first computation that ends does it
        compute(*context, 1, { 1 << 20, false, {} });
        return desk.is_answered();
    });
    CHECK(is(desk.look(), reclaim::result::done) && desk.look().bytes[2] == 0);
    CHECK(mock::made(mock::handle) == handles && counter(*context, v_purges) == 0);
    free_backend(context);
    nothing_lives();
}

// LLAMA_WARDEN_RECLAIM: nothing goes while another thread captures; the answer says so when the time is up, and the pause
// before the next try stays.
static void reclaim_capture() {
    desk              desk;
    context_t         capturing(0), idle(1);
    std::atomic<bool> captured{ false }, go_on{ false };
    hoard(idle);
    compute(capturing, 1);
    desk.taken();
    std::thread other([&] {
        compute(capturing, 1, { 0, false, [&] {
            captured = true;
            wait_until("go on", [&] { return go_on.load(); });
        } });
    });
    wait_until("the capture runs", [&] { return captured.load(); });
    make_idle(idle);
    desk.ask(all_of_cuda, 600);
    const reclaim::answer refused = desk.answered();
    CHECK(is(refused, reclaim::result::refused) && refused.left == all_of_cuda && refused.bytes[2] == 0);
    CHECK(graphs_in(idle) == (SHAPE_HAS_MAP ? 5 : SHAPE_HAS_GRAPHS ? 1 : 0));
    {
        const std::shared_ptr<state> st = state_of(idle);
        std::lock_guard<std::mutex>  lock(st->mutex);
        CHECK(st->values[v_skipped] > 0 && st->patience >= 1000 && st->not_before > 0);
    }
    desk.ask(all_of_cuda); // the pauses go on as they were, and do not begin anew
    wait_until("the pause has doubled", [&] {
        const std::shared_ptr<state> st = state_of(idle);
        std::lock_guard<std::mutex>  lock(st->mutex);
        return st->patience >= 2000;
    });
    go_on = true;
    other.join();
    make_idle(capturing), make_idle(idle);
    CHECK(is(desk.answered(), reclaim::result::done));
    forget(&capturing);
    forget(&idle);
}

// LLAMA_WARDEN_RECLAIM: a part of a pool is in use: the rest goes, and it is tried again until the time is up.
static void reclaim_in_use() {
    desk   desk;
    auto * context = new context_t(1);
    hoard(*context);
    desk.taken();
    auto held = hold(context);
    void * memory = context->pool().alloc(2 << 20);
    
    held.reset();
    make_idle(*context);
    desk.ask(all_of_cuda, 600);
    const reclaim::answer partly = desk.answered();
    CHECK(is(partly, reclaim::result::partly) && partly.left == reclaim::pools && partly.bytes[2] == 0);
    CHECK(counter(*context, v_purges) == 0 && mock::living(mock::executable) == 0);
    const uint64_t renewed = counter(*context, v_cublas_resets);
    CHECK(renewed == 1); // once, however often the pool is asked for
    const uint64_t skipped = counter(*context, v_skipped);
    desk.ask(reclaim::pools);
    wait_until("it was tried", [&] { return counter(*context, v_skipped) > skipped; });
    {
        const auto guard = hold(context);
        context->pool().free(memory, 2 << 20);
    }
    make_idle(*context);
    CHECK(is(desk.answered(), reclaim::result::done) && desk.look().bytes[2] > 0);
    CHECK(counter(*context, v_cublas_resets) == renewed);
    free_backend(context);
    nothing_lives();
}

// LLAMA_WARDEN_RECLAIM: a handle that could not be had again stays, and the answer says so.
static void reclaim_low_memory() {
    desk      desk;
    context_t context(0);
    hoard(context);
    desk.taken();
    mock::leave_free(size_t(100) << 20);
    desk.ask(all_of_cuda, 600);
    make_idle(context);
    const reclaim::answer answer = desk.answered();
    CHECK(is(answer, reclaim::result::partly) && answer.left == reclaim::cublas && answer.bytes[2] > 0);
    CHECK(counter(context, v_cublas_resets) == 0 && mock::living(mock::handle) == 1);
    forget(&context);
}

// LLAMA_WARDEN_RECLAIM, LLAMA_WARDEN_POOL_BUDGET_MIB=1: what is no request of now does nothing: one that stands there at the start, garbage, one that was
// torn, an old number, a file that was cut. A new one is done after each.
static void reclaim_garbage() {
    desk desk;
    for (int i = 0; i < 41; ++i) {
        desk.ask(all_of_cuda);
    }
    context_t context(0), witness(1);
    compute(context, 1);
    {
        const std::shared_ptr<state> st = state_of(context);
        std::lock_guard<std::mutex>  lock(st->mutex);
        st->last_purge = now_ms(), st->purge_interval = 3600000; // only what is asked for
    }
    hoard(context);
    desk.taken();
    CHECK(desk.look().seq == 41 && desk.look().result == 0);
    auto done = [&] {
        desk.ask(all_of_cuda);
        make_idle(context);
        CHECK(is(desk.answered(), reclaim::result::done));
        hoard(context);
    };
    // Each is looked at: a good one comes behind it, and only that is answered.
    auto nothing_for = [&](const reclaim::request & bad) {
        const uint64_t before = counter(context, v_invalidations);
        desk.write(bad);
        make_idle(context);
        idle_thread_comes(witness);
        CHECK(counter(context, v_invalidations) == before && commands::wanted() == 0);
        done();
    };
    nothing_for({});
    reclaim::request garbage;
    std::memset(&garbage, 0xa5, sizeof(garbage));
    nothing_for(garbage);
    reclaim::request torn = {};
    torn.seq = desk.seq + 1, torn.what = all_of_cuda, torn.check = reclaim::check_of(torn), torn.what = reclaim::graphs;
    nothing_for(torn);
    reclaim::request old = {};
    old.seq = 7, old.what = all_of_cuda, old.check = reclaim::check_of(old);
    nothing_for(old);
    CHECK(::ftruncate(desk.file, 100) == 0);
    compute(context, 1);
    idle_thread_comes(witness);
    CHECK(commands::wanted() == 0);
    done(); // the write made the file longer again
    forget(&context);
    forget(&witness);
}

// LLAMA_WARDEN_RECLAIM, LLAMA_WARDEN_POOL_BUDGET_MIB=1: a file of another version is left alone.
static void reclaim_other_version() {
    const desk desk(reclaim::version + 1);
    context_t  context(0), witness(1);
    compute(context, 1);
    reclaim::request asked = {};
    asked.seq = 1, asked.what = all_of_cuda, asked.check = reclaim::check_of(asked);
    desk.write(asked);
    make_idle(context);
    idle_thread_comes(witness);
    CHECK(desk.look().pid == 0 && counter(context, v_invalidations) == 0 && commands::wanted() == 0);
    forget(&context);
    forget(&witness);
}

// LLAMA_WARDEN_RECLAIM: takes a block of the file that is there, says so, and answers until there is a file `NAME.go`.
static void reclaim_held() {
    context_t context(0);
    hoard(context);
    std::printf("pid %d\n", (int) ::getpid());
    std::fflush(stdout);
    const std::string go = std::string(std::getenv("LLAMA_WARDEN_RECLAIM")) + ".go";
    wait_until("the file that lets it go on", [&] { return (make_idle(context), ::access(go.c_str(), F_OK) == 0); });
    forget(&context);
}
#endif

#if SHAPE_HAS_LOCK && SHAPE_HAS_MAP
// All fixes: requests one after another while two threads compute, capture and pause.
static void reclaim_race() {
    desk                     desk;
    std::atomic<bool>        over{ false };
    std::vector<std::thread> both;
    for (int device : { 0, 1 }) {
        both.emplace_back([&, device] {
            while (!over) {
                auto * context = new context_t(device);
                for (size_t i = 0; i < 400; ++i) {
                    compute(*context, i / 3 % 3 == 0 ? i / 9 : i % 3, { (i % 7 + 1) << 18, i % 2 == 0, {} });
                    if (i % 16 == 0) {
                        make_idle(*context);
                        std::this_thread::sleep_for(std::chrono::milliseconds(2));
                    }
                }
                CHECK(counter(*context, v_errors) == 0);
                free_backend(context);
            }
        });
    }
    wait_until("a block is taken", [&] { return desk.look().pid != 0; });
    size_t done = 0;
    for (int i = 0; i < 6; ++i) {
        desk.ask(all_of_cuda, 3000);
        done += is(desk.answered(), reclaim::result::done) || is(desk.answered(), reclaim::result::partly);
    }
    over = true;
    for (std::thread & each : both) {
        each.join();
    }
    CHECK(done > 0);
    nothing_lives();
}
#endif

#if SHAPE_HAS_LOCK && SHAPE_HAS_MAP
// LLAMA_WARDEN_GRAPH_IDLE_TRIM_S=3600: a child that was forked has no idle thread to wait for when it ends.
static void fork_exit() {
    context_t context(0);
    twice(context, 1);
    bool at_once = false;
    // The wait would be two seconds, however fast the machine is; on a busy one some tries may take as long without it.
    for (int round = 0; round < 5 && !at_once; ++round) {
        const auto  begin = now_ms();
        const pid_t child = ::fork();
        CHECK(child >= 0);
        if (child == 0) {
            std::exit(7);
        }
        int status = 0;
        wait_until("the child ends", [&] { return ::waitpid(child, &status, WNOHANG) == child; });
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
        at_once = now_ms() - begin < 1900;
    }
    CHECK(at_once);
    forget(&context);
}

static std::atomic<bool> idle_thread_inside{ false }, may_be_inside{ false };

// LLAMA_WARDEN_GRAPH_IDLE_TRIM_S=1: the process ends while the idle thread is giving back.
static void exit_while_busy(bool for_ever) {
    may_be_inside = for_ever;
    std::atexit([] { // registered first, as CUDA's own end is: runs last
        if (idle_thread_inside && !may_be_inside) {
            mock::wrong("the runtime ends while the idle thread is in it");
        }
        mock::end_runtime();
    });
    auto * context = new context_t(0);
    twice(*context, 1);
    const auto main_thread = std::this_thread::get_id();
    mock::on_synchronise([main_thread, for_ever](mock::id) {
        if (std::this_thread::get_id() != main_thread) {
            idle_thread_inside = true;
            // A lost device, or one that is busy a little longer.
            std::this_thread::sleep_for(for_ever ? std::chrono::hours(1) : std::chrono::milliseconds(300));
            idle_thread_inside = false;
        }
    });
    wait_until("the idle thread is at work", [] { return idle_thread_inside.load(); });
    std::exit(0);
}
static void exit_busy() { exit_while_busy(false); }
static void exit_stuck() { exit_while_busy(true); }
#endif

#if defined(LLAMA_WARDEN_TEST_NO_THREADS)
// LLAMA_WARDEN_GRAPH_IDLE_TRIM_S=1: no thread is to be had.
static void no_thread() {
    threads_run_out = true;
    context_t context(0);
    for (size_t key = 0; key < 10; ++key) {
        compute(context, key);
    }
    CHECK(threads() == 1 && counter(context, v_computes) == 10);
    forget(&context);
}
#endif

int main(int count, char ** arguments) {
    const std::string name = count > 1 ? arguments[1] : "";
    pools_are_vmm          = count > 2 && std::string(arguments[2]) == "vmm";
    const std::map<std::string, void (*)()> all = {
        { "inert", inert }, { "everything", everything }, { "purge", purge }, { "cublas", cublas },
        { "hoard", hoard }, { "every_batch", every_batch },
        { "report", report }, { "same_address", same_address }, { "report_cut", report_cut },
        { "report_held", report_held }, { "cublas_low_memory", cublas_low_memory }, { "reclaim_busy", reclaim_busy },
#if SHAPE_HAS_MAP
        { "cap", cap }, { "lru", lru }, { "one", one }, { "rotation", rotation }, { "used_once", used_once }, { "swept", swept },
        { "mixed", mixed }, { "reuse", reuse }, { "nothing_held", nothing_held },
#endif
#if SHAPE == FORK
        { "cleared_elsewhere", cleared_elsewhere },
#endif
#if SHAPE_HAS_GRAPHS && SHAPE_HAS_LOCK
        { "idle_trim", idle_trim }, { "idle_busy", idle_busy }, { "idle_capture", idle_capture },
        { "idle_guard_alone", idle_guard_alone },
#endif
#if SHAPE_HAS_LOCK
        { "idle_purge", idle_purge }, { "all_reduce", all_reduce }, { "all_reduce_race", all_reduce_race },
        { "idle_backs_off", idle_backs_off }, { "stream_busy", stream_busy }, { "reclaim_idle", reclaim_idle },
        { "reclaim_only", reclaim_only }, { "reclaim_capture", reclaim_capture }, { "reclaim_in_use", reclaim_in_use },
        { "reclaim_low_memory", reclaim_low_memory }, { "reclaim_garbage", reclaim_garbage },
        { "reclaim_other_version", reclaim_other_version }, { "reclaim_held", reclaim_held },
#endif
#if SHAPE_HAS_LOCK && SHAPE_HAS_MAP
        { "lock_timeout", lock_timeout }, { "stream_error", stream_error }, { "two_threads", two_threads },
        { "exit_busy", exit_busy }, { "exit_stuck", exit_stuck }, { "fork_exit", fork_exit },
        { "reclaim_race", reclaim_race },
#endif
#if defined(LLAMA_WARDEN_TEST_NO_THREADS)
        { "no_thread", no_thread },
#endif
    };
    auto found = all.find(name);
    if (found == all.end()) {
        std::fprintf(stderr, "no scenario %s in this shape\n", name.c_str());
        return 2;
    }
    found->second();
    return 0;
}
