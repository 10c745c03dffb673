/* Uses the runtime and the driver as ggml does: a leak of graphs, one of device memory, and things that are given back.
 * Runs its round whenever it is told to by a line, and answers `done`.
 *
 * With LIBRARY it is a library with the round alone, which asks the runtime for the driver's functions; with OPENS it is a
 * program that opens that library for itself, as llama.cpp does with its backends. With CLOSES it opens it for everybody,
 * closes it after each round, and takes the place where it was.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

typedef unsigned long long dev;
int cudaMalloc(void **out, size_t size);
int cudaFree(void *at);
int cudaMallocAsync(void **out, size_t size, void *stream);
int cudaFreeAsync(void *at, void *stream);
int cudaHostAlloc(void **out, size_t size, unsigned flags);
int cudaFreeHost(void *at);
#ifdef OLD
int cudaGraphInstantiate(void **out, void *graph, void **node, char *log, size_t size);
#define INSTANTIATE(out) cudaGraphInstantiate(out, 0, 0, 0, 0)
#else
int cudaGraphInstantiate(void **out, void *graph, dev flags);
#define INSTANTIATE(out) cudaGraphInstantiate(out, 0, 0)
#endif
int cudaGraphExecDestroy(void *graph);
#ifdef LIBRARY
int cudaGetDriverEntryPoint(const char *name, void **out, dev flags, int *found);
static void *entry(const char *name) {
    void *at = 0;
    if (cudaGetDriverEntryPoint(name, &at, 0, 0)) abort();
    return at;
}
#define cuMemCreate ((int (*)(dev *, size_t, const void *, dev))entry("cuMemCreate"))
#define cuMemRelease ((int (*)(dev))entry("cuMemRelease"))
#define cuMemMap ((int (*)(dev, size_t, size_t, dev, dev))entry("cuMemMap"))
#define cuMemUnmap ((int (*)(dev, size_t))entry("cuMemUnmap"))
#else
int cuMemCreate(dev *out, size_t size, const void *properties, dev flags);
int cuMemRelease(dev handle);
int cuMemMap(dev at, size_t size, size_t offset, dev handle, dev flags);
int cuMemUnmap(dev at, size_t size);
#endif

#ifndef OPENS
#define NOINLINE __attribute__((noinline))
#define MIB (1 << 20)

NOINLINE int capture_graphs(void) {
    int failed = 0;
    for (int i = 0; i < 3; i++) {
        void *kept, *dropped;
        failed |= INSTANTIATE(&kept);
        failed |= INSTANTIATE(&dropped);
        failed |= cudaGraphExecDestroy(dropped);
    }
    return failed;
}

NOINLINE int keep_device_memory(void) {
    void *kept, *dropped;
    int failed = cudaMalloc(&kept, 5 * MIB);
    if (failed) return 0; /* a server lives on without it */
    failed |= cudaMalloc(&dropped, 7 * MIB);
    return failed | cudaFree(dropped);
}

NOINLINE int use_pools(void) {
    void *kept, *dropped;
    return cudaMallocAsync(&kept, 2 * MIB, 0) | cudaMallocAsync(&dropped, MIB, 0) | cudaFreeAsync(dropped, 0);
}

NOINLINE int use_pinned(void) {
    void *kept, *dropped;
    return cudaHostAlloc(&kept, 3 * MIB, 0) | cudaHostAlloc(&dropped, MIB, 0) | cudaFreeHost(dropped);
}

/* As ggml's pool does it: physical memory is mapped piece by piece, its handles are given up at once, and everything is
 * unmapped with one call. */
NOINLINE int map_pool(int unmap) {
    static dev base = 0x500000000000ull;
    int failed = 0;
    for (int i = 0; i < 4; i++) {
        dev handle;
        failed |= cuMemCreate(&handle, 2 * MIB, 0, 0);
        failed |= cuMemMap(base + (dev)i * 2 * MIB, 2 * MIB, 0, handle, 0);
        failed |= cuMemRelease(handle);
    }
    if (unmap) failed |= cuMemUnmap(base, 8 * MIB);
    base += 8 * MIB;
    return failed;
}

/* Whatever is refused, a server lives on. */
int one_round(void) {
    int failed = capture_graphs() | keep_device_memory() | use_pools() | use_pinned() | map_pool(0) | map_pool(1);
    return failed && !getenv("REFUSE");
}
#else
#ifdef CLOSES
#define SCOPE RTLD_GLOBAL
#else
#define SCOPE RTLD_LOCAL
#endif
static void *library;
static int (*opened(void))(void) {
    library = dlopen("libbackend.so", RTLD_NOW | SCOPE);
    if (!library) fprintf(stderr, "%s\n", dlerror());
    return library ? (int (*)(void))dlsym(library, "one_round") : 0;
}
#endif

#ifndef LIBRARY
int main(void) {
    char line[64];
#ifdef OPENS
    int (*one_round)(void) = opened();
    if (!one_round) return 1;
#endif
    while (fgets(line, sizeof line, stdin)) {
#ifdef CLOSES
        if (!library && !(one_round = opened())) return 1;
#endif
        printf("%s\n", one_round() ? "failed" : "done");
#ifdef CLOSES
        dlclose(library);
        library = 0;
        for (int i = 0; i < 400; i++) mmap(0, 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
#endif
        fflush(stdout);
    }
    return 0;
}
#endif
