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
/* With addresses and sizes of 32 bits, for programs of long ago: whoever asks for these by mistake gets what nobody can use. */
int cuMemAlloc(unsigned *out, unsigned size) { (void)size; *out = 0; return 1; }
int cuMemFree(unsigned at) { (void)at; return 1; }
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
int cuGraphInstantiate(void **out, void *graph, void **node, char *log, size_t size) { (void)node; (void)log; (void)size; return cuGraphInstantiateWithFlags(out, graph, 0); }
int cuGraphInstantiate_v2(void **out, void *graph, void **node, char *log, size_t size) { (void)node; (void)log; (void)size; return cuGraphInstantiateWithFlags(out, graph, 0); }
int cuGraphExecDestroy(void *graph) { if (refusing()) return 1; free(graph); return 0; }

int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *found) {
    (void)flags;
    /* From which version of the interface on a name means this function, as the real driver has it. */
    static const struct { const char *name; int since; void *at; } known[] = {
        {"cuMemAlloc", 2000, cuMemAlloc}, {"cuMemAlloc", 3020, cuMemAlloc_v2},
        {"cuMemFree", 2000, cuMemFree}, {"cuMemFree", 3020, cuMemFree_v2},
        {"cuMemAllocAsync", 11020, cuMemAllocAsync}, {"cuMemFreeAsync", 11020, cuMemFreeAsync},
        {"cuMemHostAlloc", 2020, cuMemHostAlloc}, {"cuMemFreeHost", 2000, cuMemFreeHost},
        {"cuGraphInstantiate", 10000, cuGraphInstantiate}, {"cuGraphInstantiate", 11000, cuGraphInstantiate_v2},
        {"cuGraphInstantiate", 12000, cuGraphInstantiateWithFlags}, {"cuGraphInstantiateWithFlags", 11040, cuGraphInstantiateWithFlags},
        {"cuGraphExecDestroy", 10000, cuGraphExecDestroy}, {"cuGetProcAddress", 12000, cuGetProcAddress_v2},
        {"cuMemCreate", 10020, cuMemCreate}, {"cuMemRelease", 10020, cuMemRelease},
        {"cuMemMap", 10020, cuMemMap}, {"cuMemUnmap", 10020, cuMemUnmap},
    };
    *out = 0;
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i].name, name) && version >= known[i].since) *out = known[i].at;
    if (found) *found = *out ? 0 : 1;
    return *out ? 0 : 500;
}
