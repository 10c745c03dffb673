/* A CUDA runtime of our own for tests, as a library or linked into the program: like the real one it opens the driver,
 * asks it for its functions, and calls those.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef unsigned long long dev;
typedef int (*lookup)(const char *, void **, int, uint64_t, int *);
static lookup driver;
/* As the real one does, it asks for each function with the version in which that got its present form. */
static int version_of(const char *name) {
    static const struct { const char *name; int version; } known[] = {
        {"cuMemAlloc", 3020}, {"cuMemFree", 3020}, {"cuMemAllocAsync", 11020}, {"cuMemFreeAsync", 11020},
        {"cuMemHostAlloc", 2020}, {"cuMemFreeHost", 2000}, {"cuGraphExecDestroy", 10000},
#ifdef OLD
        {"cuGraphInstantiate", 11000},
#else
        {"cuGraphInstantiate", 12000},
#endif
        {"cuMemCreate", 10020}, {"cuMemRelease", 10020}, {"cuMemMap", 10020}, {"cuMemUnmap", 10020},
    };
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i].name, name)) return known[i].version;
    return 12000;
}
static void *function(const char *name) {
    void *at = 0;
    if (!driver) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        driver = library ? (lookup)dlsym(library, "cuGetProcAddress_v2") : 0;
        /* The real one asks again, by the function itself. */
        if (driver && !driver("cuGetProcAddress", &at, 12000, 0, 0) && at) driver = (lookup)at;
    }
    at = 0;
    return driver && !driver(name, &at, version_of(name), 0, 0) ? at : 0;
}
#define CALL(name, type, ...) __typeof__(type) at = (__typeof__(type))function(name); return at ? at(__VA_ARGS__) : 3

int cudaMalloc(void **out, size_t size) { CALL("cuMemAlloc", int (*)(dev *, size_t), (dev *)out, size); }
int cudaFree(void *at_) { CALL("cuMemFree", int (*)(dev), (dev)(uintptr_t)at_); }
int cudaMallocAsync(void **out, size_t size, void *stream) { CALL("cuMemAllocAsync", int (*)(dev *, size_t, void *), (dev *)out, size, stream); }
int cudaFreeAsync(void *at_, void *stream) { CALL("cuMemFreeAsync", int (*)(dev, void *), (dev)(uintptr_t)at_, stream); }
int cudaHostAlloc(void **out, size_t size, unsigned flags) { CALL("cuMemHostAlloc", int (*)(void **, size_t, unsigned), out, size, flags); }
int cudaFreeHost(void *at_) { CALL("cuMemFreeHost", int (*)(void *), at_); }
#ifdef OLD
int cudaGraphInstantiate(void **out, void *graph, void **node, char *log, size_t size) {
    CALL("cuGraphInstantiate", int (*)(void **, void *, void **, char *, size_t), out, graph, node, log, size);
}
#else
int cudaGraphInstantiate(void **out, void *graph, dev flags) { CALL("cuGraphInstantiate", int (*)(void **, void *, dev), out, graph, flags); }
#endif
int cudaGraphExecDestroy(void *graph) { CALL("cuGraphExecDestroy", int (*)(void *), graph); }
/* What programs ask that do not want to be linked with the driver. */
int cudaGetDriverEntryPoint(const char *name, void **out, dev flags, int *found) {
    (void)flags;
    *out = function(name);
    if (found) *found = *out ? 0 : 1;
    return *out ? 0 : 3;
}
