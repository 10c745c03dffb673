// llama-warden, patch set cuda-memory: bounds and reports what the CUDA backend of ggml keeps.
//
// This file is llama-warden's own. It is included once, in ggml-cuda.cu, and called from there by hooks:
//
//     ggml_backend_cuda_graph_compute          begin:  a compute_guard for the backend's context
//                                              end:    guard.finish(cgraph), before the only return
//     ggml_backend_cuda_graph_optimize         begin:  a compute_guard, as it looks up graphs too (since b7203)
//     ggml_backend_cuda_free                   forget(context), before the context is deleted
//     ggml_backend_cuda_comm_allreduce_tensor  begin:  hold(backends), as it takes memory of their pools (since b8738)
//     ggml_backend_cuda_cpy_tensor_async       hold(both contexts), where it asks for their pools (ik_llama.cpp)
//     ggml_backend_cuda_invalidate_graphs      hold(context), before its graphs are cleared (ik_llama.cpp)
//
// Nothing happens unless a variable named below is set. Whatever is destroyed here is destroyed at a safe point: the
// context's streams are done, no graph is being captured in any thread, and nobody computes on the context or holds it.
//
// The structs of ggml have changed many times. What this file needs of them it asks for by member name (`detected`)
// and takes arrays of any shape as flat ones, so that one text serves every version. What a version lacks is skipped.
//
// Locks, in the order in which they are taken: context state (`state::mutex`), then `ggml_cuda_lock`, then `commands::mutex`.
// The registry's own lock is never held while another one is taken. The idle thread only ever tries; it never waits for a
// lock, but for that of the commands, which nobody holds for longer than a few lines.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#define LLAMA_WARDEN_POSIX
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#endif
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "llama-warden-reclaim.h"

#if defined(LLAMA_WARDEN_HAS_GRAPH_LOCK) == defined(LLAMA_WARDEN_HAS_NO_GRAPH_LOCK)
#error "llama-warden: the lock around graph captures is neither the known one nor absent"
#endif

// Either may be missing in a build; declared so that it can be asked whether it is complete.
struct ggml_cuda_pool_leg;
struct ggml_cuda_pool_vmm;

namespace llama_warden {

// ---------------------------------------------------------------------------------------------- settings

// What the variables say. Zero means off.
struct settings {
    uint64_t     graph_cap          = 0; // graphs per context
    uint64_t     idle_trim_ms       = 0;
    uint64_t     pool_budget        = 0; // bytes per context
    uint64_t     pool_interval_ms   = 1000;
    uint64_t     cublas_every       = 0; // graph computes
    uint64_t     cublas_interval_ms = 10000;
    const char * report             = nullptr;
    const char * reclaim            = nullptr;

    bool any() const { return graph_cap || idle_trim_ms || pool_budget || cublas_every || report || reclaim; }

    // Work that has to happen although nobody computes.
    bool needs_idle_thread() const { return idle_trim_ms || pool_budget || reclaim; }
};

// A whole number from the environment; `fallback` when the variable is unset, empty or no number in the range.
inline uint64_t number(const char * name, uint64_t min, uint64_t max, uint64_t fallback) {
    const char * text = std::getenv(name);
    if (text == nullptr || *text == '\0') {
        return fallback;
    }
    uint64_t value = 0;
    bool     good  = true;
    for (const char * c = text; *c != '\0' && good; ++c) {
        good  = *c >= '0' && *c <= '9' && value <= max / 10;
        value = value * 10 + (uint64_t) (*c - '0');
    }
    if (good && value == 0 && fallback == 0) {
        return 0; // said to be off
    }
    if (!good || value < min || value > max) {
        std::fprintf(stderr, "llama-warden: %s=%s is ignored: expected a whole number from %llu to %llu\n", name, text,
                     (unsigned long long) min, (unsigned long long) max);
        return fallback;
    }
    return value;
}

// A path from the environment; null when the variable is unset or empty.
inline const char * path_of(const char * name) {
    const char * text = std::getenv(name);
    return text != nullptr && *text != '\0' ? text : nullptr;
}

inline settings read_settings() {
    settings s;
    s.graph_cap          = number("LLAMA_WARDEN_GRAPH_CACHE_CAP", 1, 1000000, 0);
    s.idle_trim_ms       = number("LLAMA_WARDEN_GRAPH_IDLE_TRIM_S", 1, 86400, 0) * 1000;
    s.pool_budget        = number("LLAMA_WARDEN_POOL_BUDGET_MIB", 1, 1 << 24, 0) << 20;
    s.pool_interval_ms   = number("LLAMA_WARDEN_POOL_PURGE_INTERVAL_MS", 0, 3600000, s.pool_interval_ms);
    s.cublas_every       = number("LLAMA_WARDEN_CUBLAS_RESET_EVERY", 1, 1000000000, 0);
    s.cublas_interval_ms = number("LLAMA_WARDEN_CUBLAS_RESET_INTERVAL_S", 1, 86400, s.cublas_interval_ms / 1000) * 1000;
    s.report             = path_of("LLAMA_WARDEN_REPORT");
    s.reclaim            = path_of("LLAMA_WARDEN_RECLAIM");
    return s;
}

const settings & config();

inline uint64_t now_ms() {
    using namespace std::chrono;
    return (uint64_t) duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count();
}

inline uint64_t unix_ms() {
    using namespace std::chrono;
    return (uint64_t) duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
}

// ------------------------------------------------------------------------------------- asking the structs

// `LLAMA_WARDEN_DETECT(has_x, x)`: has_x<T>::value tells whether T has the member x.
#define LLAMA_WARDEN_DETECT(trait, member)                                             \
    template <class T, class = void> struct trait : std::false_type {};                \
    template <class T> struct trait<T, decltype(void(std::declval<T &>().member))> : std::true_type {}

LLAMA_WARDEN_DETECT(has_graph_map, cuda_graphs);
LLAMA_WARDEN_DETECT(has_one_graph, cuda_graph.get()->instance);
LLAMA_WARDEN_DETECT(has_current_graph, cur_graph);
LLAMA_WARDEN_DETECT(has_workspaces, cublas_workspaces);
LLAMA_WARDEN_DETECT(has_workspace_sizes, cublas_workspace_sizes);
LLAMA_WARDEN_DETECT(has_current_stream, curr_stream_no);
LLAMA_WARDEN_DETECT(has_cpy_pointers, dest_ptrs_size);
LLAMA_WARDEN_DETECT(has_pool_used, pool_used);
LLAMA_WARDEN_DETECT(has_buffer_pool, buffer_pool);
LLAMA_WARDEN_DETECT(has_instance, instance);
LLAMA_WARDEN_DETECT(has_captured, graph);
LLAMA_WARDEN_DETECT(has_node_props, node_props);
LLAMA_WARDEN_DETECT(has_nodes_copy, nodes_copy);
LLAMA_WARDEN_DETECT(has_props, props);
LLAMA_WARDEN_DETECT(has_extra, extra);
LLAMA_WARDEN_DETECT(has_properties, ggml_graph_properties);
LLAMA_WARDEN_DETECT(has_extraneous, extraneous_srcs_properties);
LLAMA_WARDEN_DETECT(has_nodes, nodes);
LLAMA_WARDEN_DETECT(has_params, params);
#undef LLAMA_WARDEN_DETECT

template <class T, class = void> struct is_complete : std::false_type {};
template <class T> struct is_complete<T, decltype(void(sizeof(T)))> : std::true_type {};

// What this build can do at all; the rest of what is asked for is said to be out of reach, and never said to be active.
struct abilities {
    bool cap, idle, trim, report;
};
template <class C> constexpr abilities abilities_with() {
#if defined(LLAMA_WARDEN_HAS_GRAPH_LOCK)
    constexpr bool idle = true;
#else
    // Without the lock another thread could not know that a graph is being captured.
    constexpr bool idle = false;
#endif
#if defined(LLAMA_WARDEN_POSIX)
    constexpr bool report = true;
#else
    constexpr bool report = false;
#endif
    return { has_graph_map<C>::value, idle, idle && (has_graph_map<C>::value || has_one_graph<C>::value), report };
}
inline constexpr abilities able = abilities_with<ggml_backend_cuda_context>();

inline settings effective_settings() {
    settings s  = read_settings();
    auto     no = [](const char * what, const char * why) {
        std::fprintf(stderr, "llama-warden: %s is not to be had in this build: %s\n", what, why);
    };
    if (s.graph_cap && !able.cap) {
        no("LLAMA_WARDEN_GRAPH_CACHE_CAP", "a context has no cache of graphs");
        s.graph_cap = 0;
    }
    if (s.idle_trim_ms && !able.trim) {
        no("LLAMA_WARDEN_GRAPH_IDLE_TRIM_S", able.idle ? "it captures no graphs" : "nothing tells whether a graph is being captured");
        s.idle_trim_ms = 0;
    }
    if (s.report && !able.report) {
        no("LLAMA_WARDEN_REPORT", "it is written for Linux and its like only");
        s.report = nullptr;
    }
#if !defined(LLAMA_WARDEN_RECLAIM)
    if (s.reclaim) {
        no("LLAMA_WARDEN_RECLAIM", "it is read on Linux and its like only");
        s.reclaim = nullptr;
    }
#endif
    return s;
}

// Whether a value is set, in a way that no compiler foresees: the text of each line below stays in every binary, by which
// a build is found to have the fix.
inline bool set(uint64_t value) {
    volatile uint64_t seen = value;
    return seen != 0;
}

// Read once, for the life of the process. The lines on stderr are what proves that a fix is in this binary and on.
inline const settings & config() {
    static const settings once = [] {
        const settings s = effective_settings();
        if (set(s.graph_cap) || set(s.idle_trim_ms)) {
            std::fprintf(stderr, "llama-warden: fix graph-cache-cap active: cap %llu graphs, idle trim %llu s\n",
                         (unsigned long long) s.graph_cap, (unsigned long long) s.idle_trim_ms / 1000);
        }
        if (s.pool_budget) {
            std::fprintf(stderr, "llama-warden: fix pool-purge active: budget %llu MiB, interval %llu ms%s\n",
                         (unsigned long long) s.pool_budget >> 20, (unsigned long long) s.pool_interval_ms,
                         able.idle ? "" : ", not while idle");
        }
        if (s.cublas_every) {
            std::fprintf(stderr, "llama-warden: fix cublas-reset active: every %llu computes, interval %llu s\n",
                         (unsigned long long) s.cublas_every, (unsigned long long) s.cublas_interval_ms / 1000);
        }
        if (set(s.report != nullptr)) {
            std::fprintf(stderr, "llama-warden: fix memory-report active: %s\n", s.report);
        }
        if (set(s.reclaim != nullptr)) {
            std::fprintf(stderr, "llama-warden: fix reclaim-cuda active: %s%s\n", s.reclaim,
                         able.idle ? "" : ", not while idle");
        }
        return s;
    }();
    return once;
}

// At load and not at the first request, so that the start-up log has the lines.
[[maybe_unused]] static const bool announced = config().any();

// Each hook leaves its mark where it stands: a binary that lacks the text has no such call in it. Never read.
inline volatile std::atomic<const char *> last_passed{ nullptr };
inline void passed(const char * mark) {
    last_passed.store(mark, std::memory_order_relaxed);
}

// Arrays of one, two or more dimensions as one row.
template <class T> struct row {
    T *    first;
    size_t size;
    T *    begin() const { return first; }
    T *    end() const { return first + size; }
};
template <class T, class A> row<T> flat(A & array) {
    static_assert(std::is_same<typename std::remove_all_extents<A>::type, T>::value, "another type of element");
    return { reinterpret_cast<T *>(&array), sizeof(A) / sizeof(T) };
}

// ggml's own function where it has one (found by its argument's type), else what that has always returned.
template <class G> auto key_of(G * graph, int) -> decltype((const void *) ggml_cuda_graph_get_key(graph)) {
    return ggml_cuda_graph_get_key(graph);
}
template <class G> const void * key_of(G * graph, long) {
    return graph->n_nodes > 0 ? graph->nodes[0] : nullptr;
}

template <class C, class F> void each_graph(C & context, F && visit) {
    if constexpr (has_graph_map<C>::value) {
        for (auto & entry : context.cuda_graphs) {
            if (entry.second) {
                visit(*entry.second);
            }
        }
    } else if constexpr (has_one_graph<C>::value) {
        if (context.cuda_graph) {
            visit(*context.cuda_graph);
        }
    }
}

template <class C> size_t cached_graphs(C & context) {
    if constexpr (has_graph_map<C>::value) {
        return context.cuda_graphs.size();
    } else {
        size_t count = 0; // the object stays for good; what comes and goes is its executable
        each_graph(context, [&](auto & graph) { count += graph.instance != nullptr; });
        return count;
    }
}

template <class V> uint64_t bytes_of(const V & vector) {
    return vector.capacity() * sizeof(typename V::value_type);
}

// What cudaGraphInstantiate takes for each node, measured on an H200 with CUDA 13 (docs/evidence.md).
constexpr uint64_t exec_host_bytes_per_node   = 4200;
constexpr uint64_t exec_device_bytes_per_node = 1350;

struct graph_totals {
    uint64_t count = 0, nodes = 0, host = 0, device = 0;
};

template <class G> void add_graph(const G & graph, graph_totals & totals) {
    uint64_t nodes = 0;
    totals.count += 1;
    totals.host += sizeof(G);
    auto add = [&](const auto & vector) {
        totals.host += bytes_of(vector);
        nodes = std::max<uint64_t>(nodes, vector.size());
    };
    if constexpr (has_node_props<G>::value) { add(graph.node_props); }
    if constexpr (has_nodes_copy<G>::value) { add(graph.nodes_copy); }
    if constexpr (has_props<G>::value)      { add(graph.props); }
    if constexpr (has_extra<G>::value)      { add(graph.extra); }
    if constexpr (has_properties<G>::value) { add(graph.ggml_graph_properties); }
    if constexpr (has_extraneous<G>::value) { add(graph.extraneous_srcs_properties); }
    if constexpr (has_nodes<G>::value)      { add(graph.nodes); }
    if constexpr (has_params<G>::value)     { add(graph.params); }
    if constexpr (has_instance<G>::value) {
        if (graph.instance != nullptr) {
            totals.nodes += nodes;
            totals.host += nodes * exec_host_bytes_per_node;
            totals.device += nodes * exec_device_bytes_per_node;
        }
    }
}

// A pool of type P behind a base pointer: what it holds, and whether all of it is free. False when it is no P.
template <class P, class B> bool ask_pool(B & base, uint64_t & bytes, bool & free) {
    if constexpr (is_complete<P>::value) {
        if (auto * pool = dynamic_cast<P *>(&base)) {
            bytes = pool->pool_size;
            if constexpr (has_pool_used<P>::value) {
                free = pool->pool_used == 0;
            } else if constexpr (has_buffer_pool<P>::value) {
                uint64_t cached = 0;
                for (auto & buffer : pool->buffer_pool) {
                    cached += buffer.ptr != nullptr ? buffer.size : 0;
                }
                free = cached == bytes;
            } else {
                free = false;
            }
            return true;
        }
    }
    return false;
}

struct pool_totals {
    uint64_t bytes = 0;
    bool     free  = true; // no part of any pool is in use
};

template <class C> pool_totals ask_pools(C & context) {
    pool_totals totals;
    for (auto & pool : flat<std::unique_ptr<ggml_cuda_pool>>(context.pools)) {
        if (pool) {
            uint64_t bytes = 0;
            bool     free  = false;
            if (!ask_pool<ggml_cuda_pool_vmm>(*pool, bytes, free) && !ask_pool<ggml_cuda_pool_leg>(*pool, bytes, free)) {
                free = false; // a kind of pool that is not known here: hands off
            }
            totals.bytes += bytes;
            totals.free = totals.free && free;
        }
    }
    return totals;
}

// --------------------------------------------------------------------------------------------- the report

// The file that llama-warden reads; docs/patches.md describes it. All numbers are in the machine's byte order.
struct report_header {
    char     magic[8];
    uint32_t version, record_size, records, pid;
    uint64_t started_unix_ms, active, graph_cap, idle_trim_ms, pool_budget, cublas_every, cublas_interval_ms;
    uint8_t  unused[48];
};
struct report_record {
    uint32_t seq; // odd while the record is being written
    uint32_t state;
    int32_t  device;
    uint32_t context;
    uint64_t values[30];
};
constexpr uint32_t report_records = 62;
constexpr size_t   report_size    = 16384;
constexpr char     report_magic[] = "LWREPT1"; // eight bytes with its end
static_assert(sizeof(report_header) == 128 && sizeof(report_record) == 256, "the file's layout");
static_assert(sizeof(report_header) + report_records * sizeof(report_record) <= report_size, "the file's layout");

enum value : size_t {
    v_computes, v_graphs, v_graphs_peak, v_graph_nodes, v_graph_host_bytes, v_graph_device_bytes, v_evicted, v_trimmed,
    v_live_splits, v_effective_cap, v_pool_bytes, v_pool_peak, v_purges, v_purged_bytes, v_cublas_handles,
    v_workspace_bytes, v_cublas_resets, v_invalidations, v_skipped, v_errors, v_updated,
};
enum : uint32_t { record_free, record_live, record_ended };

#if defined(LLAMA_WARDEN_POSIX)
struct report_place {
    int      file  = -1;
    uint8_t *image = nullptr; // what the file should hold
};

// Opens the file, makes it ours and `report_size` zeros. It is never cut short. -1 when it cannot be had, or when it is
// something else: then not a byte of it is touched. `taken`: another process writes it, and the lock says so.
inline int open_report(const char * path, bool & taken) {
    const int   fd = ::open(path, O_CREAT | O_RDWR | O_CLOEXEC | O_NONBLOCK, 0600);
    struct stat is = {};
    if (fd < 0) {
        return -1;
    }
    char begin[8] = {};
    bool ours     = ::fstat(fd, &is) == 0 && S_ISREG(is.st_mode);
    // Where files cannot be locked, there is one writer, as it is mostly anyhow.
    taken = ours && ::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (ours && !taken && is.st_size != 0) {
        const char none[8] = {};
        ours = is.st_size == (off_t) report_size && ::pread(fd, begin, sizeof(begin), 0) == (ssize_t) sizeof(begin) &&
               (std::memcmp(begin, report_magic, sizeof(begin)) == 0 || std::memcmp(begin, none, sizeof(begin)) == 0);
    }
    const std::vector<char> zeros(report_size, 0);
    if (!ours || taken || ::pwrite(fd, zeros.data(), report_size, 0) != (ssize_t) report_size) {
        ::close(fd);
        return -1;
    }
    return fd;
}

// The file, or nothing when there is no report to write or it cannot be made. It is written with `pwrite` and not mapped:
// a store into a mapping ends the process when the disk is full (also where blocks were allocated before, as some file
// systems write elsewhere), or when somebody cuts the file.
inline const report_place & report_file_place() {
    static const report_place place = []() -> report_place {
        const settings & s = config();
        if (s.report == nullptr) {
            return {};
        }
        // Processes that inherit the variable each have a file: the first the one that is named, others with their number.
        static std::string own;
        bool               taken = false;
        int                fd    = open_report(s.report, taken);
        if (fd < 0 && taken) {
            own = std::string(s.report) + "." + std::to_string((long) ::getpid());
            fd  = open_report(own.c_str(), taken);
            if (fd >= 0) { // nobody was told of this one, so nobody would remove it
                static const pid_t owner = ::getpid();
                std::atexit([] {
                    if (::getpid() == owner) {
                        ::unlink(own.c_str());
                    }
                });
            }
        }
        if (fd < 0) {
            std::fprintf(stderr, "llama-warden: the memory report %s cannot be written: it must be a new file or an older report\n",
                         s.report);
            return {};
        }
        alignas(8) static uint8_t image[report_size];
        report_header             header = {};
        header.version            = 1;
        header.record_size        = sizeof(report_record);
        header.records            = report_records;
        header.pid                = (uint32_t) ::getpid();
        header.started_unix_ms    = unix_ms();
        header.active             = (s.graph_cap ? 1 : 0) | (s.pool_budget ? 2 : 0) | (s.cublas_every ? 4 : 0) | 8 |
                        (s.idle_trim_ms ? 16 : 0);
        header.graph_cap          = s.graph_cap;
        header.idle_trim_ms       = s.idle_trim_ms;
        header.pool_budget        = s.pool_budget;
        header.cublas_every       = s.cublas_every;
        header.cublas_interval_ms = s.cublas_interval_ms;
        std::memcpy(header.magic, report_magic, sizeof(header.magic));
        std::memcpy(image, &header, sizeof(header));
        // The magic comes last: who sees it sees the rest.
        constexpr size_t behind = sizeof(header.magic);
        (void) !::pwrite(fd, image + behind, sizeof(header) - behind, (off_t) behind);
        (void) !::pwrite(fd, image, behind, 0);
        return { fd, image };
    }();
    return place;
}
#endif

// What the file holds, or null.
inline uint8_t * report_file() {
#if defined(LLAMA_WARDEN_POSIX)
    return report_file_place().image;
#else
    return nullptr;
#endif
}

inline report_record * report_at(uint32_t index) {
    uint8_t * file = report_file();
    return file ? reinterpret_cast<report_record *>(file + sizeof(report_header)) + index : nullptr;
}

inline void write_record(report_record * record, uint32_t state, int32_t device, uint32_t context,
                         const uint64_t (&values)[30]) {
#if defined(LLAMA_WARDEN_POSIX)
    if (record != nullptr) {
        const uint32_t seq = __atomic_load_n(&record->seq, __ATOMIC_RELAXED);
        __atomic_store_n(&record->seq, seq + 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE);
        __atomic_store_n(&record->state, state, __ATOMIC_RELAXED);
        __atomic_store_n(&record->device, device, __ATOMIC_RELAXED);
        __atomic_store_n(&record->context, context, __ATOMIC_RELAXED);
        for (size_t i = 0; i < 30; ++i) {
            __atomic_store_n(&record->values[i], values[i], __ATOMIC_RELAXED);
        }
        report_record copy = { seq + 1, state, device, context, {} };
        std::copy(std::begin(values), std::end(values), copy.values);
        // Odd, then the rest, then even. On a full disk the file keeps what fits, and nobody counts a record that stays odd.
        const off_t at  = (off_t) (reinterpret_cast<uint8_t *>(record) - report_file());
        const auto  put = [&](size_t size) { return ::pwrite(report_file_place().file, &copy, size, at) == (ssize_t) size; };
        if (put(sizeof(copy.seq)) && put(sizeof(copy))) {
            copy.seq = seq + 2;
            (void) put(sizeof(copy.seq));
        }
        __atomic_store_n(&record->seq, seq + 2, __ATOMIC_RELEASE);
    }
#else
    (void) record, (void) state, (void) device, (void) context, (void) values;
#endif
}

// A record of its own for a context: the first that was never used, else the first whose context is gone.
inline report_record * claim_record(int device, uint32_t context) {
#if defined(LLAMA_WARDEN_POSIX)
    for (uint32_t wanted : { record_free, record_ended }) {
        for (uint32_t i = 0; report_file() != nullptr && i < report_records; ++i) {
            report_record * record = report_at(i);
            // The one who ended it has let go of it once its number is even again.
            if ((__atomic_load_n(&record->seq, __ATOMIC_ACQUIRE) & 1) == 0 &&
                __atomic_load_n(&record->state, __ATOMIC_ACQUIRE) == wanted) {
                const uint64_t nothing[30] = {};
                write_record(record, record_live, device, context, nothing);
                return record;
            }
        }
    }
#else
    (void) device, (void) context;
#endif
    return nullptr;
}

// ---------------------------------------------------------------------------------------- state of a context

// Finds how many graphs a context goes through again and again: with layers on the CPU, or split over devices, one
// token is many graphs, and a cap below their number would evict each one just before it is needed.
//
// A round ends when a graph of the round comes again. A graph is live when it was in the last two rounds, so that
// graphs that are made once and never again do not count, however many there are.
class splits {
  public:
    void see(const void * key) {
        if (round.insert(key).second) {
            if (round.size() > longest) { // nothing comes again: no round is this long
                round.clear();
            }
            return;
        }
        size_t both = 0;
        for (const void * old : round) {
            both += previous.count(old);
        }
        recent[next++ % window] = both;
        live_now                = *std::max_element(recent, recent + window);
        previous.swap(round);
        round.clear();
        round.insert(key);
    }
    size_t live() const { return live_now; }

  private:
    static constexpr size_t longest = 1 << 16, window = 64;

    std::unordered_set<const void *> round, previous;
    size_t                           recent[window] = {}, next = 0, live_now = 0;
};

struct state {
    std::mutex                  mutex; // held while somebody computes on the context, and by the idle thread
    ggml_backend_cuda_context * context = nullptr; // null once the context is gone
    report_record *             record  = nullptr;
    int32_t                     device  = 0;
    uint32_t                    number  = 0; // of the context, in order of creation
    uint64_t                    values[30] = {};

    std::unordered_map<const void *, uint64_t> ticks; // when each graph was used last, in computes
    splits                                     rounds;

    uint64_t last_use = 0, last_write = 0, last_purge = 0, last_reset = 0, computes_at_reset = 0;
    uint64_t purge_interval = 0;
    uint64_t watched = 0; // computations that are still looked at for what they need after a purge
    uint64_t pooled  = 0; // bytes of the pools after the last computation
    uint64_t need    = 0; // the most that one computation has added to them since they were empty
    bool     trimmed = false;

    uint64_t command = 0; // request that was looked at last
    uint32_t pending = 0; // what it asks for and was not done here

    // After a safe point that was not to be had, none is asked for until then: the wait for it must not be paid at each
    // computation, of which one token can need hundreds.
    uint64_t not_before = 0, patience = 0;

    void refused(uint64_t now) {
        patience   = std::min<uint64_t>(patience == 0 ? 1000 : 2 * patience, 60000);
        not_before = now + patience;
    }
};

class registry {
  public:
    static registry & get() {
        static registry * const one = new registry; // never destroyed: threads may outlive static objects
        return *one;
    }

    std::shared_ptr<state> find(ggml_backend_cuda_context * context) {
        std::lock_guard<std::mutex> lock(mutex);
        std::shared_ptr<state> &    found = states[context];
        if (!found) {
            found                 = std::make_shared<state>();
            found->context        = context;
            found->purge_interval = config().pool_interval_ms;
            found->last_reset     = now_ms();
            found->device         = context->device;
            found->number         = created++;
            found->record         = claim_record(found->device, found->number);
        }
        return found;
    }
    std::shared_ptr<state> take(ggml_backend_cuda_context * context) {
        std::lock_guard<std::mutex> lock(mutex);
        auto                        found = states.find(context);
        if (found == states.end()) {
            return nullptr;
        }
        std::shared_ptr<state> taken = std::move(found->second);
        states.erase(found);
        return taken;
    }
    std::vector<std::shared_ptr<state>> all() {
        std::lock_guard<std::mutex>         lock(mutex);
        std::vector<std::shared_ptr<state>> copy;
        for (auto & entry : states) {
            copy.push_back(entry.second);
        }
        return copy;
    }

  private:
    std::mutex                                                           mutex;
    std::unordered_map<ggml_backend_cuda_context *, std::shared_ptr<state>> states;
    uint32_t                                                             created = 0;
};

// ------------------------------------------------------------------------------------------- calls of CUDA

// An error that is answered with "then not" must not stay behind as the thread's last error: ggml asks for that after its
// next kernel, and would end the process for it. Errors that break a device stay, whoever asks.
inline bool worked(cudaError_t error, uint64_t & errors) {
    if (error == cudaSuccess) {
        return true;
    }
    errors += 1;
    (void) cudaGetLastError();
    return false;
}

enum class stream_is { done, busy, broken };
inline stream_is ask_stream(cudaStream_t stream) {
// ggml's tables of other vendors' names do not have these.
#if defined(GGML_USE_HIP) || defined(GGML_USE_HIPBLAS)
    const auto answer = hipStreamQuery(stream);
    const bool busy = answer == hipErrorNotReady, done = answer == hipSuccess;
#elif defined(GGML_USE_MUSA)
    const auto answer = musaStreamQuery(stream);
    const bool busy = answer == musaErrorNotReady, done = answer == musaSuccess;
#else
    const auto answer = cudaStreamQuery(stream);
    const bool busy = answer == cudaErrorNotReady, done = answer == cudaSuccess;
#endif
    if (!done) {
        (void) cudaGetLastError(); // "not ready" is kept as an error, too
    }
    return done ? stream_is::done : busy ? stream_is::busy : stream_is::broken;
}

// -------------------------------------------------------------------------------------------- the safe point

// Between construction and destruction, things of the context may be destroyed, if `ok()`.
// An error of a stream is left for ggml to find and tell at its next call; then nothing is touched here.
template <class C> class safe_point {
  public:
    // At the end of a computation: waits for the streams, and a little for captures of others.
    static safe_point after_computation(C & context, state & st) {
        safe_point point;
        for (cudaStream_t stream : flat<cudaStream_t>(context.streams)) {
            if (stream != nullptr && !worked(cudaStreamSynchronize(stream), st.values[v_errors])) {
                st.refused(now_ms());
                return point;
            }
        }
#if defined(LLAMA_WARDEN_HAS_GRAPH_LOCK)
        // A counter that never falls, after a failed capture, must not hang the server: then this time is skipped.
        point.lock.lock();
        point.good = ggml_cuda_lock_cv.wait_for(point.lock, std::chrono::milliseconds(200), nobody_captures);
        if (!point.good) {
            st.values[v_skipped] += 1;
            st.refused(now_ms());
        }
#else
        point.good = true;
#endif
        st.patience = point.good ? 0 : st.patience;
        return point;
    }

    // From the idle thread: waits for nothing. While the device still works on what was launched, the context is in use,
    // although the host has long returned: between the parts of a long prompt, say.
    static safe_point while_idle(C & context, state & st) {
        safe_point point;
#if defined(LLAMA_WARDEN_HAS_GRAPH_LOCK)
        if (!point.lock.try_lock() || !nobody_captures()) {
            st.values[v_skipped] += 1;
            st.refused(now_ms());
            return point;
        }
#endif
        for (cudaStream_t stream : flat<cudaStream_t>(context.streams)) {
            const stream_is is = stream == nullptr ? stream_is::done : ask_stream(stream);
            if (is == stream_is::busy) {
                st.last_use = now_ms();
                return point;
            }
            if (is == stream_is::broken) {
                st.values[v_errors] += 1;
                st.refused(now_ms());
                return point;
            }
        }
        st.patience = 0;
        point.good  = true;
        return point;
    }
    bool ok() const { return good; }

  private:
    safe_point() = default;
#if defined(LLAMA_WARDEN_HAS_GRAPH_LOCK)
    static bool nobody_captures() { return ggml_cuda_lock_counter == 0; } // an atomic number, or in forks a plain one

    std::unique_lock<std::mutex> lock{ ggml_cuda_lock, std::defer_lock };
#endif
    bool good = false;
};

// Whether it holds anything that work in flight could use. Without that it is a note on the host, as all of them are where
// graphs are switched off, and may go at any time.
template <class G> bool holds_something(const G & graph) {
    bool holds = false;
    if constexpr (has_instance<G>::value)     { holds = holds || graph.instance != nullptr; }
    if constexpr (has_captured<G>::value)     { holds = holds || graph.graph != nullptr; }
    if constexpr (has_cpy_pointers<G>::value) { holds = holds || graph.dest_ptrs_size > 0; }
    (void) graph;
    return holds;
}

// What a cached graph owns beside what its destructor frees.
template <class G> void before_erasing(G & graph, state & st) {
    if constexpr (has_cpy_pointers<G>::value) {
        if (graph.dest_ptrs_size > 0) {
            (void) worked(cudaFree(graph.dest_ptrs_d), st.values[v_errors]);
            graph.dest_ptrs_size = 0;
        }
    }
    (void) graph, (void) st;
}

template <class C> void forget_current(C & context) {
    if constexpr (has_current_graph<C>::value) {
        context.cur_graph = nullptr;
    }
    (void) context;
}

// Makes sure that no captured graph is launched again: each holds addresses of pools and workspaces.
// Where graphs are in a map they go as a whole, with their copies of the nodes, so that the next computation runs
// uncaptured once and takes its memory outside of a capture. The single graph of older versions only loses its
// executable, which every version takes for "capture again".
template <class C> void invalidate_graphs(C & context, state & st) {
    if constexpr (has_graph_map<C>::value) {
        each_graph(context, [&](auto & graph) { before_erasing(graph, st); });
        context.cuda_graphs.clear();
        st.ticks.clear();
    } else {
        each_graph(context, [&](auto & graph) {
            if (graph.instance != nullptr) {
                (void) worked(cudaGraphExecDestroy(graph.instance), st.values[v_errors]);
                graph.instance = nullptr;
            }
        });
    }
    forget_current(context);
    st.values[v_invalidations] += 1;
}

// --------------------------------------------------------------------------------------------------- fixes

// graph-cache-cap: which graphs go, least recently used first; empty while there is room.
template <class C> std::vector<const void *> superfluous_graphs(C & context, state & st, const void * current) {
    std::vector<const void *> out;
    if constexpr (has_graph_map<C>::value) {
        const uint64_t cap = config().graph_cap;
        if (cap == 0) {
            return out;
        }
        st.rounds.see(current);
        st.ticks[current]           = st.values[v_computes];
        const size_t live           = st.rounds.live();
        const size_t most           = std::max<size_t>(cap, live);
        st.values[v_live_splits]    = live;
        st.values[v_effective_cap]  = most;
        const size_t count          = context.cuda_graphs.size();
        if (st.ticks.size() > 2 * count + 64) { // ggml's own sweep takes graphs too
            for (auto it = st.ticks.begin(); it != st.ticks.end();) {
                it = context.cuda_graphs.count(it->first) ? std::next(it) : st.ticks.erase(it);
            }
        }
        if (count <= most) {
            return out;
        }
        // A quarter more than needed, so that not every computation ends with a synchronisation.
        const size_t                                     target = std::max<size_t>(most - cap / 4, std::max<size_t>(live, 1));
        std::vector<std::pair<uint64_t, const void *>> by_age;
        for (auto & entry : context.cuda_graphs) {
            if (entry.first != current) {
                auto used = st.ticks.find(entry.first);
                by_age.emplace_back(used == st.ticks.end() ? 0 : used->second, entry.first);
            }
        }
        const size_t goes = std::min(count - target, by_age.size());
        std::partial_sort(by_age.begin(), by_age.begin() + goes, by_age.end());
        for (size_t i = 0; i < goes; ++i) {
            out.push_back(by_age[i].second);
        }
    }
    (void) context, (void) st, (void) current;
    return out;
}

template <class C> void evict(C & context, state & st, const std::vector<const void *> & keys) {
    if (keys.empty()) {
        return;
    }
    if constexpr (has_graph_map<C>::value) {
        for (const void * key : keys) {
            auto found = context.cuda_graphs.find(key);
            if (found != context.cuda_graphs.end()) {
                if (found->second) {
                    before_erasing(*found->second, st);
                }
                context.cuda_graphs.erase(found);
                st.values[v_evicted] += 1;
            }
            st.ticks.erase(key);
        }
    }
    forget_current(context);
}

// Whether what goes may only go at a safe point.
template <class C> bool any_holds_something(C & context, const std::vector<const void *> & keys) {
    bool any = false;
    if constexpr (has_graph_map<C>::value) {
        for (const void * key : keys) {
            auto found = context.cuda_graphs.find(key);
            any        = any || (found != context.cuda_graphs.end() && found->second && holds_something(*found->second));
        }
    }
    (void) context, (void) keys;
    return any;
}

// pool-purge. The pools are made again, empty, when they are needed.
template <class C> bool purge_pools(C & context, state & st) {
    const pool_totals before = ask_pools(context);
    if (!before.free) {
        st.values[v_skipped] += 1;
        return false;
    }
    invalidate_graphs(context, st);
    for (auto & pool : flat<std::unique_ptr<ggml_cuda_pool>>(context.pools)) {
        pool.reset();
    }
    ggml_cuda_set_device(context.device); // a pool's destructor may have chosen another
    st.values[v_purges] += 1;
    st.values[v_purged_bytes] += before.bytes;
    st.pooled = st.need = 0;
    return true;
}

// Whether the pools hold more than they should and were not emptied just now.
inline bool purge_is_due(const state & st, uint64_t bytes, uint64_t now) {
    return config().pool_budget && bytes > config().pool_budget && now - st.last_purge >= st.purge_interval;
}

// Whether the pools hold half as much again as any computation has needed: sizes that none uses any more. However often
// that comes, it is no demand, so only the configured interval counts.
inline bool is_hoard(const state & st, uint64_t bytes, uint64_t now) {
    return config().pool_budget && bytes > std::max(config().pool_budget, st.need + st.need / 2) &&
           now - st.last_purge >= config().pool_interval_ms;
}

// When what comes next fills the pools above the budget again, that is what it needs, and to purge more often would only
// cost time: the interval doubles, up to ten seconds. After a purge at the end of a computation that is the next one; after
// one while idle, one of the first of the next request.
constexpr uint64_t watched_after_idle = 16;
inline void note_demand(state & st, uint64_t bytes) {
    st.need   = std::max(st.need, bytes - std::min(bytes, st.pooled));
    st.pooled = bytes;
    if (st.watched == 0) {
        return;
    }
    st.watched -= 1;
    if (bytes > config().pool_budget) {
        st.watched        = 0;
        st.purge_interval = std::min<uint64_t>(2 * st.purge_interval, std::max<uint64_t>(10000, config().pool_interval_ms));
    } else if (st.watched == 0) {
        st.purge_interval = config().pool_interval_ms;
    }
}

template <class C> uint64_t cublas_handles(C & context) {
    uint64_t count = 0;
    for (cublasHandle_t handle : flat<cublasHandle_t>(context.cublas_handles)) {
        count += handle != nullptr;
    }
    return count;
}

// Whether the stream that computes on the context's own device has a handle.
template <class C> bool has_current_handle(C & context) {
    auto         handles = flat<cublasHandle_t>(context.cublas_handles);
    const size_t each    = handles.size / GGML_CUDA_MAX_DEVICES;
    size_t       stream  = 0;
    if constexpr (has_current_stream<C>::value) {
        stream = each > 1 ? (size_t) context.curr_stream_no : 0;
    }
    return handles.first[(size_t) context.device * each + stream] != nullptr;
}

template <class C> uint64_t workspace_bytes(C & context) {
    uint64_t bytes = 0;
    if constexpr (has_workspaces<C>::value && has_workspace_sizes<C>::value) {
        auto         spaces = flat<void *>(context.cublas_workspaces);
        auto         sizes  = flat<size_t>(context.cublas_workspace_sizes);
        const size_t each   = spaces.size / sizes.size;
        for (size_t i = 0; i < spaces.size; ++i) {
            bytes += spaces.first[i] != nullptr ? sizes.first[i / each] : 0;
        }
    }
    (void) context;
    return bytes;
}

// Where less is free, nothing is given up that is needed again at once: another process could take it meanwhile, and ggml
// ends when it cannot have a handle. A handle with its workspace takes some 100 MiB at most.
constexpr size_t enough_free_bytes = size_t(256) << 20;
template <class C> bool enough_is_free(C & context, state & st) {
    size_t free_bytes = 0, all_bytes = 0;
    ggml_cuda_set_device(context.device);
    return worked(cudaMemGetInfo(&free_bytes, &all_bytes), st.values[v_errors]) && free_bytes >= enough_free_bytes;
}

// cublas-reset. From b10528 on a handle has a workspace that is allocated with it: freed here, or it would leak.
template <class C> void reset_cublas(C & context, state & st) {
    const bool current = has_current_handle(context);
    invalidate_graphs(context, st);
    auto         handles = flat<cublasHandle_t>(context.cublas_handles);
    const size_t each    = handles.size / GGML_CUDA_MAX_DEVICES;
    for (cublasHandle_t & handle : handles) {
        if (handle != nullptr) {
            // A handle is to be destroyed on the device where it was made.
            ggml_cuda_set_device((int) ((size_t) (&handle - handles.first) / each));
            if (cublasDestroy(handle) != CUBLAS_STATUS_SUCCESS) {
                st.values[v_errors] += 1;
                (void) cudaGetLastError();
            }
            handle = nullptr;
        }
    }
    if constexpr (has_workspaces<C>::value) {
        for (void *& workspace : flat<void *>(context.cublas_workspaces)) {
            if (workspace != nullptr) {
                (void) worked(cudaFree(workspace), st.values[v_errors]);
                workspace = nullptr;
            }
        }
    }
    ggml_cuda_set_device(context.device);
    if (current) {
        (void) context.cublas_handle(); // now, and not inside of the next capture
    }
    st.values[v_cublas_resets] += 1;
}

template <class C> bool reset_is_due(C & context, const state & st, uint64_t now) {
    return config().cublas_every && st.values[v_computes] - st.computes_at_reset >= config().cublas_every &&
           now - st.last_reset >= config().cublas_interval_ms && cublas_handles(context) > 0;
}

// memory-report. Adding up the graphs is not free: ten times a second, and when something changed, is enough.
template <class C> void publish(C & context, state & st, uint64_t now, bool changed) {
    if (st.record == nullptr || (!changed && now - st.last_write < 100)) {
        return;
    }
    graph_totals graphs;
    each_graph(context, [&](auto & graph) { add_graph(graph, graphs); });
    st.last_write                   = now;
    st.values[v_graphs]             = graphs.count;
    st.values[v_graphs_peak]        = std::max(st.values[v_graphs_peak], graphs.count);
    st.values[v_graph_nodes]        = graphs.nodes;
    st.values[v_graph_host_bytes]   = graphs.host;
    st.values[v_graph_device_bytes] = graphs.device;
    st.values[v_pool_bytes]         = ask_pools(context).bytes;
    st.values[v_cublas_handles]     = cublas_handles(context);
    st.values[v_workspace_bytes]    = workspace_bytes(context);
    st.values[v_updated]            = unix_ms();
    write_record(st.record, record_live, st.device, st.number, st.values);
}

// ----------------------------------------------------------------------------------------- reclaim on demand

// The request that stands, if one does, and what came of it so far. One thread at a time reads and answers: the idle thread,
// or where there is none, whoever ends a computation. What is asked of a context is done by whoever has its state.
//
// It keeps to what holds for the other fixes: a safe point that was not to be had is not asked for again before `not_before`,
// and what a purge says of the demand for pools (`watched`, `purge_interval`) is neither learnt from nor forgotten.
class commands {
  public:
    // Of the request that stands; 0: none. All that a computation costs where nobody asks for anything.
    static uint64_t wanted() { return standing().load(std::memory_order_relaxed); }

#if defined(LLAMA_WARDEN_RECLAIM)
    static commands & get() {
        static commands * const one = new commands; // never destroyed: threads may outlive static objects
        return *one;
    }

    // Looks at the file, four times a second at most.
    void poll(uint64_t now) {
        std::unique_lock<std::mutex> look(reader, std::try_to_lock);
        if (!look.owns_lock() || now < next_look) {
            return;
        }
        next_look = now + 200;
        if (!opened) {
            opened = true;
            there  = file.open(config().reclaim, reclaim::part::cuda, mine);
            if (!there) {
                std::fprintf(stderr, "llama-warden: nothing is given back on demand: %s is not to be had\n", config().reclaim);
            }
        }
        reclaim::request next = {};
        if (there && file.poll(next)) {
            std::lock_guard<std::mutex> lock(mutex); // one that stood until now is not answered any more
            asked    = next;
            since    = now;
            given    = {};
            spent_ms = 0;
            did      = false;
            errors   = false;
            standing().store((next.what & mine) != 0 ? next.seq : 0, std::memory_order_relaxed);
        }
    }

    // What is still to be done at a context for the request that stands.
    uint32_t pending(state & st) {
        std::lock_guard<std::mutex> lock(mutex);
        if (wanted() != 0 && st.command != asked.seq) {
            st.command = asked.seq;
            st.pending = asked.what & mine;
        }
        return wanted() != 0 ? st.pending : 0;
    }

    // Something was given back, or could not be, for this request.
    void note(uint64_t seq, const reclaim::channel::amounts & more, uint64_t ms, bool some, bool wrong) {
        std::lock_guard<std::mutex> lock(mutex);
        if (wanted() != seq) {
            return; // it was answered meanwhile
        }
        for (size_t i = 0; i < 4; ++i) {
            given.bytes[i] += more.bytes[i];
        }
        spent_ms += ms;
        did    = did || some;
        errors = errors || wrong;
    }

    // Answers when nothing is left to be done, or when the time is up. `own`: the state that the caller has.
    void conclude(uint64_t now, const state * own) {
        const uint64_t seq = wanted();
        if (seq == 0) {
            return;
        }
        uint32_t left = 0;
        for (const std::shared_ptr<state> & st : registry::get().all()) {
            left |= left_of(*st, st.get() == own, seq);
        }
        std::unique_lock<std::mutex> lock(mutex);
        if (wanted() != seq || (left != 0 && now - since < asked.deadline_ms)) {
            return;
        }
        using reclaim::result;
        const result how = left == 0 ? result::done : did ? result::partly : errors ? result::failed : result::refused;
        standing().store(0, std::memory_order_relaxed);
        const reclaim::channel::amounts all = given;
        const uint64_t                  ms  = spent_ms;
        lock.unlock(); // a slow file is nobody's business
        file.put(seq, how, left, ms, all);
    }

  private:
    static constexpr uint32_t mine = reclaim::graphs | reclaim::pools | reclaim::cublas;

    static std::atomic<uint64_t> & standing() {
        static std::atomic<uint64_t> seq{ 0 };
        return seq;
    }

    // Who computes just now has not been looked at. A context that never computed holds nothing.
    uint32_t left_of(state & st, bool own, uint64_t seq) const {
        std::unique_lock<std::mutex> lock(st.mutex, std::defer_lock);
        if (!own && !lock.try_lock()) {
            return mine;
        }
        return st.context == nullptr || st.last_use == 0 ? 0 : st.command == seq ? st.pending : mine;
    }

    std::mutex       reader; // held by who looks at the file; taken before `mutex`
    reclaim::channel file;
    bool             opened = false, there = false;
    uint64_t         next_look = 0;

    std::mutex                mutex;
    reclaim::request          asked = {};
    uint64_t                  since = 0, spent_ms = 0;
    reclaim::channel::amounts given;
    bool                      did = false, errors = false;
#else
    static commands & get() {
        static commands one;
        return one;
    }
    void     poll(uint64_t) {}
    uint32_t pending(state &) { return 0; }
    void     conclude(uint64_t, const state *) {}

  private:
    static std::atomic<uint64_t> & standing() {
        static std::atomic<uint64_t> seq{ 0 };
        return seq;
    }
#endif
};

// Whether a request waits for this context. What it does not hold is given back already.
template <class C> bool reclaim_is_due(C & context, state & st) {
#if defined(LLAMA_WARDEN_RECLAIM)
    if (commands::wanted() == 0 || commands::get().pending(st) == 0) {
        return false;
    }
    if (cached_graphs(context) == 0) {
        st.pending &= ~(uint32_t) reclaim::graphs;
    }
    if (ask_pools(context).bytes == 0) {
        st.pending &= ~(uint32_t) reclaim::pools;
    }
    if (cublas_handles(context) == 0) {
        st.pending &= ~(uint32_t) reclaim::cublas;
    }
    return st.pending != 0;
#else
    (void) context, (void) st;
    return false;
#endif
}

// At a safe point: gives back what is asked for. What cannot go just now stays pending.
template <class C> void reclaim_at(C & context, state & st, uint64_t now) {
#if defined(LLAMA_WARDEN_RECLAIM)
    const uint64_t errors = st.values[v_errors], spaces = workspace_bytes(context);
    const uint32_t before = st.pending;
    graph_totals   graphs, kept;
    each_graph(context, [&](auto & graph) { add_graph(graph, graphs); });
    reclaim::channel::amounts given;
    if (st.pending & reclaim::pools) {
        const uint64_t bytes = ask_pools(context).bytes;
        if (purge_pools(context, st)) {
            given.bytes[2] = bytes;
            st.pending &= ~(uint32_t) (reclaim::pools | reclaim::graphs);
        }
    }
    if (st.pending & reclaim::cublas) {
        if (enough_is_free(context, st)) {
            st.last_reset        = now;
            st.computes_at_reset = st.values[v_computes];
            reset_cublas(context, st);
            const uint64_t rest = workspace_bytes(context);
            given.bytes[3]      = spaces > rest ? spaces - rest : 0;
            st.pending &= ~(uint32_t) (reclaim::cublas | reclaim::graphs);
        } else {
            st.values[v_skipped] += 1;
        }
    }
    if (st.pending & reclaim::graphs) {
        invalidate_graphs(context, st);
        st.pending &= ~(uint32_t) reclaim::graphs;
    }
    each_graph(context, [&](auto & graph) { add_graph(graph, kept); });
    given.bytes[0] = graphs.host > kept.host ? graphs.host - kept.host : 0;
    given.bytes[1] = graphs.device > kept.device ? graphs.device - kept.device : 0;
    commands::get().note(st.command, given, now_ms() - now, st.pending != before, st.values[v_errors] != errors);
#else
    (void) context, (void) st, (void) now;
#endif
}

// --------------------------------------------------------------------------------------------- idle thread

// Gives back what an idle server keeps. Exists only when a variable asks for it.
class idle_thread {
  public:
    static void start_once() {
        static const bool started = start();
        (void) started;
    }

  private:
    static bool start() {
        auto * thread = new idle_thread; // never destroyed: whoever still looks at it at the end finds it
        thread->process = this_process();
        try {
            thread->worker = std::thread([thread] { thread->run(); });
        } catch (const std::exception & wrong) { // no more threads: the server can do without this one
            std::fprintf(stderr, "llama-warden: nothing will be given back while idle: no thread: %s\n", wrong.what());
            return false;
        }
        the_one() = thread;
#if !defined(_WIN32) // there the threads are gone when this would run
        // CUDA registered its own end before, so this runs first.
        std::atexit([] { the_one()->stop(); });
#endif
        return true;
    }
    static idle_thread *& the_one() {
        static idle_thread * thread = nullptr;
        return thread;
    }
    static long this_process() {
#if defined(LLAMA_WARDEN_POSIX)
        return (long) ::getpid();
#else
        return 0;
#endif
    }

    // Waits for what is being given back just now, but not for ever: `exit` may have been called in the handler of a
    // signal, by a thread that holds a lock which the idle thread wants, or a device may be lost.
    // In a child that was forked there is no such thread, and its lock may be held for ever by nobody.
    void stop() {
        if (process != this_process()) {
            return;
        }
        std::unique_lock<std::mutex> lock(mutex);
        stopping = true;
        wake.notify_all();
        const bool gone = wake.wait_for(lock, std::chrono::seconds(2), [this] { return done; });
        lock.unlock();
        if (gone) {
            worker.join();
        } else {
            worker.detach();
        }
    }

    void run() {
#if defined(LLAMA_WARDEN_POSIX)
        sigset_t all; // signals are for the threads of the server
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, nullptr);
#endif
        const auto                   pause = std::chrono::milliseconds(250);
        std::unique_lock<std::mutex> lock(mutex);
        while (!wake.wait_for(lock, pause, [this] { return stopping; })) {
            lock.unlock();
            if (config().reclaim) {
                commands::get().poll(now_ms());
            }
            bool gave_back = false;
            for (const std::shared_ptr<state> & st : registry::get().all()) {
                gave_back = look(*st) || gave_back;
            }
            commands::get().conclude(now_ms(), nullptr);
#if defined(__GLIBC__)
            if (gave_back) {
                malloc_trim(0); // the copies of the nodes were on the heap
            }
#endif
            lock.lock();
        }
        done = true;
        wake.notify_all();
    }

    // Whether something was given back that nobody asked for: who asked has the heap trimmed, too, when it is time.
    static bool look(state & st) {
        std::unique_lock<std::mutex> lock(st.mutex, std::try_to_lock);
        if (!lock.owns_lock() || st.context == nullptr || st.last_use == 0) {
            return false;
        }
        return look_at(*st.context, st);
    }

    template <class C> static bool look_at(C & context, state & st) {
        const uint64_t now   = now_ms();
        const size_t   count = cached_graphs(context);
        const bool trim  = config().idle_trim_ms && !st.trimmed && count > 0 && now - st.last_use >= config().idle_trim_ms;
        // Not between the parts of one answer: what was given back would have to be had again at once.
        const uint64_t rest  = std::max<uint64_t>(st.purge_interval, 1000);
        const bool     purge = now - st.last_use >= rest && purge_is_due(st, ask_pools(context).bytes, now);
        const bool     asked = reclaim_is_due(context, st) && now - st.last_use >= 1000;
        if ((!trim && !purge && !asked) || now < st.not_before) {
            return false;
        }
        bool held = purge || asked;
        each_graph(context, [&](auto & graph) { held = held || holds_something(graph); });
        if (held) {
            ggml_cuda_set_device(context.device);
            const auto point = safe_point<C>::while_idle(context, st);
            return point.ok() && give_back(context, st, trim, purge, asked, count, now);
        }
        return give_back(context, st, trim, purge, asked, count, now);
    }

    template <class C>
    static bool give_back(C & context, state & st, bool trim, bool purge, bool asked, size_t count, uint64_t now) {
        if (asked) { // first, so that what it gives back is counted
            reclaim_at(context, st, now);
        }
        if (trim) {
            invalidate_graphs(context, st);
            st.values[v_trimmed] += count - cached_graphs(context);
            st.trimmed = true;
        }
        if (purge) {
            st.last_purge = now;
            st.watched    = purge_pools(context, st) ? watched_after_idle : 0;
        }
        publish(context, st, now, true);
        return trim || purge;
    }

    std::mutex              mutex;
    std::condition_variable wake;
    bool                    stopping = false, done = false;
    long                    process = 0; // that started it
    std::thread             worker;
};

// --------------------------------------------------------------------------------------------------- hooks

// Lives through one ggml_backend_cuda_graph_compute, or another function that uses what the idle thread may take.
class compute_guard {
  public:
    explicit compute_guard(ggml_backend_cuda_context * context, const char * mark = nullptr) {
        passed(mark);
        if (config().any()) {
            st = registry::get().find(context);
            st->mutex.lock();
        }
    }
    compute_guard(const compute_guard &)             = delete;
    compute_guard & operator=(const compute_guard &) = delete;
    ~compute_guard() {
        if (st) {
            st->mutex.unlock();
        }
    }

    // The computation is launched, and captured if it was to be.
    template <class G> void finish(G * graph, const char * mark = nullptr) {
        passed(mark);
        if (st) {
            finish(*st->context, *st, key_of(graph, 0));
        }
    }

  private:
    template <class C> static void finish(C & context, state & st, const void * key) {
        const uint64_t now = now_ms();
        st.last_use        = now;
        st.trimmed         = false;
        st.values[v_computes] += 1;
        if (!able.idle && config().reclaim) { // nobody else would look
            commands::get().poll(now);
        }
        const bool                      asked  = reclaim_is_due(context, st);
        const std::vector<const void *> graphs = superfluous_graphs(context, st, key);
        bool                            purge  = false;
        if (config().pool_budget || config().report) {
            const uint64_t bytes    = ask_pools(context).bytes;
            st.values[v_pool_peak] = std::max(st.values[v_pool_peak], bytes);
            note_demand(st, bytes);
            purge = purge_is_due(st, bytes, now) || is_hoard(st, bytes, now);
        }
        bool reset   = reset_is_due(context, st, now);
        bool changed = false;
        if (reset && !enough_is_free(context, st)) {
            reset         = false;
            st.last_reset = now; // asked again after the interval
            st.values[v_skipped] += 1;
        }
        const bool in_use = purge || reset || asked || any_holds_something(context, graphs);
        if (!in_use) {
            changed = !graphs.empty();
            evict(context, st, graphs);
        } else if (now >= st.not_before) {
            const auto point = safe_point<C>::after_computation(context, st);
            if (point.ok()) {
                changed = true;
                evict(context, st, graphs);
                if (asked) {
                    reclaim_at(context, st, now);
                }
                if (reset) {
                    st.last_reset        = now;
                    st.computes_at_reset = st.values[v_computes];
                    reset_cublas(context, st);
                }
                if (purge) {
                    st.last_purge = now;
                    st.watched    = purge_pools(context, st) ? 1 : 0;
                }
            }
        }
        publish(context, st, now, changed);
        if (!able.idle) {
            commands::get().conclude(now, &st);
        }
        if (able.idle && config().needs_idle_thread()) {
            idle_thread::start_once();
        }
    }

    std::shared_ptr<state> st;
};

// What somebody uses of contexts outside of a computation stays as it is while this lives: the idle thread passes by, and
// whoever computes on one waits.
class held_contexts {
  public:
    explicit held_contexts(std::vector<std::shared_ptr<state>> && some) : states(std::move(some)) {
        // All who hold several take them in this order.
        std::sort(states.begin(), states.end(), [](const auto & a, const auto & b) { return a->number < b->number; });
        states.erase(std::unique(states.begin(), states.end()), states.end());
        for (const auto & st : states) {
            st->mutex.lock();
        }
    }
    held_contexts(const held_contexts &)             = delete;
    held_contexts & operator=(const held_contexts &) = delete;
    ~held_contexts() {
        for (const auto & st : states) {
            st->last_use = now_ms();
            st->mutex.unlock();
        }
    }

  private:
    std::vector<std::shared_ptr<state>> states;
};

inline std::shared_ptr<void> hold_all(std::initializer_list<ggml_backend_cuda_context *> contexts) {
    std::vector<std::shared_ptr<state>> states;
    for (ggml_backend_cuda_context * context : contexts) {
        states.push_back(registry::get().find(context));
    }
    return std::make_shared<held_contexts>(std::move(states));
}

// These are declared by the hooks, too, which may stand above the place where this file is included.
std::shared_ptr<void> hold(ggml_backend_cuda_context * context);
std::shared_ptr<void> hold(ggml_backend_cuda_context * one, ggml_backend_cuda_context * other);
std::shared_ptr<void> hold(const ggml_backend_t * backends, size_t count);

std::shared_ptr<void> hold(ggml_backend_cuda_context * context) {
    return config().any() ? hold_all({ context }) : nullptr;
}
std::shared_ptr<void> hold(ggml_backend_cuda_context * one, ggml_backend_cuda_context * other) {
    return config().any() ? hold_all({ one, other }) : nullptr;
}
std::shared_ptr<void> hold(const ggml_backend_t * backends, size_t count) {
    if (!config().any()) {
        return nullptr;
    }
    std::vector<std::shared_ptr<state>> states;
    for (size_t i = 0; i < count; ++i) {
        states.push_back(registry::get().find((ggml_backend_cuda_context *) backends[i]->context));
    }
    return std::make_shared<held_contexts>(std::move(states));
}

// The context is about to be deleted.
inline void forget(ggml_backend_cuda_context * context, const char * mark = nullptr) {
    passed(mark);
    if (!config().any()) {
        return;
    }
    if (std::shared_ptr<state> st = registry::get().take(context)) {
        std::lock_guard<std::mutex> lock(st->mutex);
        st->context = nullptr;
        write_record(st->record, record_ended, st->device, st->number, st->values);
    }
}

} // namespace llama_warden
