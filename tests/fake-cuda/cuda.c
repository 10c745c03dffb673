/* A libcuda.so.1 of our own for tests: addresses and handles out of a counter, no device. It also answers
 * cuGetProcAddress, which is how the runtime finds it. FAIL makes allocations fail, and REFUSE whatever
 * would give them back.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long dev;
static dev next = 0x7f0000000000ull;
static dev fresh(size_t size) {
    dev at = next;
    next += (size + 0xfff) & ~0xfffull;
    return at;
}
static int failing(void) { return getenv("FAIL") != 0; }
static int refusing(void) { return getenv("REFUSE") ? 1 : 0; }

int cuMemAlloc_v2(dev *out, size_t size) { if (failing()) return 2; *out = fresh(size); return 0; }
int cuMemFree_v2(dev at) { (void)at; return refusing(); }
int cuMemAllocAsync(dev *out, size_t size, void *stream) { (void)stream; *out = fresh(size); return 0; }
int cuMemFreeAsync(dev at, void *stream) { (void)at; (void)stream; return refusing(); }
int cuMemHostAlloc(void **out, size_t size, unsigned flags) { (void)flags; *out = malloc(size); return *out ? 0 : 2; }
int cuMemFreeHost(void *at) { if (refusing()) return 1; free(at); return 0; }
int cuMemCreate(dev *out, size_t size, const void *properties, dev flags) { (void)properties; (void)flags; *out = fresh(size); return 0; }
int cuMemRelease(dev handle) { (void)handle; return refusing(); }
int cuMemMap(dev at, size_t size, size_t offset, dev handle, dev flags) { (void)at; (void)size; (void)offset; (void)handle; (void)flags; return 0; }
int cuMemUnmap(dev at, size_t size) { (void)at; (void)size; return refusing(); }
/* A graph costs memory of the host, as a real one does. */
int cuGraphInstantiateWithFlags(void **out, void *graph, dev flags) { (void)graph; (void)flags; *out = malloc(100000); return 0; }
int cuGraphExecDestroy(void *graph) { if (refusing()) return 1; free(graph); return 0; }

int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *found) {
    (void)version; (void)flags;
    static const struct { const char *name; void *at; } known[] = {
        {"cuMemAlloc", cuMemAlloc_v2}, {"cuMemFree", cuMemFree_v2}, {"cuMemAllocAsync", cuMemAllocAsync},
        {"cuMemFreeAsync", cuMemFreeAsync}, {"cuMemHostAlloc", cuMemHostAlloc}, {"cuMemFreeHost", cuMemFreeHost},
        {"cuGraphInstantiate", cuGraphInstantiateWithFlags}, {"cuGraphExecDestroy", cuGraphExecDestroy},
        {"cuGetProcAddress", cuGetProcAddress_v2}, {"cuMemCreate", cuMemCreate}, {"cuMemRelease", cuMemRelease},
        {"cuMemMap", cuMemMap}, {"cuMemUnmap", cuMemUnmap},
    };
    *out = 0;
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i].name, name)) *out = known[i].at;
    if (found) *found = *out ? 0 : 1;
    return *out ? 0 : 500;
}
